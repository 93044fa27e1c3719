"""Ranks' output in the node's log: whole lines with their rank, live, and nothing lost at the end."""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.agent import log_lines
from flytekitplugins_safedist.agent.log_lines import (
    LogFollower,
    last_words,
    printable,
    tail,
    to_stdout,
    without_traceback,
)
from tests.harness.procs import DEADLINE


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "POLL_SECONDS", 0.01)


class Log:
    """What a follower passes on, block by block; a test waits for a text to arrive."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self._arrived = threading.Condition()

    def __call__(self, block: str) -> None:
        with self._arrived:
            self.blocks.append(block)
            self._arrived.notify_all()

    @property
    def text(self) -> str:
        return "".join(self.blocks)

    def wait_for(self, text: str) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: text in self.text, timeout=60), self.text


@contextmanager
def following(*logs: tuple[str, Path]) -> Iterator[Log]:
    shown = Log()
    follower = LogFollower(logs, shown, clock=lambda: 0.0)  # a bar is shown again by time
    follower.start()
    try:
        yield shown
    finally:
        follower.stop()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_lines_have_their_rank_and_are_whole_and_passed_on_while_it_runs(tmp_path: Path) -> None:
    zero, one = tmp_path / "0", tmp_path / "1"
    with following(("0 ", zero), ("1 ", one)) as shown:
        append(zero, b"loss ")
        append(one, b"whole\n")
        shown.wait_for("1 whole\n")
        append(zero, b"0.5\n")
        shown.wait_for("0 loss 0.5\n")
    assert shown.text == "1 whole\n0 loss 0.5\n"
    assert all(block.endswith("\n") for block in shown.blocks)


def test_however_much_a_rank_prints_little_of_it_is_in_memory_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "0"
    line = b"x" * 99 + b"\n"
    append(log, line * 40_000)
    shown = 0

    def count(block: str) -> None:
        nonlocal shown
        shown += len(block)

    follower = LogFollower([("", log)], count)
    tracemalloc.start()
    try:
        follower.start()
        assert follower.stop() == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shown == 40_000 * len(line)
    assert peak < shown / 2


@pytest.mark.parametrize("prefix", ["", None])
def test_a_log_takes_little_disk_however_much_a_rank_prints_and_keeps_its_end(
    tmp_path: Path, prefix: str | None
) -> None:
    log = tmp_path / "0"
    line = b"x" * 99 + b"\n"
    shown = 0

    def count(block: str) -> None:
        nonlocal shown
        shown += len(block)

    follower = LogFollower([(prefix, log)], count)
    append(log, line * 320_000)
    append(log, b"the last thing it said\n")
    follower.start()
    assert follower.stop(within=DEADLINE) == 0
    written = 320_000 * len(line) + len(b"the last thing it said\n")
    assert (shown, log.stat().st_size) == (0 if prefix is None else written, written)
    assert 16 << 20 <= log.stat().st_blocks * 512 < 24 << 20
    with log.open("rb") as file:
        file.seek(-(16 << 20), os.SEEK_END)
        assert b"\0" not in file.read()
    assert tail(log, 2) == ((line * 2).decode().splitlines()[0], "the last thing it said")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of 2 MB, of which a MiB is kept."""
    monkeypatch.setattr(log_lines, "KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(log_lines, "_FREED_AT_ONCE", 1 << 18)
    append(tmp_path / "0", (b"x" * 99 + b"\n") * 20_000)
    return tmp_path / "0"


def test_what_a_reader_that_has_stopped_has_missed_is_told_and_not_given_back_and_nobody_waits_for_it(
    large: Path,
) -> None:
    unread = threading.Event()
    follower = LogFollower([("", large)], lambda _: unread.wait())
    follower.start()
    try:
        assert follower.stop(within=0.2) == 2_000_000
        assert large.stat().st_blocks * 512 >= 2_000_000
    finally:
        unread.set()
        follower.stop()


def test_a_reader_that_has_gone_away_ends_the_showing_alone(large: Path) -> None:
    def gone(_: str) -> None:
        raise ValueError("I/O operation on closed file")

    follower = LogFollower([("", large)], gone)
    follower.start()
    assert follower.stop(within=DEADLINE) == 2_000_000
    assert large.stat().st_blocks * 512 < 3 << 19, "it takes little disk all the same"


def test_a_log_that_was_full_for_a_moment_has_what_comes_after_that(tmp_path: Path) -> None:
    log, tried, taken = tmp_path / "0", threading.Event(), []

    def take(block: str) -> None:
        if not tried.is_set():
            tried.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.append(block)

    follower = LogFollower([("", log)], take)
    append(log, b"lost\n")
    follower.start()
    assert tried.wait(DEADLINE)
    append(log, b"shown\n")
    assert follower.stop(within=DEADLINE) == len(b"lost\n")
    assert taken == ["shown\n"]


def test_letters_that_the_nodes_log_cannot_hold_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    to_stdout("caf\u00e9\n")
    assert raw.getvalue() == b"caf\\xe9\n"


def test_a_log_that_cannot_be_read_for_a_moment_is_read_later(tmp_path: Path) -> None:
    zero, one = tmp_path / "0", tmp_path / "1"
    zero.symlink_to(zero)  # any error but that it is not there, as with no descriptors left
    with following(("0 ", zero), ("1 ", one)) as shown:
        append(one, b"after a look at both\n")
        shown.wait_for("1 after a look at both\n")
        append(tmp_path / "real", b"line\n")
        (tmp_path / "real").replace(zero)
        shown.wait_for("0 line\n")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        # What nested bars do to a cursor is no line, and a line that was empty by itself stays.
        (b"\n\x1b[A\n\x1b[A\r      \x1b[A\n{'eval_loss': 1.5}\n\n", "0 \n0 {'eval_loss': 1.5}\n0 \n"),
        (b"".join(b"\r%6d|######" % step for step in range(100_000)) + b"\n", "0  99999|######\n"),
        (b"line\nlast words", "0 line\n0 last words\n"),
        (b"", ""),
    ],
    ids=["nested bars", "a progress bar of megabytes", "a last line without end", "a rank that never wrote"],
)
def test_what_a_rank_has_written_is_shown_once_and_no_thread_is_left(
    tmp_path: Path, written: bytes, shown: str
) -> None:
    def following_now() -> int:
        return sum(thread.name == "safedist rank logs" for thread in threading.enumerate())

    before, log = following_now(), Log()
    if written:
        append(tmp_path / "0", written)
    LogFollower([], log).stop()  # as where ranks could not be started: that must not hide why they could not
    follower = LogFollower([("0 ", tmp_path / "0")], log)
    follower.start()
    assert following_now() == before + 1
    follower.stop()
    follower.stop()
    assert (log.text, following_now()) == (shown, before)


