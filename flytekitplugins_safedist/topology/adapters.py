"""One pure adapter per operator.

Identity has no default: an adapter that misses a variable says so. The operators' ``WORLD_SIZE`` counts *pods*, and
Volcano's every pod of the job, training or not, so it is never taken for a number of ranks or nodes, only compared.

Sources of what is read here:

- PyTorchJob: training-operator v1.9.0, ``pkg/controller.v1/pytorch/{envvar,master,elastic}.go``
- MPIJob: our own launcher, or Open MPI's ``mpirun`` (its documented ``OMPI_COMM_WORLD_*`` variables)
- JobSet: Flyte v2.0.18, ``flyteplugins/go/tasks/plugins/k8s/clustered/runtime_torch.go``; the index is the kubelet's
- Kubeflow Trainer v2.3.0: ``pkg/runtime/framework/plugins/torch/torch.go``
- Volcano: ``pkg/controllers/job/plugins/distributed-framework/pytorch/pytorch.go`` and the ``env`` plugin
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from .. import envvars
from ..errors import TopologyError
from . import reading
from .devices import ranks_here
from .model import Asked, Endpoint, Topology
from .pinned import check_pinned

_VOLCANO = "Volcano's pytorch plugin"
_ENV_ONLY = "a training operator before v1.7, or Volcano's pytorch plugin"
"""Both set the four ``env://`` names, and nothing that would tell them apart."""


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
            where=reading.seen_variables(env),
            seen=" and ".join(adapter.source for adapter in speaking),
            expected="the variables of one operator",
            hint="remove those that the task's environment, pod template or image sets itself",
        )
    topology = speaking[0].read(env, asked) if speaking else _alone(env, asked)
    ranks, why = ranks_here(env, asked, devices)
    if why is not None:
        topology = replace(topology, nproc_per_node=ranks, notes=(*topology.notes, why))
    return reading.with_users_endpoint(topology, env)


def _pytorchjob(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "PyTorchJob"
    rank = reading.whole_number(env, envvars.PET_NODE_RANK, source)
    nodes = reading.whole_number(env, envvars.PET_NNODES, source)
    reading.same_nodes(env, asked, source, low=nodes, high=nodes)
    if envvars.RANK in env and reading.whole_number(env, envvars.RANK, source) != rank:
        raise reading.contradiction(
            env, source, f"RANK={env[envvars.RANK]}", f"RANK={rank}, as {envvars.PET_NODE_RANK} says"
        )
    reading.same_nproc(env, asked, source, envvars.PET_NPROC_PER_NODE)
    return reading.fixed(env, asked, source, rank, reading.master(env, source))


def _trainjob(env: Mapping[str, str], asked: Asked) -> Topology:
    """Kubeflow Trainer v2: a JobSet's pods, with torchrun's variables and no other. Its number of processes is never
    compared: without GPUs it counts CPUs, whatever the task asks for, and with GPUs it leaves them to torchrun."""
    source = "Kubeflow Trainer's TrainJob"
    rank = reading.whole_number(env, envvars.PET_NODE_RANK, source)
    nodes = reading.whole_number(env, envvars.PET_NNODES, source)
    reading.same_nodes(env, asked, source, low=nodes, high=nodes)
    index = env.get(envvars.JOB_COMPLETION_INDEX)
    if index is not None and index != str(rank):
        stated = f"{envvars.JOB_COMPLETION_INDEX}={index}"
        raise reading.contradiction(env, source, stated, f"{rank}, as {envvars.PET_NODE_RANK} says")
    endpoint = reading.master(env, source, prefix="PET_") if asked.max_nodes > 1 else None
    topology = reading.fixed(env, asked, source, rank, endpoint)
    processes = env.get(envvars.PET_NPROC_PER_NODE, "auto")
    if processes in ("auto", str(asked.nproc_per_node)):
        return topology
    note = (
        f"{envvars.PET_NPROC_PER_NODE}={processes} of the TrainJob is not used (it counts CPUs where there is no GPU): "
        f"{asked.nproc_per_node} ranks on each node, as the task is configured"
    )
    return replace(topology, notes=(*topology.notes, note))


def _pytorchjob_elastic(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "PyTorchJob with an elastic policy"
    text = reading.required(env, envvars.PET_NNODES, source)
    low, colon, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() if colon else not high)):
        raise reading.malformed(env, source, envvars.PET_NNODES, "MIN:MAX")
    reading.same_nodes(env, asked, source, low=int(low), high=int(high or low))
    reading.same_nproc(env, asked, source, envvars.PET_NPROC_PER_NODE)
    if asked.min_nodes == asked.max_nodes:
        raise reading.contradiction(
            env, source, "an elastic policy", f"a job of exactly {asked.max_nodes} nodes, with a Master"
        )
    return Topology(
        node_rank=None,
        min_nodes=asked.min_nodes,
        max_nodes=asked.max_nodes,
        nproc_per_node=asked.nproc_per_node,
        endpoint=reading.endpoint(env, envvars.PET_RDZV_ENDPOINT, source),
        source=source,
    )


