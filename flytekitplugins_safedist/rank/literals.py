"""A task's inputs, its outputs and its decks, moved from the agent to its ranks and back.

Inputs and outputs are Flyte literals (protobuf): types are flytekit's business, in both directions, and each rank
converts for itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

from flyteidl.core import interface_pb2, literals_pb2
from flytekit import FlyteContext, FlyteContextManager
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine
from flytekit.deck.deck import TimeLineDeck
from flytekit.models.interface import VariableMap
from flytekit.models.literals import Literal, LiteralCollection, LiteralMap, Scalar, Union
from flytekit.models.types import Error

from ..compat import flytekit as flytekit_inside
from ..errors import PayloadError
from ..fs.atomic import atomic_write
from ..store.transfers import Transfers
from ..texts import named
from .places import RankFiles
from .task import task_of

logger = logging.getLogger(__name__)

MAX_RESULT_BYTES = 1 << 30
"""Outputs larger than this (one GiB of literals, files not counted) are refused; protobuf itself ends at 2 GiB."""

_ROOM_BYTES = 1 << 20
"""Of outputs; few have more."""

_OF_A_RANK = re.compile(r"/safedist-[^/]+/round-(\d+)/rank-(\d+)(?:/|$)")
"""The layout of :mod:`.places`."""


def write_literals(literals: LiteralMap, path: Path) -> None:
    """Write a literal map as protobuf bytes."""
    data = literals.to_flyte_idl().SerializeToString()
    if len(data) > MAX_RESULT_BYTES:
        largest = {name: value.to_flyte_idl().ByteSize() for name, value in literals.literals.items()}
        raise PayloadError(
            "the values are too large to be literals",
            where={"bytes by name": largest},
            seen=f"{len(data)} bytes",
            expected=f"at most {MAX_RESULT_BYTES} bytes",
            hint="return large data as FlyteFile, FlyteDirectory or a data frame",
        )
    path.write_bytes(data)


def read_literals(path: Path) -> LiteralMap:
    """Read what :func:`write_literals` wrote."""
    return mended(LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(path.read_bytes())))


def mended(literals: LiteralMap) -> LiteralMap:
    """The same literals, which flytekit can write again, with the keys of all maps in one order, by name.

    An error that it reads from a protobuf (``err`` of a workflow's ``on_failure`` handler, as a pod gets it) stays a
    protobuf (1.16, ``Scalar.from_flyte_idl``), which its own ``to_flyte_idl`` and ``str`` then fail at.
    A protobuf map comes in an order that differs by process: ranks that loop over a dict would meet in a collective
    with different keys.
    """
    return LiteralMap({name: _mended(literal) for name, literal in sorted(literals.literals.items())})


def _mended(literal: Literal) -> Literal:
    scalar, collection = literal.scalar, literal.collection
    if collection is not None:
        collection = LiteralCollection([_mended(each) for each in collection.literals])
    if scalar is not None and scalar.union is not None:
        scalar = Scalar(union=Union(_mended(scalar.union.value), scalar.union.stored_type))
    elif scalar is not None and scalar.error is not None:
        scalar = Scalar(error=Error(failed_node_id=scalar.error.failed_node_id, message=scalar.error.message))
    return Literal(
        scalar=scalar,
        collection=collection,
        map=mended(literal.map) if literal.map is not None else None,
        hash=literal.hash,
        metadata=literal.metadata,
        offloaded_metadata=literal.offloaded_metadata,
    )


def native_inputs(path: Path, entity: Any, ctx: FlyteContext) -> dict[str, Any]:
    """The task's inputs as Python values of their declared types; of a mapped task those of this pod's element. Dicts
    come in one order of keys in all ranks."""
    sent = read_literals(path)
    with flytekit_inside.one_order_of_keys(_mended):
        if task_of(entity) is not entity:
            return flytekit_inside.inputs_of_element(entity, sent, ctx)
        TypeEngine.lazy_import_transformers()  # else a class that came here by value is known to none of them
        values: dict[str, Any] = TypeEngine.literal_map_to_kwargs(ctx, sent, entity.python_interface.inputs)
    return values


def write_outputs(entity: Any, inputs: dict[str, Any], returned: Any, files: RankFiles, transfers: Transfers) -> None:
    """Turn rank 0's return value into literals (uploading files), and render its decks; leave both for the agent.

    Raises:
        StorageError: the store stayed away, whatever it was that wrote to it.
        PayloadError: a file is not there.
    """
    ctx, task = FlyteContextManager.current_context(), task_of(entity)
    # As in a pod, also when run locally: flytekit then copies files to the raw output prefix instead of pointing into
    # this rank's scratch, which is about to go, and does not write the decks' page, which the agent does.
    state = ctx.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(ctx.with_execution_state(state)) as upload_ctx:
        try:
            literals, native = transfers.outlast(
                "uploading the task's outputs",
                lambda: flytekit_inside.to_literals(entity, returned, upload_ctx),
                only_once=_has_iterator(returned),
            )
        except Exception as error:
            missing = _not_there(returned, str(error))
            if missing is None:
                raise
            raise missing from None  # all that flytekit says is that the path is not there
        with _costing_no_outputs():
            flytekit_inside.write_decks(task, inputs, native, upload_ctx)
    files.result.unlink(missing_ok=True)  # the room that was kept
    publish_decks(ctx.user_space_params, files.decks)
    _write_types(task.interface.outputs, files.types)
    write_literals(literals, files.result)


@contextlib.contextmanager
def _costing_no_outputs() -> Iterator[None]:
    """Inside, decks are made: the user's types and renderers say what is in them, when hours of work are done."""
    try:
        yield
    except Exception as error:
        logger.warning(f"the task's decks are not whole: {named(error)}")


def keep_room(files: RankFiles) -> None:
    """Keep some room for the outputs, on the disk on which they are handed to the agent: before the task's function
    runs, which may fill that."""
    with contextlib.suppress(OSError), files.result.open("wb") as file:  # it is full already
        os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)


