"""What a task is made of, moved from the agent to its ranks and back: the function, its inputs, its outputs, decks.

Inputs and outputs are Flyte literals (protobuf): types are flytekit's business, in both directions, and each rank
converts for itself. The function travels as a module and a name wherever it can be imported; only what cannot
(``__main__``, nested functions, lambdas) is pickled by value, with cloudpickle.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compat import flytekit as flytekit_inside
from ..errors import PayloadError
from ..flyte.output_limits import OutputLimits, refusal, refused
from ..flyte.task_context import FlyteSnapshot
from . import main_module, returned_paths
from .main_module import MainModule
from .records import Record

if TYPE_CHECKING:
    from flytekit import FlyteContext
    from flytekit.core.python_function_task import PythonFunctionTask
    from flytekit.models.literals import Literal, LiteralMap

MAX_RESULT_BYTES = 1 << 30
"""Outputs larger than this (one GiB of literals, files not counted) are refused; protobuf itself ends at 2 GiB."""


@dataclass(frozen=True)
class JobOrder(Record):
    """What all ranks of a job share.

    Attributes:
        module, name: where the task object is imported from, or both None.
        pickled: the task object by value, base64, where it cannot be imported.
        sys_path: the agent's module search path.
        argv: the agent's command line, for code that reads ``sys.argv``.
        inputs: file with the serialized ``LiteralMap``.
        flyte: the Flyte context.
        upload_timeout: seconds that an upload may take.
        limits: of what Flyte takes as outputs; None in a local run, where nothing limits them.
        main: where the agent's ``__main__`` came from, when the task is at home there; else None.
    """

    module: str | None
    name: str | None
    pickled: str | None
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    inputs: Path
    flyte: FlyteSnapshot
    upload_timeout: float
    limits: OutputLimits | None = None
    main: MainModule | None = None


def reference(task: PythonFunctionTask[Any], modules: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """How ranks get the task object: ``(module, name, pickled)``.

    Args:
        task: the task.
        modules: ``sys.modules``: importing ``module`` must give this very object back under ``name``.

    Raises:
        PayloadError: it can neither be imported nor pickled.
    """
    function = task.task_function
    module = function.__module__
    if module and module != "__main__" and module in modules:
        own = function.__name__ if hasattr(function, "__name__") else ""
        for name in dict.fromkeys((own, str(task.name).rsplit(".", 1)[-1])):
            if name and getattr(modules[module], name, None) is task:
                return module, name, None
    import cloudpickle

    try:
        return None, None, base64.b64encode(cloudpickle.dumps(task)).decode()
    except Exception as error:
        raise PayloadError(
            "the task function can neither be imported by its ranks nor pickled for them",
            where={"task": task.name, "module": module},
            seen=f"{type(error).__name__}: {error}",
            expected="a function at module level, in a module that ranks can import",
            hint="move the task (or what its closure holds: locks, sockets, open files) to module level",
        ) from error


def search_path(module: str | None, modules: Mapping[str, Any], path: Sequence[str]) -> tuple[str, ...]:
    """The module search path under which ranks find ``module`` as the agent did.

    ``pyflyte run`` imports the user's file with its project on the path and takes it off again, so the directory that
    the module came from is put in front where it is missing.
    """
    file = _file_of(modules.get(module or ""))
    if module is None or file is None:
        return tuple(path)
    depth = module.count(".") + (1 if Path(file).stem == "__init__" else 0)
    root = str(Path(file).resolve().parents[depth])
    return tuple(path) if root in map(os.path.realpath, path) else (root, *path)


def _file_of(module: Any) -> str | None:
    file: str | None = module.__file__ if hasattr(module, "__file__") else None
    return file


def load_task(order: JobOrder) -> PythonFunctionTask[Any]:
    """The task object, in a rank; errors of importing the user's module are the user's and come through as they are."""
    if order.pickled is not None:
        import cloudpickle

        task: PythonFunctionTask[Any] = cloudpickle.loads(base64.b64decode(order.pickled))
        if order.main is not None:
            main_module.stand_in(order.main, task.task_function)
        return task
    module = importlib.import_module(str(order.module))
    try:
        found: PythonFunctionTask[Any] = getattr(module, str(order.name))
    except AttributeError as error:
        raise PayloadError(
            "the task is not in its module when a rank imports it",
            where={"module": order.module, "task": order.name, "file": _file_of(module)},
            expected="the same code in the agent and in its ranks",
            hint="do not define the task under a condition that differs between processes",
        ) from error
    return found


def write_literals(literals: LiteralMap, path: Path) -> None:
    """Write a literal map as protobuf bytes."""
    data = literals.to_flyte_idl().SerializeToString()
    if len(data) > MAX_RESULT_BYTES:
        largest = {name: value.to_flyte_idl().ByteSize() for name, value in literals.literals.items()}
        raise PayloadError(
            "the values are too large to be literals",
            where={"bytes by name": largest},
            seen=f"{len(data)} bytes",
            expected=f"at most {MAX_RESULT_BYTES} bytes",
            hint="return large data as FlyteFile, FlyteDirectory or a data frame",
        )
    path.write_bytes(data)


def read_literals(path: Path) -> LiteralMap:
    """Read what :func:`write_literals` wrote."""
    from flyteidl.core import literals_pb2
    from flytekit.models.literals import LiteralMap

    message = literals_pb2.LiteralMap()
    message.ParseFromString(path.read_bytes())
    return mended(LiteralMap.from_flyte_idl(message))


def mended(literals: LiteralMap) -> LiteralMap:
    """The same literals, which flytekit can write again.

    An error that it reads from a protobuf (``err`` of a workflow's ``on_failure`` handler, as a pod gets it) stays a
    protobuf (1.16, ``Scalar.from_flyte_idl``), which its own ``to_flyte_idl`` and ``str`` then fail at.
    """
    from flytekit.models.literals import LiteralMap

    return LiteralMap({name: _mended(literal) for name, literal in literals.literals.items()})


def _mended(literal: Literal) -> Literal:
    from flytekit.models.literals import Literal, LiteralCollection, Scalar, Union
    from flytekit.models.types import Error

    scalar, collection = literal.scalar, literal.collection
    if collection is not None:
        collection = LiteralCollection([_mended(each) for each in collection.literals])
    if scalar is not None and scalar.union is not None:
        scalar = Scalar(union=Union(_mended(scalar.union.value), scalar.union.stored_type))
    elif scalar is not None and scalar.error is not None:
        scalar = Scalar(error=Error(failed_node_id=scalar.error.failed_node_id, message=scalar.error.message))
    return Literal(
        scalar=scalar,
        collection=collection,
        map=mended(literal.map) if literal.map is not None else None,
        hash=literal.hash,
        metadata=literal.metadata,
        offloaded_metadata=literal.offloaded_metadata,
    )


def native_inputs(order: JobOrder, task: PythonFunctionTask[Any], ctx: FlyteContext) -> dict[str, Any]:
    """The task's inputs as Python values of their declared types."""
    from flytekit.core.type_engine import TypeEngine

    values: dict[str, Any] = TypeEngine.literal_map_to_kwargs(
        ctx, read_literals(order.inputs), task.python_interface.inputs
    )
    return values


def write_outputs(
    task: PythonFunctionTask[Any],
    inputs: dict[str, Any],
    returned: Any,
    path: Path,
    limits: OutputLimits | None = None,
) -> None:
    """Turn rank 0's return value into literals (uploading files), and render its decks; leave both for the agent.

    Raises:
        OutputTooLargeError: Flyte would refuse them; they are kept under the raw output prefix.
        PayloadError: a file is not there.
    """
    from flytekit import FlyteContextManager
    from flytekit.core.context_manager import ExecutionState

    ctx = FlyteContextManager.current_context()
    # As in a pod, also when run locally: flytekit then copies files to the raw output prefix instead of pointing into
    # this rank's scratch, which is about to go, and does not write the decks' page, which the agent does.
    state = ctx.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(ctx.with_execution_state(state)) as upload_ctx:
        try:
            literals, native = flytekit_inside.to_literals(task, returned, upload_ctx)
        except Exception as error:
            missing = returned_paths.problem(returned, str(error))
            if missing is None:
                raise
            raise missing from None  # all that flytekit says is that the path is not there
        if limits is not None:
            _refuse_what_flyte_would(literals, limits, upload_ctx, path)
        flytekit_inside.write_decks(task, inputs, native, upload_ctx)
    leave_decks(ctx, path)
    write_literals(literals, path)


def _refuse_what_flyte_would(literals: LiteralMap, limits: OutputLimits, ctx: FlyteContext, path: Path) -> None:
    sizes = {name: value.to_flyte_idl().ByteSize() for name, value in literals.literals.items()}
    large = refused(sizes, limits)
    if not large:
        return
    file, target = path.with_suffix(".refused"), None
    try:
        write_literals(literals, file)
        access = ctx.file_access
        target = access.put_data(str(file), access.join(access.raw_output_prefix, "refused-outputs", "outputs.pb"))
        kept = f"all values are kept at {target}, in the format of Flyte's own outputs.pb (docs/outputs.md)"
    except Exception as error:
        kept = f"the values could not be kept either: {type(error).__name__}: {error}"
    raise refusal(large, limits, kept=kept)


def leave_decks(ctx: FlyteContext, path: Path) -> None:
    """Leave what this rank's decks say, of a result that is at *path* or never will be, for the agent; whole or not."""
    from flytekit.deck.deck import TimeLineDeck

    decks = ctx.user_space_params.decks
    told = [{"name": deck.name, "html": deck.html} for deck in decks if not isinstance(deck, TimeLineDeck)]
    making = decks_path(path).with_suffix(".making")
    making.write_text(json.dumps(told))
    making.rename(decks_path(path))


@contextlib.contextmanager
def decks_left(ctx: FlyteContext, path: Path) -> Iterator[None]:
    """Inside, whatever is raised: a failed task keeps its decks, as a plain one does."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # a full disk, an html that is no text: what failed first is the cause
            leave_decks(ctx, path)
        raise


def decks_path(result: Path) -> Path:
    """Where the decks of a result lie."""
    return result.with_suffix(".decks.json")


def read_decks(result: Path) -> list[dict[str, str]]:
    """Name and HTML of each deck of the rank whose result that is, or would be; none where it left none."""
    try:
        decks: list[dict[str, str]] = json.loads(decks_path(result).read_text())
    except FileNotFoundError:
        return []
    return decks
