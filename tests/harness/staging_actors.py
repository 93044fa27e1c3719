"""Staging processes driven by pipes, and the archive they all stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.tarballs import directory, hardlink, member, snapshot, symlink, targz

SCRIPT = Path(__file__).parents[1] / "agents" / "staging_actor.py"
MODULES = {f"pkg/m{n}.py": f"VALUE = {n}\n" + "#" * 997 * n for n in range(40)}


def archive(path: Path, version: str = "1", *, linked: bool = True) -> Path:
    """A project of 40 modules with everything an archive may hold; without hard links where they are not ``linked``."""
    members = [member(name, text.encode()) for name, text in MODULES.items()]
    extra = [
        member("main.py", f"VERSION = '{version}'".encode(), mode=0o755),
        member("pkg/__init__.py", b""),
        directory("empty", 0o750),
        symlink("pkg/alias.py", "m1.py"),
        hardlink("pkg/same.py", "pkg/m2.py"),
    ]
    path.write_bytes(targz([*members, *(extra if linked else extra[:-1])]))
    return path


class Actor:
    """One staging process."""

    def __init__(self, uri: Path | str, dest: Path, **order) -> None:
        order |= {"uri": str(uri), "dest": str(dest)}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= order.pop("environment", {})
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.points: list[str] = []
        self.outcome: dict[str, object] = {}
        self.stderr = ""
        self.until("ready")

    def until(self, point: str) -> Actor:
        """Read what it says until it is at ``point``."""
        while not self.points or self.points[-1] != point:
            line = self.process.stdout.readline()
            assert line, f"ended before {point!r}, after {self.points}: {self.process.stderr.read()}"
            said = json.loads(line)
            assert "point" in said, f"finished before {point!r}: {said}"
            self.points.append(said["point"])
        return self

    def go(self) -> Actor:
        """Let it go on from where it stopped."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has done it."""
        self.process.kill()
        self.process.wait()
        self.close()

    def end(self) -> dict[str, object]:
        """Wait for it and return its outcome."""
        out, self.stderr = self.process.communicate()
        for line in out.splitlines():
            said = json.loads(line)
            if "point" in said:
                self.points.append(said["point"])
            else:
                self.outcome = said
        assert self.outcome, f"no outcome, exit {self.process.returncode}: {self.stderr}"
        return self.outcome

    def close(self) -> None:
        """Release the pipes."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


def all_at_once(started: list[Actor]) -> list[dict[str, object]]:
    """Let them all go, wait for all."""
    for actor in started:
        actor.go()
    return [actor.end() for actor in started]


class Place:
    """A node of the test: archive and destination."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.dest = root / "dest"
        self.uri = archive(root / "fast.tar.gz")

    def expected(self) -> dict[str, tuple[object, ...]]:
        """What GNU tar makes of the same archive."""
        into = self.root / "expected"
        into.mkdir(exist_ok=True)
        subprocess.run(["tar", "-xzf", self.uri, "-C", into], check=True)
        return content(into)

    def assert_complete(self, *dests: Path) -> None:
        """Byte for byte what tar makes, and nothing else anywhere."""
        expected = self.expected()
        for dest in dests or (self.dest,):
            assert content(dest) == expected
            assert left_in(dest.parent) == []


def content(root: Path) -> dict[str, tuple[object, ...]]:
    """Names, kinds, modes, contents and links below ``root``: times are those of the staging, and hard links become
    copies where the file system has none."""
    return {name: facts[:3] for name, facts in snapshot(root).items()}


def left_in(directory: Path) -> list[str]:
    """What staging has left there."""
    return [name for name in os.listdir(directory) if name.startswith(".safedist-")]


@pytest.fixture(name="actors")
def actors_fixture() -> Iterator[object]:
    """Makes actors and leaves none behind."""
    made: list[Actor] = []

    def make(*args, **order) -> Actor:
        made.append(Actor(*args, **order))
        return made[-1]

    yield make
    for actor in made:
        if actor.process.poll() is None:
            actor.process.kill()
            actor.process.wait()
        actor.close()


@pytest.fixture(name="place")
def place_fixture(tmp_path: Path) -> Place:
    """See :class:`Place`."""
    return Place(tmp_path)
