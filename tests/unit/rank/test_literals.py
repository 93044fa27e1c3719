"""What moves between the agent and its ranks: inputs and outputs as literals, decks.

That values arrive with their types, and files outlive their rank: tests/unit/plugin/test_task.py, with real ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from flyteidl.core import literals_pb2
from flytekit import FlyteContextManager, task
from flytekit.core.type_engine import TypeEngine
from flytekit.deck import Deck
from flytekit.models.literals import LiteralMap

from flytekitplugins_safedist.errors import PayloadError
from flytekitplugins_safedist.plugin.task import SafeTorch
from flytekitplugins_safedist.rank import literals as moved
from flytekitplugins_safedist.rank import task_context
from flytekitplugins_safedist.rank.places import RankFiles
from flytekitplugins_safedist.store.transfers import Transfers

pytestmark = pytest.mark.processes


def literals(of: Any, values: dict[str, Any]) -> LiteralMap:
    return TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), values, of.python_interface.inputs)


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
