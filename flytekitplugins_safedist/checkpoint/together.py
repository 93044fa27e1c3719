"""Saves that all ranks take at one step, because one asks or a pod of the job is told to stop: this rank's part.

How the ranks come to one step: :mod:`..ranks.shared_page`. Outside a task there is no agent, and nothing ever happens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from ..errors import NotInTaskError
from ..ranks import context
from ..ranks.shared_page import AgreedSave, RankPage
from .leaving import Leaving

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
"""Between two looks while a state is held."""


class Together:
    """Whether all ranks save now.

    Args:
        leaving: what tells the next attempt that this pod still saves.
    """

    def __init__(self, leaving: Leaving) -> None:
        self._leaving = leaving
        self._page: RankPage | None = None
        self._begun = False
        self._asking = False
        self._agreed: AgreedSave | None = None
        self._is_over = False
        try:
            self._page = context.page()
        except NotInTaskError:
            return

    @property
    def possible(self) -> bool:
        """Whether there is an agent that could bring the ranks to one step."""
        return self._page is not None

    def ask(self) -> None:
        """Ask for a save by all ranks, at a step soon. Asked again before it has come, nothing more happens."""
        if self._page is not None and not self._asking:
            self._asking = True
            self._page.ask()

    def wanted(self, step: int) -> bool:
        """Say that ``step`` is done; whether all ranks save after it. If so, call :meth:`fulfil`, on every rank."""
        if self._page is None:
            return False
        if not self._begun:
            self._begun = True
            self._page.take_part(step)
            self._leaving.watch(self._page)
        self._agreed = self._page.at(step)
        return self._agreed is not None

    def fulfil(self, save: Callable[[bool], None]) -> bool:
        """Save, if that was :meth:`wanted`. Returns whether it was.

        Where it was because a pod is told to stop, this does not return before the agent ends this rank: whatever it
        did from here on would be lost.

        Args:
            save: save; and, if given True, return when it is committed.
        """
        agreed, self._agreed = self._agreed, None
        if self._page is None:
            return False
        if agreed is not None:
            self._save(agreed, save, self._page)
        if self._is_over:
            self._is_over = False
            self._page.stand_still()
        return agreed is not None

    def at(self, step: int, save: Callable[[bool], None]) -> bool:
        """Both: say that ``step`` is done, and save if all ranks save after it. Returns whether they do."""
        return (self.wanted(step) or self._is_over) and self.fulfil(save)

    def holding(self, step: int, save: Callable[[bool], None]) -> Holding:
        """While inside, the state of ``step`` stays as it is, and can be saved at any moment."""
        return Holding(self, step, save)

    def look(self, step: int, save: Callable[[bool], None]) -> None:
        """While ``step`` is held: save, if all ranks save it."""
        agreed = self._page.held(step) if self._page is not None else None
        if agreed is not None and self._page is not None:
            self._save(agreed, save, self._page)

    def hold(self, step: int) -> bool:
        """Whether there is anybody who could ask for what is held from now on."""
        if self._page is None:
            return False
        self._page.hold(step)
        if not self._begun:
            self._begun = True
            self._leaving.watch(self._page)
        return True

    def _save(self, agreed: AgreedSave, save: Callable[[bool], None], page: RankPage) -> None:
        try:
            save(agreed.urgent)
        except Exception as error:  # what was committed stays, and the training must not end by it
            logger.warning(
                f"the save that all ranks agreed on failed; an earlier one stays: {type(error).__name__}: {error}"
            )
        finally:
            self._asking, self._is_over = False, agreed.urgent
            if agreed.urgent:
                self._leaving.over()
            page.finish(agreed.call)


class Holding:
    """A stretch of the task in which the state does not change: an evaluation, a compilation. Made by
    :meth:`Together.holding`."""

    def __init__(self, together: Together, step: int, save: Callable[[bool], None]) -> None:
        self._together, self._step, self._save = together, step, save
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._together.hold(self._step):
            self._thread = threading.Thread(target=self._watch, name="safedist-held", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._together.look(self._step, self._save)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        if error is None:
            # The last moment at which this state can be saved: whoever calls now is answered, and served.
            self._together.at(self._step, self._save)
