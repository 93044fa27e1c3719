"""What moves between the agent and its ranks: inputs and outputs as literals, decks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
from flyteidl.core import literals_pb2
from flytekit import FlyteContextManager, task
from flytekit.core.type_engine import TypeEngine
from flytekit.deck import Deck
from flytekit.models.literals import LiteralMap
from flytekit.types.file import FlyteFile

from flytekitplugins_safedist.errors import PayloadError
from flytekitplugins_safedist.plugin.task import SafeTorch
from flytekitplugins_safedist.rank import literals as moved
from flytekitplugins_safedist.rank import task_context
from flytekitplugins_safedist.rank.places import RankFiles
from flytekitplugins_safedist.store.transfers import Transfers

pytestmark = pytest.mark.processes


class Both(NamedTuple):
    loss: float
    name: str


@task(task_config=SafeTorch())
def every_type(
    number: int, text: str, flag: bool, many: list[int], table: dict[str, float], wait: timedelta, none: None = None
) -> Both:
    return Both(1.0, "x")


def literals(of: Any, values: dict[str, Any]) -> LiteralMap:
    return TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), values, of.python_interface.inputs)


def test_inputs_arrive_with_their_python_types(tmp_path: Path) -> None:
    values = {
        "number": 3,
        "text": "ä\0",
        "flag": True,
        "many": [1, 2],
        "table": {"a": 0.5},
        "wait": timedelta(seconds=1.5),
        "none": None,
    }
    path = tmp_path / "inputs.pb"
    moved.write_literals(literals(every_type, values), path)
    arrived = moved.native_inputs(path, every_type, FlyteContextManager.current_context())
    assert arrived == values
    assert {name: type(value) for name, value in arrived.items()} == {name: type(v) for name, v in values.items()}


def outputs_of(of: Any, returned: Any, path: Path) -> LiteralMap:
    with task_context.entered(task_context.take(), path.parent):
        files = RankFiles.at(path.with_suffix(""), path)
        moved.write_outputs(of, {}, returned, files, Transfers())
    assert moved.read_types(files.types).keys() == of.interface.outputs.keys()
    return moved.read_literals(files.result)


def test_every_literal_that_flyte_has_is_read_and_written_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    kinds = [field.name for field in literals_pb2.Scalar.DESCRIPTOR.fields]
    came = []
    for kind in kinds:
        one = literals_pb2.Literal()
        getattr(one.scalar, kind).SetInParent()
        several = literals_pb2.LiteralMap(literals={"plain": one})
        several.literals["maybe"].scalar.union.value.CopyFrom(one)
        several.literals["maybe"].scalar.union.type.simple = 1
        several.literals["listed"].collection.literals.append(one)
        several.literals["named"].map.literals["a"].CopyFrom(several.literals["maybe"])
        first.write_bytes(several.SerializeToString())
        read = moved.read_literals(first)
        moved.write_literals(read, second)
        assert sorted(read.literals) == ["listed", "maybe", "named", "plain"]
        assert moved.read_literals(second) == read, kind
        written = literals_pb2.LiteralMap.FromString(second.read_bytes())
        came.append(written.literals["named"].map.literals["a"].scalar.union.value.scalar.WhichOneof("value"))
    assert came == kinds


def test_outputs_are_written_under_their_declared_names(tmp_path: Path) -> None:
    written = outputs_of(every_type, Both(0.25, "run"), tmp_path / "result.pb")
    assert TypeEngine.literal_map_to_kwargs(
        FlyteContextManager.current_context(), written, every_type.python_interface.outputs
    ) == {"loss": 0.25, "name": "run"}


def test_a_task_without_outputs_writes_none(tmp_path: Path) -> None:
    @task(task_config=SafeTorch())
    def nothing() -> None:
        pass

    assert outputs_of(nothing, None, tmp_path / "result.pb").literals == {}


def test_a_returned_file_is_copied_out_of_the_ranks_scratch(tmp_path: Path) -> None:
    @task(task_config=SafeTorch())
    def save() -> FlyteFile:
        return FlyteFile("")

    model = tmp_path / "scratch" / "model.bin"
    model.parent.mkdir()
    model.write_bytes(b"weights")
    written = outputs_of(save, FlyteFile(str(model)), model.parent / "result.pb")
    uri = Path(written.literals["o0"].scalar.blob.uri)
    assert not uri.is_relative_to(tmp_path)
    assert uri.read_bytes() == b"weights"


def test_a_result_of_the_wrong_type_is_flytekits_error_naming_types(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"loss|float"):
        outputs_of(every_type, Both("high", "x"), tmp_path / "result.pb")  # type: ignore[arg-type]
    assert not (tmp_path / "result.pb").exists()


def test_values_above_the_limit_are_refused_with_the_size_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A small limit stands in for the real one, which would need gigabytes of memory.
    monkeypatch.setattr(moved, "MAX_RESULT_BYTES", 100)

    @task(task_config=SafeTorch())
    def wide(text: str, number: int) -> None:
        pass

    moved.write_literals(literals(wide, {"text": "x" * 20, "number": 1}), tmp_path / "small.pb")
    with pytest.raises(PayloadError) as caught:
        moved.write_literals(literals(wide, {"text": "x" * 200, "number": 1}), tmp_path / "large.pb")
    by_name = caught.value.where["bytes by name"]
    assert isinstance(by_name, dict)
    assert by_name["text"] > 200 > by_name["number"]
    assert str(caught.value).startswith("the values are too large to be literals [bytes by name={'text': ")
    assert caught.value.expected == "at most 100 bytes"
    assert caught.value.hint == "return large data as FlyteFile, FlyteDirectory or a data frame"
    assert not (tmp_path / "large.pb").exists()


class Failing:
    """A renderer of the user's."""

    def to_html(self, value: object) -> str:
        raise RuntimeError(f"cannot draw {value}")


def test_a_deck_that_cannot_be_made_costs_no_outputs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @task(task_config=SafeTorch(), enable_deck=True)
    def drawing() -> Annotated[int, Failing()]:
        return 1

    with task_context.entered(task_context.take(), tmp_path):
        Deck("loss", "<b>0.1</b>")
        files = RankFiles.at(tmp_path / "0", tmp_path)
        moved.write_outputs(drawing, {}, 1, files, Transfers())
    assert moved.read_literals(files.result).literals["o0"].scalar.primitive.integer == 1
    assert {"name": "loss", "html": "<b>0.1</b>"} in moved.read_decks(files.decks)
    assert caplog.messages == ["the task's decks are not whole: RuntimeError: cannot draw 1"]
