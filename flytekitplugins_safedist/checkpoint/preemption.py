"""Preemption: the step at which all ranks save because a pod is told to stop, and the mark of a lone pod.

How the ranks come to one step: :mod:`..ranks.shared_page`. Outside a task there is no agent, and nothing ever happens.

A lone pod leaves a mark at its place when it is told to stop, until what it saves then is committed.

Flyte starts the next attempt as soon as a pod is being deleted (v1.16: the deletion timestamp fails the attempt), while
the pod still saves. Without the mark the next attempt finds an older save, or none, and steps are lost. With several
nodes nothing of the kind happens: the job's own rendezvous keeps a replacement until the others have saved.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import socket
import threading
import time
from collections.abc import Callable

from ..errors import NotInTaskError
from ..fs.identity import current_identity
from ..ranks import context
from ..ranks.shared_page import AgreedSave, RankPage
from .store import Store

logger = logging.getLogger(__name__)

MARK = "safedist-leaving.json"
_LOOK_SECONDS = 0.1
"""Between two looks at this rank's page (a load from memory)."""
_ASK_SECONDS = 0.5
"""Between two looks at the store for a mark."""
_SKEW_SECONDS = 300.0
"""How far the clocks of two nodes may be apart. An older mark is of a pod that was killed, and nobody waits for it."""


class Preemption:
    """Whether all ranks save now, as their agents have agreed; and the mark of this pod, where it is alone.

    Args:
        store: where the mark is left; asked when the first step is told.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self._find, self._lock = store, threading.Lock()
        self._store: Store | None = None
        self._page: RankPage | None = None
        self._is_over = self._is_left = False
        with contextlib.suppress(NotInTaskError):
            self._page = context.page()

    def at(self, step: int) -> AgreedSave | None:
        """Say that ``step`` is done. If all ranks save after it: how; then call :meth:`over`."""
        if self._page is None:
            return None
        if self._store is None:
            self._page.take_part(step)
            self._store = self._find()
            who = current_identity()
            if who.rank == 0 and who.nnodes == 1 and self._page.preemption_seconds:
                context.in_any_case(self._unmark)
                inside = contextvars.copy_context()  # flytekit's way to the store is found through it
                threading.Thread(
                    target=inside.run, args=(self._mark, self._page, self._store), name="safedist-leaving", daemon=True
                ).start()
        return self._page.at(step)

    def over(self, agreed: AgreedSave) -> None:
        """The save is committed, or has failed.

        Where it was because a pod is told to stop, this does not return before the agent ends this rank: whatever it
        did from here on would be lost.
        """
        if self._page is None:
            return
        if agreed.urgent:
            self._unmark()
        self._page.finish(agreed.call)
        if agreed.urgent:
            self._page.stand_still()

    def _mark(self, page: RankPage, store: Store) -> None:
        """Leave the mark as soon as this pod is told to stop, wherever the training is then."""
        while not page.preempted:
            if self._is_over:
                return
            time.sleep(_LOOK_SECONDS)
        with self._lock:
            if self._is_over:
                return
            self._is_left = True  # also where only the answer is lost
            try:
                mark = {"host": socket.gethostname(), "since": time.time()}
                store.put(MARK, json.dumps(mark).encode())
            except Exception as error:  # the save itself is tried all the same
                logger.warning(f"the next attempt is not told that this pod still saves: {error}")

    def _unmark(self) -> None:
        """Nothing more will be saved: take the mark away."""
        with self._lock:
            was_left, self._is_left, self._is_over = self._is_left, False, True
            try:
                if was_left and self._store is not None:
                    self._store.remove(MARK)
            except Exception as error:
                logger.warning(f"the next attempt waits in vain for this pod: {error}")


def wait_for_others(store: Store) -> None:
    """Where a pod still saves at this place, wait for it, ``Timeouts.preemption`` at most: a pod that is killed takes
    no mark away."""
    try:
        seconds = context.page().preemption_seconds
    except NotInTaskError:
        return
    until = time.monotonic() + seconds
    mark = _fresh(store.get(MARK), seconds)
    if mark is None:
        return
    logger.info(f"waiting for the pod of the attempt before ({mark}), which still saves to {store.url}: {seconds:g} s")
    while _fresh(store.get(MARK), seconds) is not None:
        if time.monotonic() > until:
            logger.warning(f"{mark} has not committed a save in {seconds:g} s: it was killed before it could")
            store.remove(MARK)
            break
        time.sleep(_ASK_SECONDS)


def _fresh(data: bytes | None, seconds: float) -> str | None:
    """The host that has left a mark, where it may still be there."""
    try:
        mark = json.loads(data or b"{}")
        is_fresh = abs(time.time() - float(mark["since"])) < seconds + _SKEW_SECONDS
        return str(mark["host"]) if is_fresh else None
    except (ValueError, KeyError, TypeError):
        return None
