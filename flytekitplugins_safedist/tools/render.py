"""A task's job as the cluster will see it, before it is registered: :func:`load_task`, :func:`template_of` what
registration sends, :func:`job_manifest` what Flyte's backend makes of that, :func:`summary` what it comes to.

The backend's part follows ``flyteplugins/go/tasks`` (``plugins/k8s/kfoperators``, ``plugins/k8s/pod``,
``pluginmachinery/flytek8s``) of Flyte v1.16.8 with its default configuration. Left out is what an execution adds to
every pod alike: its labels, variables and secrets, and paths in the place of ``{{.input}}``; and what the platform
adds: its PodTemplates, and its labels of the nodes that have an accelerator.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..compat.flytekit import project_root
from ..config.arguments import containers_of
from ..config.effective import GPU, PARTS, POD, Amount, Amounts, by_part, effective, gpus_of, of_container
from ..config.hints import hints
from ..config.validate import TRAINER
from ..errors import SafedistError

Manifest = dict[str, Any]

_DEFAULTS = {"cpu": "1", "memory": "1Gi"}
"""What a container gets that asks for nothing: ``task_resources`` of Flyte's own charts. It has no limits."""
_RESOURCES = {"CPU": "cpu", "MEMORY": "memory", "EPHEMERAL_STORAGE": "ephemeral-storage", "GPU": GPU}


# --- a task of a file -------------------------------------------------------------------------------------------------
def load_task(file: Path, name: str) -> Any:
    """Import *file* as registration does and return its task *name*.

    Raises:
        SafedistError: there is no such file or task, the file is not Python or ends when it is imported, or the task is
            not one of ours; ConfigError: the task's configuration cannot work.
    """
    from ..plugin.task import SafeTask

    if not file.is_file():
        raise SafedistError("there is no such file", where={"file": file})
    if file.suffix != ".py" or "." in file.stem:
        hint = "give the file that the task is written in, under a name that Python can import"
        raise SafedistError("this is not a module of Python", where={"file": file}, hint=hint)
    tasks = {key: value for key, value in vars(_module(file.resolve())).items() if issubclass(type(value), SafeTask)}
    if name not in tasks:
        what, where = "there is no such SafeHorovod or SafeTorch task", {"file": file, "task": name}
        hint = "@task(task_config=...) must be the outermost decorator, and the name at module level"
        raise SafedistError(what, where=where, seen=", ".join(sorted(tasks)) or "none in this file", hint=hint)
    return tasks[name]


def _module(path: Path) -> Any:
    root = Path(project_root(str(path)))
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    where = {"file": path, "as": name, "from": root}
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    options, sys.argv = sys.argv, [str(path)]  # a file that parses its command line is to see none of ours
    try:
        module = importlib.import_module(name)
    except SafedistError:
        raise
    except (Exception, SystemExit) as error:
        hint = "run this where the task's own imports work"
        text = "\n" + _as_python_shows(error, path)
        raise SafedistError("the file cannot be imported", where=where, seen=text, hint=hint) from error
    finally:
        sys.argv = options
    found = getattr(module, "__file__", None) or "a part of Python itself"
    if not Path(found).exists() or not path.samefile(found):
        raise SafedistError("another module has that name", where=where, seen=found, hint="rename the file")
    return module


