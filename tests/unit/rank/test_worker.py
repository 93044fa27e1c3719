"""What a rank is told and what it leaves: orders, and records of any exception that a user's function can raise.

How a rank runs, in processes of its own, is tested with the others of its job in tests/agents.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
from flytekit.exceptions.system import FlyteDownloadDataException
from flytekit.exceptions.user import FlyteRecoverableException
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from flytekitplugins_safedist.errors import (
    CheckpointError,
    ConfigError,
    FsIoError,
    MissingDependencyError,
    NotInTaskError,
    PayloadError,
    ScratchError,
)
from flytekitplugins_safedist.failures import Failure
from flytekitplugins_safedist.rank import main, recording, shared_page
from flytekitplugins_safedist.rank.fork import Reads, die_with_parent
from flytekitplugins_safedist.rank.order import RankOrder
from flytekitplugins_safedist.rank.outcome import Raised, RankOutcome, Status
from flytekitplugins_safedist.rank.places import RankFiles
from flytekitplugins_safedist.run import ScriptStatusError
from tests.harness.outcomes import SIXTH, rank_at
from tests.harness.procs import DEADLINE

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup  # which pytest brings there


def order(directory: Path, /, **environment: str) -> RankOrder:
    return RankOrder(
        context=rank_at(directory / "rank-5", **SIXTH, node_dir=directory / "node"),
        environment=environment,
        files=RankFiles.at(directory / "5", directory / "5.fr"),
        log=directory / "5.log",
        ran_before=False,
    )


@given(st.dictionaries(st.text(), st.text(st.characters())))
def test_an_order_reads_back_equal_whatever_bytes_the_environment_holds(environment: dict[str, str]) -> None:
    original = order(Path("/s"), **environment)
    text = json.dumps(original.to_dict())
    text.encode("ascii")
    assert RankOrder.from_dict(json.loads(text)) == original


def recorded(error: BaseException) -> Raised:
    """The record of an exception as a rank's function would raise it."""
    with pytest.raises(type(error)) as caught:
        raise error
    return recording.record(caught.value, recording.own_frames_cut(caught.value))


class LossError(ValueError):
    pass


class MyRecoverableError(FlyteRecoverableException):  # type: ignore[misc]
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_frames_of_a_package_beside_ours_whose_name_begins_with_ours_are_the_users() -> None:
    place = f"{Path(recording.__file__).parents[1]}_tasks/train.py"
    inside: dict[str, Any] = {}
    exec(compile("def train():\n    raise LossError('bad loss')", place, "exec"), {"LossError": LossError}, inside)
    with pytest.raises(LossError) as caught:
        inside["train"]()
    assert f'File "{place}", line 2, in train' in recording.own_frames_cut(caught.value)


def test_a_record_has_type_message_and_the_whole_traceback_with_its_causes() -> None:
    error = LossError("bad loss")
    error.__cause__ = KeyError("k")
    record = recorded(error)
    assert (record.type, record.message) == (f"{__name__}.LossError", "bad loss")
    assert "KeyError: 'k'" in record.traceback
    assert "The above exception was the direct cause" in record.traceback
    assert record.traceback.endswith("LossError: bad loss\n")
    assert recorded(ValueError("x")).type == "ValueError"


def test_whose_fault_it_is_and_whether_it_repeats() -> None:
    expected = [
        (ValueError("x"), Failure.OWN, False),
        (OSError(errno.EIO, "x"), Failure.NODE_DISK, False),
        (SystemExit(3), Failure.OWN, False),
        (KeyboardInterrupt(), Failure.OWN, False),
        (ImportError("x"), Failure.COMES_AGAIN, True),
        (SyntaxError("x"), Failure.COMES_AGAIN, True),
        (ConfigError([]), Failure.COMES_AGAIN, True),
        (MissingDependencyError("x"), Failure.COMES_AGAIN, True),
        (NotInTaskError("x"), Failure.COMES_AGAIN, True),
        (PayloadError("x"), Failure.COMES_AGAIN, True),
        (ScratchError("x"), Failure.OWN, False),
        (FsIoError("x"), Failure.NODE_DISK, False),
        (CheckpointError("x"), Failure.COMES_AGAIN, True),
        (FlyteRecoverableException("x"), Failure.RECOVERABLE, False),
        (MyRecoverableError("x"), Failure.RECOVERABLE, False),
        (FlyteDownloadDataException("x"), Failure.STORAGE, False),
    ]
    records = [(error, recorded(error)) for error, *_ in expected]
    assert [(error, record.failure, record.repeats) for error, record in records] == expected


