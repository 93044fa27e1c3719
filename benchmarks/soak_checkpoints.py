"""A soak of checkpoints: ranks, agents and what serves the store are killed with SIGKILL while a job saves.

Each run is a chain of lives of one job, in one place: a directory, a file system that two nodes see late, from caches
and with lost replies (tests/harness/fusefs.py), or S3 (moto's server, behind a proxy that can be killed). The model is
sharded or not, and the number of ranks changes from life to life; some jobs have an agent, which starts killed ranks
again.
Each life is killed at a point of a save, at a call of the writing thread to the file system, or at any time, and the
next one resumes. Where it is rank 0 alone, in every other life the others live on, and only see that it is gone. Every
state that is resumed must be of one save, and never older than the last committed one.

    python benchmarks/soak_checkpoints.py --runs 120
    python benchmarks/soak_checkpoints.py --seed 7 --only 31       # the 32nd run of that seed again
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import soaking

from tests.checkpoint import points
from tests.checkpoint.lives import Kill, Life, faults, lived
from tests.fs.ranks import Process, pause
from tests.harness.fusefs import FuseMount
from tests.harness.moto_s3 import BUCKET, S3
from tests.harness.procs import Warm
from tests.harness.proxy import Proxy

CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
LATE_SECONDS = 0.3
LYING = {
    "late": [0, LATE_SECONDS],
    "not_there": 30,
    "stale_attrs": 1,
    "locks": "dropped",
    "faults": [
        {"op": op, "errno": code, "chance": 0.005, "when": when}
        for op in ("mkdir", "rename", "unlink", "rmdir")
        for code in ("ESTALE", "EINTR")
        for when in ("before", "after")
    ],
}
"""What the file system does to its nodes (tests/harness/fusefs_server.py)."""


@dataclass(frozen=True)
class Run:
    """One chain of lives, drawn from its seed.

    Attributes:
        store: "disk", "fuse" or "s3".
        agent: whether the ranks have one.
        sharded: whether each rank holds a part of the model.
        floats: of 4 bytes, in the largest tensor.
        lives: ranks of each, and how it ends.
    """

    store: str
    agent: bool
    sharded: bool
    floats: int
    lives: tuple[tuple[int, Kill], ...]


def drawn(seed: int, number: int) -> Run:
    """The run of that number: the same for one seed, whatever ran before."""
    die = random.Random(f"{seed}/{number}")
    store = die.choices(["disk", "fuse", "s3"], [5, 4, 3])[0]
    agent = die.random() < 0.12
    sharded = die.random() < 0.4
    lives = []
    for _ in range(2 if agent else 6):
        count = 2 if agent else die.choice([2, 3]) if sharded else die.choice([1, 1, 1, 2])
        lives.append((count, _kill(die, store, count, agent=agent, sharded=sharded)))
    # Beyond 5 MiB an object of S3 is uploaded in several pieces.
    floats = 1_600_000 if store == "s3" and die.random() < 0.3 else 1000
    return Run(store, agent, sharded, floats, tuple(lives))


def _kill(die: random.Random, store: str, count: int, *, agent: bool, sharded: bool) -> Kill:
    whom = die.choice(["rank", "rank", "all"] + ["store"] * (store != "disk") + ["agent"] * 3 * agent)
    rank = die.randrange(count) if sharded else 0
    mine = points.IN_ORDER if rank == 0 else (points.PART_OPENED, points.PART_WRITTEN)
    how = die.choices(["point", "call", "time"], [6, 3 * (store != "s3"), 2])[0]
    if how == "time":
        return Kill(whom, rank, "time", die.randrange(400))
    if how == "call":
        return Kill(whom, rank, die.choice(CALLS), die.choice([1, 1, 2, 3, 5, 8]))
    return Kill(whom, rank, die.choice(mine), die.choice([1, 2]))


@dataclass
class Site:
    """Where a run saves: the place as each node names it, and what serves it.

    Attributes:
        nodes: the place, once for each node.
        environment: by which ranks reach it.
    """

    nodes: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def served_by(self, node: int) -> int | None:
        """The process that serves the store to a node."""

    def mend(self) -> None:
        """Have what serves the store back, where it was killed."""


class Lying(Site):
    """A file system of two nodes."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._backing, self._at = directory / "server", [directory / "node-0", directory / "node-1"]
        self._clients = [FuseMount(self._backing, at, seed=node, **LYING) for node, at in enumerate(self._at)]
        stack.callback(self._close)
        super().__init__([str(at / "place") for at in self._at])

    def _close(self) -> None:
        for client in self._clients:
            client.close()

    def served_by(self, node: int) -> int:
        return self._clients[node]._server.pid

    def mend(self) -> None:
        time.sleep(LATE_SECONDS)  # by then every node sees all that was made
        for node, client in enumerate(self._clients):
            if client._server.poll() is not None:
                client.close()
                self._clients[node] = FuseMount(self._backing, self._at[node], seed=node, **LYING)


