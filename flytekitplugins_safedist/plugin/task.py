"""The flytekit task classes; importing this module registers them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from flytekit import FlyteContext, FlyteContextManager
from flytekit.core.base_task import IgnoreOutputs
from flytekit.core.context_manager import ExecutionState
from flytekit.core.node import Node
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.type_engine import TypeEngine
from flytekit.deck import Deck
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import TaskPlugins
from flytekit.models.literals import Literal, LiteralMap

from .. import lastwords
from ..agent import run
from ..agent.ending import Undecided
from ..agent.prepare import TaskCall
from ..agent.verdict import Verdict
from ..compat import flytekit as flytekit_inside
from ..config.options import SafeDistributed, SafeHorovod, SafeTorch
from ..errors import ConfigError, Problem, RankFailedError, SafedistError, TopologyError
from ..failures import Payer
from ..rank import literals, task
from ..record import run_page
from . import overrides
from .jobspec import registered_as
from .serialization import SerializesToKubeflow, plan_task
from .users_error import as_users

logger = logging.getLogger(__name__)

__all__ = ["RecoverableRankFailedError", "SafeHorovod", "SafeTask", "SafeTorch"]


class RecoverableRankFailedError(RankFailedError, FlyteRecoverableException):  # type: ignore[misc]
    """A rank failed for what the task's ``retries`` pay for: ``FlyteRecoverableException``, memory, a hang."""

    timestamp: float | None = None
    """When it happened, in seconds: where flytekit aggregates errors, the earliest is the root cause."""


_OURS = f"{__name__.partition('.')[0]}."

flytekit_inside.require_hooks(PythonFunctionTask)
Node.with_overrides = overrides.guarded(Node.with_overrides)


@dataclass(frozen=True, repr=False)
class RankInput:
    """An input that ranks convert themselves: a FlyteFile converted here would have every rank download to one path."""

    literal: Literal

    def __repr__(self) -> str:
        """What flytekit's log line of a task's inputs shows."""
        return "converted by each rank"


class SafeTask(SerializesToKubeflow):
    """A task whose function runs on every rank. Made by ``@task(task_config=SafeHorovod(...))`` or ``SafeTorch``."""

    def __init__(self, task_config: SafeDistributed, task_function: Callable[..., Any], **kwargs: Any) -> None:
        """
        Raises:
            ConfigError: everything that is wrong with the configuration, at once.
        """
        # Before flytekit's constructor: it wants the task type and the pod template, and it makes the task known to
        # registration, which a task that cannot work must never be.
        self.plan = plan_task(task_config, task_function, kwargs)
        super().__init__(task_config=task_config, task_function=task_function, **kwargs | registered_as(self.plan))

    def _literal_map_to_python_input(self, literal_map: LiteralMap, ctx: FlyteContext) -> dict[str, Any]:
        if "execute" in vars(self):
            # A user's test has put a mock in its place (flytekit.testing): it gets what the function would get.
            values: dict[str, Any] = super()._literal_map_to_python_input(literal_map, ctx)
            return values
        return {name: RankInput(literal) for name, literal in literals.mended(literal_map).literals.items()}

    def execute(self, **kwargs: Any) -> Any:
        """Run the function on every rank; rank 0's outputs are the task's.

        Args:
            kwargs: inputs as flytekit's dispatch hands them over (:class:`RankInput`), or as Python values (a map task
                in a local run).

        Returns:
            The outputs as they came: as a ``LiteralMap``, or as Python values.
        """
        task.is_called()
        ctx = FlyteContextManager.current_context()
        state = ctx.execution_state
        if state is not None and state.mode == ExecutionState.Mode.TASK_EXECUTION:
            raise TopologyError(
                "this task is run by another command than its own",
                where={"task": self.name},
                expected="safedist-execute, as registration writes it",
                hint="leave the command of the pod's primary container to registration",
            )
        with warnings.catch_warnings():
            flytekit_inside.no_warning_is_an_error()
            if not all(isinstance(value, RankInput) for value in kwargs.values()):
                inputs = TypeEngine.dict_to_literal_map(ctx, kwargs, self.python_interface.inputs)
                return self._to_native(ctx, self._run(ctx, inputs))
            return self._run(ctx, LiteralMap({name: value.literal for name, value in kwargs.items()}))

    def _run(self, ctx: FlyteContext, inputs: LiteralMap) -> Any:
        source = task.source_of(self, sys.modules)
        path = task.search_path(self.task_function.__module__, sys.modules, sys.path)
        environment = dict(os.environ)
        own = {name: value or "" for name, value in self.environment.items()}  # as Flyte sets what is None
        call = TaskCall(self.name, source, self.plan, own, inputs, environment, path)
        try:
            result = run.run(call)
        except (KeyboardInterrupt, SystemExit) as interrupt:  # flytekit's handler makes exit(1) of SIGINT
            if isinstance(interrupt, Undecided):
                raise
            logger.info(run.INTERRUPTED)
            raise _ended_by_ctrl_c() from None
        except SafedistError as error:
            lastwords.keep(error)
            raise
        if result is None:
            raise IgnoreOutputs("node 0 has uploaded the result of this job")
        self._take_decks(ctx, result.decks)
        if isinstance(result, run.Done):
            return result.outputs
        if run.is_ctrl_c(result.error):
            raise _ended_by_ctrl_c()
        failed = raised_by(result)
        if not self.name.startswith(_OURS):  # a script's
            failed.what = f"task {self.name}: {failed.what}"  # in a workflow of several, nobody else says which it was
            failed.args = (str(failed),)
        raise failed if result.raised is None else as_users(failed, result.raised)

    def _to_native(self, ctx: FlyteContext, outputs: LiteralMap) -> Any:
        types = self.python_interface.outputs
        values = TypeEngine.literal_map_to_kwargs(ctx, outputs, types)
        returned = tuple(values[name] for name in types)
        return returned if len(returned) > 1 else next(iter(returned), None)

    def _take_decks(self, ctx: FlyteContext, decks: Sequence[dict[str, str]]) -> None:
        if not self.enable_deck:
            return
        add_decks(ctx, decks)
        if ctx.execution_state is not None and ctx.execution_state.is_local_execution():
            # flytekit writes the page itself only where it converted the outputs; rank 0 did that here.
            flytekit_inside.output_deck(self.name.split(".")[-1], ctx.user_space_params)


