"""Whatever a user writes, a task is refused with a ConfigError or registered, and shown: nothing else is raised."""

from __future__ import annotations

import random
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from flytekit import Resources, task
from flytekit.core.pod_template import PodTemplate
from flytekit.extras import accelerators
from flytekit.tools.translator import get_serializable
from flytekitplugins import kfmpi, kfpytorch
from kubernetes.client import (
    V1Container,
    V1ContainerPort,
    V1EnvVar,
    V1EnvVarSource,
    V1ObjectFieldSelector,
    V1PodSpec,
    V1ResourceRequirements,
    V1Toleration,
    V1Volume,
    V1VolumeMount,
)

from flytekitplugins_safedist import (
    Hangs,
    Logs,
    Metrics,
    Preflight,
    Profile,
    SafeHorovod,
    SafeTorch,
    Scratch,
    Timeouts,
)
from flytekitplugins_safedist.errors import ConfigError
from flytekitplugins_safedist.tools.render import job_manifest, summary
from tests.fs.ranks import AT_LENGTH
from tests.harness.flyte import SETTINGS, pods
from tests.unit.config.plans import Hidden

NONSENSE: list[Any] = [
    *(None, True, 0, -1, 1, 3, 1.5, float("nan"), float("inf"), 10**30, 10**5000, "", "x", "2", "2:4", "\0", "\ud800"),
    *(
        [],
        {},
        (),
        (1,),
        {"a": 1},
        Path("/x"),
        timedelta(1),
        Hidden(),
        object,
        b"x",
        "1" * 5000,
        "64Gi",
        set(),
        range(0),
    ),
    *(range(5), range(10**12), len, "\u0663", "\U0001f600", Logs(), SafeTorch, kfpytorch.Worker(), PodTemplate()),
]


