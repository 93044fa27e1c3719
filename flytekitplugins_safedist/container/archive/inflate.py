"""An archive's bytes in, raw bytes out, and nothing accepted that gzip or zstd itself would refuse.

What an archive is packed with is told by its content and never by its name: ``flytectl register files`` un-gzips the
archive while it uploads it and keeps its name (flytectl/cmd/register/register_util.go, ``uploadFastRegisterArtifact``),
so that a plain tar is called ``.tar.gz``.

``tarfile`` stops reading at the end-of-archive mark and so never looks at the CRC behind it; this reads the stream to
its end, checks CRC and length of every member, and refuses what follows the last one.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...errors import ArchiveError
from .limits import Limits

_accelerated: Any = None
with suppress(ImportError):  # no wheels for every platform; same interface, same checks, two to four times the speed
    from isal import isal_zlib as _accelerated

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_FRAMES = (ZSTD_MAGIC, *(bytes([low]) + b"\x2a\x4d\x18" for low in range(0x50, 0x60)))
"""What a zstd frame, or one to be skipped, begins with (RFC 8878, 3.1)."""

PIECE = 1 << 20
"""Bytes handed on at a time: small enough for the processor's cache, large enough to hold many source files."""

FIRST_PIECE = 1 << 16
"""The first one is smaller, and each one twice the one before: whoever writes need not wait for a whole one."""

_TAR_BLOCK = 512  # no tar archive is shorter
_GZIP_WBITS = 31  # zlib.decompressobj: 16 + 15, a gzip header and trailer, both verified
crc32: Callable[..., int] = (_accelerated or zlib).crc32
INFLATER = "isal" if _accelerated is not None else "zlib"


def _may_become(start: bytes, magics: Iterable[bytes]) -> bool:
    """Whether more bytes could make ``start`` one of ``magics``."""
    return any(len(start) < len(magic) and magic.startswith(start) for magic in magics)


def _module(name: str) -> Any:
    return _accelerated if name == "isal" and _accelerated is not None else zlib


def _zstd() -> Any:
    """The standard library's module (3.14), or its backport under its own name; None without either."""
    for name in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            return import_module(name)
    return None


class _Frame:
    """One frame of zstd behind the interface of :func:`zlib.decompressobj`, as far as it is used here."""

    unconsumed_tail = b""  # it keeps by itself what it has not used yet

    def __init__(self, module: Any) -> None:
        self._inner = module.ZstdDecompressor()

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data)

    def decompress(self, data: bytes, most: int) -> bytes:
        return bytes(self._inner.decompress(data, most))


@dataclass(frozen=True)
class _Packing:
    """How an archive is packed: what each of its parts begins with, what decodes one, and how that complains."""

    name: str
    begins: tuple[bytes, ...]
    engine: Callable[[], Any]
    error: type[Exception]


class Inflate:
    """One pass over an archive: gzip, zstd, or a stream that is not packed at all.

    Args:
        label: how the archive is called in messages.
        limits: see :class:`Limits`.
        inflater: "isal" or "zlib".
        plain: whether what is neither gzip nor zstd is handed on as it is; it is refused otherwise.

    Attributes:
        compressed: bytes consumed so far.
        raw: bytes produced so far.
    """

    def __init__(self, label: str, limits: Limits, inflater: str = INFLATER, *, plain: bool = True) -> None:
        self.label = label
        self.limits = limits
        self.compressed = 0
        self.raw = 0
        self._inflater = inflater
        self._plain = plain
        self._piece = FIRST_PIECE
        self._members = 0
        self._padding = False

    def run(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the raw bytes in pieces; of at most :data:`PIECE` where they were packed.

        Raises:
            ArchiveError: not an archive, damaged, truncated, trailing garbage, or over the limits.
        """
        counted = self._counted(chunks)
        start = b""
        for chunk in counted:
            start += chunk
            if len(start) >= len(ZSTD_MAGIC) or not _may_become(start, (GZIP_MAGIC, *_ZSTD_FRAMES)):
                break
        packing = self._packing(start)
        whole = itertools.chain((start,) if start else (), counted)
        yield from self._as_it_is(whole) if packing is None else self._unpacked(packing, whole)

    def _counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.compressed += len(chunk)
            yield chunk

    def _packing(self, start: bytes) -> _Packing | None:
        if start.startswith(_ZSTD_FRAMES):
            module = _zstd()
            if module is None:
                raise self._refuse(
                    "The archive is packed with zstd, which nothing in this image can unpack",
                    hint="pip install flytekitplugins-safedist[zstd], or pack it with gzip",
                )
            return _Packing("zstd", _ZSTD_FRAMES, lambda: _Frame(module), module.ZstdError)
        if start.startswith(GZIP_MAGIC) or GZIP_MAGIC.startswith(start) or not self._plain:
            module = _module(self._inflater)
            return _Packing("gzip", (GZIP_MAGIC,), lambda: module.decompressobj(wbits=_GZIP_WBITS), module.error)
        return None

    def _as_it_is(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        first = b""
        for chunk in chunks:
            self.raw += len(chunk)
            self._check_limits()
            first = first or chunk[:8]
            yield chunk
        if self.raw < _TAR_BLOCK:
            raise self._refuse(
                "The archive is not a tar archive",
                seen=f"{self.raw} bytes, the first {first!r}",
                expected="tar, plain or packed with gzip or zstd",
                hint="the object is not a code archive; register the task again",
            )

    def _unpacked(self, packing: _Packing, chunks: Iterable[bytes]) -> Iterator[bytes]:
        engine: Any = None
        pending = b""
        for chunk in chunks:
            data = pending + chunk if pending else chunk
            pending = b""
            while data:
                if engine is None:
                    if self._at_padding(data, packing):
                        break
                    if _may_become(data, packing.begins):
                        pending = data
                        break
                    engine = self._begin(data, packing)
                yield from self._pieces(engine, data, packing)
                if not engine.eof:
                    break
                data = engine.unused_data
                engine = None
        if engine is not None or pending or not self._members:
            raise self._refuse(
                f"The archive is truncated: its {packing.name} stream ends early",
                seen=f"{self.compressed} compressed bytes",
                hint="register the task again; if it repeats, the upload or a proxy cuts objects short",
            )

    def _at_padding(self, data: bytes, packing: _Packing) -> bool:
        """gzip allows zero bytes behind the last member (tapes), and only those."""
        if self._members and (self._padding or data[0] == 0):
            if data.count(0) != len(data):
                raise self._refuse(f"The archive has trailing garbage behind its {packing.name} stream")
            self._padding = True
            return True
        return False

    def _begin(self, data: bytes, packing: _Packing) -> Any:
        if not data.startswith(packing.begins):
            if self._members:
                raise self._refuse(f"The archive has trailing garbage behind its {packing.name} stream")
            raise self._refuse(
                "The archive is not gzip",
                seen=f"first bytes {data[:8]!r}",
                expected=f"first bytes {GZIP_MAGIC!r}",
                hint="the object is not a code archive; register the task again",
            )
        self._members += 1
        return packing.engine()

    def _pieces(self, engine: Any, data: bytes, packing: _Packing) -> Iterator[bytes]:
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
        except packing.error as error:
            raise self._refuse(
                f"The archive is damaged: its {packing.name} stream does not decode or fails its checksum",
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
