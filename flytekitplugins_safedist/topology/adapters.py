"""Each operator's variables, and what they make of a node.

Identity has no default: where a variable is missing, an error says which. The operators' ``WORLD_SIZE`` counts *pods*,
so it is never taken for a number of ranks.

PyTorchJob: training-operator v1.9.0, ``pkg/controller.v1/pytorch/{envvar,master,elastic}.go``
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from .. import envvars
from ..config.options import nodes_text, parse_nodes
from ..config.registered import Registered
from ..errors import TopologyError
from .devices import no_gpu_here, ranks_here, sockets_despite_rdma
from .model import Endpoint, Topology

_ENV_ONLY = (envvars.RANK, envvars.WORLD_SIZE, envvars.MASTER_ADDR, envvars.MASTER_PORT)
_NAMES = {envvars.ENDPOINT, *_ENV_ONLY}


def _refused(env: Mapping[str, str], what: str, **facts: str | None) -> TopologyError:
    """The error, with every variable about identity that is there, and how many nodes were registered. None is ever a
    secret."""
    seen: dict[str, object] = {name: env[name] for name in sorted(env) if name in _NAMES or name.startswith("PET_")}
    if (registered := Registered.from_env(env)) is not None:
        seen["registered nnodes"] = registered.nnodes
    return TopologyError(what, where=seen, **facts)  # type: ignore[arg-type]


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
            expected = f"{name} beside the other variables of {self.source}"
            hint = "it has no default: a guessed identity would make two nodes believe they are the same one"
            raise _refused(self.env, f"{self.source} does not say {name}", expected=expected, hint=hint)
        return text

    def whole_number(self, name: str) -> int:
        """A number, 0 or more."""
        text = self.required(name)
        if not (text.isascii() and text.isdecimal()):
            raise self.unreadable(name, "a whole number, 0 or more")
        return int(text)

    def address(self) -> Endpoint:
        """Where node 0 is met, by torch's own two variables."""
        host = self.required(envvars.MASTER_ADDR)
        port = self.whole_number(envvars.MASTER_PORT)
        if not 0 < port < 65536:
            raise self.unreadable(envvars.MASTER_PORT, "a TCP port, 1 to 65535")
        return Endpoint(host, port)

    def endpoint(self, name: str) -> Endpoint:
        """``HOST:PORT``."""
        host, _, port = self.required(name).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise self.unreadable(name, "HOST:PORT")
        return Endpoint(host.removeprefix("[").removesuffix("]"), int(port))

    def same_nodes(self, asked: Registered, low: int, high: int) -> None:
        """Raise where the operator says another number of nodes than was asked for."""
        if (low, high) != (asked.min_nodes, asked.max_nodes):
            raise self.contradiction(f"nnodes={nodes_text(low, high)}", f"nnodes={asked.nnodes}")

    def same_nproc(self, asked: Registered) -> None:
        """Raise where the operator says another number of ranks per node; "auto" is none."""
        text = self.env.get(envvars.PET_NPROC_PER_NODE, "")
        if text.isdecimal() and text != str(asked.nproc_per_node):
            seen = f"{envvars.PET_NPROC_PER_NODE}={text}"
            raise self.contradiction(seen, f"{asked.nproc_per_node}, as the task is configured")

    def unreadable(self, name: str, expected: str) -> TopologyError:
        """The error for a variable that cannot be read."""
        what = f"{name} of {self.source} cannot be read"
        return _refused(self.env, what, seen=repr(self.env.get(name)), expected=expected)

    def contradiction(self, seen: str, expected: str) -> TopologyError:
        """The error for an operator that says something else than the configuration."""
        what = f"{self.source} contradicts the task's configuration"
        hint = "register the task again; if it stays, something sets the operator's variables a second time"
        return _refused(self.env, what, seen=seen, expected=expected, hint=hint)


@dataclass(frozen=True)
class Adapter:
    """How one operator speaks.

    Attributes:
        source: its name, for messages.
        recognises: these variables are this operator's.
        read: its word as a topology; raises TopologyError where the word is missing or contradicts itself.
    """

    source: str
    recognises: Callable[[Mapping[str, str]], bool]
    read: Callable[[Words, Registered], Topology]