def test_text_cut_within_a_character_is_joined_and_garbage_is_shown_as_such(tmp_path: Path) -> None:
    log = tmp_path / "0"
    euro = "€".encode()
    with following(("0 ", log), ("1 ", tmp_path / "1")) as shown:
        append(log, b"10 " + euro[:1])
        append(tmp_path / "1", b"seen\n")
        shown.wait_for("1 seen")
        append(log, euro[1:] + b"\n\xff\xfe\x00\n")
    assert "0 10 €\n0 \ufffd\ufffd\x00\n" in shown.text


def test_a_line_without_end_is_passed_on_in_parts_instead_of_being_kept_in_memory(tmp_path: Path) -> None:
    log = tmp_path / "0"
    with following(("0 ", log)) as shown:
        append(log, b"x" * 200_000)
        shown.wait_for("0 x")
        append(log, b"y\nnext\n")
    lines = shown.text.splitlines()
    assert lines[-1] == "0 next"
    assert "".join(line.removeprefix("0 ") for line in lines[:-1]) == "x" * 200_000 + "y"
    assert len(lines) > 2


def test_a_line_is_printed_as_a_person_would_see_it() -> None:
    seen = {
        b"": "",
        b"plain": "plain",
        b"dos\r": "dos",
        b"a\rb": "b",
        b"a\rb\r": "b",
        b"\r": "",
        b"\x1b[A\x1b[A{'loss': 1}": "{'loss': 1}",
        b"\x1b[1;31mred\x1b[0m": "\x1b[1;31mred\x1b[0m",
        b"\xe2\x82\xac": "€",
        b"\xe2\x82": "\ufffd",
    }
    assert {line: printable(line) for line in seen} == seen


# --- the tail --------------------------------------------------------------------------------------------------------
def test_what_cannot_be_read_has_no_tail_nor_is_there_one_of_no_lines(tmp_path: Path) -> None:
    assert tail(tmp_path / "missing", 5) == ()
    assert tail(tmp_path, 5) == ()
    (tmp_path / "empty").touch()
    assert tail(tmp_path / "empty", 5) == ()
    append(tmp_path / "0", b"1\n")
    assert [tail(tmp_path / "0", lines) for lines in (0, -1)] == [(), ()]


def test_the_tail_of_a_huge_log_is_read_from_its_end_only(tmp_path: Path) -> None:
    log = tmp_path / "0"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # a sparse terabyte: reading it all would never end
    append(log, b"\nlast\n")
    assert tail(log, 1) == ("last",)