def write_nothing(files: RankFiles) -> None:
    """Leave the outputs of a task that has none, before its function runs: it may not come back."""
    _write_types({}, files.types)
    write_literals(LiteralMap({}), files.result)


def _write_types(outputs: Mapping[str, Any], path: Path) -> None:
    path.write_bytes(VariableMap(outputs).to_flyte_idl().SerializeToString())


def read_types(path: Path) -> dict[str, Any]:
    """The variables that the task declares as its outputs, by name."""
    return dict(VariableMap.from_flyte_idl(interface_pb2.VariableMap.FromString(path.read_bytes())).variables)


def leave_decks(parameters: Any, path: Path) -> None:
    """Leave what this rank's decks say, of its ``ExecutionParameters``, for the agent, whose the timeline is, and
    which may read it at any time."""
    told = [{"name": deck.name, "html": deck.html} for deck in parameters.decks if not isinstance(deck, TimeLineDeck)]
    with atomic_write(path, durable=False) as file:
        file.write(json.dumps(told).encode())


def publish_decks(parameters: Any, path: Path) -> None:
    """Leave them as the task runs, at ``Deck.publish()``."""
    with _costing_no_outputs():
        leave_decks(parameters, path)


@contextlib.contextmanager
def decks_left(ctx: FlyteContext, path: Path) -> Iterator[None]:
    """Inside, whatever is raised: a failed task keeps its decks, as a plain one does."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # a full disk, an html that is no text: what failed first is the cause
            leave_decks(ctx.user_space_params, path)
        raise


def read_decks(path: Path) -> list[dict[str, str]]:
    """Name and HTML of each deck that a rank has left; none where it left none."""
    try:
        decks: list[dict[str, str]] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # ValueError: it was ended as it wrote them
        return []
    return decks


def _not_there(returned: object, said: str) -> PayloadError | None:
    """Why files of *returned* could not be uploaded, where flytekit has *said* so of one that is not there."""
    for path in _paths(returned):
        # A word that is no absolute path may be any of what flytekit says.
        said_of_it = path if PurePath(path).is_absolute() else f"File {path} does not exist"
        if said_of_it not in said or os.path.exists(path):  # noqa: PTH110  (it may hold a NUL or be too long)
            continue
        owner = _OF_A_RANK.search(os.path.realpath(path))  # TMPDIR is a link
        whose = f": it is in the scratch of rank {owner[2]}, round {owner[1]}" if owner is not None else ""
        return PayloadError(
            f"rank 0 returns a path that is not there{whose}",
            where={"path": os.path.abspath(path)},  # noqa: PTH100  (the same)
            expected="a file or directory that rank 0 has written, or that all nodes see",
            hint="rank 0's return value is the task's, and each rank's scratch is its own, on its node's disk: have "
            "rank 0 write what it returns, or write to storage that all nodes share and return that path",
        )
    return None


def _has_iterator(value: object) -> bool:
    """Whether there is one in *value*, which would have nothing, or only the rest, for a second try."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_has_iterator, value)) if isinstance(value, (list, tuple)) else isinstance(value, Iterator)


def _paths(value: Any) -> Iterator[str]:
    if is_dataclass(value) and not isinstance(value, type):  # FlyteFile and FlyteDirectory are such, too
        value = [getattr(value, field.name, None) for field in fields(value)]
    elif isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _paths(each)
    elif isinstance(value, (str, PurePath)):
        yield str(value)