def test_sys_exit_in_the_function_is_said_to_be_that() -> None:
    said = "the task function called sys.exit(0) instead of returning a value"
    assert recording.record(SystemExit(0), "").message == said


def test_of_sys_exit_it_is_said_which_line_of_the_users_led_there() -> None:
    parser = argparse.ArgumentParser()
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--no-such"])
    line = f"{Path(__file__).name}:{caught.traceback[0].lineno + 1} in {caught.traceback[0].name}"
    assert recorded(caught.value).message.endswith(f"sys.exit(2) instead of returning a value, at {line}")
    assert ScriptStatusError("train.py", caught.value).words == f"train.py ended with status 2, at {line}"


def test_of_sys_exit_in_an_except_block_it_is_said_what_had_come_there() -> None:
    """Hydra ends so, and many a script's main."""

    def main() -> None:
        try:
            float("bad")
        except ValueError:
            sys.exit(1)

    with pytest.raises(SystemExit) as caught:
        main()
    after = ", after ValueError: could not convert string to float: 'bad'"
    assert recorded(caught.value).message.endswith(after)
    assert ScriptStatusError("train.py", caught.value).words.endswith(after)


@pytest.mark.parametrize(("status", "text"), [("no data", "no data\n"), (3, ""), (None, "")])
def test_of_sys_exit_a_ranks_log_has_what_an_interpreter_prints(status: object, text: str) -> None:
    assert recording.shown(SystemExit(status)) == text


def test_an_exception_that_cannot_be_turned_into_text_is_recorded_all_the_same() -> None:
    record = recorded(Unspeakable())
    assert record.type == f"{__name__}.Unspeakable"
    assert record.message == "<no message: str() of it raised RuntimeError: no words>"


def test_an_exception_that_would_end_the_process_as_text_is_not_said_to_take_long() -> None:
    class Leaves(Exception):
        def __str__(self) -> str:
            raise SystemExit(3)

    assert recording.record(Leaves(), "").message == "<no message: str() of it raised SystemExit: 3>"


def test_the_first_line_of_a_group_says_what_those_in_it_have_raised() -> None:
    failed = [ValueError(f"sample {number}\nin full") for number in range(5)]
    inner = ExceptionGroup("", failed)
    record = recorded(ExceptionGroup("in a TaskGroup", [KeyError("x"), inner, inner, ValueError("sample 0")]))
    first = "in a TaskGroup (4 sub-exceptions): KeyError: 'x'; ValueError: sample 0; ValueError: sample 1; and 3 more"
    assert record.message == first
    assert "ValueError: sample 4\n" in record.traceback
    assert (
        recorded(ExceptionGroup("more\nlines", [ValueError("a")])).message
        == "more: ValueError: a\nlines (1 sub-exception)"
    )


