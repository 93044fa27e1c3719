"""What flytekit runs in a pod in the place of the task: the job. The task itself, its inputs and its outputs are the
ranks' business; this process imports nothing of the user's."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from flytekit import FlyteContext
from flytekit.core.utils import timeit
from flytekit.deck import DeckField
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.models.interface import TypedInterface
from flytekit.models.literals import LiteralMap

from .. import lastwords, stopping
from ..agent import run
from ..agent.prepare import TaskCall
from ..agent.verdict import Verdict, of_error
from ..config.registered import Registered
from ..errors import SafedistError
from ..failures import Payer
from ..plugin.task import add_decks, raised_by
from ..rank import literals
from ..rank.order import TaskSource
from ..rank_server.client import RankServer
from ..record import run_page
from ..store.errors import one_line
from .verdict import Decided

logger = logging.getLogger(__name__)


class JobTask:
    """Has of a flytekit task what its ``_dispatch_execute`` asks for.

    Args:
        source: where ranks get the task from.
        registered: the job.
        server: that imports libraries already.
        ctx: flytekit's, of this execution.
    """

    def __init__(self, source: TaskSource, registered: Registered, server: RankServer, ctx: FlyteContext) -> None:
        self.name = str(ctx.user_space_params.task_id.name) or ".".join([*source.imports[:1], source.name])
        self.disable_deck = registered.decks is None
        self.interface = TypedInterface({}, {})
        self._source, self._registered, self._server = source, registered, server

    def dispatch_execute(self, ctx: FlyteContext, inputs: LiteralMap) -> LiteralMap:
        """Run the job; rank 0's outputs are the task's."""
        if DeckField.TIMELINE in (self._registered.decks or ()):  # as flytekit has it of any task
            ctx.user_space_params.decks.append(ctx.user_space_params.timeline_deck)
        try:
            with timeit("Execute user level code"):
                done = self._run(ctx, inputs)
        except Exception as error:
            raise FlyteUserRuntimeException(error) from error
        self.interface = TypedInterface({}, done.types)
        self._take_decks(ctx, done.decks)
        return done.outputs

    def _run(self, ctx: FlyteContext, inputs: LiteralMap) -> run.Done:
        environment, registered = dict(os.environ), self._registered
        variables = {name: environment[name] for name in registered.variables if name in environment}
        call = TaskCall(
            self.name, self._source, registered, variables, literals.mended(inputs), environment, sys.path, self._server
        )
        try:
            result = run.run(call)
        except SafedistError as error:
            lastwords.keep(error)
            verdict = of_error(error)
            if verdict is not None:
                _leave_for_retry(verdict, error)
            raise
        if isinstance(result, run.Done):
            return result
        if result is None:
            stopping.decided(0)
            # flytekit takes its IgnoreOutputs for an error and logs it as one; this ends the process as well, with
            # nothing uploaded, and without a word.
            raise SystemExit(0)
        self._take_decks(ctx, result.decks)
        if result.payer is Payer.FLYTE:
            if not self.disable_deck:  # this leaves flytekit before it writes the page
                _upload_decks(ctx)
            _leave_for_retry(result)
        raise raised_by(result)

    def _take_decks(self, ctx: FlyteContext, decks: Sequence[dict[str, str]]) -> None:
        if not self.disable_deck:
            add_decks(ctx, decks)


def _upload_decks(ctx: FlyteContext) -> None:
    params = ctx.user_space_params
    try:
        deck = run_page.ConsoleDeck(params.output_metadata_prefix, ctx.file_access.raw_output_prefix)
        deck.put(lambda: {each.name: each.html for each in params.decks}).result()
    except Exception as error:  # whatever the store's client raises: the verdict counts
        logger.warning(f"the task's deck could not be uploaded: {one_line(error)}")


def _leave_for_retry(verdict: Verdict, cause: BaseException | None = None) -> NoReturn:
    """The platform's doing: uploaded as such, so that another attempt costs none of the task's retries."""
    code, error = verdict.error.error_code, verdict.error
    logger.info(f"infrastructure failure, uploaded as {code} for Flyte to try again by itself: {error}")
    raise Decided(verdict) from cause
