"""How ranks ended, as values: the record survives its file, and one failure is chosen as the root cause."""

from __future__ import annotations

import dataclasses
import json
import pickle
import signal
import sys
import textwrap
import traceback

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flytekitplugins_safedist.failures import Failure
from flytekitplugins_safedist.rank import recording
from flytekitplugins_safedist.rank.outcome import (
    NO_RANK,
    RankOutcome,
    Status,
    root_cause,
)
from flytekitplugins_safedist.rank.outcome_text import describe
from tests.harness.outcomes import OUTCOMES, failed, outcome, raised


# --- the record ------------------------------------------------------------------------------------------------------
@given(OUTCOMES)
def test_a_record_reads_back_equal_from_its_one_line_of_json(original: RankOutcome) -> None:
    text = original.to_json()
    assert "\n" not in text
    text.encode()  # whatever the user's messages hold, the file can be written
    assert RankOutcome.from_json(text) == original
    assert pickle.loads(pickle.dumps(original)) == original


@given(OUTCOMES, st.data())
def test_a_torn_record_is_refused_and_never_half_believed(original: RankOutcome, data: st.DataObject) -> None:
    text = original.to_json()
    with pytest.raises(ValueError):
        RankOutcome.from_json(text[: data.draw(st.integers(0, len(text) - 1))])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(JSON)
@example(None)
@example("raised")
@example(5)
@example({"raised": None, "log_tail": None})
@example({"raised": 5})
@example({"raised": {"failure": "nobody's", "errnos": []}})
def test_json_that_is_no_record_is_refused_as_that(data: object) -> None:
    with pytest.raises(ValueError, match="not a RankOutcome"):
        RankOutcome.from_json(json.dumps(data))


def test_a_record_with_a_field_of_another_version_is_refused() -> None:
    data = json.loads(outcome().to_json())
    with pytest.raises(ValueError, match="surprise"):
        RankOutcome.from_json(json.dumps({**data, "surprise": 1}))
    with pytest.raises(ValueError, match="status"):
        RankOutcome.from_json(json.dumps({**data, "status": "tired"}))
    del data["time_ns"]
    with pytest.raises(ValueError, match="time_ns"):
        RankOutcome.from_json(json.dumps(data))


@pytest.mark.parametrize("status", Status)
def test_what_we_stopped_ourselves_is_no_failure(status: Status) -> None:
    assert outcome(status=status).failed is (status in (Status.RAISED, Status.EXITED, Status.KILLED))


