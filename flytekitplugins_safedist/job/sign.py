"""A job's leader has a sign in the store, beside the outputs, and renews it: whoever cannot reach the leader sees there
whether it lives.

Freshness is watched on the reader's own clock: a sign that does not change for three renewals is nobody's. No clock of
another machine counts. A store that cannot be read is no sign of anything.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..fs.atomic import atomic_write
from ..store.errors import one_line
from ..store.put_new import path_of

if TYPE_CHECKING:
    from flytekit.core.data_persistence import FileAccessProvider

NAME = ".safedist-leader.json"
"""Of the object; hidden, for it is nobody's output."""

RENEW_SECONDS = 60.0
"""Between two renewals; shorter where nodes are to notice each other's loss in a shorter time."""

RENEWALS = 3
"""Without a change, after which a sign is nobody's."""

_LOOKS = 6
"""Of a reader, in the time between two renewals."""

_FIRST_SECONDS = 10.0
"""That the first is waited for: a job begins also where the store is away."""


@dataclass(frozen=True)
class Sign:
    """The process that leads a job, and how often it has said so."""

    process: str
    beat: int


@dataclass(frozen=True)
class SignPlace:
    """Where the sign of one attempt's leader is.

    Args:
        address: the object's.
        access: the way to the store.
        renew: seconds between two renewals.
    """

    address: str
    access: FileAccessProvider
    renew: float

    @classmethod
    def of(cls, prefix: str, access: FileAccessProvider, heartbeat: float) -> SignPlace:
        """Beside the outputs of an attempt whose nodes are to notice a loss within *heartbeat* seconds."""
        return cls(f"{prefix.rstrip('/')}/{NAME}", access, min(RENEW_SECONDS, heartbeat))

    def put(self, sign: Sign) -> None:
        """Replace what is there.

        Raises:
            Exception: whatever the store's client raises.
        """
        data, path = json.dumps({"process": sign.process, "beat": sign.beat}).encode(), path_of(self.address)
        if path is None:
            self.access.get_filesystem_for_path(self.address).pipe_file(self.address, data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=False) as file:
            file.write(data)

    def read(self) -> Sign | None:
        """What is there; None for nothing.

        Raises:
            Exception: whatever the store's client raises.
        """
        path = path_of(self.address)
        try:
            if path is None:
                data = self.access.get_filesystem_for_path(self.address).cat_file(self.address)
            else:
                data = path.read_bytes()
        except FileNotFoundError:
            return None
        found = json.loads(data)
        return Sign(str(found["process"]), int(found["beat"]))


class Renewal:
    """The leader's side, in a thread of its own, from its beginning until it is closed.

    Args:
        place: where.
        process: the leader's id.
        say: takes a sentence for the node's log.
    """

    def __init__(self, place: SignPlace, process: str, say: Callable[[str], object]) -> None:
        self._place, self._process, self._say = place, process, say
        self._first, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="safedist leader's sign", daemon=True).start()
        self._first.wait(_FIRST_SECONDS)

    def close(self) -> None:
        """Renew it no more."""
        self._closed.set()

    def _run(self) -> None:
        beat, is_well = 0, True
        while not self._closed.is_set():
            beat += 1
            try:
                self._place.put(Sign(self._process, beat))
                is_well = True
            except Exception as error:  # whatever the store's client raises: the job itself does not need the sign
                if is_well:
                    self._say(f"the sign that this node leads the job cannot be put into the store: {one_line(error)}")
                is_well = False
            self._first.set()
            self._closed.wait(self._place.renew)


class SignWatch:
    """A reader's side: what it has seen of the sign, and when.

    Args:
        place: where it is.
        clock: tells seconds; it only grows.
    """

    def __init__(self, place: SignPlace, clock: Callable[[], float] = time.monotonic) -> None:
        self._place, self._clock = place, clock
        self._sign: Sign | None = None
        self._since: float | None = None

    def look(self) -> bool:
        """Read it; whether it has changed since the last time, when there was one already.

        Raises:
            Exception: it cannot be read.
        """
        sign = self._place.read()
        is_known, has_changed = self._sign is not None, sign != self._sign
        if has_changed or self._since is None:
            self._sign, self._since = sign, self._clock()
        return is_known and has_changed and sign is not None

    def wait(
        self, decided: Callable[[], bool], patience: float, sleep: Callable[[float], object] = time.sleep
    ) -> Literal["decided", "led", "nobody", "unknown"]:
        """Find out about a leader that cannot be reached: wait for its sign to change, or to be too old.

        Args:
            decided: whether the attempt's verdict is in the store; asks it.
            patience: seconds that the store may be away.
            sleep: how to wait.

        Returns:
            ``decided``: the verdict is there; ``led``: somebody leads the job; ``nobody``: nobody has a sign, or one
            that is too old; ``unknown``: the store cannot be read.
        """
        away = self._clock()
        while True:
            with suppress(Exception):  # whatever the store's client raises: it is asked again
                if decided():
                    return "decided"
                if self.look():
                    return "led"
                away = self._clock()
                if self._sign is None or self._is_old:
                    return "nobody"
            if self._clock() - away > patience:
                return "unknown"
            sleep(self._place.renew / _LOOKS)

    @property
    def _is_old(self) -> bool:
        return self._since is not None and self._clock() - self._since >= RENEWALS * self._place.renew