def add_decks(ctx: FlyteContext, decks: Sequence[dict[str, str]]) -> None:
    """Add what rank 0 has drawn to the task's decks; the run's page is the first."""
    for deck in decks:
        Deck(deck["name"], deck["html"])
    ctx.user_space_params.decks.sort(key=lambda deck: deck.name != run_page.NAME)


def raised_by(verdict: Verdict) -> SafedistError:
    """The exception of a job that has failed, in the class that flytekit knows."""
    error = verdict.error
    if verdict.payer is not Payer.RETRIES:
        return error
    recoverable = RecoverableRankFailedError(
        error.what, where=error.where, seen=error.seen, expected=error.expected, hint=error.hint
    )
    recoverable.code, recoverable.timestamp = error.error_code, verdict.time_ns / 1e9
    return recoverable


def _ended_by_ctrl_c() -> BaseException:
    """What ends a local run that a person has interrupted: a KeyboardInterrupt, which a script may catch; it ends the
    script without a traceback, and with a shell's exit code for it. Of a command line of click's (``pyflyte``) the code
    alone: there a KeyboardInterrupt becomes 1."""
    if hasattr(sys, "ps1"):
        return KeyboardInterrupt()
    code = 128 + signal.SIGINT
    return SystemExit(code) if click.get_current_context(silent=True) is not None else _Interrupt(code)


class _Interrupt(SystemExit, KeyboardInterrupt):
    """Both, to an interpreter."""


def _of_a_class(task_config: type, task_function: Callable[..., Any], **kwargs: Any) -> Any:
    """What flytekit makes of ``@task(task_config=SafeTorch)``, whose type is none that has a plugin: a plain task.

    Raises:
        ConfigError: it is a config of ours whose parentheses were forgotten.
    """
    if issubclass(task_config, SafeDistributed):
        name, reason = task_config.__name__, "is a class, of which flytekit makes a task without ranks"
        raise ConfigError([Problem("task_config", name, reason, f"write task_config={name}()")])
    return PythonFunctionTask(task_config, task_function, **kwargs)


TaskPlugins.register_pythontask_plugin(type, _of_a_class)
TaskPlugins.register_pythontask_plugin(SafeHorovod, SafeTask)
TaskPlugins.register_pythontask_plugin(SafeTorch, SafeTask)
