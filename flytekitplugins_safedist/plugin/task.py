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

from .. import lastwords, stopping
from ..compat import flytekit as flytekit_inside
from ..config.options import SafeDistributed, SafeHorovod, SafeTorch
from ..errors import RankFailedError, SafedistError
from ..flyte import run_page
from ..flyte.storage_errors import one_line
from ..job import run
from ..job.ending import Undecided
from ..job.verdict import Kind, Origin, Verdict, of_error
from ..pod.store import error_document
from ..ranks import literals
from ..ranks.prefork import PREFORK, Prefork
from . import overrides
from .jobspec import registered_as
from .serialization import SerializesToKubeflow, plan_task

logger = logging.getLogger(__name__)

__all__ = ["RecoverableRankFailedError", "SafeHorovod", "SafeTask", "SafeTorch"]


class RecoverableRankFailedError(RankFailedError, FlyteRecoverableException):  # type: ignore[misc]
    """A rank raised ``FlyteRecoverableException`` or a subclass: Flyte retries the task."""

    seconds: float | None = None

    @classmethod
    def of(cls, error: SafedistError, *, time_ns: int) -> RecoverableRankFailedError:
        """The same facts, in the class that flytekit knows as recoverable."""
        recoverable = cls(error.what, where=error.where, seen=error.seen, expected=error.expected, hint=error.hint)
        if isinstance(error, RankFailedError):
            recoverable.error_code = error.error_code
        recoverable.seconds = time_ns / 1e9
        return recoverable

    @property
    def timestamp(self) -> float | None:
        """When it happened, in seconds: where flytekit aggregates errors, the earliest is the root cause."""
        return self.seconds


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
        with warnings.catch_warnings():
            flytekit_inside.no_warning_is_an_error()
            return self._execute(kwargs)

    def _execute(self, kwargs: dict[str, Any]) -> Any:
        ctx = FlyteContextManager.current_context()
        if all(isinstance(value, RankInput) for value in kwargs.values()):
            result = self._run(ctx, LiteralMap({name: value.literal for name, value in kwargs.items()}))
            self._take_decks(ctx, result.decks)
            return result.outputs
        result = self._run(ctx, self._to_literals(ctx, kwargs))
        self._take_decks(ctx, result.decks)
        return self._to_native(ctx, result.outputs)

    def _run(self, ctx: FlyteContext, inputs: LiteralMap) -> run.Done:
        stopping.leave_within(self.plan.timeouts.exit)
        remote = ctx.execution_state is not None and ctx.execution_state.mode == ExecutionState.Mode.TASK_EXECUTION
        try:
            result = run.run(self, self.plan, inputs, dict(os.environ), PREFORK.take() or Prefork())
        except (KeyboardInterrupt, SystemExit) as interrupt:  # flytekit's handler makes exit(1) of SIGINT
            if remote or isinstance(interrupt, Undecided):
                raise
            run.say(run.INTERRUPTED)
            raise _ended_by_ctrl_c() from None
        except SafedistError as error:
            lastwords.keep(error)
            verdict = of_error(error)
            if remote and verdict is not None:
                raise _leave_for_retry(verdict) from error
            raise
        if isinstance(result, run.Done):
            return result
        if isinstance(result, run.Elsewhere):
            if remote:
                stopping.decided(0)
                # flytekit takes its IgnoreOutputs for an error and logs it as one; this ends the process as well, with
                # nothing uploaded, and without a word.
                raise SystemExit(0)
            raise IgnoreOutputs("node 0 has uploaded the result of this job")
        self._take_decks(ctx, result.decks)
        if run.is_ctrl_c(result.error) and not remote:
            raise _ended_by_ctrl_c()
        if result.origin is Origin.SYSTEM:
            if remote and self.enable_deck:  # this leaves flytekit before it writes the page
                _upload_decks(ctx)
            raise _leave_for_retry(result) if remote else result.error
        if result.kind is Kind.RECOVERABLE:
            raise RecoverableRankFailedError.of(result.error, time_ns=result.time_ns)
        raise result.error

    def _to_literals(self, ctx: FlyteContext, values: dict[str, Any]) -> LiteralMap:
        return TypeEngine.dict_to_literal_map(ctx, values, self.python_interface.inputs)

    def _to_native(self, ctx: FlyteContext, outputs: LiteralMap) -> Any:
        types = self.python_interface.outputs
        values = TypeEngine.literal_map_to_kwargs(ctx, outputs, types)
        if not types:
            return None
        if len(types) == 1:
            return next(iter(values.values()))
        return tuple(values[name] for name in types)

    def _take_decks(self, ctx: FlyteContext, decks: Sequence[dict[str, str]]) -> None:
        if not self.enable_deck:
            return
        for deck in decks:
            Deck(deck["name"], deck["html"])
        ctx.user_space_params.decks.sort(key=lambda deck: deck.name != run_page.NAME)  # what is opened first
        if ctx.execution_state is not None and ctx.execution_state.is_local_execution():
            # flytekit writes the page itself only where it converted the outputs; rank 0 did that here.
            flytekit_inside.output_deck(self.name.split(".")[-1], ctx.user_space_params)


def _upload_decks(ctx: FlyteContext) -> None:
    params = ctx.user_space_params
    try:
        deck = run_page.ConsoleDeck(params.output_metadata_prefix, ctx.file_access.raw_output_prefix)
        deck.put({each.name: each.html for each in params.decks})
    except Exception as error:  # whatever the store's client raises: the verdict counts
        logger.warning(f"the task's deck could not be uploaded: {one_line(error)}")


def _ended_by_ctrl_c() -> BaseException:
    """What ends a local run that a person has interrupted: a shell's exit code for it.

    KeyboardInterrupt itself would show flytekit's stack, and become 1 in ``pyflyte``; but SystemExit would end a Python
    prompt or a notebook.
    """
    return KeyboardInterrupt() if hasattr(sys, "ps1") else SystemExit(128 + signal.SIGINT)


def _leave_for_retry(verdict: Verdict) -> error_document.Decided:
    """The platform's doing: uploaded as such, so that another attempt costs none of the task's retries."""
    run.say(f"infrastructure failure, uploaded as {verdict.code} for Flyte to try again by itself: {verdict.error}")
    return error_document.Decided(error_document.SystemFailure(verdict.code, str(verdict.error), verdict.time_ns))


flytekit_inside.leave_inputs_of_elements(SafeTask)
TaskPlugins.register_pythontask_plugin(SafeHorovod, SafeTask)
TaskPlugins.register_pythontask_plugin(SafeTorch, SafeTask)
