"""What registration pins into a pod, and reads there: all that a node needs to meet the others without the task's own
code. One variable, ``SAFEDIST_JOB``, written and read here alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from .. import envvars, stopping
from ..errors import Problem, TopologyError
from .options import Backend, StartMethod, Timeouts, nodes_text
from .typed import well_typed

VERSION = 1
"""Of what the variable holds: a version of this package reads its own only."""


@dataclass(frozen=True, kw_only=True)
class Registered:
    """The job as it was registered. Nothing here has a default: what a pod is not told it does not guess.

    Attributes:
        backend: "horovod" or "torch".
        min_nodes, max_nodes: equal for a fixed size.
        nproc_per_node: ranks per node.
        nproc_is_open: the user named no number of ranks: in a pod they follow the GPUs that it has.
        gpus: of each pod, or None where nothing asks for any.
        start_method: "preload", or "spawn": then nothing is imported and forked early.
        max_replacements: how often nodes may be lost, in the whole job.
        shared_caches: compile caches that stay where the environment has them.
        timeouts: the task's.
    """

    backend: Backend
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    nproc_is_open: bool
    gpus: int | None
    start_method: StartMethod
    max_replacements: int
    shared_caches: tuple[str, ...]
    timeouts: Timeouts

    @property
    def nnodes(self) -> str:
        """The number of nodes as users write it: ``"4"`` or ``"2:4"``."""
        return nodes_text(self.min_nodes, self.max_nodes)

    @property
    def world_size(self) -> int:
        """Ranks of the job when every node is there."""
        return self.max_nodes * self.nproc_per_node

    def variables(self) -> dict[str, str]:
        """What is pinned into the container."""
        told = {field.name: getattr(self, field.name) for field in fields(Registered)}
        return {envvars.JOB: json.dumps({"version": VERSION, **told, "timeouts": asdict(self.timeouts)})}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Registered | None:
        """Read it; None where this pod is none of ours.

        Raises:
            TopologyError: it was registered by another version of this package, or says something else than that does.
        """
        text = env.get(envvars.JOB)
        if text is None:
            return None
        problems: list[Problem] = []
        try:
            said: dict[str, Any] = json.loads(text)
            version = said.pop("version")
            if version == VERSION:
                values = {"timeouts": Timeouts(**said["timeouts"]), "shared_caches": tuple(said["shared_caches"])}
                made = Registered(**{**said, **values})
                made = well_typed(made, problems)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _unreadable(text, f"{type(error).__name__}: {error}") from error
        if version != VERSION:
            raise TopologyError(
                "this pod was registered by another version of flytekitplugins-safedist than its image has",
                where={f"version in {envvars.JOB}": version},
                expected=VERSION,
                hint="register the task with the version that is in its image, or build the image with this one",
            )
        if problems:
            raise _unreadable(text, "; ".join(map(str, problems)))
        return made


def _unreadable(text: str, why: str) -> TopologyError:
    hint = "register the task again; nothing else sets this variable"
    return TopologyError(f"{envvars.JOB} cannot be read: {why}", seen=repr(text[:500]), hint=hint)


def grace_pinned(env: Mapping[str, str]) -> float:
    """Seconds that this pod has between SIGTERM and SIGKILL; what is no time to wait is Kubernetes' usual one."""
    with suppress(ValueError):
        seconds = float(env.get(envvars.GRACE, ""))
        if 0 < seconds < float("inf"):
            return seconds
    return stopping.GRACE_SECONDS
