"""A task of a file, and what registration would send for it."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...compat.flytekit import project_root
from ...errors import RenderError, SafedistError


def load_task(file: Path, name: str) -> Any:
    """Import *file* as registration does and return its task *name*.

    Raises:
        RenderError: there is no such file or task, the file is not Python or raises when it is imported, or the task
            is not one of ours.
        ConfigError: the task's configuration cannot work.
    """
    if not file.is_file():
        raise RenderError("there is no such file", where={"file": file})
    if file.suffix != ".py":
        raise RenderError(
            "this is not a Python file",
            where={"file": file},
            hint="give the file that the task is written in; what pyflyte packages or registers is made of it alike",
        )
    path = file.resolve()
    root = Path(project_root(str(path)))
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module_name = ".".join(path.relative_to(root).with_suffix("").parts)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RenderError(
            "the file cannot be imported",
            where={"file": file, "as": module_name, "from": root},
            seen=error,
            hint="run this where the task's own imports work",
        ) from error
    except SafedistError:
        raise
    except Exception as error:
        raise RenderError(
            "the file cannot be imported",
            where={"file": file, "as": module_name, "from": root},
            seen="\n" + _as_python_shows(error, path),
        ) from error
    tasks = {key: value for key, value in vars(module).items() if hasattr(value, "plan")}
    if name not in tasks:
        raise RenderError(
            "there is no such SafeHorovod or SafeTorch task",
            where={"file": file, "task": name},
            seen=", ".join(sorted(tasks)) or "none in this file",
        )
    return tasks[name]


def _as_python_shows(error: Exception, file: Path) -> str:
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
        raise RenderError(
            "this is not an image",
            where={"--image": ", ".join(images)},
            seen=error,
            expected="[NAME=]REGISTRY/NAME:TAG",
        ) from error
    settings = SerializationSettings(
        image_config=with_image_names(task, named),
        project="flytesnacks",
        domain="development",
        version="unregistered",
        fast_serialization_settings=FastSerializationSettings(enabled=fast),
    )
    return get_serializable(OrderedDict(), settings, task).template.to_flyte_idl()


def with_image_names(task: Any, config: Any) -> Any:
    """flytekit's image *config* with the names of the task's ``ImageSpec``: one that has its name there is not built
    (``get_registerable_container_image``)."""
    from dataclasses import replace

    from flytekit.configuration import Image
    from flytekit.image_spec.image_spec import ImageSpec

    spec = getattr(task.pod_template, "pod_spec", None)
    containers = [*(getattr(spec, "containers", None) or ()), *(getattr(spec, "init_containers", None) or ())]
    images = [task.container_image, *(container.image for container in containers)]
    found = [
        Image.look_up_image_info(name=image.id, image_identifier=image.image_name())
        for image in images
        if isinstance(image, ImageSpec)
    ]
    return replace(config, images=[*(config.images or ()), *found]) if found else config
