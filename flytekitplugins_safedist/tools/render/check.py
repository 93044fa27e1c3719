"""Is the job one that the cluster accepts: against published CRD schemas, and against typed client models.

An API server *prunes* fields that a schema does not know, silently; here they are findings, like wrong types.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import RenderError

_SIMPLE: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}
_MODEL_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
_GENERIC = re.compile(
    r"(list|dict)[\[(](?:str, )?(.+)[\])]", re.IGNORECASE
)  # "list[X]", "Dict[str, X]", "dict(str, X)"


def check_schema(manifest: Mapping[str, Any], crds: Path) -> list[str]:
    """Findings of *manifest* against the CustomResourceDefinitions in the directory *crds*; an ordinary pod has none.

    Raises:
        RenderError: no definition for this kind and version is there.
    """
    if manifest["apiVersion"] == "v1":
        return []
    schema = _schema(str(manifest["kind"]), str(manifest["apiVersion"]), crds)
    return list(_against_schema(dict(manifest), schema, ""))


def check_models(manifest: Mapping[str, Any]) -> list[str]:
    """Findings of *manifest* against the typed models: of ``kubeflow-training`` for jobs, ``kubernetes`` for pods.

    Raises:
        RenderError: ``kubeflow-training`` is needed and not installed.
    """
    kind = str(manifest["kind"])
    name = "V1Pod" if kind == "Pod" else f"KubeflowOrgV1{kind}"
    return list(_against_model(dict(manifest), name, _models(kind), ""))


@functools.lru_cache(maxsize=8)
def _schema(kind: str, api_version: str, crds: Path) -> Mapping[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in sorted(crds.glob("*.y*ml")):
        text = path.read_text(encoding="utf-8")
        if f"kind: {kind}\n" not in text:
            continue
        for definition in yaml.load_all(text, Loader=loader):
            if definition["spec"]["names"]["kind"] != kind:
                continue
            for version in definition["spec"]["versions"]:
                if f"{definition['spec']['group']}/{version['name']}" == api_version:
                    found: Mapping[str, Any] = version["schema"]["openAPIV3Schema"]
                    return found
    raise RenderError(
        "no CustomResourceDefinition for this job was found",
        where={"directory": crds, "kind": kind, "apiVersion": api_version},
        hint="kubectl get crd pytorchjobs.kubeflow.org mpijobs.kubeflow.org -o yaml, one file each",
    )


def _against_schema(value: object, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield f"{path}: {value!r} is neither a number nor a string"
        elif isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
            yield f"{path}: {value!r} does not match {schema['pattern']}"
        return
    kind = schema.get("type")
    if kind is not None and not _is(value, _SIMPLE[kind]):
        yield f"{path}: {value!r} is not of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, (int, float)) and value < schema.get("minimum", value):
        yield f"{path}: {value} is below {schema['minimum']}"
    if isinstance(value, dict):
        yield from _object(value, schema, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _against_schema(item, schema.get("items", {}), f"{path}[{index}]")


def _object(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    further = schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: is required"
    # metadata of an object is checked by the API server itself; its schema is just "object".
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or (not properties and further is None)
    for name, item in value.items():
        if name in properties:
            yield from _against_schema(item, properties[name], f"{path}.{name}")
        elif isinstance(further, Mapping):
            yield from _against_schema(item, further, f"{path}.{name}")
        elif not is_open and further is not True:
            yield f"{path}.{name}: is not a field; the API server would drop it"


def _models(kind: str) -> Callable[[str], Any]:
    from kubernetes.client import models as core

    if kind == "Pod":
        return lambda name: getattr(core, name, None)
    try:
        from kubeflow.training import models as jobs
    except ImportError as error:
        raise RenderError(
            "the typed models of jobs are not installed",
            where={"package": "kubeflow-training"},
            seen=error,
            hint="pip install 'flytekitplugins-safedist[check]'",
        ) from error
    return lambda name: getattr(jobs, name, None) or getattr(core, name, None)


def _against_model(value: object, type_name: str, find: Callable[[str], Any], path: str) -> Iterator[str]:
    generic = _GENERIC.fullmatch(type_name)
    if generic is not None:
        yield from _against_generic(value, generic[1].lower(), generic[2], find, path)
        return
    if type_name in _MODEL_TYPES:
        if not _is(value, _MODEL_TYPES[type_name]):
            yield f"{path}: {value!r} is not of type {type_name}"
        return
    model = find(type_name)
    if model is None:
        return  # "object", "datetime": anything that YAML can say
    if not isinstance(value, dict):
        yield f"{path}: {value!r} is not a {type_name}"
        return
    attributes = {json: name for name, json in model.attribute_map.items()}
    for name, item in value.items():
        if name not in attributes:
            yield f"{path}.{name}: is not a field of {type_name}"
        else:
            yield from _against_model(item, model.openapi_types[attributes[name]], find, f"{path}.{name}")


def _against_generic(value: object, shape: str, inner: str, find: Callable[[str], Any], path: str) -> Iterator[str]:
    if shape == "list" and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _against_model(item, inner, find, f"{path}[{index}]")
    elif shape == "dict" and isinstance(value, dict):
        for name, item in value.items():
            yield from _against_model(item, inner, find, f"{path}.{name}")
    else:
        yield f"{path}: {value!r} is not a {shape} of {inner}"


def _is(value: object, types: tuple[type, ...]) -> bool:
    # In Python a bool is an int; in YAML it is not.
    return isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
