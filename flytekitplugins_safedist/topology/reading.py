"""What the adapters share: reading the operators' variables, and the errors that say what was there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .. import envvars
from ..errors import TopologyError
from .model import DEFAULT_PORT, Asked, Endpoint, Topology

_FAMILIES = ("PET_", "OMPI_COMM_WORLD_", "JOBSET_", "SAFEDIST_MPI_")
_NAMES = frozenset(
    {
        envvars.NODES,
        envvars.NPROC_PER_NODE,
        envvars.ENDPOINT,
        envvars.RANK,
        envvars.WORLD_SIZE,
        envvars.MASTER_ADDR,
        envvars.MASTER_PORT,
        envvars.JOB_COMPLETION_INDEX,
        envvars.NNODES,
        envvars.JOBSET_NPROC_PER_NODE,
        envvars.VC_TASK_INDEX,
        envvars.VK_TASK_INDEX,
    }
)


def fixed(env: Mapping[str, str], asked: Asked, source: str, rank: int, endpoint: Endpoint | None) -> Topology:
    """A node of a job of a fixed size."""
    if asked.min_nodes != asked.max_nodes:
        raise contradiction(env, source, "a job of fixed size", f"an elastic one, {asked.min_nodes}:{asked.max_nodes}")
    if rank >= asked.max_nodes:
        raise contradiction(env, source, f"node rank {rank}", f"0 to {asked.max_nodes - 1}")
    return Topology(
        node_rank=rank,
        min_nodes=asked.min_nodes,
        max_nodes=asked.max_nodes,
        nproc_per_node=asked.nproc_per_node,
        endpoint=endpoint,
        source=source,
    )


def same_nodes(env: Mapping[str, str], asked: Asked, source: str, *, low: int, high: int) -> None:
    """Raise where the operator says another number of nodes than was asked for."""
    if (low, high) != (asked.min_nodes, asked.max_nodes):
        asked_nodes = str(high) if low == high else f"{low}:{high}"
        want = str(asked.max_nodes) if asked.min_nodes == asked.max_nodes else f"{asked.min_nodes}:{asked.max_nodes}"
        raise contradiction(env, source, f"nodes={asked_nodes}", f"nodes={want}")


def same_nproc(env: Mapping[str, str], asked: Asked, source: str, name: str) -> None:
    """The operator's word on ranks per node, when it has one, is the pinned value or "decide yourself"."""
    text = env.get(name)
    if text is None or text == str(asked.nproc_per_node):
        return
    if not text.isdecimal():
        if envvars.NPROC_PER_NODE in env:
            return
        raise TopologyError(
            f"{name}={text} leaves the number of ranks to each pod, which could decide differently",
            where=seen_variables(env),
            expected=f"a number, or {envvars.NPROC_PER_NODE} pinned into the pod",
            hint="register the task with this package, which pins it, or set the variable in the pod template",
        )
    raise contradiction(env, source, f"{name}={text}", f"{asked.nproc_per_node}, as the task is configured")


def with_users_endpoint(topology: Topology, env: Mapping[str, str]) -> Topology:
    """``SAFEDIST_ENDPOINT`` wins where nodes meet at an endpoint, and is refused where they do not."""
    if envvars.ENDPOINT not in env:
        return topology
    if topology.endpoint is None:
        raise TopologyError(
            f"{envvars.ENDPOINT} is set, but there is no other node to meet",
            where=seen_variables(env),
            seen=topology.source,
            hint="remove it; it has a meaning for jobs of two or more nodes only",
        )
    return replace(topology, endpoint=endpoint(env, envvars.ENDPOINT, "the user"))


def master(env: Mapping[str, str], source: str, *, prefix: str = "") -> Endpoint:
    """Where node 0 is met, by torch's own two variables, or those that torchrun reads (*prefix* ``PET_``)."""
    host = required(env, f"{prefix}{envvars.MASTER_ADDR}", source)
    return Endpoint(host, port(env, f"{prefix}{envvars.MASTER_PORT}", source))


def endpoint(env: Mapping[str, str], name: str, source: str) -> Endpoint:
    """``HOST:PORT``; without a port, the operators' own."""
    host, colon, port = required(env, name, source).rpartition(":")
    if not colon:
        return Endpoint(port, DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise malformed(env, source, name, "HOST:PORT")
    return Endpoint(host.removeprefix("[").removesuffix("]"), int(port))


def port(env: Mapping[str, str], name: str, source: str) -> int:
    """A TCP port."""
    port = whole_number(env, name, source)
    if not 0 < port < 65536:
        raise malformed(env, source, name, "a TCP port, 1 to 65535")
    return port


def whole_number(env: Mapping[str, str], name: str, source: str) -> int:
    """A number, 0 or more."""
    text = required(env, name, source)
    if not (text.isascii() and text.isdecimal()):
        raise malformed(env, source, name, "a whole number, 0 or more")
    return int(text)


def required(env: Mapping[str, str], name: str, source: str) -> str:
    """A variable for which nothing stands in."""
    text = env.get(name)
    if not text:
        raise TopologyError(
            f"{source} does not say {name}",
            where=seen_variables(env),
            expected=f"{name} beside the other variables of {source}",
            hint="it has no default: a guessed identity would make two nodes believe they are the same one",
        )
    return text


def malformed(env: Mapping[str, str], source: str, name: str, expected: str) -> TopologyError:
    """The error for a variable that cannot be read."""
    return TopologyError(
        f"{name} of {source} cannot be read", where=seen_variables(env), seen=repr(env.get(name)), expected=expected
    )


def contradiction(env: Mapping[str, str], source: str, seen: str, expected: str) -> TopologyError:
    """The error for an operator that says something else than the configuration."""
    return TopologyError(
        f"{source} contradicts the task's configuration",
        where=seen_variables(env),
        seen=seen,
        expected=expected,
        hint="register the task again; if it stays, something sets the operator's variables a second time",
    )


def seen_variables(env: Mapping[str, str]) -> dict[str, object]:
    """Every variable about identity that is there. None of them is ever a secret."""
    return {name: env[name] for name in sorted(env) if name in _NAMES or name.startswith(_FAMILIES)}