@given(OUTCOMES, st.integers(0, 100))
@example(failed(of=raised(message="x" * 30)), 1)
@example(failed(of=raised(message="x" * 20, traceback="y" * 20)), 20)
def test_a_shortened_record_is_bounded_and_keeps_all_but_the_length_of_its_texts(
    original: RankOutcome, limit: int
) -> None:
    short = original.shortened(limit)
    if original.raised is not None:
        assert short.raised is not None
        for before, after in (
            (original.raised.message, short.raised.message),
            (original.raised.traceback, short.raised.traceback),
        ):
            assert len(after) <= limit + len("\n... [cut] ...\n")
            assert after == before or (len(before) > limit and after.startswith(before[: limit // 2]))
    assert len(short.log_tail) == len(original.log_tail)
    assert all(len(line) <= max(80, limit) for line in short.log_tail)
    assert dataclasses.replace(short, raised=original.raised, log_tail=original.log_tail) == original


def test_a_cut_text_keeps_both_ends() -> None:
    text = "start " + "x" * 1000 + " end"
    short = failed(of=raised(message=text, traceback=text)).shortened(20)
    assert short.raised is not None
    assert short.raised.message == short.raised.traceback == "start xxxx\n... [cut] ...\nxxxxxx end"


def test_a_record_that_cannot_be_made_to_fit_has_no_text_left() -> None:
    least = failed(of=raised(message="x" * 100, traceback="y" * 100), log_tail=("z",)).fitting(32, RankOutcome.to_json)
    assert least.raised == raised(message="\n... [cut] ...\n", traceback="\n... [cut] ...\n")
    assert least.log_tail == ()


@pytest.mark.parametrize(("lines", "limit", "each"), [(1, 1000, 1000), (2, 1000, 500), (3, 1000, 333), (5, 50, 80)])
def test_the_lines_of_a_log_share_what_is_allowed_but_none_is_cut_below_a_terminals_width(
    lines: int, limit: int, each: int
) -> None:
    short = outcome(log_tail=("x" * 2000,) * lines).shortened(limit)
    assert short.log_tail == ("x" * each,) * lines
    assert short.raised is None


def test_a_record_that_fits_is_left_as_it_is() -> None:
    record = failed(of=raised(message="x" * 5000), log_tail=("y" * 500,) * 5)
    size = len(record.to_json().encode())
    assert record.fitting(size, RankOutcome.to_json) is record
    assert len(record.fitting(size - 1, RankOutcome.to_json).to_json().encode()) < size


def test_a_record_that_is_too_long_is_cut_no_more_than_the_next_half() -> None:
    record = failed(of=raised(message="語" * 5000, traceback=""))
    for halvings, limit in ((1, 4000), (2, 2000)):
        fitted = record.fitting(limit, RankOutcome.to_json)
        assert fitted in (record.shortened(limit >> halvings), record.shortened(limit >> (halvings + 1)))
        assert len(fitted.to_json().encode()) <= limit
    assert record.fitting(4000, RankOutcome.to_json) == record.shortened(1000)
    # By bytes, not by characters: the same message in ASCII may keep twice as many.
    ascii_only = failed(of=raised(message="x" * 5000, traceback=""))
    assert ascii_only.fitting(4000, RankOutcome.to_json) == ascii_only.shortened(2000)


def test_where_texts_cut_short_are_still_too_long_the_first_lines_of_the_log_go() -> None:
    log = tuple(f"{number:080}" for number in range(20))
    record = failed(of=raised(message="m", traceback=""), log_tail=log)
    whole = len(record.to_json().encode())
    assert record.fitting(whole - 1, RankOutcome.to_json).log_tail == log[11:]
    left = len(dataclasses.replace(record, log_tail=log[11:]).to_json().encode())
    assert record.fitting(left, RankOutcome.to_json).log_tail == log[11:]
    assert record.fitting(left - 1, RankOutcome.to_json).log_tail == log[16:]
    assert record.fitting(1, RankOutcome.to_json).log_tail == ()


# --- the root cause --------------------------------------------------------------------------------------------------
def test_nothing_failed_means_no_cause() -> None:
    assert root_cause([]) is None
    assert root_cause([outcome(0), outcome(1, Status.STOPPED)]) is None


def test_the_earliest_failure_wins_by_nanoseconds_and_not_by_rank() -> None:
    late, early = failed(0, 1_000_000_001), failed(3, 1_000_000_000)
    assert root_cause([late, early]) is early


def test_the_lowest_rank_wins_a_tie() -> None:
    assert root_cause([failed(2), failed(1), failed(3)]) == failed(1)


def test_a_failure_that_speaks_for_itself_wins_over_an_earlier_echo() -> None:
    echo = failed(0, 1, of=raised("horovod.common.exceptions.HorovodInternalError", failure=Failure.PEER_LOST))
    aborted = outcome(1, Status.KILLED, 2, exit_code=-signal.SIGABRT)
    real = failed(2, 3)
    assert root_cause([echo, aborted, real]) is real
    killed = outcome(3, Status.KILLED, 4, exit_code=-signal.SIGKILL)
    assert root_cause([echo, aborted, killed]) is killed
    left = outcome(3, Status.EXITED, 4, exit_code=3)
    assert root_cause([echo, aborted, left]) is left


def test_among_echoes_alone_the_earliest_is_all_there_is() -> None:
    first = outcome(1, Status.KILLED, 2, exit_code=-signal.SIGABRT)
    assert root_cause([failed(0, 3, of=raised(failure=Failure.PEER_LOST)), first]) is first


def test_a_rank_that_aborts_is_nearer_to_the_root_than_those_that_lost_it_however_late_its_end_is_seen():
    aborted = outcome(1, Status.KILLED, 200, exit_code=-6)
    assert root_cause([failed(0, 100, of=raised(failure=Failure.PEER_LOST)), aborted]) is aborted
    assert root_cause([aborted, failed(2, 300)]).rank == 2


@given(st.lists(OUTCOMES, max_size=6), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_reports(outcomes: list[RankOutcome], rng: st.DataObject) -> None:
    unique = list({(each.rank, each.time_ns): each for each in outcomes}.values())
    shuffled = list(unique)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    cause = root_cause(unique)
    assert root_cause(shuffled) == cause
    assert (cause is None) == (not any(each.failed for each in unique))
    if cause is not None and cause.echo:  # also where an exception tells of another rank's failure
        assert all(each.echo for each in unique if each.failed)


def test_a_collective_that_timed_out_is_nearer_to_the_root_than_the_ranks_that_lost_the_one_that_waited() -> None:
    lost = failed(0, 1, of=raised(failure=Failure.PEER_LOST))
    waited = failed(1, 2, of=raised(failure=Failure.PEER_LOST), timed_out=True)
    knows = failed(2, 3, of=raised(failure=Failure.PEER_LOST), timed_out=True, others="Where rank 3 was then")
    assert root_cause([lost, waited]) is waited
    assert root_cause([lost, waited, knows]) is knows
    assert root_cause([lost, waited, knows, failed(3, 4)]).rank == 3


# --- words -----------------------------------------------------------------------------------------------------------
def test_a_failure_has_a_name_for_consoles_and_metrics() -> None:
    expected = [
        (failed(of=raised("ValueError")), "USER:ValueError"),
        (failed(of=raised("my.own.pack age.Unlucky")), "USER:Unlucky"),
        (failed(of=raised("my.own.Unreadable", code="DATA:Unreadable")), "DATA:Unreadable"),
        (outcome(0, Status.KILLED, exit_code=-signal.SIGSEGV), "USER:SIGSEGV"),
        (outcome(0, Status.KILLED, exit_code=-signal.SIGILL), "USER:SIGILL"),  # its reason has a colon too
        (outcome(0, Status.KILLED, exit_code=-signal.SIGUSR1), "USER:SIGUSR1"),
        (outcome(0, Status.KILLED, exit_code=-37), "USER:signal37"),
        (outcome(0, Status.EXITED, exit_code=3), "USER:Exit3"),
    ]
    assert [(ended, ended.label) for ended, _ in expected] == expected


@pytest.mark.parametrize(("node_rank", "node"), [(-1, "a node"), (0, "node 0"), (1, "node 1")])
def test_a_node_that_cannot_begin_is_told_as_such(node_rank: int, node: str) -> None:
    text = describe(failed(NO_RANK, of=raised(message="no scratch", traceback="T"), node_rank=node_rank))
    assert text == f"{node} (n0) cannot begin: it raised ValueError: no scratch\n\nT"


def test_an_exception_that_says_nothing_is_named_by_its_class_alone() -> None:
    text = describe(failed(3, of=raised("MemoryError", message="", traceback="T")))
    assert text.splitlines()[0].endswith(" raised MemoryError")


def test_what_sys_exit_was_given_is_told_once() -> None:
    text = describe(
        failed(3, of=raised("SystemExit", message="it ended with status 1: no data", traceback="no data\n"))
    )
    assert text.count("no data") == 1


def test_what_is_known_of_memory_is_told_behind_the_cause_of_a_kill() -> None:
    assert describe(outcome(2, Status.KILLED, exit_code=-9, out_of_memory=True, memory="8 of 8 GiB")) == (
        "rank 2 (local_rank 2) on node 0 (n0) was killed by SIGKILL: the kernel's out-of-memory killer\n\n8 of 8 GiB"
    )


def test_a_raised_exception_is_told_with_rank_type_message_traceback_and_last_lines() -> None:
    cause = failed(3, of=raised(message="bad batch"), node_rank=1, local_rank=1, host="n1", log_tail=("epoch 1", "x"))
    assert describe(cause) == (
        "rank 3 (local_rank 1) on node 1 (n1) raised ValueError: bad batch\n\n"
        "Traceback\nValueError: bad batch\n\n"
        "Last 2 line(s) that rank 3 printed:\n    epoch 1\n    x"
    )


def test_a_failure_after_restarts_says_so() -> None:
    first = describe(failed(round=0))
    assert "round" not in first
    for number in (1, 2):
        again = f"This was round {number}: the ranks had been started before (rounds count from 0)."
        assert describe(failed(round=number)) == f"{first}\n\n{again}"


def test_outcomes_are_frozen_and_default_to_the_users_fault() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        outcome().rank = 1  # type: ignore[misc]
    assert raised().failure is Failure.OWN


def test_letters_that_no_encoding_has_are_spelled_out_wherever_they_stand() -> None:
    odd = outcome(host="\udcff", memory="\udcff", log_tail=("fine", "\udcff"), seconds={"\udcff": 1.0})
    assert odd.to_json().encode()
    assert (odd.host, odd.memory, odd.log_tail, odd.seconds) == (
        "\\udcff",
        "\\udcff",
        ("fine", "\\udcff"),
        {"\\udcff": 1.0},
    )


def test_control_characters_of_an_exception_are_spelled_out() -> None:
    shown = raised("ValueError", "\x1b[2J\x07gone\r\x00\x9b\ttab\nline")
    assert shown.message == "\\x1b[2J\\x07gone\\x0d\\x00\\x9b\ttab\nline"


def test_what_a_loaders_worker_said_stands_in_the_first_line() -> None:
    of_worker = (
        "Caught BadSample in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n"
        '  File "data.py", line 7, in read\n    raise KeyError(17)\nKeyError: 17\n\nDuring handling of the above '
        "exception, another exception occurred:\n\nTraceback (most recent call last):\n"
        '  File "data.py", line 9, in __getitem__\n    raise BadSample(17)\n'
        "my.data.BadSample: bad sample 17:\n  truncated JPEG\n"
    )
    text = describe(failed(of=raised("my.data.BadSample", of_worker)))
    assert "raised my.data.BadSample: bad sample 17:\n  truncated JPEG (in DataLoader worker process 3)\n\n" in text
    assert text.count("Original Traceback") == 1, "in the traceback alone"
    cut = "Caught BadSample in DataLoader worker process 3.\nOriginal Traceback ..."
    assert f"raised BadSample: {cut}" in describe(failed(of=raised("BadSample", cut)))


def test_what_torchs_checkpoints_raise_has_the_first_line_of_the_rank_that_failed() -> None:
    text = (
        "CheckpointException ranks:dict_keys([2])\nTraceback (most recent call last): (RANK 2)\n"
        '  File "filesystem.py", line 424, in write\n    data = planner.resolve_data(item)\n'
        "OSError: [Errno 5] Input/output error\n"
    )
    shown = describe(failed(of=raised("torch.distributed.checkpoint.api.CheckpointException", text)))
    assert (
        "raised torch.distributed.checkpoint.api.CheckpointException: OSError: [Errno 5] Input/output error\n" in shown
    )


@pytest.mark.parametrize(
    ("of", "says", "told"), [("rich.traceback", "no", ""), ("tracker", "kept: no", "kept: no"), ("tracker", "", "")]
)
def test_a_hook_that_knows_more_than_to_print_the_traceback_hears_of_an_exception(monkeypatch, of, says, told) -> None:
    heard = []

    def hook(kind: type[BaseException], error: BaseException, _: object) -> None:
        heard.append(error)
        lines = traceback.format_exception_only(kind, error)
        sys.stderr.write(says or "\n".join(textwrap.wrap("".join(lines), 7)))

    hook.__module__ = of
    monkeypatch.setattr(sys, "excepthook", hook)
    error = ModuleNotFoundError("no")
    assert recording.told_to_hook(error) == told
    assert heard == ([error] if of == "tracker" else [])
