"""flytekit's private names, looked up here and nowhere else. Imports flytekit only inside its functions."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from string import Template
from types import SimpleNamespace
from typing import Any

from . import gone, lookup

FAST_EXECUTE = "pyflyte-fast-execute"


def knows_labels() -> bool:
    """Whether ``@task`` takes labels: 1.16.0, the oldest that is supported, does not."""
    from flytekit.core.base_task import TaskMetadata

    return "labels" in TaskMetadata.__dataclass_fields__


def sends_pod_templates_of_mapped_tasks() -> bool:
    """Whether a call's pod template reaches the cluster where a task is mapped: flytekit before 1.16.22 leaves it out
    without a word (flyte#7076)."""
    from flytekit.tools import translator

    return "_pod_template" in translator.get_serializable_array_node_map_task.__code__.co_names


def draw_names_anew() -> None:
    """In a process that was forked: let flytekit name what it uploads otherwise than this process's brothers do.

    Its generator is none that Python seeds anew in a child: all ranks of a node, and their agent, would upload to the
    same "random" addresses, one over the other.
    """
    names = sys.modules.get("flytekit.interfaces.random")
    if names is not None:
        lookup(names, "random", of="flytekit").seed()


def no_warning_is_an_error() -> None:
    """From here on, what a user's filters (``PYTHONWARNINGS=error``, ``warnings.simplefilter("error")``) make an error
    of is shown as a warning: flytekit reads its own deprecated names after the work is done, and would discard it.
    Their other filters stay as they are."""
    filters: Any = warnings.filters
    filters[:] = [("default", *what) if action == "error" else (action, *what) for action, *what in filters]


# --- a task and its conversion ----------------------------------------------------------------------------------------
_INPUT_HOOK = "_literal_map_to_python_input"
_TASK_HOOKS = (_INPUT_HOOK, "_output_to_literal_map", "_write_decks", "_get_container")


def require_hooks(task_class: type[Any]) -> None:
    """Look whether flytekit's task class has what ours overrides or calls: an override of nothing would pass unseen.

    Raises:
        IncompatibleVersionError: one of them is gone.
    """
    for name in _TASK_HOOKS:
        lookup(task_class, name, of="flytekit")


@contextlib.contextmanager
def one_order_of_keys(mended: Callable[[Any], Any]) -> Iterator[None]:
    """While literals are converted to values: the keys of what flytekit reads anew come in one order, too. That is what
    Flyte has put into the store because it was large, and a protobuf Struct (a dict or dataclass from the console).

    Args:
        mended: the same literal, with its keys in order.
    """
    from flytekit.core.type_engine import TypeEngine
    from google.protobuf import json_format

    unwrap, to_json = lookup(TypeEngine, "unwrap_offloaded_literal", of="flytekit"), json_format.MessageToJson

    async def unwrapped(ctx: Any, literal: Any) -> Any:
        return mended(await unwrap(ctx, literal))

    TypeEngine.unwrap_offloaded_literal = unwrapped
    json_format.MessageToJson = functools.partial(to_json, sort_keys=True)
    try:
        yield
    finally:
        TypeEngine.unwrap_offloaded_literal, json_format.MessageToJson = unwrap, to_json


def to_literals(task: Any, returned: Any, ctx: Any) -> tuple[Any, Any]:
    """A task's return value as a ``LiteralMap``, files uploaded; and the values by output name."""
    from flytekit.utils.asyn import run_sync

    literals, native = run_sync(lookup(task, "_output_to_literal_map", of="flytekit"), returned, ctx)
    return literals, native


def inputs_of_element(mapped: Any, literals: Any, ctx: Any) -> dict[str, Any]:
    """The inputs of a mapped task as Python values: those of the element that Flyte's variables name."""
    values: dict[str, Any] = lookup(mapped, _INPUT_HOOK, of="flytekit")(literals, ctx)
    return values


def write_decks(task: Any, inputs: Any, outputs: Any, ctx: Any) -> None:
    """Render a task's decks of inputs and outputs."""
    lookup(task, "_write_decks", of="flytekit")(inputs, outputs, ctx, ctx.user_space_params)


def deck_page(decks: Mapping[str, str]) -> str:
    """The page of all decks, as flytekit makes it, of their names and HTML."""
    from flytekit.deck import deck

    all_ = SimpleNamespace(decks=[SimpleNamespace(name=name, html=html) for name, html in decks.items()])
    return str(lookup(deck, "_get_deck", of="flytekit")(all_, ignore_jupyter=True))


def output_deck(name: str, parameters: Any) -> None:
    """Write the page of all decks, as flytekit does at the end of a task."""
    from flytekit.deck import deck

    lookup(deck, "_output_deck", of="flytekit")(name, parameters)


def publish_decks_by(leave: Callable[[Any], object]) -> None:
    """Have ``Deck.publish()`` of this process, which is a rank, upload nothing: the job's page has one writer.

    Args:
        leave: is called instead, with flytekit's ``ExecutionParameters``.
    """
    from flytekit.deck import deck

    lookup(deck, "_output_deck", of="flytekit")
    deck._output_deck = lambda **told: leave(told["new_user_params"])


# --- the context of a running task ------------------------------------------------------------------------------------
def checkpoint_places(parameters: Any) -> tuple[str | None, str | None]:
    """Destination and source of the running task's checkpoint; None where it has none.

    Args:
        parameters: flytekit's ``ExecutionParameters``, whose public ``checkpoint`` raises where there is none.
    """
    checkpoint = lookup(parameters, "_checkpoint", of="flytekit")
    if checkpoint is None:
        return None, None
    destination = lookup(checkpoint, "_checkpoint_dest", of="flytekit")
    return destination, lookup(checkpoint, "_checkpoint_src", of="flytekit")


def resuming_checkpoint(destination: str, source: str | None, exists: Callable[[str], bool]) -> Any:
    """flytekit's checkpoint for ranks that were started again within an attempt.

    What the attempt itself has saved comes before what the attempt before it saved: that alone is what flytekit reads.

    Args:
        destination: where this attempt saves.
        source: what the attempt before it saved; None where there was none.
        exists: whether there is anything at a place. Asked once, before anything is read or saved.
    """
    from flytekit.core.checkpointer import SyncCheckpoint

    class ResumingCheckpoint(SyncCheckpoint):  # type: ignore[misc]  # flytekit is untyped to mypy here
        """Looks where the rounds before this one have saved."""

        @functools.cached_property
        def _checkpoint_src(self) -> str | None:
            return destination if exists(destination) else source

        def save(self, cp: Any) -> Any:
            _ = self._checkpoint_src  # asked before there is what this round saves
            return super().save(cp)

    checkpoint = ResumingCheckpoint(checkpoint_dest=destination, checkpoint_src=source)
    if "_checkpoint_src" not in vars(checkpoint):
        raise gone("SyncCheckpoint._checkpoint_src", of="flytekit")
    del checkpoint._checkpoint_src  # for what the property gives
    return checkpoint


def execution_metadata(access: Any) -> dict[str, str]:
    """What flytekit hands to object stores about the execution."""
    return dict(lookup(access, "_execution_metadata", of="flytekit") or {})


# --- flytekit's own programs ------------------------------------------------------------------------------------------
def project_root(file: str) -> str:
    """The directory under which ``pyflyte run`` and ``register`` would import a file."""
    from flytekit.tools import script_mode

    return str(lookup(script_mode, "_find_project_root", of="flytekit")(file))


def file_access(
    around: Callable[[Any, str, str, Callable[[str, Any], Awaitable[Any]]], Awaitable[Any]],
    around_download: Callable[..., Awaitable[Any]],
) -> type[Any]:
    """flytekit's ``FileAccessProvider``, with something around each upload, of outputs and of files, and each download:
    all go through its ``_put`` and ``get``. What types do by clients of their own (pandas, say) does not.

    Args:
        around: called with the provider, the path that is uploaded, the address it goes to, and what does it, given
            the path and what fsspec is to call meanwhile.
        around_download: called with the address, the path it goes to, what downloads it there, given the path and what
            fsspec is to call meanwhile, and, as ``is_directory``, what it is.

    Raises:
        IncompatibleVersionError: uploads go another way.
    """
    from flytekit.core.data_persistence import FileAccessProvider

    lookup(FileAccessProvider, "_put", of="flytekit")

    class WatchedFileAccess(FileAccessProvider):  # type: ignore[misc]  # flytekit is untyped to mypy here
        async def _put(self, from_path: str, to_path: str, recursive: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
            async def once(path: str, callback: Any) -> Any:
                told = {"callback": callback, **kwargs}
                return await super(WatchedFileAccess, self)._put(path, to_path, recursive=recursive, **told)

            return await around(self, from_path, to_path, once)

        async def get(self, from_path: str, to_path: str, recursive: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
            async def once(path: str, callback: Any) -> Any:
                told = {"callback": callback, **kwargs}
                return await super(WatchedFileAccess, self).get(from_path, path, recursive=recursive, **told)

            return await around_download(from_path, to_path, once, is_directory=recursive)

    return WatchedFileAccess


def worker_name() -> str:
    """What the backend calls this pod where it aggregates errors; "" elsewhere."""
    from flytekit.bin import entrypoint

    return str(lookup(entrypoint, "_get_worker_name", of="flytekit")())


def adapt_entrypoint(
    *,
    access: type[Any],
    traceback: Callable[[Callable[[Exception], str]], Callable[[Exception], str]],
    dispatch: Callable[[Callable[..., None]], Callable[..., None]],
) -> None:
    """Change what ``pyflyte-execute`` does in this process.

    Args:
        access: its way to the store.
        traceback: makes its text for an exception from flytekit's own.
        dispatch: makes what runs the task from flytekit's own.

    Raises:
        IncompatibleVersionError: one of the names is gone, and to set it would change nothing.
    """
    from flytekit.bin import entrypoint
    from flytekit.core.constants import ERROR_FILE_NAME
    from flytekit.deck import deck

    lookup(entrypoint, "FileAccessProvider", of="flytekit")
    lookup(entrypoint, "_build_error_file_name", of="flytekit")
    entrypoint.FileAccessProvider = access
    # Where errors are aggregated, flytekit gives each pod's error a name that nobody can look for. A job has one error,
    # and Flyte takes the usual name in both cases (flyteplugins v1.16, EarliestFileErrorRetriever: error*.pb).
    entrypoint._build_error_file_name = lambda: ERROR_FILE_NAME
    entrypoint.get_traceback_str = traceback(lookup(entrypoint, "get_traceback_str", of="flytekit"))
    entrypoint._dispatch_execute = dispatch(lookup(entrypoint, "_dispatch_execute", of="flytekit"))
    _forget_loops_that_do_not_run()
    # A deck is opened where nothing may be fetched from elsewhere, and flytekit's page links to a font.
    page = lookup(deck, "get_deck_template", of="flytekit")
    deck.get_deck_template = lambda: Template(re.sub(r"<link [^>]*>", "", page().template))


def _forget_loops_that_do_not_run() -> None:
    """flytekit keeps a loop whose thread could not be started, and its next call waits for that without end."""
    from flytekit.utils import asyn

    runner = lookup(asyn, "_TaskRunner", of="flytekit")
    run = runner.run

    def run_or_forget(self: Any, coroutine: Any) -> Any:
        try:
            return run(self, coroutine)
        except RuntimeError:
            loop = lookup(self, "_TaskRunner__loop", of="flytekit")
            if loop is not None and not loop.is_running():
                self._TaskRunner__loop = None
                loop.close()
                coroutine.close()
            raise

    runner.run = run_or_forget