def _mpijob(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "MPIJob worker"
    rank = reading.whole_number(env, envvars.MPI_NODE_RANK, source)
    nodes = reading.whole_number(env, envvars.MPI_NODES, source)
    reading.same_nodes(env, asked, source, low=nodes, high=nodes)
    endpoint = replace(reading.endpoint(env, envvars.MPI_ENDPOINT, source), moved=env.get(envvars.MPI_NODE_0, ""))
    return reading.fixed(env, asked, source, rank, endpoint)


def _mpirun(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "MPIJob worker (mpirun)"
    rank = reading.whole_number(env, envvars.OMPI_RANK, source)
    nodes = reading.whole_number(env, envvars.OMPI_SIZE, source)
    here = reading.whole_number(env, envvars.OMPI_LOCAL_SIZE, source)
    if here != 1:
        raise TopologyError(
            f"mpirun started {here} agents in this pod",
            where=reading.seen_variables(env),
            expected="one agent for each pod; the agent starts the ranks itself",
            hint="start it with --map-by ppr:1:node",
        )
    reading.same_nodes(env, asked, source, low=nodes, high=nodes)
    if asked.max_nodes == 1:
        return reading.fixed(env, asked, source, rank, None)
    # mpirun tells nobody where rank 0 runs, and node 0's address must not be guessed from host names.
    return reading.fixed(env, asked, source, rank, reading.endpoint(env, envvars.ENDPOINT, source))


def _jobset(env: Mapping[str, str], asked: Asked) -> Topology:
    source = "JobSet"
    rank = reading.whole_number(env, envvars.JOB_COMPLETION_INDEX, source)
    nodes = reading.whole_number(env, envvars.NNODES, source)
    reading.same_nodes(env, asked, source, low=nodes, high=nodes)
    reading.same_nproc(env, asked, source, envvars.JOBSET_NPROC_PER_NODE)
    name = reading.required(env, envvars.JOBSET_NAME, source)
    # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>; Flyte calls its one replicated job "workers" and
    # makes the JobSet's name the subdomain (clustered/plugin.go, build.go).
    host = env.get(envvars.MASTER_ADDR) or f"{name}-workers-0-0.{name}"
    return reading.fixed(env, asked, source, rank, Endpoint(host, reading.port(env, envvars.MASTER_PORT, source)))


def _volcano(env: Mapping[str, str], asked: Asked) -> Topology:
    source = _VOLCANO if _has_index(env) else _ENV_ONLY
    if envvars.RANK not in env:
        raise TopologyError(
            "this pod is not a training pod of its job",
            where=reading.seen_variables(env),
            seen=f"no {envvars.RANK}; the plugin gives one to its master and worker tasks only",
            hint="run safedist-execute in the tasks that the plugin's --master and --worker arguments name",
        )
    rank = reading.whole_number(env, envvars.RANK, source)
    pods = reading.whole_number(env, envvars.WORLD_SIZE, source)
    if pods < asked.max_nodes:
        raise reading.contradiction(
            env, source, f"a job of {pods} pods", f"at least {asked.max_nodes}, one for each node"
        )
    topology = reading.fixed(env, asked, source, rank, reading.master(env, source))
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
            where=reading.seen_variables(env),
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
        alone=True,
        notes=notes,
    )


def is_alone(env: Mapping[str, str]) -> bool:
    """No operator speaks in *env*: nobody replaces this pod when it fails."""
    return not any(adapter.recognises(env) for adapter in ADAPTERS)


def _has_index(env: Mapping[str, str]) -> bool:
    return envvars.VC_TASK_INDEX in env or envvars.VK_TASK_INDEX in env


def _is_trainjob(env: Mapping[str, str]) -> bool:
    """The training operator sets torch's own names beside torchrun's; Trainer v2 only torchrun's."""
    return not any(name in env for name in (envvars.MASTER_ADDR, envvars.RANK, envvars.WORLD_SIZE))


def _is_volcano(env: Mapping[str, str]) -> bool:
    if _has_index(env):
        return True
    # The plugin alone leaves no mark of its own, only the four env:// names, which PyTorchJob sets as well.
    others = (envvars.PET_NODE_RANK, envvars.PET_RDZV_ENDPOINT, envvars.JOBSET_NAME, envvars.OMPI_RANK)
    return envvars.MASTER_ADDR in env and envvars.WORLD_SIZE in env and not any(name in env for name in others)


ADAPTERS: tuple[Adapter, ...] = (
    Adapter("PyTorchJob", lambda env: envvars.PET_NODE_RANK in env and not _is_trainjob(env), _pytorchjob),
    Adapter("Kubeflow Trainer's TrainJob", lambda env: envvars.PET_NODE_RANK in env and _is_trainjob(env), _trainjob),
    Adapter("PyTorchJob with an elastic policy", lambda env: envvars.PET_RDZV_ENDPOINT in env, _pytorchjob_elastic),
    Adapter("MPIJob worker", lambda env: envvars.MPI_NODE_RANK in env, _mpijob),
    Adapter("MPIJob worker (mpirun)", lambda env: envvars.OMPI_RANK in env, _mpirun),
    Adapter("JobSet", lambda env: envvars.JOBSET_NAME in env, _jobset),
    Adapter("Volcano's pytorch plugin", _is_volcano, _volcano),
)
