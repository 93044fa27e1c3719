"""The raw tar stream, cut to order."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ArchiveError


class Feed:
    """The raw stream, cut into blocks on demand. Holds one piece of it at a time.

    ``take`` never copies more than it returns, and ``views`` hands out views of what is there, so that a file of any
    size passes through without being held.
    """

    def __init__(self, pieces: Iterator[bytes], label: str) -> None:
        self._pieces = pieces
        self._piece = b""
        self._view = memoryview(b"")
        self._at = 0
        self.label = label

    def take(self, count: int) -> bytes:
        """Exactly ``count`` bytes, or an error that says the archive is truncated."""
        end = self._at + count
        data = self._piece[self._at : end]
        self._at = end
        if len(data) == count:
            return data
        parts = [data]
        missing = count - len(data)
        while missing:
            piece = self._next()
            self._at = min(missing, len(piece))
            parts.append(piece[: self._at])
            missing -= self._at
        return b"".join(parts)

    def views(self, count: int) -> Iterator[memoryview]:
        """``count`` bytes as consecutive views; each is valid until the next is asked for."""
        end = self._at + count
        if end <= len(self._piece):  # nearly every file of a project, and half the time for it
            view = self._view[self._at : end]
            self._at = end
            return iter((view,) if count else ())
        return self._long(count)

    def _long(self, count: int) -> Iterator[memoryview]:
        while count:
            available = len(self._piece) - self._at
            if available <= 0:
                self._next()
                continue
            size = min(available, count)
            start = self._at
            self._at += size
            count -= size
            yield self._view[start : start + size]

    def rest_is_zero(self) -> bool:
        """Read to the end, which makes the inflater verify its checksum; is everything there zero?"""
        data = self._piece[self._at :]
        self._piece, self._view, self._at = b"", memoryview(b""), 0
        clean = data.count(0) == len(data)
        for piece in self._pieces:
            clean = clean and piece.count(0) == len(piece)
        return clean

    def _next(self) -> bytes:
        piece = next(self._pieces, None)
        if piece is None:
            raise ArchiveError(
                "The archive is truncated: the tar stream ends inside a member or without its end mark",
                where={"archive": self.label},
                hint="register the task again",
            )
        self._piece, self._view, self._at = piece, memoryview(piece), 0
        return piece
