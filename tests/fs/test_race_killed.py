"""Killed before any of its steps, and by the hundred at once: nothing is half there, on whatever file system.

A step is a call that changes or opens something, as Python's audit events tell; fsync, which has none, is one too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec.asyn  # these here, and not in every process: their steps are none of ours
import fsspec.core
import fsspec.implementations.local  # noqa: F401
import pytest

from flytekitplugins_safedist.errors import PathBlockedError
from flytekitplugins_safedist.fs import atomic_path, atomic_write, download_once, ensure_dir
from tests.fs.ranks import AT_LENGTH, Outcome, Process, pause, processes, size
from tests.harness import needs
from tests.harness.mounts import mount

RACING = size(60, 1000)
STEPS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.link",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "os.listdir",
    "os.scandir",
    "tests.step",
)
LENGTH = 3000
PARTS = ("a", "sub/b")


def _bytes(writer: int) -> bytes:
    return str(writer % 10).encode() * LENGTH


def _write(place: Path, writer: int) -> None:
    with atomic_write(ensure_dir(place / "files") / "state") as file:
        for at in range(0, LENGTH, LENGTH // 3):
            sys.audit("tests.step")
            file.write(_bytes(writer)[at : at + LENGTH // 3])
            file.flush()


def _publish(place: Path, writer: int) -> None:
    try:
        with atomic_path(ensure_dir(place / "made" / "below") / "ckpt") as draft:
            for name in PARTS:
                ensure_dir((draft / name).parent)
                (draft / name).write_bytes(_bytes(writer))
    except PathBlockedError:
        assert (place / "made" / "below" / "ckpt" / PARTS[-1]).exists(), "another was faster"


def _fetch(place: Path, writer: int) -> None:
    try:
        download_once(place.parent / f"source-{writer % 2}", place / "data" / "copy", timeout=300)
    except PathBlockedError:
        recorded = json.loads((place / "data" / ".copy.safedist-source").read_text())["source"]
        assert recorded.endswith(f"source-{1 - writer % 2}"), "the other was first"


WORKS: list[Callable[[Path, int], None]] = [_write, _publish, _fetch]


def _whole(place: Path, works: list[Callable[[Path, int], None]] = WORKS) -> None:
    """Whatever is there is all there."""
    if _write in works and (place / "files" / "state").exists():
        found = (place / "files" / "state").read_bytes()
        assert found in {_bytes(one) for one in range(10)}
    if _publish in works and (place / "made" / "below" / "ckpt").exists():
        found_parts = {(place / "made" / "below" / "ckpt" / name).read_bytes() for name in PARTS}
        assert found_parts in [{_bytes(one)} for one in range(10)]
    if _fetch in works and (place / "data" / "copy").exists():
        recorded = json.loads((place / "data" / ".copy.safedist-source").read_text())["source"]
        assert (place / "data" / "copy").read_bytes() == Path(recorded).read_bytes() != b"", "the recorded source's"


def _all_there(place: Path) -> None:
    for name in ("files/state", "made/below/ckpt", "data/copy"):
        assert (place / name).exists(), name
    _whole(place)


def _sources(place: Path) -> None:
    for number in range(2):
        (place.parent / f"source-{number}").write_bytes(_bytes(number))


def _dies_before(step: int, work: Callable[[Path, int], None], place: Path, writer: int) -> int:
    """Do ``work``, and be killed before its ``step``-th step; the number of steps, if it has fewer."""
    taken = [0]

    def at(event: str, args: tuple[object, ...]) -> None:
        if event in STEPS:
            taken[0] += 1
            if taken[0] > step:
                os.kill(os.getpid(), signal.SIGKILL)

    fsync = os.fsync
    os.fsync = lambda handle: (sys.audit("tests.step"), fsync(handle))[1]
    sys.addaudithook(at)
    work(place, writer)
    return taken[0]


def _steps(place: Path) -> list[int]:
    _sources(ensure_dir(place / "here"))
    return [Process(_dies_before, 10**6, work, place / "here", 2).outcome().get() for work in WORKS]


def _killed_at_every_step(place: Path) -> list[int]:
    """After each kill all is whole, and the next process finds its way; how many steps each kind of work has."""
    steps = [_killed(place, work, replacing=False) for work in WORKS]
    _killed(place, _write, replacing=True)  # nothing else replaces what is there
    return steps


def _killed(place: Path, work: Callable[[Path, int], None], *, replacing: bool) -> int:
    died = 0
    while True:
        here = ensure_dir(place / f"{work.__name__}-{replacing}-{died}")
        _sources(here)
        if replacing:
            work(here, 1)
        outcome = Process(_dies_before, died, work, here, 2).outcome()
        _whole(here, [work])
        work(here, 4)
        _whole(here, [work])
        if outcome.kind == "value":
            assert died > 5, "the steps are seen"
            return died
        assert outcome.kind == "died", outcome
        died += 1


def _read_for_ever(place: Path) -> None:
    pause("begin")
    while True:
        _whole(place)


def _race(place: Path, steps: list[int]) -> None:
    """All kinds of work at once, in processes of which most are killed somewhere, under the eyes of a reader."""
    _sources(place)
    chance = random.Random(1)
    kinds = [index // 2 % 3 for index in range(RACING)]
    works = [(kind, chance.randrange(steps[kind] * 4 // 3)) for kind in kinds]
    with processes([(_read_for_ever, place)]) as (reader,):
        reader.until("begin")
        gate, go = os.pipe()

        def start(index: int, kind: int, step: int) -> None:
            os.close(go)
            os.read(gate, 1)  # ends for all at once, when nobody has the other end
            _dies_before(step, WORKS[kind], place, index)  # of two sources, as two jobs with one destination

        with processes([(start, index, *one) for index, one in enumerate(works)]) as racing:
            reader.resume()
            os.close(go)
            outcomes: list[Outcome] = [one.outcome() for one in racing]
        assert not reader.done(), reader.next_message()
    os.close(gate)
    assert {outcome.kind for outcome in outcomes} == {"died", "value"}, outcomes
    for work in WORKS:
        work(place, 0)
        work(place, 1)
    _all_there(place)


def _one_by_one_and_at_once(place: Path, killed: bool = True) -> None:
    steps = (_killed_at_every_step if killed else _steps)(ensure_dir(place / "one by one"))
    _race(ensure_dir(place / "at once" / "shared"), steps)


def test_whoever_is_killed_before_whichever_step_nothing_is_half_there(tmp_path):
    Process(_one_by_one_and_at_once, tmp_path / "place", small=True).outcome(within=size(240, 1800)).get()


# --- other file systems ----------------------------------------------------------------------------------------------
def _mounted(kind: str, base: Path) -> Path:
    place = ensure_dir(base / "mounted")
    if kind == "tmpfs":
        mount("-t", "tmpfs", "none", place)
    elif kind == "ext4":
        with (base / "disk").open("wb") as disk:
            disk.truncate(256 << 20)
        subprocess.run(["mkfs.ext4", "-q", base / "disk"], check=True, capture_output=True)
        mount("-o", "loop", base / "disk", place)
    else:
        layers = [ensure_dir(base / "layers" / name) for name in ("lower", "upper", "work")]
        options = "lowerdir={},upperdir={},workdir={}".format(*layers)
        mount("-t", "tmpfs", "none", base / "layers")  # an upper layer on another overlay is refused
        for layer in layers:
            layer.mkdir()
        mount("-t", "overlay", "none", "-o", options, place)
    return place


def _on(kind: str, base: Path) -> str:
    try:
        place = _mounted(kind, base)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{kind} cannot be mounted here: {getattr(error, 'stderr', b'') or error!s}"
    _one_by_one_and_at_once(place, AT_LENGTH)
    return "raced"


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "overlay"])
def test_the_same_on_a_file_system_mounted_for_it(tmp_path, kind):
    outcome = Process(_on, kind, tmp_path, small=True).outcome(within=size(240, 1800)).get()
    if outcome != "raced":
        needs.missing(outcome, bring="sudo make test (in a container: --privileged)")


def _onto_a_mount(base: Path) -> str:
    """Rename a directory to where one with its own number is mounted."""
    try:
        for place in (base, base / "other"):
            mount("-t", "tmpfs", "none", ensure_dir(place))
            (place / "first").mkdir()
        mount("--bind", base / "other" / "first", ensure_dir(base / "made"))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"nothing can be mounted here: {error}"
    assert (base / "first").stat().st_ino == (base / "made").stat().st_ino
    try:
        with atomic_path(base / "made") as draft:
            (base / "first").rename(draft)
    except PathBlockedError as error:
        return str(error)
    return f"took it for done: {os.listdir(base)}"


def test_a_mount_whose_root_has_the_number_of_what_is_renamed_to_it_is_not_taken_for_that(tmp_path):
    said = Process(_onto_a_mount, tmp_path / "here").outcome().get()
    if said.startswith("nothing can be mounted"):
        needs.missing(said, bring="sudo make test (in a container: --privileged)")
    assert "something is mounted there" in said
