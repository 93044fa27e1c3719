"""When all ranks save together: because a pod is told to stop, or by rank 0's clock.

In a task their agents bring them to one step (:mod:`..rank.shared_page`). Elsewhere all ask rank 0, at steps that they
know.

Rank 0 leaves a mark at its place when a pod is told to stop, until what is saved then is committed: Flyte starts the
next attempt as soon as a lone pod is being deleted (v1.16: the deletion timestamp fails the attempt), or a whole job
(at the task's ``timeout``), while the pods still save. Without the mark the next attempt finds an older save, or none.
Pods that are replaced within an attempt need none: its rendezvous keeps them until the others have saved.
"""

from __future__ import annotations

import contextvars
import logging
import socket
import threading
import time
from collections.abc import Callable

from ..errors import NotInTaskError
from ..handoff import Slot
from ..rank import context
from ..rank.shared_page import AgreedSave, RankPage
from .store import Store

logger = logging.getLogger(__name__)

MARK = "safedist-leaving.json"
_LOOK_SECONDS = 0.1
"""Between two looks at this rank's page (a load from memory)."""
_ASK_SECONDS = 0.5
"""Between two looks at the store for a mark."""
_LOOKS = 50
"""Without agents: how often the ranks ask rank 0, between two saves."""
_AGAIN_SECONDS = 60.0
"""After which rank 0 asks its agent again, for a save that has not come."""


class Timer:
    """Rank 0's clock; and the steps at which all ask it, where there are no agents.

    Args:
        seconds: between two saves.

    Attributes:
        look: the step of the next question, the same in every rank.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.begin()

    def begin(self) -> None:
        """A save is begun now, whatever for; or training is, from one."""
        self._begun, self._asked, self.look = time.monotonic(), -_AGAIN_SECONDS, 0
        self._before: tuple[int, float] | None = None

    @property
    def is_over(self) -> bool:
        """Whether a save is due."""
        return time.monotonic() - self._begun >= self._seconds

    def asks(self) -> bool:
        """Whether rank 0 is to ask its agent now, of which it makes a note."""
        asks = self.is_over and time.monotonic() - self._asked >= _AGAIN_SECONDS
        self._asked = time.monotonic() if asks else self._asked
        return asks

    def answer(self, step: int, *, is_busy: bool) -> tuple[bool, int]:
        """What rank 0 says at a step: whether all save, and when they ask again, by how long the last steps took."""
        now, before, self._asked = time.monotonic(), self._before, -_AGAIN_SECONDS
        self._before = step, now
        steps, seconds = (step - before[0], now - before[1]) if before is not None else (0, 1.0)
        wanted = int(steps * self._seconds / _LOOKS / max(seconds, 1e-6))
        return self.is_over and not is_busy, step + max(1, min(wanted, 2 * steps))


class Agreement:
    """What all ``Checkpoints`` of a rank have to do with its agent's agreements.

    A save that is agreed on is one of each of those that save by themselves (``every``); where there is none, of all.

    Args:
        page: that this rank shares with its agent.
    """

    def __init__(self, page: RankPage) -> None:
        self.page = page
        self._members: dict[object, tuple[bool, Callable[[], object]]] = {}
        self._save: AgreedSave | None = None
        self._pending: set[object] = set()

    def at(self, member: object, step: int, *, by_itself: bool, settle: Callable[[], object]) -> AgreedSave | None:
        """Say that ``step`` is done. If ``member`` is to save after it: why; call :meth:`over` when that is done.

        Args:
            member: who says so.
            step: as for :meth:`~..rank.shared_page.RankPage.at`.
            by_itself: whether it saves without being forced to.
            settle: returns when nothing of it is in flight; called before this rank stands still.
        """
        if not self._members:
            self.page.take_part(step)
        self._members[member] = by_itself, settle
        savers = {each for each, (saves, _) in self._members.items() if saves} or {*self._members}
        if member not in savers:
            return None
        save = self.page.at(step)
        if save is not None:
            self._save, self._pending = save, savers
        elif member not in self._pending:  # it is past that step, and the others have not come to theirs
            self._end()
        return self._save

    def open_for(self, member: object) -> AgreedSave | None:
        """The save that ``member`` has still to make; None where there is none."""
        return self._save if member in self._pending else None

    def over(self, member: object) -> None:
        """What it had to save is committed, or has failed, or was not due.

        Where a pod is told to stop, this does not return before the agent ends this rank, once all have saved: whatever
        it did from here on would be lost.
        """
        self._pending.discard(member)
        if not self._pending:
            self._end()

    def _end(self) -> None:
        save, self._save, self._pending = self._save, None, set()
        if save is None:
            return
        for _, settle in self._members.values() if save.urgent else ():
            settle()  # one that does not save now may have a save in flight, which would be lost
        self.page.finish(save.call)
        if save.urgent:
            self.page.stand_still()


_OF_RANK: Slot[Agreement] = Slot()


def of_rank() -> Agreement | None:
    """This rank's; None outside a task."""
    try:
        page = context.page()
    except NotInTaskError:
        return None
    if _OF_RANK.value is None or _OF_RANK.value.page is not page:
        _OF_RANK.value = Agreement(page)
    return _OF_RANK.value


