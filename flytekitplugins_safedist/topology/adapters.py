"""One pure adapter per operator.

Identity has no default: an adapter that misses a variable says so. The operators' ``WORLD_SIZE`` counts *pods*, and
Volcano's every pod of the job, training or not, so it is never taken for a number of ranks or nodes, only compared.

Sources of what is read here:

- PyTorchJob: training-operator v1.9.0, ``pkg/controller.v1/pytorch/{envvar,master,elastic}.go``
- MPIJob: our own launcher, or Open MPI's ``mpirun`` (its documented ``OMPI_COMM_WORLD_*`` variables)
- JobSet: Flyte v2.0.9, ``flyteplugins/go/tasks/plugins/k8s/clustered/runtime_torch.go``; the index is the kubelet's
- Volcano: ``pkg/controllers/job/plugins/distributed-framework/pytorch/pytorch.go`` and the ``env`` plugin
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from .. import envvars
from ..errors import TopologyError
from .devices import ranks_here
from .model import DEFAULT_PORT, Asked, Endpoint, Topology
from .pinned import check_pinned

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
    read: Callable[[Mapping[str, str], Asked], Topology]


def from_env(env: Mapping[str, str], asked: Asked, devices: Collection[str] = ()) -> Topology:
    """Read this node's place from *env*, and check it against what was *asked* for at registration.

    The ranks of a node are those that its GPUs make, where the user left that open: see :func:`.devices.ranks_here`.
    *devices* are the names of the files in ``/dev``.

    Without any operator's variables this is a local run, or the one pod of ``nodes=1``.

    Raises:
        TopologyError: nobody says which node this is, or two say different things, or what is said contradicts the
            configuration. The error lists what was seen and from whom.
    """
    check_pinned(env, asked)
    speaking = [adapter for adapter in ADAPTERS if adapter.recognises(env)]
    if len(speaking) > 1:
        raise TopologyError(
            "more than one operator says which node this is",
            where=_said(env),
            seen=" and ".join(adapter.source for adapter in speaking),
            expected="the variables of one operator",
            hint="remove those that the task's environment, pod template or image sets itself",
        )
    topology = speaking[0].read(env, asked) if speaking else _alone(env, asked)
    ranks, why = ranks_here(env, asked, devices)
    if why is not None:
        topology = replace(topology, nproc_per_node=ranks, notes=(*topology.notes, why))
    return _with_users_endpoint(topology, env)


def _pytorchjob(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "PyTorchJob"
    rank = _int(env, envvars.PET_NODE_RANK, source)
    nodes = _int(env, envvars.PET_NNODES, source)
    _same_nodes(env, asked, source, low=nodes, high=nodes)
    if envvars.RANK in env and _int(env, envvars.RANK, source) != rank:
        raise _contradiction(env, source, f"RANK={env[envvars.RANK]}", f"RANK={rank}, as {envvars.PET_NODE_RANK} says")
    _same_nproc(env, asked, source, envvars.PET_NPROC_PER_NODE)
    return _fixed(env, asked, source, rank, _master(env, source))


def _pytorchjob_elastic(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "PyTorchJob with an elastic policy"
    text = _text(env, envvars.PET_NNODES, source)
    low, colon, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() if colon else not high)):
        raise _malformed(env, source, envvars.PET_NNODES, "MIN:MAX")
    _same_nodes(env, asked, source, low=int(low), high=int(high or low))
    _same_nproc(env, asked, source, envvars.PET_NPROC_PER_NODE)
    if asked.min_nodes == asked.max_nodes:
        raise _contradiction(
            env, source, "an elastic policy", f"a job of exactly {asked.max_nodes} nodes, with a Master"
        )
    return Topology(
        node_rank=None,
        min_nodes=asked.min_nodes,
        max_nodes=asked.max_nodes,
        nproc_per_node=asked.nproc_per_node,
        endpoint=_endpoint(env, envvars.PET_RDZV_ENDPOINT, source),
        source=source,
    )


def _mpijob(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "MPIJob worker"
    rank = _int(env, envvars.MPI_NODE_RANK, source)
    nodes = _int(env, envvars.MPI_NODES, source)
    _same_nodes(env, asked, source, low=nodes, high=nodes)
    return _fixed(env, asked, source, rank, _endpoint(env, envvars.MPI_ENDPOINT, source))


def _mpirun(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "MPIJob worker (mpirun)"
    rank = _int(env, envvars.OMPI_RANK, source)
    nodes = _int(env, envvars.OMPI_SIZE, source)
    here = _int(env, envvars.OMPI_LOCAL_SIZE, source)
    if here != 1:
        raise TopologyError(
            f"mpirun started {here} agents in this pod",
            where=_said(env),
            expected="one agent for each pod; the agent starts the ranks itself",
            hint="start it with --map-by ppr:1:node",
        )
    _same_nodes(env, asked, source, low=nodes, high=nodes)
    if asked.max_nodes == 1:
        return _fixed(env, asked, source, rank, None)
    # mpirun tells nobody where rank 0 runs, and node 0's address must not be guessed from host names.
    return _fixed(env, asked, source, rank, _endpoint(env, envvars.ENDPOINT, source))


def _jobset(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "JobSet"
    rank = _int(env, envvars.JOB_COMPLETION_INDEX, source)
    nodes = _int(env, envvars.NNODES, source)
    _same_nodes(env, asked, source, low=nodes, high=nodes)
    _same_nproc(env, asked, source, envvars.JOBSET_NPROC_PER_NODE)
    name = _text(env, envvars.JOBSET_NAME, source)
    # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>; Flyte calls its one replicated job "workers" and
    # makes the JobSet's name the subdomain (clustered/plugin.go, build.go).
    host = env.get(envvars.MASTER_ADDR) or f"{name}-workers-0-0.{name}"
    return _fixed(env, asked, source, rank, Endpoint(host, _port(env, envvars.MASTER_PORT, source)))


def _volcano(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "Volcano's pytorch plugin"
    if envvars.RANK not in env:
        raise TopologyError(
            "this pod is not a training pod of its job",
            where=_said(env),
            seen=f"no {envvars.RANK}; the plugin gives one to its master and worker tasks only",
            hint="run safedist-execute in the tasks that the plugin's --master and --worker arguments name",
        )
    rank = _int(env, envvars.RANK, source)
    pods = _int(env, envvars.WORLD_SIZE, source)
    if pods < asked.max_nodes:
        raise _contradiction(env, source, f"a job of {pods} pods", f"at least {asked.max_nodes}, one for each node")
    topology = _fixed(env, asked, source, rank, _master(env, source))
    if pods == asked.max_nodes:
        return topology
    note = (
        f"{envvars.WORLD_SIZE}={pods} counts every pod of the Volcano job, training or not; the job has "
        f"{asked.max_nodes} nodes and {asked.max_nodes * asked.nproc_per_node} ranks, as it was registered"
    )
    return replace(topology, notes=(*topology.notes, note))


def _alone(env: Mapping[str, str], asked: Asked) -> Topology:
    in_pod = envvars.NODES in env or envvars.FLYTE_EXECUTION_ID in env
    if asked.max_nodes > 1 and in_pod:
        raise TopologyError(
            "nothing says which node of the job this pod is",
            where=_said(env),
            expected="the variables of one of: " + ", ".join(adapter.source for adapter in ADAPTERS),
            hint="check that the cluster's training operator handled this job (the pod has none of its variables)",
        )
    notes: tuple[str, ...] = ()
    if asked.max_nodes > 1:
        notes = (
            f"a local run is one node: {asked.nproc_per_node} ranks instead of "
            f"{asked.max_nodes * asked.nproc_per_node} on {asked.max_nodes} nodes",
        )
    return Topology(
        node_rank=0,
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=asked.nproc_per_node,
        endpoint=None,
        source="single pod" if in_pod else "local run",
        notes=notes,
    )


def _is_volcano(env: Mapping[str, str]) -> bool:
    if envvars.VC_TASK_INDEX in env or envvars.VK_TASK_INDEX in env:
        return True
    # The plugin alone leaves no mark of its own, only the four env:// names, which PyTorchJob sets as well.
    others = (envvars.PET_NODE_RANK, envvars.PET_RDZV_ENDPOINT, envvars.JOBSET_NAME, envvars.OMPI_RANK)
    return envvars.MASTER_ADDR in env and envvars.WORLD_SIZE in env and not any(name in env for name in others)


ADAPTERS: tuple[Adapter, ...] = (
    Adapter("PyTorchJob", lambda env: envvars.PET_NODE_RANK in env, _pytorchjob),
    Adapter("PyTorchJob with an elastic policy", lambda env: envvars.PET_RDZV_ENDPOINT in env, _pytorchjob_elastic),
    Adapter("MPIJob worker", lambda env: envvars.MPI_NODE_RANK in env, _mpijob),
    Adapter("MPIJob worker (mpirun)", lambda env: envvars.OMPI_RANK in env, _mpirun),
    Adapter("JobSet", lambda env: envvars.JOBSET_NAME in env, _jobset),
    Adapter("Volcano's pytorch plugin", _is_volcano, _volcano),
)


# --- what the adapters share -----------------------------------------------------------------------------------------


def _fixed(env: Mapping[str, str], asked: Asked, source: str, rank: int, endpoint: Endpoint | None) -> Topology:
    if asked.min_nodes != asked.max_nodes:
        raise _contradiction(env, source, "a job of fixed size", f"an elastic one, {asked.min_nodes}:{asked.max_nodes}")
    if rank >= asked.max_nodes:
        raise _contradiction(env, source, f"node rank {rank}", f"0 to {asked.max_nodes - 1}")
    return Topology(
        node_rank=rank,
        min_nodes=asked.min_nodes,
        max_nodes=asked.max_nodes,
        nproc_per_node=asked.nproc_per_node,
        endpoint=endpoint,
        source=source,
    )


def _same_nodes(env: Mapping[str, str], asked: Asked, source: str, *, low: int, high: int) -> None:
    if (low, high) != (asked.min_nodes, asked.max_nodes):
        said = str(high) if low == high else f"{low}:{high}"
        want = str(asked.max_nodes) if asked.min_nodes == asked.max_nodes else f"{asked.min_nodes}:{asked.max_nodes}"
        raise _contradiction(env, source, f"nodes={said}", f"nodes={want}")


def _same_nproc(env: Mapping[str, str], asked: Asked, source: str, name: str) -> None:
    """The operator's word on ranks per node, when it has one, is the pinned value or "decide yourself"."""
    said = env.get(name)
    if said is None or said == str(asked.nproc_per_node):
        return
    if not said.isdecimal():
        if envvars.NPROC_PER_NODE in env:
            return
        raise TopologyError(
            f"{name}={said} leaves the number of ranks to each pod, which could decide differently",
            where=_said(env),
            expected=f"a number, or {envvars.NPROC_PER_NODE} pinned into the pod",
            hint="register the task with this package, which pins it, or set the variable in the pod template",
        )
    raise _contradiction(env, source, f"{name}={said}", f"{asked.nproc_per_node}, as the task is configured")


