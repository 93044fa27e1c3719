"""The recorded cases: what was asked of the real backend and operator, and what they made of it."""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import yaml
from flyteidl.core import tasks_pb2
from google.protobuf.json_format import ParseDict

HERE = Path(__file__).parent
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
NAMES = sorted(path.stem for path in (HERE / "cases").glob("*.yaml"))
"""Every file in the folder is a case."""


@functools.cache
def case(name: str) -> dict[str, Any]:
    """A recorded case, by its file's name."""
    found: dict[str, Any] = yaml.load((HERE / "cases" / f"{name}.yaml").read_text(encoding="utf-8"), Loader=_LOADER)
    return found


def recorded_template(one: dict[str, Any]) -> Any:
    """The ``TaskTemplate`` that the backend was given."""
    return ParseDict(one["template"], tasks_pb2.TaskTemplate())


def module_of(one: dict[str, Any]) -> types.ModuleType:
    """The module that defines the case's task, imported from a file as registration does."""
    name = one["template"]["id"]["name"].rpartition(".")[0]
    source = (HERE / "preamble.py").read_text(encoding="utf-8") + "\n\n" + one["task"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.py")
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