def _as_python_shows(error: BaseException, file: Path) -> str:
    """The traceback that ``python FILE`` would end with: the frames before the file's own are importlib's and ours."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename != str(file):
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb)).rstrip()


def template_of(task: Any, *, images: Sequence[str] = (), fast: bool = True) -> Any:
    """The ``TaskTemplate`` that registration would send for *task*.

    Args:
        task: one of ours.
        images: as ``pyflyte --image`` takes them.
        fast: with fast registration; the archive's place is only known then, so flytectl's placeholders stand for it.

    An image that registration would build (``ImageSpec``) is named, not built.
    """
    from flytekit.configuration import FastSerializationSettings, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    try:
        named = ImageConfig.validate_image(None, "--image", tuple(images))
    except (AssertionError, ValueError) as error:
        where, form = {"--image": ", ".join(images)}, "[NAME=]REGISTRY/NAME:TAG"
        raise SafedistError("this is not an image", where=where, seen=error, expected=form) from error
    settings = SerializationSettings(
        image_config=with_image_names(task, named),
        project="flytesnacks",
        domain="development",
        version="unregistered",
        fast_serialization_settings=FastSerializationSettings(enabled=fast),
    )
    task.has_hinted = True  # the summary does
    try:
        return get_serializable(OrderedDict(), settings, task).template.to_flyte_idl()
    except AssertionError as error:
        hint = "name what it asks for; registration would say the same"
        raise SafedistError("flytekit cannot serialize it", where={"task": task.name}, seen=error, hint=hint) from error


def with_image_names(task: Any, config: Any) -> Any:
    """flytekit's image *config* with the names of the task's ``ImageSpec``: one that has its name there is not built
    (``get_registerable_container_image``)."""
    from flytekit.configuration import Image
    from flytekit.image_spec.image_spec import ImageSpec

    names = [
        Image.look_up_image_info(name=image.id, image_identifier=image.image_name())
        for image in [task.container_image, *(container.image for container in containers_of(task.pod_template))]
        if isinstance(image, ImageSpec)
    ]
    return replace(config, images=[*(config.images or ()), *names]) if names else config


# --- what Flyte's backend makes of it ---------------------------------------------------------------------------------
def job_manifest(template: Any, call: Mapping[str, Any] | None = None) -> Manifest:
    """The object that the backend creates.

    Args:
        template: the ``flyteidl.core.TaskTemplate`` that is registered.
        call: the resources of ``with_overrides``, as a workflow's node has them.
    """
    from google.protobuf.json_format import MessageToDict

    task = _whole(MessageToDict(template))
    metadata: Manifest = {"name": "f0123456789abcdef-n0-0", "namespace": "flytesnacks-development"}
    own = task["metadata"].get("metadata", {})  # of the task: on the job, and on no pod of it
    if task["type"] == "python-task":
        pod = _pod(task, {}, _amounts(call))
        metadata |= _labels(pod.get("metadata", {}), own)
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}
    custom = task["custom"]
    policy, elastic = custom["runPolicy"], custom.get("elasticConfig")
    roles = {name: custom.get(f"{name.lower()}Replicas") for name in ("Master", "Worker")}
    spec: Manifest = {
        "pytorchReplicaSpecs": {name: _replica(task, role, _amounts(call)) for name, role in roles.items() if role},
        "runPolicy": {**policy, "cleanPodPolicy": _word(policy.get("cleanPodPolicy", "None"))},
    }
    if elastic is not None:
        spec["elasticPolicy"] = {"maxRestarts": 0, "nProcPerNode": elastic.pop("nprocPerNode"), **elastic}
    metadata |= _labels(own)
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec}


def _replica(task: Manifest, role: Manifest, call: Amounts) -> Manifest:
    pod = _pod(task, _amounts(role.get("resources")), call)
    trainer = _primary(task, pod["spec"])
    trainer |= {"name": TRAINER, "image": role.get("image", trainer["image"])}
    policy = _word(role.get("restartPolicy", "Never"))
    return {"replicas": role["replicas"], "restartPolicy": policy, "template": pod}


def _amounts(resources: Mapping[str, Any] | None) -> Amounts:
    """Of a role or a call, as flyteidl has them."""
    return {
        (part, _RESOURCES[each["name"]]): Amount(part, each["value"])
        for part in PARTS
        for each in (resources or {}).get(part, ())
    }


def _word(policy: str) -> str:
    """``RESTART_POLICY_ON_FAILURE`` as ``OnFailure``."""
    return "".join(word.capitalize() for word in policy.split("_")[2:]) or policy


def _labels(*sources: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Labels and annotations of these, the last first."""
    union = {
        kind: {key: text for source in sources for key, text in source.get(kind, {}).items()}
        for kind in ("labels", "annotations")
    }
    return {kind: texts for kind, texts in union.items() if texts}


