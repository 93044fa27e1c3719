"""Errors are made of facts: the message follows from them, and both survive the way between processes."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import sys
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

from flytekitplugins_safedist import errors
from flytekitplugins_safedist.errors import ConfigError, Problem, SafedistError
from flytekitplugins_safedist.failures import Payer
from flytekitplugins_safedist.plugin.task import RecoverableRankFailedError
from flytekitplugins_safedist.rank import recording
from tests.harness.outcomes import failed
from tests.unit.test_house import MODULES, nodes


def every_class() -> list[type[SafedistError]]:
    ours = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, SafedistError)]
    return [*ours, RecoverableRankFailedError]


def an(cls: type[SafedistError]) -> SafedistError:
    if issubclass(cls, ConfigError):
        return cls([Problem("nodes", 0, "is too few", "use 1"), Problem("x", "y", "is odd", "drop it")], where={"t": 1})
    return cls("it broke", where={"path": Path("/x"), "rank": 3}, seen=[1], expected=2.5, hint="look at /x")


def test_the_tree_has_no_class_outside_the_table_of_errors_but_flytes_recoverable_one() -> None:
    names = {cls.__name__ for cls in every_class()}
    elsewhere = [
        node.name
        for path in MODULES
        for node in nodes(path.read_text())
        if path.name != "errors.py" and isinstance(node, ast.ClassDef)
        if any(ast.unparse(base).rpartition(".")[2] in names for base in node.bases)
    ]
    assert elsewhere == ["RecoverableRankFailedError"]
    assert len(names) > 15


def test_an_error_keeps_its_class_facts_and_message_through_pickling_and_copying() -> None:
    for cls in every_class():
        error = an(cls)
        pickled = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
        for back in (*pickled, copy.copy(error), copy.deepcopy(error)):
            assert type(back) is cls
            assert back.__dict__ == error.__dict__
            assert str(back) == str(error) == error.args[0] == back.args[0]


def test_an_error_of_a_data_loaders_worker_is_raised_again_by_torch_as_what_it_was() -> None:
    for cls in every_class():
        try:
            raise an(cls)
        except SafedistError:
            wrapped = ExceptionWrapper(sys.exc_info(), where="in DataLoader worker process 0")
        with pytest.raises(cls) as caught:
            pickle.loads(pickle.dumps(wrapped)).reraise()
        assert type(caught.value) is cls
        assert f"Caught {cls.__name__} in DataLoader worker process 0" in str(caught.value)
        assert str(an(cls)) in str(caught.value)


def test_notes_added_on_the_way_survive_pickling() -> None:
    error = SafedistError("it broke")
    error.__notes__ = ["while staging"]  # type: ignore[attr-defined]  # what add_note of Python 3.11 fills
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while staging"]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "it broke"),
        ({"where": {"path": "/x", "rank": 3}}, "it broke [path=/x, rank=3]"),
        ({"seen": 0}, "it broke (seen: 0)"),
        ({"expected": "more"}, "it broke (expected: more)"),
        ({"seen": 1, "expected": 2}, "it broke (seen: 1; expected: 2)"),
        ({"hint": "mend it"}, "it broke. Fix: mend it"),
        (
            {"where": {"rank": 0}, "seen": "a", "expected": "b", "hint": "mend it"},
            "it broke [rank=0] (seen: a; expected: b). Fix: mend it",
        ),
    ],
)
def test_the_message_is_composed_of_the_facts_that_are_there(facts: dict[str, object], message: str) -> None:
    error = SafedistError("it broke", **facts)  # type: ignore[arg-type]
    assert str(error) == error.args[0] == message


def test_a_sentence_that_ends_already_gets_no_second_full_stop_before_the_next_step() -> None:
    assert str(SafedistError("it broke.", hint="mend it")) == "it broke. Fix: mend it"


def test_the_callers_mapping_is_copied_and_not_kept() -> None:
    where: dict[str, object] = {"rank": 0}
    error = SafedistError("it broke", where=where)
    where["rank"] = 1
    assert error.where == {"rank": 0}


def test_a_config_error_counts_and_lists_all_of_its_problems() -> None:
    assert str(an(ConfigError)) == "2 problems: nodes=0 is too few (use 1); x='y' is odd (drop it) [t=1]"
    assert str(ConfigError([Problem("nodes", 0, "is too few", "use 1")])) == "1 problem: nodes=0 is too few (use 1)"


def test_errors_can_be_caught_as_what_they_are_and_as_pythons() -> None:
    def are(base: type[BaseException]) -> set[str]:
        return {cls.__name__ for cls in every_class() if issubclass(cls, base)}

    timeouts = {"FsTimeoutError", "LaunchTimeoutError", "RendezvousTimeoutError"}
    assert are(TimeoutError) == {*timeouts, "NotReplacedError"}
    assert timeouts == {cls.__name__ for cls in every_class() if "Timeout" in cls.__name__}
    assert are(PermissionError) == {"FsAccessError"}
    assert are(errors.RendezvousError) >= {"RendezvousTimeoutError", "GroupClosedError", "FencedError"}
    for name in (*timeouts, "FsAccessError"):  # an OSError makes its own text of its arguments
        text = "it broke [path=/x, rank=3] (seen: [1]; expected: 2.5). Fix: look at /x"
        assert str(an(getattr(errors, name))) == text


def test_the_table_of_the_docs_has_every_error_with_its_bases_and_words_in_every_column() -> None:
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    assert [row for row in rows if len(row) != 6 or not all(row)] == []
    shown = {row[0].strip("`"): re.findall(r"`(\w+)`", row[1]) for row in rows}
    assert len(shown) == len(rows)
    assert shown == {cls.__name__: [base.__name__ for base in cls.__bases__] for cls in every_class()}


def test_a_rank_that_one_has_ended_has_the_code_and_the_budget_that_the_docs_say() -> None:
    """Those are made of the error (scripts/failures.py), and a rank's of its record."""
    pays = {Payer.NOBODY: "none: the task fails", Payer.RETRIES: "the task's `retries`", Payer.FLYTE: "Flyte"}
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    told = re.findall(r"^\| `(\w+)` \|.*\| `(\w+:\w+)` \| ([^|]+) \|$", text, re.MULTILINE)
    ends = {cls.__name__: failed(of=recording.record(an(cls), "")) for cls in every_class()}
    assert told == [(name, ends[name].label, pays[ends[name].failure.row.payer]) for name, *_ in told]
    assert len(told) == len(ends)


def test_the_page_names_all_errors_that_are_not_restarted_in_place() -> None:
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    named = text.partition("restarted in place: of the table ")[2].partition(", and whatever")[0]
    assert set(re.findall(r"`(\w+)`", named)) == {cls.__name__ for cls in every_class() if an(cls).failure.row.repeats}
