"""A type that moves its values to and from an S3 store by a client of its own, once, as data frames do."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any, Iterator  # noqa: UP035  (by this one flytekit knows what its lines of JSON are)

from flytekit import FlyteContext, task
from flytekit.core.type_engine import TypeEngine, TypeTransformer
from flytekit.models.literals import Literal, Primitive, Scalar
from flytekit.models.types import LiteralType, SimpleType
from flytekit.types.file import FlyteFile
from flytekit.types.iterator.json_iterator import JSON

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from tests.harness.moto_s3 import BUCKET
from tests.harness.procs import say, wait_for_word


@dataclass
class Frame:
    """What is stored."""

    rows: str


class FrameTransformer(TypeTransformer[Frame]):
    """Its values are objects of the store."""

    def __init__(self) -> None:
        super().__init__("frame", Frame)

    def get_literal_type(self, t: type[Frame]) -> LiteralType:
        return LiteralType(simple=SimpleType.STRING)

    def to_literal(self, ctx: FlyteContext, python_val: Frame, python_type: Any, expected: LiteralType) -> Literal:
        client().put_object(Bucket=BUCKET, Key="frame", Body=python_val.rows.encode())
        return Literal(scalar=Scalar(primitive=Primitive(string_value="frame")))

    def to_python_value(self, ctx: FlyteContext, lv: Literal, expected_python_type: type[Frame]) -> Frame:
        told("reads")
        return Frame(client().get_object(Bucket=BUCKET, Key="frame")["Body"].read().decode())


TypeEngine.register(FrameTransformer())


def client() -> Any:
    import botocore.config
    import botocore.session

    names = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    once = botocore.config.Config(retries={"total_max_attempts": 1})
    return botocore.session.get_session().create_client(
        "s3", endpoint_url=os.environ["TEST_STORE"], config=once, **names
    )


@functools.cache
def told(what: str) -> None:
    """Once in each process."""
    say(what)
    wait_for_word()


@task(task_config=SafeTorch(nproc_per_node=1))
def writes() -> Frame:
    told("returns")
    return Frame("1, 2, 3")


@task(task_config=SafeTorch(nproc_per_node=1, timeouts=Timeouts(upload=2)))
def writes_soon() -> Frame:
    told("returns")
    return Frame("1, 2, 3")


@task(task_config=SafeTorch(nproc_per_node=1))
def reads(frame: Frame) -> str:
    return frame.rows


def reads_back() -> str:
    rows: str = reads(frame=Frame("1, 2, 3"))
    return rows


@task(task_config=SafeTorch(nproc_per_node=1))
def lines() -> Iterator[JSON]:
    told("returns")
    return ({"step": step} for step in range(3))


def written() -> Iterator[FlyteFile]:
    for step in range(3):
        path = current_rank().scratch / f"{step}.txt"
        path.write_text(str(step))
        yield FlyteFile(str(path))


@task(task_config=SafeTorch(nproc_per_node=1))
def files() -> Iterator[FlyteFile]:
    told("returns")
    return written()