def _pod(task: Manifest, role: Amounts, call: Amounts) -> Manifest:
    """The pod of a role: its labels and annotations, where it has some, and ``spec``."""
    spec = _whole(task["k8sPod"]["podSpec"])
    primary = _primary(task, spec)
    for container in [primary, *spec.get("initContainers", ())]:
        _ask(container, role, call, _DEFAULTS)
    for sidecar in (container for container in spec["containers"] if container is not primary):
        _ask(sidecar, {}, {}, dict.fromkeys(_DEFAULTS, "0"))
    spec.setdefault("restartPolicy", "Never")
    memory = task.get("extendedResources", {}).get("sharedMemory")
    if memory is not None:
        size = {"sizeLimit": memory.get("sizeLimit") or "0"}
        volume = {"name": memory["mountName"], "emptyDir": {"medium": "Memory", **size}}
        mount = {"name": memory["mountName"], "mountPath": memory["mountPath"]}
        spec["volumes"] = [*spec.get("volumes", ()), volume]
        primary["volumeMounts"] = [*primary.get("volumeMounts", ()), mount]
    metadata = _labels(task["k8sPod"].get("metadata", {}))
    return {"metadata": metadata, "spec": spec} if metadata else {"spec": spec}


def _primary(task: Manifest, spec: Manifest) -> Manifest:
    name = task["config"]["primary_container_name"]
    return next(container for container in spec["containers"] if container["name"] == name)


def _ask(container: Manifest, role: Amounts, call: Amounts, least: Mapping[str, str]) -> None:
    """Have a container ask for what is effective of its own, its role's and a call's, and for *least* besides."""
    own = of_container(SimpleNamespace(name=container["name"], resources=container.get("resources")))
    amounts = {key: str(each.value) for key, each in effective({}, own, {POD: role}, call)[POD].items()}
    parts = {part: {**least, **texts} for part, texts in by_part(amounts).items()}
    container["resources"] = {**container.get("resources", {}), **parts}


def _whole(value: Any) -> Any:
    """A copy in which numbers are whole (protobuf's Struct holds doubles alone), without what is empty."""
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items() if each != []}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# --- what it comes to -------------------------------------------------------------------------------------------------
def summary(task: Any, template: Any) -> list[str]:
    """As YAML comments, to stand above the manifest.

    Args:
        task: one of ours.
        template: the ``TaskTemplate`` that it is registered as.
    """
    plan, image = task.plan, template.k8s_pod.pod_spec["containers"][0]["image"]
    pods = {role.name: role.replicas for role in plan.roles} or {"pod": 1}
    gpus = sum(pods[name] * gpus_of(amounts)[0] for name, amounts in plan.resources.items())
    ranks = dict.fromkeys(nodes * plan.nproc_per_node for nodes in (plan.min_nodes, plan.max_nodes))
    own = {role.name: dict(template.custom[f"{role.name}Replicas"]).get("image") or image for role in plan.roles}
    images = [f"{each} ({name})" for name, each in own.items()] if len(set(own.values())) > 1 else [image]
    roles = ", ".join(f"{role.replicas} {role.name}" for role in plan.roles)
    cluster = template.metadata.pod_template_name
    facts = {
        "task": task.name,
        "job": f"a PyTorchJob: {roles}" if roles else "a pod",
        "nodes": plan.nnodes,
        "ranks": f"{' to '.join(map(str, ranks))} ({plan.nproc_per_node} per node, {plan.backend})",
        "GPUs": f"{gpus} in total" if gpus else "none",
        "images": ", ".join(images),
        "restarts": f"{plan.config.max_restarts} of all ranks together in each attempt, "
        f"{template.metadata.retries.retries} retries of the attempt by Flyte",
        "platform": "Flyte's own defaults; what yours adds or bounds is not shown"
        + (f", nor its PodTemplate {cluster!r}, on which these pods lie" if cluster else ""),
    }
    width = max(map(len, facts))
    lines = [f"# {name:<{width}}  {text}" for name, text in facts.items()]
    return lines + [f"# WARNING {each}" for each in hints(plan, task.arguments, image, task.container_image)]
