"""What registration pins into a pod, and reads there: all that a node goes by. An agent needs none of the task's code.

One variable, ``SAFEDIST_JOB``, written and read here alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .. import envvars, stopping
from ..errors import ConfigError, TopologyError
from .options import Backend, Hangs, Logs, Metrics, Preflight, Profile, Scratch, StartMethod, Timeouts, nodes_text
from .quantities import size_in_bytes

VERSION = 2
"""Of what the variable holds: a version of this package reads its own only."""

END_SECONDS = 10.0
"""From the ranks' end to this process's, after a signal: to leave the other nodes, and to remove scratch."""

UPLOAD_SECONDS = 25.0
"""For an upload that runs when the pod is told to stop, or begins then: outputs, or the one error."""

_PARTS = {part.__name__.lower(): part for part in (Timeouts, Scratch, Logs, Hangs, Metrics, Preflight, Profile)}
"""Fields that are options of their own."""


@dataclass(frozen=True, kw_only=True)
class Registered:
    """The job as it was registered. Nothing here has a default: what a pod is not told it does not guess.

    Attributes:
        backend: "horovod" or "torch".
        min_nodes, max_nodes: equal for a fixed size.
        nproc_per_node: ranks per node.
        nproc_is_open: the user named no number of ranks: in a pod they follow the GPUs that it has.
        gpus: of each pod that a process sees: one where they are slices; None where nothing asks for any.
        start_method: "preload", or "spawn": then ranks are fresh interpreters.
        max_restarts: how often all ranks may be started again, in the whole job.
        max_replacements: how often nodes may be lost, in the whole job.
        timeouts, scratch, logs, hangs, metrics, preflight, profile: as configured.
        variables: names of the task's own variables. They win over safedist's defaults; the container has the values.
        decks: that the task shows of flytekit's own, by name; None: no deck at all.
    """

    backend: Backend
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    nproc_is_open: bool
    gpus: int | None
    start_method: StartMethod
    max_restarts: int
    max_replacements: int
    timeouts: Timeouts
    scratch: Scratch
    logs: Logs
    hangs: Hangs
    metrics: Metrics
    preflight: Preflight | None
    profile: Profile | None
    variables: tuple[str, ...]
    decks: tuple[str, ...] | None

    @property
    def nnodes(self) -> str:
        """The number of nodes as users write it: ``"4"`` or ``"2:4"``."""
        return nodes_text(self.min_nodes, self.max_nodes)

    @property
    def size_limit(self) -> int | None:
        """Of the scratch of one node, in bytes; None: none of the user's."""
        return size_in_bytes(self.scratch.size_limit)

    @property
    def grace_needed(self) -> int:
        """Whole seconds that a pod needs between SIGTERM and SIGKILL, from our own waits: ranks save their work and are
        ended, and what there is to upload is uploaded."""
        return math.ceil(self.timeouts.preemption + self.timeouts.stop + END_SECONDS + UPLOAD_SECONDS)

    def pinned(self) -> dict[str, str]:
        """What is pinned into the container."""
        told = {field.name: getattr(self, field.name) for field in fields(Registered)}
        for name, part in _PARTS.items():  # of a user's own class the fields that a pod knows
            if told[name] is not None:
                told[name] = {field.name: getattr(told[name], field.name) for field in fields(part)}
        text = json.dumps({"version": VERSION, **told}, default=sorted)
        return {envvars.JOB: text.replace("$", r"\u0024")}  # Kubernetes would fill in $(NAME), and make $ of $$

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Registered | None:
        """Read it; None where this pod is none of ours.

        Raises:
            TopologyError: it was registered by another version of this package, or says something else than that does.
        """
        text = env.get(envvars.JOB)
        if text is None:
            return None
        try:
            said: dict[str, Any] = json.loads(text)
            version = said.pop("version")
            if version == VERSION:
                return Registered(**_values(said))
        except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
            what, hint = f"{envvars.JOB} cannot be read", "register the task again; nothing else sets this variable"
            raise TopologyError(f"{what}: {type(error).__name__}: {error}", seen=repr(text[:500]), hint=hint) from error
        what = "this pod was registered by another version of flytekitplugins-safedist than its image has"
        where = {f"version in {envvars.JOB}": version}
        hint = "register the task with the version that is in its image, or build the image with this one"
        raise TopologyError(what, where=where, expected=VERSION, hint=hint)


def _values(said: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists for tuples, and tables for options."""

    def value(name: str, given: Any) -> Any:
        if isinstance(given, dict):
            return _PARTS[name](**{inner: value(inner, each) for inner, each in given.items()})
        return tuple(given) if isinstance(given, list) else given

    return {name: value(name, given) for name, given in said.items()}


def grace_pinned(env: Mapping[str, str]) -> float:
    """Seconds that this pod has between SIGTERM and SIGKILL; where none is named, Kubernetes' usual ones."""
    return float(env.get(envvars.GRACE) or 0) or stopping.GRACE_SECONDS