def _with_users_endpoint(topology: Topology, env: Mapping[str, str]) -> Topology:
    """``SAFEDIST_ENDPOINT`` wins where nodes meet at an endpoint, and is refused where they do not."""
    if envvars.ENDPOINT not in env:
        return topology
    if topology.endpoint is None:
        raise TopologyError(
            f"{envvars.ENDPOINT} is set, but there is no other node to meet",
            where=_said(env),
            seen=topology.source,
            hint="remove it; it has a meaning for jobs of two or more nodes only",
        )
    return replace(topology, endpoint=_endpoint(env, envvars.ENDPOINT, "the user"))


def _master(env: Mapping[str, str], source: str) -> Endpoint:
    return Endpoint(_text(env, envvars.MASTER_ADDR, source), _port(env, envvars.MASTER_PORT, source))


def _endpoint(env: Mapping[str, str], name: str, source: str) -> Endpoint:
    host, colon, port = _text(env, name, source).rpartition(":")
    if not colon:
        return Endpoint(port, DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise _malformed(env, source, name, "HOST:PORT")
    return Endpoint(host.removeprefix("[").removesuffix("]"), int(port))


def _port(env: Mapping[str, str], name: str, source: str) -> int:
    port = _int(env, name, source)
    if not 0 < port < 65536:
        raise _malformed(env, source, name, "a TCP port, 1 to 65535")
    return port


def _int(env: Mapping[str, str], name: str, source: str) -> int:
    text = _text(env, name, source)
    if not (text.isascii() and text.isdecimal()):
        raise _malformed(env, source, name, "a whole number, 0 or more")
    return int(text)


def _text(env: Mapping[str, str], name: str, source: str) -> str:
    text = env.get(name)
    if not text:
        raise TopologyError(
            f"{source} does not say {name}",
            where=_said(env),
            expected=f"{name} beside the other variables of {source}",
            hint="nothing stands in for it: a guessed identity would make two nodes believe they are the same one",
        )
    return text


def _malformed(env: Mapping[str, str], source: str, name: str, expected: str) -> TopologyError:
    return TopologyError(
        f"{name} of {source} cannot be read", where=_said(env), seen=repr(env.get(name)), expected=expected
    )


def _contradiction(env: Mapping[str, str], source: str, seen: str, expected: str) -> TopologyError:
    return TopologyError(
        f"{source} contradicts the task's configuration",
        where=_said(env),
        seen=seen,
        expected=expected,
        hint="register the task again; if it stays, something sets the operator's variables a second time",
    )


def _said(env: Mapping[str, str]) -> dict[str, object]:
    """Every variable about identity that is there. None of them is ever a secret."""
    return {name: env[name] for name in sorted(env) if name in _NAMES or name.startswith(_FAMILIES)}
