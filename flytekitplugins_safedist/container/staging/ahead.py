"""Let one iterator work in a thread of its own, a bounded distance ahead of its reader."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress

_DEPTH = 8
"""Pieces in between (of at most 1 MiB each): enough to even out the two, little enough to hold."""

_JOIN = 5.0


class Ahead(Iterator[bytes]):
    """Fetching and inflating go on while files are written.

    Leave it (it is a context manager) before anything is forked: the thread has ended then. When the reader leaves with
    an error or by a signal, it does not wait for the thread, which may hang in a network that does not answer.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_DEPTH)
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._work, name="safedist-inflate", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        last: BaseException | None = None
        try:
            for piece in self._pieces:
                self._queue.put(piece)
                if self._unwanted.is_set():
                    return
        except BaseException as error:  # whatever it is, it is the reader's
            last = error
        self._queue.put(last)

    def __next__(self) -> bytes:
        piece = self._queue.get()
        if isinstance(piece, bytes):
            return piece
        self._queue.put(piece)  # the end stays the end
        if piece is None:
            raise StopIteration
        raise piece

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._unwanted.set()
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()  # room for the piece the thread may be waiting to hand over
        if kind is None:
            self._thread.join(_JOIN)
