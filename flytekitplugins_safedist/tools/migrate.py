"""From ``HorovodJob``, ``PyTorch`` and ``Elastic`` of Flyte's own plugins to the config that does the same here.

    >>> from flytekitplugins_safedist.tools.migrate import migrate
    >>> print(migrate(HorovodJob(worker=Worker(replicas=4), slots=8)))
    SafeHorovod(nodes=4, nproc_per_node=8, timeouts=Timeouts(rendezvous=1200.0))

What has no counterpart, or means something else here, stands in the notes and is never just dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from ..config.cluster import Kubeflow, Operator
from ..config.options import SafeDistributed, SafeHorovod, SafeTorch, Timeouts, parse_nodes
from ..errors import MigrationError


@dataclass(frozen=True)
class Migration:
    """A config, and what the user should know about the step to it.

    Attributes:
        config: to use as ``task_config``.
        notes: one sentence each.
    """

    config: SafeDistributed
    notes: tuple[str, ...]

    def source(self) -> str:
        """The config as Python, defaults left out."""
        default = type(self.config)()
        values = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        changed = {name: value for name, value in values.items() if value != getattr(default, name)}
        return f"{type(self.config).__name__}({', '.join(f'{name}={_text(value)}' for name, value in changed.items())})"

    def __str__(self) -> str:
        return "\n".join([self.source(), *(f"# {note}" for note in self.notes)])


def migrate(config: object, *, operator: Operator = "pytorch") -> Migration:
    """The counterpart of a stock *config*.

    Args:
        config: ``HorovodJob`` of kfmpi, ``PyTorch`` or ``Elastic`` of kfpytorch.
        operator: for ``HorovodJob``: ``"mpi"`` on clusters that have no PyTorchJob.

    Raises:
        MigrationError: nothing here corresponds to it.
    """
    known: dict[str, Callable[[Any, list[str]], dict[str, Any]]] = {
        "HorovodJob": lambda job, notes: _from_horovod(job, operator, notes),
        "PyTorch": _from_pytorch,
        "Elastic": _from_elastic,
    }
    name = type(config).__name__
    if name not in known:
        raise MigrationError(
            "there is no counterpart for this task config", seen=name, expected="one of " + ", ".join(known)
        )
    notes: list[str] = []
    arguments = known[name](config, notes)
    _fit_to_size(arguments, notes)
    kind = SafeHorovod if name == "HorovodJob" else SafeTorch
    given = {key: value for key, value in arguments.items() if value is not None}
    cluster = {field.name: given.pop(field.name) for field in fields(Kubeflow) if field.name in given}
    return Migration(kind(**given, cluster=Kubeflow(**cluster)), tuple(notes))


def _from_horovod(job: Any, operator: Operator, notes: list[str]) -> dict[str, Any]:
    from flytekitplugins.kfmpi import HorovodJob

    workers = job.num_workers or job.worker.replicas
    if workers is None:
        raise MigrationError("the HorovodJob does not say how many workers it has", expected="worker.replicas")
    for role in ("worker", "launcher"):
        if getattr(job, role).command:
            notes.append(f"{role}.command is gone: no sshd and no horovodrun are needed, the agent is started for you")
    if (
        job.verbose
        or job.log_level != HorovodJob().log_level
        or job.discovery_script_path != HorovodJob().discovery_script_path
    ):
        notes.append("verbose, log_level and discovery_script_path are gone with horovodrun; see Logs(...)")
    if _is_set(job.launcher) and operator == "pytorch":
        notes.append("launcher is gone: a PyTorchJob has none, and node 0 is one of the workers")
    arguments = {
        "nodes": workers,
        "nproc_per_node": job.slots,
        "operator": operator,
        "run_policy": job.run_policy,
        "timeouts": Timeouts(rendezvous=float(job.elastic_timeout)),
    }
    if operator == "mpi":
        own = {"launcher": _without(job.launcher, "command"), "worker": _without(job.worker, "command", "replicas")}
        return {**arguments, **own}
    return {**arguments, **_as_pytorch_roles(job.worker)}


def _from_pytorch(job: Any, notes: list[str]) -> dict[str, Any]:
    workers = job.num_workers or job.worker.replicas
    if workers is None:
        raise MigrationError("the PyTorch config does not say how many workers it has", expected="worker.replicas")
    notes.append(
        "PyTorch ran your function once per pod, and you set up the process group; here it runs in every rank "
        "(nproc_per_node of them in each pod), with the same variables set"
    )
    return {
        "nodes": workers + 1,
        "nproc_per_node": 1,
        "master": _without(job.master),
        "worker": _without(job.worker, "replicas"),
        "run_policy": job.run_policy,
        "shared_memory": job.increase_shared_mem,
    }


def _from_elastic(job: Any, notes: list[str]) -> dict[str, Any]:
    rendezvous = {name: value for name, value in job.rdzv_configs.items() if name in ("timeout", "join_timeout")}
    other = sorted(set(job.rdzv_configs) - set(rendezvous))
    if other:
        notes.append(f"rdzv_configs {', '.join(other)} are gone: the rendezvous sets its timeouts together")
    nproc = str(job.nproc_per_node)
    if not nproc.isdecimal():
        notes.append(f"nproc_per_node={nproc!r} is left out: the default is the number of GPUs that the task requests")
    if job.start_method == "fork":
        notes.append('start_method="fork" becomes "preload", which forks before threads and CUDA exist, or spawns')
    if job.monitor_interval != 5:
        notes.append("monitor_interval is gone: the agent hears of a rank's end at once")
    low, high = parse_nodes(job.nnodes) or (None, None)
    return {
        "nodes": high if low == high else job.nnodes,
        "nproc_per_node": int(nproc) if nproc.isdecimal() else None,
        "max_restarts": job.max_restarts,
        "start_method": "preload" if job.start_method == "fork" else "spawn",
        "timeouts": Timeouts(rendezvous=float(max(rendezvous.values()))) if rendezvous else None,
        "run_policy": job.run_policy,
        "shared_memory": job.increase_shared_mem,
    }


def _fit_to_size(arguments: dict[str, Any], notes: list[str]) -> None:
    """One node is an ordinary pod: what only a job can have is said to the user instead."""
    if arguments["nodes"] == 1:
        for name in ("run_policy", "master", "worker", "launcher"):
            if arguments.pop(name, None) is not None:
                notes.append(f"{name} is gone: one node is an ordinary pod (image, resources and timeout are @task's)")
        arguments.pop("operator", None)
        return
    if arguments.get("run_policy") is not None and arguments["run_policy"].clean_pod_policy is None:
        notes.append("run_policy: pods that still run are removed at the end now (clean_pod_policy RUNNING)")
    if getattr(arguments.get("worker"), "restart_policy", None) is None:
        notes.append("a worker that fails comes back and joins again now (OnFailure); it failed the job (Never)")


def _as_pytorch_roles(worker: Any) -> dict[str, Any]:
    from flytekitplugins import kfpytorch

    if not _is_set(worker):
        return {}
    settings: Mapping[str, Any] = {name: getattr(worker, name) for name in ("image", "requests", "limits")}
    policy = worker.restart_policy
    restart = None if policy is None else kfpytorch.RestartPolicy[policy.name]
    return {
        "master": kfpytorch.Master(**settings, restart_policy=restart),
        "worker": kfpytorch.Worker(**settings, restart_policy=restart),
    }


def _is_set(role: Any) -> bool:
    """The role says more than how many there are."""
    return any(getattr(role, name) is not None for name in ("image", "requests", "limits", "restart_policy"))


def _without(role: Any, *names: str) -> Any:
    """*role* without what is decided elsewhere here; None when nothing is left."""
    if not _is_set(role):
        return None
    kept = {field.name: getattr(role, field.name) for field in fields(role) if field.name not in names}
    return type(role)(**kept)


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _text(value: Any) -> str:
    """Python for *value*, with only what was set of the dataclasses that flytekit's plugins use."""
    if type(value).__name__ in ("RestartPolicy", "CleanPodPolicy"):
        return f"{type(value).__name__}.{value.name}"
    if hasattr(value, "__dataclass_fields__"):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        kept = {
            field.name: values[field.name]
            for field in fields(value)
            if values[field.name] not in (None, _default(field))
        }
        return (
            f"{type(value).__name__}({', '.join(f'{name}={_text(kept_value)}' for name, kept_value in kept.items())})"
        )
    return repr(value)