class Author:
    """Writes tasks, mostly plausible ones.

    Args:
        seed: of what is written.
        calm: the part of values that are no nonsense.
        plain: the part of choices that are the first one.
    """

    def __init__(self, seed: int, calm: float, plain: float) -> None:
        self.dice, self.calm, self.plain = random.Random(seed), calm, plain

    def any(self, *values: Any) -> Any:
        return values[0] if self.dice.random() < self.plain else self.dice.choice(values)

    def field(self, *values: Any) -> Any:
        return self.any(*values) if self.dice.random() < self.calm else self.any(*NONSENSE)

    def required(self, value: Any) -> Any:
        """None is refused by Kubernetes' client itself."""
        found = self.field(value)
        return value if found is None else found

    def resources(self) -> Any:
        return Resources(
            cpu=self.any(None, "2", 1.5, "x", ("1", "2")),
            mem=self.any(None, "4Gi", "1Gi", "lots"),
            gpu=self.any(None, None, "0", "2", "4", "x", 1),
            ephemeral_storage=self.any(None, "5Gi"),
        )

    def container(self, name: Any) -> V1Container:
        source = V1EnvVarSource(field_ref=V1ObjectFieldSelector(field_path="x"))
        return V1Container(
            name=name,
            image=self.any(None, "i:1"),
            command=self.field(None),
            resources=self.any(
                None,
                V1ResourceRequirements(limits={"nvidia.com/gpu": "2"}),
                V1ResourceRequirements(requests={"cpu": "1", "memory": "1Gi"}),
                {"limits": {"cpu": "1"}},
                V1ResourceRequirements(limits={"x/y": self.field("1", "lots")}),
            ),
            env=self.any(None, [V1EnvVar(name="A", value=self.field("1"))], [V1EnvVar(name="A", value_from=source)]),
            volume_mounts=self.any(
                None, *([V1VolumeMount(name="v", mount_path=self.required(at))] for at in ("/dev/shm", "/a", "/a/../b"))
            ),
            ports=self.field(
                None,
                [self.required(V1ContainerPort(container_port=self.required(23456)))],
                [V1ContainerPort(container_port=9100), V1ContainerPort(container_port=9100, protocol="UDP")],
            ),
        )

    def template(self) -> Any:
        names = self.any(["primary"], ["primary", "side"], ["side"], ["primary"] * 2, ["pytorch", "primary"], [])
        return PodTemplate(
            labels=self.field(None, {"kueue.x-k8s.io/queue-name": "q"}),
            pod_spec=self.field(
                V1PodSpec(
                    containers=self.required([self.container(self.required(name)) for name in names]),
                    init_containers=self.any(None, [self.container("init")]),
                    termination_grace_period_seconds=self.any(None, 30, 600, "x"),
                    tolerations=self.field(None, [self.field(V1Toleration(key="k", effect=self.field("NoExecute")))]),
                    host_network=self.field(None, True),
                    volumes=self.field(None, [self.field(V1Volume(name=self.required("v")))], [V1Volume(name="x")]),
                )
            ),
        )

    def role(self, kind: Any) -> Any:
        asks = {name: self.any(None, self.resources()) for name in ("requests", "limits")}
        policy = self.field(None, *kfpytorch.RestartPolicy)
        return self.any(None, None, kind(image=self.field(None, "a:1"), restart_policy=policy, **asks))

    def config(self) -> Any:
        some = self.field
        return self.any(SafeTorch, SafeHorovod)(
            nnodes=some(1, 2, 3, "2", "2:4"),
            nproc_per_node=some(None, None, 1, 2, 4),
            max_restarts=some(0, 2),
            max_replacements=some(10, 3, 0),
            start_method=some("preload", "spawn"),
            scratch=some(
                Scratch(),
                Scratch(size_limit=some("5Gi", 100), volume=some("disk", "memory", None), keep=some("always")),
                Scratch(claim=some(None, "c"), path=some(None, "/data"), shared_caches=some((), ("triton",))),
            ),
            timeouts=some(Timeouts(), Timeouts(code=some(1, 2.5), stop=some(3), preemption=some(30))),
            logs=some(Logs(), Logs(show=some(None, (0,), range(2)), tail_lines=some(3), prefix=some("{rank}"))),
            hangs=some(Hangs(), Hangs(action=some("fail"), floor=some(None, 10), ceiling=some(100))),
            metrics=some(Metrics(), Metrics(prometheus=some(9400, None), otlp=some(True))),
            preflight=some(None, Preflight(action=some("report"), slow=some(0.5), timeout=some(3))),
            profile=some(None, Profile(steps=some((1, 2)), ranks=some(None, (0,)))),
            master=self.role(kfpytorch.Master),
            worker=self.role(self.any(kfpytorch.Worker, kfpytorch.Worker, kfmpi.Worker)),
            run_policy=some(
                None,
                None,
                kfpytorch.RunPolicy(
                    backoff_limit=some(None, 3, 100), clean_pod_policy=some(None, *kfpytorch.CleanPodPolicy)
                ),
            ),
            queue=some(None, "q"),
        )

    def arguments(self) -> dict[str, Any]:
        some, kinds = self.field, (accelerators.A100, accelerators.A100.partition_1g_5gb, accelerators.V5E)
        return {
            "requests": some(None, self.resources()),
            "limits": some(None, None, self.resources()),
            "resources": some(None, None, None, self.resources()),
            "accelerator": some(None, None, None, *kinds),
            "pod_template": some(None, self.template()),
            "shared_memory": some(None, None, True, "2Gi", False),
            "environment": some(
                None, {"A": "1"}, {"SAFEDIST_ENDPOINT": "h:1"}, {"RANK": "1"}, {1: 2}, {"B": some("3")}
            ),
            "labels": some(None, {"a": "b"}, {"kueue.x-k8s.io/queue-name": "q"}),
        }


def body(x: int = 1) -> int:
    return x


def see(author: Author) -> bool:
    """Whether a task is accepted; then it is registered and shown as well."""
    config, arguments = author.config(), author.arguments()
    try:
        made = task(task_config=config, **arguments)(body)
    except ConfigError as error:
        return not str(error)
    template = get_serializable(OrderedDict(), SETTINGS, made).template.to_flyte_idl()
    return bool(pods(job_manifest(template)) and summary(made, template))


@pytest.mark.parametrize(("calm", "plain"), [(0.99, 0.0), (0.999, 0.7)])
def test_whatever_is_written_is_refused_or_registered_and_shown(calm: float, plain: float) -> None:
    count = 12_000 if AT_LENGTH else 150
    accepted = sum(see(Author(seed, calm, plain)) for seed in range(count))
    assert accepted > count / 100, "what is accepted is to be seen as well"
