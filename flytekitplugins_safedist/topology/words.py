"""An operator's variables as it means them, and the errors that say what was there instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import envvars
from ..errors import TopologyError
from .model import DEFAULT_PORT, Asked, Endpoint, asked_nodes

_FAMILIES = ("PET_", "JOBSET_", "SAFEDIST_MPI_")
_ENV_ONLY = (envvars.RANK, envvars.WORLD_SIZE, envvars.MASTER_ADDR, envvars.MASTER_PORT)
_OURS = (envvars.NODES, envvars.NPROC_PER_NODE, envvars.ENDPOINT)
_NAMES = {*_OURS, *_ENV_ONLY, envvars.JOB_COMPLETION_INDEX, envvars.NNODES, envvars.JOBSET_NPROC_PER_NODE}


def seen_variables(env: Mapping[str, str]) -> dict[str, object]:
    """Every variable about identity that is there. None of them is ever a secret."""
    return {name: env[name] for name in sorted(env) if name in _NAMES or name.startswith(_FAMILIES)}


def handmade(env: Mapping[str, str]) -> list[str]:
    """Torch's own names, which say nothing of nodes where no operator speaks: a shell, or an image, has set them."""
    return [name for name in _ENV_ONLY if name in env]


@dataclass(frozen=True)
class Words:
    """What one operator says; each method raises TopologyError where that is missing, unreadable, or contradicts what
    was asked for.

    Attributes:
        env: the pod's variables.
        source: the operator's name.
    """

    env: Mapping[str, str]
    source: str

    def required(self, name: str) -> str:
        """A variable for which nothing stands in."""
        text = self.env.get(name)
        if not text:
            raise TopologyError(
                f"{self.source} does not say {name}",
                where=seen_variables(self.env),
                expected=f"{name} beside the other variables of {self.source}",
                hint="it has no default: a guessed identity would make two nodes believe they are the same one",
            )
        return text

    def whole_number(self, name: str) -> int:
        """A number, 0 or more."""
        text = self.required(name)
        if not (text.isascii() and text.isdecimal()):
            raise self.unreadable(name, "a whole number, 0 or more")
        return int(text)

    def address(self, prefix: str = "", host: str = "") -> Endpoint:
        """Where node 0 is met, by torch's own two variables (or torchrun's, *prefix* ``PET_``)."""
        host = host or self.required(f"{prefix}{envvars.MASTER_ADDR}")
        name = f"{prefix}{envvars.MASTER_PORT}"
        port = self.whole_number(name)
        if not 0 < port < 65536:
            raise self.unreadable(name, "a TCP port, 1 to 65535")
        return Endpoint(host, port)

    def endpoint(self, name: str, moved: str = "") -> Endpoint:
        """``HOST:PORT``; without a port, the operators' own."""
        host, colon, port = self.required(name).rpartition(":")
        if not colon:
            return Endpoint(port, DEFAULT_PORT, moved)
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise self.unreadable(name, "HOST:PORT")
        return Endpoint(host.removeprefix("[").removesuffix("]"), int(port), moved)

    def same_nodes(self, asked: Asked, low: int, high: int) -> None:
        """Raise where the operator says another number of nodes than was asked for."""
        if (low, high) != (asked.min_nodes, asked.max_nodes):
            said = str(high) if low == high else f"{low}:{high}"
            raise self.contradiction(f"nnodes={said}", f"nnodes={asked_nodes(asked)}")

    def same_nproc(self, asked: Asked, name: str) -> None:
        """The operator's word on ranks per node, when it has one, is the pinned value or "decide yourself"."""
        text = self.env.get(name)
        if text is None or text == str(asked.nproc_per_node):
            return
        if text.isdecimal():
            raise self.contradiction(f"{name}={text}", f"{asked.nproc_per_node}, as the task is configured")
        if envvars.NPROC_PER_NODE not in self.env:
            raise TopologyError(
                f"{name}={text} leaves the number of ranks to each pod, which could decide differently",
                where=seen_variables(self.env),
                expected=f"a number, or {envvars.NPROC_PER_NODE} pinned into the pod",
                hint="register the task with this package, which pins it, or set the variable in the pod template",
            )

    def unreadable(self, name: str, expected: str) -> TopologyError:
        """The error for a variable that cannot be read."""
        return TopologyError(
            f"{name} of {self.source} cannot be read",
            where=seen_variables(self.env),
            seen=repr(self.env.get(name)),
            expected=expected,
        )

    def contradiction(self, seen: str, expected: str) -> TopologyError:
        """The error for an operator that says something else than the configuration."""
        return TopologyError(
            f"{self.source} contradicts the task's configuration",
            where=seen_variables(self.env),
            seen=seen,
            expected=expected,
            hint="register the task again; if it stays, something sets the operator's variables a second time",
        )
