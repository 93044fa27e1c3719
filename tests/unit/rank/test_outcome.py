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
@given(OUTCOMES, st.integers(0, 100), st.data())
@example(failed(of=raised(message="x" * 30)), 1, None)
@example(failed(of=raised(message="x" * 20, traceback="y" * 20)), 20, None)
def test_a_record_reads_back_equal_from_its_one_line_of_json_whole_or_shortened_and_never_torn(
    original: RankOutcome, limit: int, data: st.DataObject | None
) -> None:
    text = original.to_json()
    assert "\n" not in text
    text.encode()  # whatever the user's messages hold, the file can be written
    assert RankOutcome.from_json(text) == original
    assert pickle.loads(pickle.dumps(original)) == original
    if data is not None:
        with pytest.raises(ValueError):
            RankOutcome.from_json(text[: data.draw(st.integers(0, len(text) - 1))])
    _see_shortened(original, original.shortened(limit), limit)


def _see_shortened(original: RankOutcome, short: RankOutcome, limit: int) -> None:
    """It is bounded, and keeps all but the length of its texts."""
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
ECHO = failed(0, 1, of=raised("horovod.common.exceptions.HorovodInternalError", failure=Failure.PEER_LOST))
LOST = failed(0, 100, of=raised(failure=Failure.PEER_LOST))
ABORTED = outcome(1, Status.KILLED, 200, exit_code=-signal.SIGABRT)
WAITED = failed(1, 200, of=raised(failure=Failure.PEER_LOST), timed_out=True)
KNOWS = failed(2, 300, of=raised(failure=Failure.PEER_LOST), timed_out=True, others="Where rank 3 was then")
REAL = failed(3, 400)


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        pytest.param([], None, id="none is there"),
        pytest.param([outcome(0), outcome(1, Status.STOPPED)], None, id="none has failed"),
        pytest.param([failed(0, 10**9 + 1), failed(3, 10**9)], failed(3, 10**9), id="by nanoseconds, not by rank"),
        pytest.param([failed(2), failed(1), failed(3)], failed(1), id="the lowest rank of a tie"),
        pytest.param([ECHO, ABORTED, REAL], REAL, id="what speaks for itself before an earlier echo"),
        *(
            pytest.param([ECHO, ABORTED, own], own, id=f"as {own.status}")
            for own in (
                outcome(3, Status.KILLED, 400, exit_code=-signal.SIGKILL),
                outcome(3, Status.EXITED, 400, exit_code=3),
            )
        ),
        pytest.param([LOST, ABORTED], ABORTED, id="an abort before those that lost it, however late it is seen"),
        pytest.param([LOST, WAITED], WAITED, id="a time-out before those that lost the one that waited"),
        pytest.param([LOST, WAITED, KNOWS], KNOWS, id="the time-out that knows where the others were"),
        pytest.param([LOST, WAITED, KNOWS, REAL], REAL, id="what speaks for itself before any of them"),
        pytest.param([failed(0, 3, of=ECHO.raised), ECHO], ECHO, id="the earliest of echoes alone"),
    ],
)
def test_the_root_cause_is(ended: list[RankOutcome], cause: RankOutcome | None) -> None:
    assert root_cause(ended) == cause


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


TRAINED = failed(3, of=raised(message="bad batch"), node_rank=1, local_rank=1, host="n1", log_tail=("epoch 1", "x"))


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        *(
            (
                failed(NO_RANK, of=raised(message="no scratch", traceback="T"), node_rank=number),
                f"{node} (n0) cannot begin: it raised ValueError: no scratch\n\nT",
            )
            for number, node in ((-1, "a node"), (0, "node 0"), (1, "node 1"))
        ),
        (
            failed(3, of=raised("MemoryError", message="", traceback="T")),
            "rank 3 (local_rank 3) on node 0 (n0) raised MemoryError\n\nT",
        ),
        (
            outcome(2, Status.KILLED, exit_code=-9, out_of_memory=True, memory="8 of 8 GiB"),
            "rank 2 (local_rank 2) on node 0 (n0) was killed by SIGKILL: the kernel's out-of-memory killer\n\n"
            "8 of 8 GiB",
        ),
        (
            TRAINED,
            "rank 3 (local_rank 1) on node 1 (n1) raised ValueError: bad batch\n\n"
            "Traceback\nValueError: bad batch\n\n"
            "Last 2 line(s) that rank 3 printed:\n    epoch 1\n    x",
        ),
    ],
)
def test_an_end_is_told_with_rank_type_message_traceback_last_lines_and_what_is_known_of_memory(ended, said) -> None:
    assert describe(ended) == said


def test_what_sys_exit_was_given_is_told_once() -> None:
    of = raised("SystemExit", message="it ended with status 1: no data", traceback="no data\n")
    assert describe(failed(3, of=of)).count("no data") == 1


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
