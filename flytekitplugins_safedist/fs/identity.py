"""Which rank of which job is this process? From an environment, as a pure function; nothing is guessed.

Under torchrun (and our own ranks) the answer is in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables); under horovodrun in HOROVOD_RANK, _SIZE,
_LOCAL_RANK, _LOCAL_SIZE, _CROSS_RANK and _CROSS_SIZE (horovod/runner/gloo_run.py, 0.28.1).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from .. import envvars
from ..errors import FsError, FsIdentityError
from ..handoff import Slot

DEFAULT_TIMEOUT_S = 300.0
"""Parallel file systems have been seen to take 60 s to show a directory; a rank that starts late takes minutes."""

LONGEST_TIMEOUT_S = 1e6
"""Eleven days stand for ever (``math.inf``): sockets take no more than 24."""

_TORCH = (envvars.RANK, envvars.WORLD_SIZE, envvars.LOCAL_RANK, envvars.LOCAL_WORLD_SIZE, envvars.GROUP_RANK)
_HOROVOD = (
    envvars.HOROVOD_RANK,
    envvars.HOROVOD_SIZE,
    envvars.HOROVOD_LOCAL_RANK,
    envvars.HOROVOD_LOCAL_SIZE,
    envvars.HOROVOD_CROSS_RANK,
)


@dataclass(frozen=True)
class Identity:
    """A rank's place in its job. ``round`` counts restarts of the ranks, ``attempt`` Flyte's retries; both from 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nnodes: int
    round: int
    attempt: int

    def __post_init__(self) -> None:
        for index, size in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "nnodes")):
            if not 0 <= getattr(self, index) < getattr(self, size):
                raise FsIdentityError(
                    f"{index} must be at least 0 and less than {size}",
                    seen=f"{index}={getattr(self, index)}, {size}={getattr(self, size)}",
                    hint="look at what sets these variables: two launchers may be at work at once",
                )

    @property
    def single(self) -> bool:
        """True if this process is the whole job."""
        return self.world_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} (local rank {self.local_rank} on node {self.node_rank})"


OF_RANK: Slot[Identity] = Slot()
"""Who this process is, where it is a rank of a task. Said as it starts: its code may clear the environment after."""


def known_identity() -> Identity | None:
    """As ``current_identity``; None where the environment is wrong: to wait, one need not know who waits."""
    try:
        return current_identity()
    except FsIdentityError:
        return None


def current_identity(env: Mapping[str, str] = os.environ) -> Identity:
    """This process's rank, from its environment; a task's rank if that names none, else ``Identity()``, a job of one
    process.

    Raises:
        FsIdentityError: the variables are there only in part, are no numbers, or torch's and Horovod's disagree.
    """
    torch = _read(env, _TORCH, envvars.GROUP_WORLD_SIZE, "torchrun")
    horovod = _read(env, _HOROVOD, envvars.HOROVOD_CROSS_SIZE, "horovodrun")
    if torch and horovod and torch != horovod:
        raise FsIdentityError(
            "torch's and Horovod's variables name different ranks",
            seen=f"{torch} by RANK …, {horovod} by HOROVOD_RANK …",
            hint="start the ranks with one launcher, or unset the other's variables",
        )
    place = torch or horovod
    attempt = _number(env, envvars.FLYTE_ATTEMPT)
    if place is None and env is os.environ and OF_RANK.value is not None:
        return OF_RANK.value
    if place is None:
        return Identity(0, 1, 0, 1, 0, 1, 0, attempt)
    # torchrun's first: one that a rank of ours has started counts its own.
    rounds = envvars.TORCHELASTIC_RESTART_COUNT if env.get(envvars.TORCHELASTIC_RESTART_COUNT) else envvars.ROUND
    rank, world_size, local_rank, local_world_size, node_rank, nnodes = place
    return Identity(rank, world_size, local_rank, local_world_size, node_rank, nnodes, _number(env, rounds), attempt)


def _read(env: Mapping[str, str], names: tuple[str, ...], nodes: str, launcher: str) -> tuple[int, ...] | None:
    present = [name for name in names if env.get(name)]
    if not present:
        return None
    if len(present) < len(names):
        raise FsIdentityError(
            "the environment names this process's rank only in part",
            seen=", ".join(f"{name}={env[name]}" for name in present),
            expected="also " + ", ".join(name for name in names if name not in present),
            hint=f"start the ranks with {launcher} or as a safedist task, or unset these for a single process",
        )
    place = tuple(_number(env, name) for name in names)
    _, world_size, _, local_world_size, _ = place
    if env.get(nodes):
        return (*place, _number(env, nodes))
    if local_world_size > 0 and world_size % local_world_size == 0:
        return (*place, world_size // local_world_size)
    raise FsIdentityError(
        "the number of nodes is not known",
        seen=f"world size {world_size}, {local_world_size} on this node, {nodes} not set",
        hint=f"set {nodes}",
    )


def _number(env: Mapping[str, str], name: str) -> int:
    """What a variable says; 0 of one that is not set."""
    try:
        return int(env.get(name) or 0)
    except ValueError:
        raise FsIdentityError(
            f"{name} is not a number", where={"variable": name}, seen=env[name], expected="a whole number"
        ) from None


def timeout_s(given: float | None, default: float = DEFAULT_TIMEOUT_S) -> float:
    """Seconds to wait: the call's own word, else SAFEDIST_FS_TIMEOUT for the whole job, else ``default``.

    Raises:
        FsError: it is not a positive number.
    """
    text = os.environ.get(envvars.FS_TIMEOUT)
    source, said = (envvars.FS_TIMEOUT, text) if given is None and text else ("timeout", given)
    if said is None:
        return default
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise FsError(f"{source} is not a usable time", seen=repr(said), expected="seconds, more than 0")
    return min(seconds, LONGEST_TIMEOUT_S)