def from_env(env: Mapping[str, str], asked: Registered, devices: Collection[str] = ()) -> Topology:
    """Read this node's place from *env*, and check it against what was *asked* for at registration.

    The ranks of a node are those that its GPUs make, where the user left that open: see :func:`.devices.ranks_here`.
    *devices* are the names of the files in ``/dev``.

    Without any operator's variables this is a local run, or the one pod of ``nnodes=1``.

    Raises:
        TopologyError: nobody says which node this is, or two say different things, or what is said contradicts the
            configuration. The error lists what was seen and from whom.
    """
    registered = Registered.from_env(env)
    speaking = [adapter for adapter in ADAPTERS if adapter.recognises(env)]
    if len(speaking) > 1:
        raise _refused(
            env,
            "more than one operator says which node this is",
            seen=" and ".join(adapter.source for adapter in speaking),
            expected="the variables of one operator",
            hint="remove those that the task's environment, pod template or image sets itself",
        )
    topology = speaking[0].read(Words(env, speaking[0].source), asked) if speaking else _alone(env, asked)
    topology = replace(topology, machine=env.get(envvars.KUBERNETES_NODE, ""))
    if registered is not None:
        ranks, why = ranks_here(env, registered, asked, devices)
        slow = sockets_despite_rdma(env, devices) if asked.max_nodes > 1 else None
        none = no_gpu_here(registered, devices)
        notes = [note for note in (*topology.notes, why, none, slow) if note is not None]
        topology = replace(topology, nproc_per_node=ranks, notes=tuple(notes))
    if envvars.ENDPOINT not in env:
        return topology
    if topology.endpoint is None:
        what = f"{envvars.ENDPOINT} is set, but there is no other node to meet"
        hint = "remove it; it has a meaning for jobs of two or more nodes only"
        raise _refused(env, what, seen=topology.source, hint=hint)
    return replace(topology, endpoint=Words(env, "the user").endpoint(envvars.ENDPOINT))


def is_alone(env: Mapping[str, str]) -> bool:
    """No operator speaks in *env*: nobody replaces this pod when it fails."""
    return not any(adapter.recognises(env) for adapter in ADAPTERS)


def _pytorchjob(words: Words, asked: Registered) -> Topology:
    rank, nodes = words.whole_number(envvars.PET_NODE_RANK), words.whole_number(envvars.PET_NNODES)
    words.same_nodes(asked, nodes, nodes)
    if rank >= asked.max_nodes:
        raise words.contradiction(f"node rank {rank}", f"0 to {asked.max_nodes - 1}")
    if envvars.RANK in words.env and words.whole_number(envvars.RANK) != rank:
        seen = f"RANK={words.env[envvars.RANK]}"
        raise words.contradiction(seen, f"RANK={rank}, as {envvars.PET_NODE_RANK} says")
    words.same_nproc(asked)
    return Topology(rank, nodes, nodes, asked.nproc_per_node, words.address(), words.source)


def _pytorchjob_elastic(words: Words, asked: Registered) -> Topology:
    nodes = parse_nodes(words.required(envvars.PET_NNODES))
    if nodes is None:
        raise words.unreadable(envvars.PET_NNODES, "MIN:MAX")
    words.same_nodes(asked, *nodes)
    words.same_nproc(asked)
    endpoint = words.endpoint(envvars.PET_RDZV_ENDPOINT)
    return Topology(None, asked.min_nodes, asked.max_nodes, asked.nproc_per_node, endpoint, words.source)


def _alone(env: Mapping[str, str], asked: Registered) -> Topology:
    in_pod = envvars.JOB in env or envvars.FLYTE_EXECUTION_ID in env
    # Torch's own names say nothing of nodes where no operator speaks: a shell, or an image, has set them.
    made = [name for name in _ENV_ONLY if name in env]
    if asked.max_nodes > 1 and (in_pod or made):
        raise _refused(
            env,
            "nothing says which node of the job this pod is",
            seen=f"{', '.join(made)}, which name ranks and not nodes" if made else None,
            expected="the variables of one of: " + ", ".join(adapter.source for adapter in ADAPTERS),
            hint=f"unset {', '.join(made)} for a local run; in a pod, {envvars.PET_NODE_RANK}, {envvars.PET_NNODES}, "
            f"{envvars.MASTER_ADDR} and {envvars.MASTER_PORT} are what a PyTorchJob of Kubeflow's sets"
            if made
            else "check that the cluster's training operator handled this job (the pod has none of its variables)",
        )
    ranks = asked.nproc_per_node
    note = f"a local run is one node: {ranks} ranks instead of {asked.max_nodes * ranks} on {asked.max_nodes} nodes"
    source = "single pod" if in_pod else "local run"
    return Topology(0, 1, 1, ranks, None, source, alone=True, notes=(note,) if asked.max_nodes > 1 else ())


ADAPTERS: tuple[Adapter, ...] = (
    Adapter("PyTorchJob", lambda env: envvars.PET_NODE_RANK in env, _pytorchjob),
    Adapter("PyTorchJob with an elastic policy", lambda env: envvars.PET_RDZV_ENDPOINT in env, _pytorchjob_elastic),
)
