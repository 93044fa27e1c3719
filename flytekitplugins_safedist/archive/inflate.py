"""gzip bytes in, raw bytes out, and nothing accepted that gzip itself would refuse.

``tarfile`` stops reading at the end-of-archive mark and so never looks at the CRC behind it; this reads the stream to
its end, checks CRC and length of every member, and refuses what follows the last one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from ..errors import ArchiveError
from .limits import Limits

_accelerated: Any = None
with suppress(ImportError):  # no wheels for every platform; same interface, same checks, two to four times the speed
    from isal import isal_zlib as _accelerated

GZIP_MAGIC = b"\x1f\x8b"
PIECE = 1 << 20
"""Bytes handed on at a time: small enough for the processor's cache, large enough to hold many source files."""

FIRST_PIECE = 1 << 16
"""The first one is smaller, and each one twice the one before: whoever writes need not wait for a whole one."""

_GZIP_WBITS = 31  # zlib.decompressobj: 16 + 15, a gzip header and trailer, both verified
INFLATER = "isal" if _accelerated is not None else "zlib"


def _module(name: str) -> Any:
    return _accelerated if name == "isal" and _accelerated is not None else zlib


class Inflate:
    """One pass over a gzip stream.

    Args:
        label: how the archive is called in messages.
        limits: see :class:`Limits`.
        inflater: "isal" or "zlib".

    Attributes:
        compressed: bytes consumed so far.
        raw: bytes produced so far.
    """

    def __init__(self, label: str, limits: Limits, inflater: str = INFLATER) -> None:
        self.label = label
        self.limits = limits
        self.compressed = 0
        self.raw = 0
        self._zlib = _module(inflater)
        self._piece = FIRST_PIECE
        self._members = 0
        self._padding = False

    def run(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the raw bytes in pieces of at most :data:`PIECE`.

        Raises:
            ArchiveError: not gzip, damaged, truncated, trailing garbage, or over the limits.
        """
        engine: Any = None
        pending = b""
        for chunk in chunks:
            self.compressed += len(chunk)
            data = pending + chunk if pending else chunk
            pending = b""
            while data:
                if engine is None:
                    if self._at_padding(data):
                        break
                    if len(data) < len(GZIP_MAGIC) and GZIP_MAGIC.startswith(data):
                        pending = data
                        break
                    engine = self._begin(data)
                yield from self._pieces(engine, data)
                if not engine.eof:
                    break
                data = engine.unused_data
                engine = None
        if engine is not None or pending or not self._members:
            raise self._refuse(
                "The archive is truncated: its gzip stream ends early",
                seen=f"{self.compressed} compressed bytes",
                hint="register the task again; if it repeats, the upload or a proxy cuts objects short",
            )

    def _at_padding(self, data: bytes) -> bool:
        """gzip allows zero bytes behind the last member (tapes), and only those."""
        if self._members and (self._padding or data[0] == 0):
            if data.count(0) != len(data):
                raise self._refuse("The archive has trailing garbage behind its gzip stream")
            self._padding = True
            return True
        return False

    def _begin(self, data: bytes) -> Any:
        if not data.startswith(GZIP_MAGIC):
            if self._members:
                raise self._refuse("The archive has trailing garbage behind its gzip stream")
            raise self._refuse(
                "The archive is not gzip",
                seen=f"first bytes {data[:8]!r}",
                expected=f"first bytes {GZIP_MAGIC!r}",
                hint="the object is not a code archive; register the task again",
            )
        self._members += 1
        return self._zlib.decompressobj(wbits=_GZIP_WBITS)

    def _pieces(self, engine: Any, data: bytes) -> Iterator[bytes]:
        try:
            while True:
                most = self._piece
                piece = engine.decompress(data, most)
                self._piece = min(2 * most, PIECE)
                if piece:
                    self.raw += len(piece)
                    self._check_limits()
                    yield piece
                data = engine.unconsumed_tail
                # A full piece may leave output inside the engine with no input left to push it out.
                if engine.eof or (not data and len(piece) < most):
                    return
        except self._zlib.error as error:
            raise self._refuse(
                "The archive is damaged: its gzip stream does not decode or fails its checksum",
                seen=str(error),
                hint="register the task again",
            ) from error

    def _check_limits(self) -> None:
        limits = self.limits
        if self.raw > limits.max_bytes:
            raise self._refuse(
                "The archive unpacks to more than the limit",
                seen=f"more than {limits.max_bytes} bytes",
                expected=f"at most {limits.max_bytes} bytes",
                hint="keep data out of the code archive (.flyteignore), or raise SAFEDIST_CODE_MAX_BYTES",
            )
        if self.raw > limits.ratio_from and self.raw > limits.max_ratio * max(self.compressed, 1):
            raise self._refuse(
                "The archive unpacks to suspiciously much for its size",
                seen=f"{self.raw} bytes from {self.compressed}",
                expected=f"at most {limits.max_ratio:g} times",
                hint="if it is meant to be so, raise SAFEDIST_CODE_MAX_RATIO",
            )

    def _refuse(self, what: str, **facts: Any) -> ArchiveError:
        return ArchiveError(what, where={"archive": self.label}, **facts)