@given(st.binary(max_size=200), st.integers(1, 10))
def test_any_bytes_have_a_tail_of_at_most_that_many_lines(data: bytes, lines: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        shown = tail(Path(file.name), lines)
    assert len(shown) <= lines
    whole = data.removesuffix(b"\n").split(b"\n") if data else []
    assert list(shown) == [printable(line) for line in whole[-lines:]]


# --- the traceback once -------------------------------------------------------------------------------------------
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: bad\n'


def test_other_lines_are_kept() -> None:
    traceback = TRACEBACK.splitlines()
    for lines, shown in (["epoch 1", *traceback, "more"], TRACEBACK), (["a", ""], ""), (traceback[1:], TRACEBACK):
        assert without_traceback(lines, shown) == tuple(lines)
    assert without_traceback([], TRACEBACK) == ()


def test_a_traceback_with_any_message_is_recognised_in_the_log_it_was_printed_to(tmp_path: Path) -> None:
    left, log = {}, tmp_path / "0"
    for message in ("a\rb", "a\r\nb", "page\x0cfeed", "line\u2028separator", "x\x1cy", "\udcff", "€"):
        shown = f"Traceback (most recent call last):\nValueError: {message}\n"
        with log.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:  # as a rank's own
            stream.write(f"epoch 1\n{shown}")
        left[message] = without_traceback(tail(log, 20), shown)
    assert left == dict.fromkeys(left, ("epoch 1",))


# --- what a crash says ----------------------------------------------------------------------------------------------
THROWN = ["terminate called after throwing an instance of 'c10::Error'", "  what():  CUDA error: device-side assert"]
NATIVE = [
    "Exception raised from c10_cuda_check (most recent call first):",
    *(f"frame #{n}: c10" for n in range(30)),
    "",
]
FATAL = "Fatal Python error: Aborted"
OTHERS = ["", "Thread 0x00007f (most recent call first):", *['  File "threading.py", line 1 in wait'] * 40, ""]
CRASHED = [
    "Current thread 0x00008f (most recent call first):",
    *(f'  File "a.py", line {n} in f' for n in range(40)),
    "",
]
MODULES = ["Extension modules: numpy (total: 1)"]


def test_the_text_of_a_crash_is_kept_and_of_its_stacks_what_leads_there() -> None:
    dump = [*OTHERS, *CRASHED, *MODULES]
    assert last_words(["epoch 1", *THROWN, FATAL, *dump], 20) == ("epoch 1", *THROWN, FATAL, *CRASHED[1:11])
    assert last_words(["epoch 1", *THROWN, *NATIVE, FATAL, *OTHERS], 5) == (*THROWN, NATIVE[0], "", FATAL)
    assert last_words([FATAL, *OTHERS, *THROWN, FATAL, *dump], 2) == (FATAL, CRASHED[1])
    assert last_words([FATAL, *dump], 1) == (FATAL,)


def test_what_is_no_crash_is_kept_as_it_is() -> None:
    assert last_words(["epoch 1", "free(): invalid pointer"], 1) == ("free(): invalid pointer",)
    assert last_words([], 3) == ()


class Followed:
    """Two ranks' logs, followed with a clock of the test's own; a third has marks by which a look is known."""

    def __init__(self, directory: Path) -> None:
        self.zero, self.one, self.marks = directory / "0", directory / "1", directory / "marks"
        self.shown, self.now = Log(), 0.0
        self._marks = 0
        logs = [("0 ", self.zero), ("1 ", self.one), ("", self.marks)]
        self.follower = LogFollower(logs, self.shown, clock=lambda: self.now)
        self.follower.start()

    def look(self) -> str:
        """Once the follower has looked at all logs from now on: what it has shown of rank 0."""
        for _ in range(2):  # the first look may have begun before now
            self._marks += 1
            append(self.marks, b"mark %d\n" % self._marks)
            self.shown.wait_for(f"mark {self._marks}\n")
        return "".join(line for line in self.shown.text.splitlines(keepends=True) if line.startswith("0 "))


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    followed = Followed(tmp_path)
    yield followed
    followed.follower.stop()


def test_where_a_progress_bar_is_shows_every_few_seconds(followed: Followed) -> None:
    append(followed.zero, b"\r 10%|#")
    assert followed.look() == ""
    append(followed.zero, b"\r 20%|##\r 30%|###")
    assert followed.look() == ""
    followed.now = log_lines.BAR_SECONDS  # after it has seen the bar: it looks at the clock whenever it likes
    assert followed.look() == "0  30%|###\n"
    append(followed.zero, b"\r 40%|####")
    assert followed.look() == "0  30%|###\n"
    followed.now *= 2
    assert followed.look() == "0  30%|###\n0  40%|####\n"
    append(followed.zero, b"\r100%|##########\nepoch 1\n")
    assert followed.look().endswith("0  40%|####\n0 100%|##########\n0 epoch 1\n")


def test_a_progress_bar_that_stands_still_is_shown_once_and_a_short_one_at_its_end_only(followed: Followed) -> None:
    append(followed.zero, b"\r 10%|#\r100%|##########\n\r 50%|#####")
    assert followed.look() == "0 100%|##########\n"
    for seconds in (1, 2, 3):
        followed.now = seconds * log_lines.BAR_SECONDS
        assert followed.look() == "0 100%|##########\n0  50%|#####\n"


def test_a_half_line_that_is_no_progress_bar_waits_for_its_end_however_long(followed: Followed) -> None:
    append(followed.zero, b"loss ")
    followed.look()
    followed.now = 1000.0
    assert followed.look() == ""


def test_the_progress_bars_of_one_rank_are_enough(followed: Followed) -> None:
    append(followed.zero, b"\r 10%|#")
    append(followed.one, b"\r 10%|#")
    followed.look()
    followed.now = 2 * log_lines.BAR_SECONDS
    followed.look()
    assert "1 " not in followed.shown.text
    append(followed.one, b"\r100%|##########\n")
    followed.look()
    assert followed.shown.text.count("1 100%|##########\n") == 1