class Objects(Site):
    """A prefix of S3, behind a proxy. The server itself keeps all in memory, so it is not what is killed."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack, server: S3) -> None:
        self._proxy = directory / "proxy"
        keeper = Process(_keep_proxy, int(server.endpoint.rsplit(":", 1)[1]), self._proxy)
        stack.callback(keeper.kill)
        keeper.until("there")
        _, port = self._proxy.read_text().split()
        way = {"FLYTE_AWS_ENDPOINT": f"http://127.0.0.1:{port}", "FSSPEC_S3": '{"default_block_size": 5242880}'}
        super().__init__([f"s3://{BUCKET}/{directory.name}"], {**server.environment, **way})

    def served_by(self, node: int) -> int:
        return int(self._proxy.read_text().split()[0])


def _keep_proxy(target: int, told: Path) -> None:
    """Have a proxy at one port, in a process of its own; a new one a little after it was killed."""
    port, keeper = 0, os.getpid()
    while True:
        ready, there = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(there, str(Proxy(target, port).port).encode())
            while os.getppid() == keeper:
                time.sleep(0.2)
            os._exit(0)
        os.close(there)
        first, port = port == 0, int(os.read(ready, 16))
        os.close(ready)
        told.write_text(f"{child} {port}")
        if first:
            threading.Thread(target=pause, args=("there",), daemon=True).start()
        os.waitpid(child, 0)
        time.sleep(0.2)


@functools.cache
def _server(root: Path) -> S3:
    server = S3(root)
    atexit.register(server.close)
    server.put("there", b"")
    return server


@contextlib.contextmanager
def _site(run: Run, directory: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        if run.store == "disk":
            yield Site([str(directory / "place")])
        elif run.store == "fuse":
            yield Lying(directory, stack)
        else:
            yield Objects(directory, stack, _server(directory.parent))


def carried_out(run: Run, directory: Path, warm: Warm) -> str:
    """One chain of lives; returns what is to be counted of it.

    Raises:
        AssertionError: something of what must be true is not.
    """
    directory.mkdir()
    (directory / "ledger").touch()
    counted = []
    with _site(run, directory) as site:
        for number, (count, kill) in enumerate(run.lives):
            life = Life(10 * number + 10, "", directory, sharded=run.sharded, kill=kill, floats=run.floats)
            before, saving = (_ledger(directory).count(word) for word in ("struck", "struck saving"))
            for path in directory.glob("*.pid"):
                path.unlink()
            nodes = [site.nodes[(number + rank) % len(site.nodes)] for rank in range(count)]
            served_by = site.served_by(site.nodes.index(nodes[kill.rank]))
            if served_by is not None:
                (directory / "store.pid").write_text(str(served_by))
            if run.agent:
                _with_agent(life, nodes[0], site, warm)
            else:
                lives_on = kill.whom == "rank" and kill.rank == 0 and number % 2 == 1
                _without(life, nodes, site, together=not lives_on)
            assert f"resumed {life.number} " in _ledger(directory), f"life {life.number} could not resume"
            if _ledger(directory).count("struck") > before:
                counted += ["in-a-save"] * (_ledger(directory).count("struck saving") > saving)
                counted += ["kills", run.store, f"by:{kill.whom}", f"at:{kill.at.replace(' ', '-')}"]
            site.mend()
        look = Life(10 * len(run.lives) + 10, "", directory, steps=0, floats=run.floats)
        (outcome,) = lived(look, [site.nodes[0]], site.environment)
        assert outcome.kind == "value", outcome
    assert faults(_ledger(directory)) == [], _ledger(directory)
    return " ".join(counted)


def _ledger(directory: Path) -> str:
    return (directory / "ledger").read_text()


def _with_agent(life: Life, place: str, site: Site, warm: Warm) -> None:
    files = life.directory / f"pod-{life.number}"
    told = {**asdict(replace(life, place=place)), "directory": str(life.directory)}
    running = warm.start(
        "job_lives:train",
        files,
        kind="execute",
        environment={
            "TEST_LIFE": json.dumps(told),
            "FLYTE_INTERNAL_EXECUTION_ID": files.name,
            **site.environment,
        },
        arguments=["--output-prefix", str(files / "outputs")],
    )
    (life.directory / "agent.pid").write_text(str(running.pid))
    ended = running.wait()
    assert ended.left == [], ended.left


def _without(life: Life, nodes: list[str], site: Site, *, together: bool) -> None:
    outcomes = lived(life, nodes, site.environment, together=together)
    assert "hung" not in {one.kind for one in outcomes}, outcomes
    # A save may fail for good on a file system that loses replies; the ranks say so at their end.
    assert isinstance(site, Lying) or "struck" in _ledger(life.directory) or {one.kind for one in outcomes} == {"value"}


if __name__ == "__main__":
    sys.exit(soaking.main(__doc__, drawn, carried_out))