class Collects(Exception):
    """Of a library's own, as many have: which are in it, it says itself; and one of them is this very one."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(f"all failed: {errors}")
        self.exceptions = [self, *errors]


class Hides(Exception):
    @property
    def exceptions(self) -> object:
        raise RuntimeError("not yet")


def test_what_only_looks_like_a_group_is_recorded_all_the_same() -> None:
    assert recorded(Collects(ValueError("a"))).message == "all failed: (ValueError('a'),): ValueError: a"
    assert recorded(Hides("x")).message == "x"


def test_errnos_are_collected_along_the_chain_of_causes() -> None:
    full = OSError(errno.ENOSPC, "full")
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = full
    assert recorded(wrapped).errnos == (errno.ENOSPC,)
    handling = ValueError("while handling")
    handling.__context__ = full
    assert recording.record(handling, "").errnos == (errno.ENOSPC,)
    assert recorded(OSError("no number")).errnos == ()


@pytest.mark.parametrize("rank", [0, 2])
def test_what_torchs_checkpoints_raise_in_every_rank_is_of_the_ranks_that_failed(rank: int) -> None:
    everywhere = CheckpointException("write", {2: (OSError(errno.EIO, "Input/output error"), StackSummary())})
    left = recording.record(everywhere, "", rank=rank, world_size=3)
    assert (left.failure, left.of_another) == (Failure.NODE_DISK, rank == 0)


def test_a_suppressed_context_is_no_cause() -> None:
    error = ValueError("x")
    error.__context__ = OSError(errno.ENOSPC, "full")
    error.__suppress_context__ = True
    assert recording.record(error, "").errnos == ()


def test_room_for_the_record_is_set_aside_before_the_rank_exists(tmp_path: Path) -> None:
    shared_page.make(tmp_path / "page")
    assert (tmp_path / "page").stat().st_blocks * 512 >= shared_page.RECORD_BYTES


def left(directory: Path, raised: Raised | None) -> RankOutcome:
    to = order(directory)
    agents = shared_page.make(to.files.page)
    rank = main.RankProcess(None, to, 0, {}, None)  # type: ignore[arg-type]
    rank.seconds["function"] = 1.5
    rank.end(Status.RAISED if raised else Status.SUCCEEDED, 1, raised)
    record = agents.record
    assert record is not None
    assert len(record.encode()) <= shared_page.RECORD_BYTES
    return RankOutcome.from_json(record)


def test_a_record_says_whose_it_is_and_how_long_the_phases_took(tmp_path: Path) -> None:
    record = left(tmp_path, None)
    assert (record.rank, record.local_rank, record.node_rank, record.round) == (5, 1, 2, 4)
    assert (record.status, record.pid, record.seconds) == (Status.SUCCEEDED, os.getpid(), {"function": 1.5})


def test_a_record_that_is_cut_short_is_none_and_the_last_of_several_counts(tmp_path: Path) -> None:
    agents, ranks = shared_page.make(tmp_path / "page"), shared_page.open_page(tmp_path / "page")
    assert agents.record is None
    ranks.end("first")
    ranks._record[1:2] = b"!"  # what a processor shows of a record whose seal it has seen first
    assert agents.record is None
    ranks.end("the second")
    assert agents.record == "the second"


@pytest.mark.parametrize("character", ["x", "\n", "😀", "\udcff"])
def test_a_huge_message_is_cut_to_the_room_that_was_set_aside(tmp_path: Path, character: str) -> None:
    text = "start " + character * 1_000_000 + " end"
    record = left(tmp_path, Raised(type="ValueError", message=text, traceback=text))
    assert record.raised is not None
    shown = {"\udcff": r"\udcff"}.get(character, character)  # protobuf could not hold the surrogate
    for kept in (record.raised.message, record.raised.traceback):
        assert kept.startswith(f"start {shown}")
        assert "... [cut] ..." in kept
        assert kept.endswith(f"{shown} end")


def test_an_order_with_anything_missing_is_no_order() -> None:
    data = order(Path("/s")).to_dict()
    for name in data.keys() - {"errors", "terminal", "profile"}:
        with pytest.raises(LookupError, match=name):
            RankOrder.from_dict({key: value for key, value in data.items() if key != name})


def test_what_fails_before_the_function_has_a_record_as_what_fails_in_it(tmp_path: Path) -> None:
    to = replace(order(tmp_path), log=tmp_path / "nowhere" / "5.log")
    agents = shared_page.make(to.files.page)
    child = os.fork()
    if child == 0:
        code = 99
        with suppress(BaseException):
            code = main.RankProcess(None, to, 0, {}, None).run()  # type: ignore[arg-type]
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == main.EXIT_FAILED
    assert agents.record is not None
    record = RankOutcome.from_json(agents.record)
    assert record.raised is not None
    assert (record.raised.type, record.raised.errnos) == ("FileNotFoundError", (errno.ENOENT,))


def test_a_rank_whose_server_died_before_the_kernel_was_told_ends_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            main.be(None, order(tmp_path), server=-1, sets={}, reads=Reads())  # type: ignore[arg-type]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == main.EXIT_FAILED


def test_a_rank_dies_with_its_server() -> None:
    ended, held = os.pipe()
    told, tell = os.pipe()
    server = os.fork()
    if server == 0:
        if os.fork() == 0:
            die_with_parent(signal.SIGKILL)
            os.write(tell, str(os.getpid()).encode())
        else:
            os.close(held)
        signal.pause()
        os._exit(0)
    os.close(held)
    rank = int(os.read(told, 20))
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    try:
        assert select.select([ended], [], [], DEADLINE)[0], "the rank's end of the pipe is closed"
    finally:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
        for end in (ended, told, tell):
            os.close(end)
