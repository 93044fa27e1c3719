"""Where the files of a job and of its ranks are on a node. Values: the agent makes and removes the directories.

Layout, all of it mode 0700::

    <root>/safedist-<random>/
        round-0/rank-3/        what current_rank().scratch names
            tmp/               TMPDIR, by its link
            flyte/             flytekit's local sandbox and working directory
        0-3                    link to that rank's tmp/ in that round
        node/                  what current_rank().node_dir names, of all ranks and rounds
        inputs/                what ranks download of the task's inputs, once for all of them
        cache/rank-3/<name>/   compile caches (caches.py): a restart does not compile again
        cache/preload/<name>/  those of the process that imports libraries for all ranks
        logs/round-0-rank-3.log
        orders/                inputs, and what ranks hand back
        owner                  locked while the job's agent lives (agent/scratch.py)

Sockets are made below TMPDIR, and their paths must be short: so it goes through that link, and where that is too long
all the same, through another to the job's directory, in /tmp.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..config.caches import CACHES
from ..envvars import TMPDIR, TORCHELASTIC_ERROR_FILE


@dataclass(frozen=True)
class RankScratch:
    """The directories of one rank in one round.

    Attributes:
        path: of its own directory.
        tmp: its TMPDIR: a link.
        caches: parent of its compile caches, in every round the same.
    """

    path: Path
    tmp: Path
    caches: Path

    def environment(self, shared: Collection[str]) -> dict[str, str]:
        """Variables that send temporary files, compile caches and what torch's ``record`` writes of an error here.

        Args:
            shared: names of caches (``caches.CACHES``) that stay where the environment has them.
        """
        error_file = str(self.path / "error.json")
        return {TMPDIR: str(self.tmp), TORCHELASTIC_ERROR_FILE: error_file, **cache_variables(self.caches, shared)}


@dataclass(frozen=True)
class JobScratch:
    """The directory of one job on this node.

    Attributes:
        path: of the directory.
        short: the same, or a link to it where paths below it are too long for sockets.
        orders: in it: the task's inputs, and what ranks hand back to the agent.
        node: what all ranks share, in every round.
        inputs: what ranks have downloaded of the task's inputs (:mod:`.shared_inputs`).
        logs: one file per round and rank.
    """

    path: Path
    short: Path
    orders: Path = field(init=False)
    node: Path = field(init=False)
    inputs: Path = field(init=False)
    logs: Path = field(init=False)

    def __post_init__(self) -> None:
        for name in ("orders", "node", "inputs", "logs"):
            object.__setattr__(self, name, self.path / name)

    @property
    def preload(self) -> Path:
        """Parent of the compile caches of what is imported for all ranks."""
        return self.path / "cache" / "preload"

    def rank(self, round_: int, rank: int) -> RankScratch:
        """The directories of a rank."""
        own = self.path / f"round-{round_}" / f"rank-{rank}"
        return RankScratch(own, self.short / f"{round_}-{rank}", self.path / "cache" / f"rank-{rank}")

    def log(self, round_: int, rank: int) -> Path:
        """The file that holds all that a rank printed."""
        return self.logs / f"round-{round_}-rank-{rank}.log"

    def errors(self, round_: int, rank: int) -> Path:
        """The file for its standard error, where that is apart."""
        return self.logs / f"round-{round_}-rank-{rank}.err"

    def files(self, round_: int, rank: int) -> RankFiles:
        """What a rank and its agent hand each other."""
        name = f"round-{round_}-rank-{rank}"
        return RankFiles.at(self.orders / name, self.short / self.orders.name / f"{name}.fr")


@dataclass(frozen=True)
class RankFiles:
    """What a rank and its agent hand each other.

    Attributes:
        page: the memory that the rank shares with its agent, where it says how it ended.
        result: where rank 0 leaves its outputs.
        types: where rank 0 leaves the types of its outputs, as they were declared.
        decks: where the rank leaves its decks.
        profile: where the rank leaves what torch's profiler saw, if it is looked into.
        stacks: where the rank writes the stacks of its threads when it is asked to.
        records: the socket at which torch tells of the rank's collectives.
    """

    page: Path
    result: Path
    types: Path
    decks: Path
    profile: Path
    stacks: Path
    records: Path

    @classmethod
    def at(cls, base: Path, records: Path) -> RankFiles:
        """All but the socket at one place, each with its name here behind what all names begin with."""
        own = {each.name: base.with_suffix(f".{each.name}") for each in fields(cls)}
        return cls(**{**own, "records": records})


def cache_variables(parent: Path, shared: Collection[str]) -> dict[str, str]:
    """What sends libraries there.

    Args:
        parent: of the directories.
        shared: names of caches that stay where the environment has them.
    """
    return {cache.variable: str(parent / cache.name) for cache in CACHES if cache.name not in shared}
