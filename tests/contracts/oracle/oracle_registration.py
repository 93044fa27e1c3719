"""What registration sends for a case's task today: its template, and the node of a workflow that calls it."""

from __future__ import annotations

from collections import OrderedDict
from types import ModuleType
from typing import Any

from flytekit import map_task, workflow
from flytekit.configuration import FastSerializationSettings, Image, ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable
from google.protobuf.json_format import MessageToDict
from oracle_cases import module_of

from tests.harness.product import with_image_names

_FAST = {
    "baked": None,
    "fast": FastSerializationSettings(
        enabled=True, destination_dir="/root", distribution_location="s3://bucket/fast1234.tar.gz"
    ),
    "packaged": FastSerializationSettings(enabled=True),
}
_IMAGES = ImageConfig(
    default_image=Image(name="default", fqn="registry.example/train", tag="1"),
    images=[
        Image(name="default", fqn="registry.example/train", tag="1"),
        Image(name="alt", fqn="registry.example/alt", tag="1"),
    ],
)


def registered(one: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The ``TaskTemplate`` and the node, as JSON, of a workflow of one call with the case's overrides."""
    module = module_of(one)
    settings = SerializationSettings(
        image_config=with_image_names(module.train, _IMAGES),  # nothing is built here
        project="flytesnacks",
        domain="development",
        version="v1",
        fast_serialization_settings=_FAST[one["registration"]],
    )
    entity = map_task(module.train) if one.get("map_task") else module.train
    known: Any = OrderedDict()
    called = get_serializable(known, settings, _calling(entity, one.get("overrides"), module))
    node = MessageToDict(called.template.nodes[0].to_flyte_idl())
    template = next(spec.template for spec in known.values() if getattr(spec, "template", None) and is_task(spec))
    return template.to_flyte_idl(), node


def is_task(spec: Any) -> bool:
    """Whether a serialized entity is a task's."""
    return type(spec).__name__ == "TaskSpec"


def _calling(entity: Any, overrides: str | None, module: ModuleType) -> Any:
    def call(x: Any) -> Any:
        called = entity(x=x)
        if overrides:
            called.with_overrides(**eval(f"dict({overrides})", module.__dict__))
        return called

    inputs = entity.python_interface.inputs
    call.__annotations__ = {**inputs, "return": next(iter(entity.python_interface.outputs.values()))}
    call.__module__ = module.__name__
    return workflow(call)