class Mark:
    """The mark of an attempt, left as soon as a pod of it is told to stop, wherever the training is then.

    Args:
        page: that its rank 0 shares with its agent.
        find: where it saves. Not asked before that, for it asks the store.
        life: names the attempt, and the ranks' round in it.
        leave_pointer: tells the next attempt so.
    """

    def __init__(
        self, page: RankPage, find: Callable[[], Store], life: str, leave_pointer: Callable[[str], object]
    ) -> None:
        self._text = f"{socket.gethostname()} of {life}".encode()
        self._over = threading.Event()
        run = contextvars.copy_context().run  # flytekit's way to the store is found through it
        self._thread = threading.Thread(
            target=run, args=(self._run, page, find, leave_pointer), name="safedist-leaving", daemon=True
        )
        self._thread.start()
        context.in_any_case(self.remove)

    def _run(self, page: RankPage, find: Callable[[], Store], leave_pointer: Callable[[str], object]) -> None:
        while not page.preempted:
            if self._over.wait(_LOOK_SECONDS):
                return
        store = None
        try:
            store = find()
            store.put(MARK, self._text)
            leave_pointer(store.url)  # last: who finds the place by it finds the mark
        except Exception as error:  # the save itself is tried all the same, and the mark may be there
            logger.warning(f"the next attempt is not told that this pod still saves: {error}")
        self._over.wait()
        if store is not None:
            _remove(store, self._text)

    def remove(self) -> None:
        """Nothing more will be saved."""
        self._over.set()
        self._thread.join()


def wait_for_others(store: Store, attempt: str, life: str, seconds: float) -> None:
    """Where pods of another attempt still save at this place, wait for them; who is killed takes no mark away.

    Args:
        store: the place.
        attempt: how the name of each life of this attempt begins. A mark of an earlier one is of ranks that have ended:
            a round begins when all have.
        life: names this one, whose own mark stays.
        seconds: for which a pod stays to save, at most. A mark that nobody takes away costs them once.
    """
    mark, until = store.get(MARK), time.monotonic() + seconds
    who = (mark or b"").decode(errors="replace")
    if mark is None or who.endswith(f" of {life}"):
        return
    if f" of {attempt}" not in who:
        logger.info(f"waiting for the pod of the attempt before ({who}), which still saves to {store.url}")
        while store.get(MARK) is not None:
            if time.monotonic() > until:
                logger.warning(f"{who} has committed no save in {seconds:g} s, and is not waited for any longer")
                break
            time.sleep(_ASK_SECONDS)
        else:
            return
    _remove(store, mark)


def _remove(store: Store, text: bytes) -> None:
    """Take a mark away, unless another pod has left its own meanwhile."""
    try:
        if store.get(MARK) == text:
            store.remove(MARK)
    except Exception as error:  # a place that this task may only read, say
        logger.warning(f"{MARK} stays in {store.url}, and the next start waits in vain: {error}")
