"""The kernel's side of a FUSE file system (``linux/fuse.h``, version 7.31), without a library: requests are read from
``/dev/fuse``, told to an object by paths, and answered.

Only root can mount this way. Names and attributes are never cached by the kernel: it asks each time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NOSUID_NODEV, _DETACH = 6, 2
_VERSION = 7, 31
_BIGGEST = 128 << 10
"""Bytes of one write."""
_ASYNC_READ, _BIG_WRITES, _FLOCK_LOCKS = 1 << 0, 1 << 5, 1 << 10
"""Of locks, those of flock(2) alone."""
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _HANDLE, _ATIME_NOW, _MTIME_NOW = (1 << bit for bit in range(9))
"""What a ``setattr`` sets."""
_NO_INODE = 0xFFFFFFFF
"""Of a directory's entry: unknown."""
_IDLE = 8
"""Threads that wait for a request, at most."""


def unmount(mountpoint: str | os.PathLike[str]) -> None:
    """At once; who holds files there is cut off with the end of the server."""
    _LIBC.umount2(os.fsencode(mountpoint), _DETACH)


class _Nodes:
    """The kernel's numbers for paths. What was removed or replaced keeps its number, and has no path."""

    def __init__(self) -> None:
        self._paths: dict[int, str | None] = {1: "/"}
        self._numbers = {"/": 1}
        self._lookups: dict[int, int] = {}
        self._last = 1

    def path(self, number: int) -> str | None:
        return self._paths[number]

    def below(self, number: int, name: bytes) -> str:
        directory = self._paths[number]
        if directory is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return f"{directory.rstrip('/')}/{os.fsdecode(name)}"

    def looked_up(self, path: str) -> int:
        if path not in self._numbers:
            self._last += 1
            self._numbers[path], self._paths[self._last] = self._last, path
        number = self._numbers[path]
        self._lookups[number] = self._lookups.get(number, 0) + 1
        return number

    def forget(self, number: int, lookups: int) -> None:
        self._lookups[number] = self._lookups.get(number, 0) - lookups
        if self._lookups[number] <= 0 and number != 1:
            path = self._paths.pop(number, None)
            del self._lookups[number]
            if path is not None:
                del self._numbers[path]

    def gone(self, path: str) -> None:
        number = self._numbers.pop(path, None)
        if number is not None:
            self._paths[number] = None

    def moved(self, old: str, new: str) -> None:
        self.gone(new)
        for path in [path for path in self._numbers if path == old or path.startswith(f"{old}/")]:
            number, here = self._numbers.pop(path), new + path[len(old) :]
            self._numbers[here], self._paths[number] = number, here


class Mount:
    """A mounted file system.

    Args:
        operations: called as ``operations(name, path, *arguments)``; path is None where a file that is open has none
            any more. Raises OSError.
        mountpoint: a directory.

    Raises:
        OSError: it cannot be mounted.
    """

    def __init__(self, operations: Any, mountpoint: str) -> None:
        self._operations, self._nodes = operations, _Nodes()
        self._listings: dict[int, list[bytes]] = {}
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        data = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        if _LIBC.mount(b"fusefs", os.fsencode(mountpoint), b"fuse", _NOSUID_NODEV, data.encode()) != 0:
            raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}", mountpoint)
        # What goes by a path goes one after the other: a rename above it would make the path another's.
        self._by_path = threading.RLock()
        self._counting, self._idle = threading.Lock(), 1

    def serve(self, *, helps: bool = False) -> None:
        """Answer until it is unmounted. As many threads as there are requests: a lock may be waited for.

        Args:
            helps: this is a further thread, which may leave when there are more than enough.
        """
        while True:
            try:
                request = os.read(self._device, _BIGGEST + 8192)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    os._exit(0)
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):  # ENOENT: it was given up
                    continue
                raise
            with self._counting:
                self._idle -= 1
                if self._idle == 0:
                    self._idle += 1
                    threading.Thread(target=self.serve, kwargs={"helps": True}, daemon=True).start()
            self._answer(request)
            with self._counting:
                if helps and self._idle >= _IDLE:
                    return
                self._idle += 1

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
        name, by_handle = _OPCODES.get(opcode, ("unknown", False))
        result, status = b"", 0
        try:
            answer: Callable[[int, bytes], bytes | None] = getattr(self, f"_{name}")
            if by_handle:
                told = answer(node, request[40:])
            else:
                with self._by_path:
                    told = answer(node, request[40:])
            if told is None:
                return
            result = told
        except OSError as error:
            status = -(error.errno or errno.EIO)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            status = -errno.EIO
        try:
            os.write(self._device, struct.pack("<IiQ", 16 + len(result), status, unique) + result)
        except OSError as error:
            if error.errno != errno.ENOENT:  # nobody waits for it any more
                raise

    def _ask(self, op: str, path: str | None, *arguments: Any) -> Any:
        return self._operations(op, path, *arguments)

    # --- about the connection ----------------------------------------------------------------------------------------
    def _init(self, _node: int, body: bytes) -> bytes:
        _major, _minor, ahead, offered = struct.unpack_from("<IIII", body)
        wanted = _ASYNC_READ | _BIG_WRITES | (_FLOCK_LOCKS if self._operations.has_locks else 0)
        return struct.pack("<IIIIHHIIHH8I", *_VERSION, ahead, offered & wanted, 12, 9, _BIGGEST, 1, 0, 0, *[0] * 8)

    def _nothing(self, _node: int, _body: bytes) -> bytes:
        return b""

    def _unknown(self, _node: int, _body: bytes) -> bytes:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def _interrupt(self, _node: int, _body: bytes) -> None:
        """What is under way is done to its end."""

    def _forget(self, node: int, body: bytes) -> None:
        self._nodes.forget(node, struct.unpack_from("<Q", body)[0])

    def _batch_forget(self, _node: int, body: bytes) -> None:
        for number, lookups in struct.iter_unpack("<QQ", body[8 : 8 + 16 * struct.unpack_from("<I", body)[0]]):
            self._nodes.forget(number, lookups)

    # --- names -------------------------------------------------------------------------------------------------------
    def _entry(self, path: str, found: os.stat_result) -> bytes:
        return struct.pack("<QQQQII", self._nodes.looked_up(path), 0, 0, 0, 0, 0) + _attributes(found)

    def _new(self, op: str, path: str, *arguments: Any) -> bytes:
        self._ask(op, path, *arguments)
        return self._entry(path, self._ask("getattr", path))

    def _lookup(self, node: int, body: bytes) -> bytes:
        path = self._nodes.below(node, body[:-1])
        return self._entry(path, self._ask("getattr", path))

    def _getattr(self, node: int, body: bytes) -> bytes:
        flags, handle = struct.unpack_from("<IxxxxQ", body)
        return self._attr(node, handle if flags & 1 else None)

    def _attr(self, node: int, handle: int | None) -> bytes:
        path = self._path(node, handle)
        return bytes(16) + _attributes(self._ask("getattr", path, *([] if handle is None else [handle])))

    def _path(self, node: int, handle: int | None) -> str | None:
        path = self._nodes.path(node)
        if path is None and handle is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return path

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, given, size, *rest = struct.unpack_from("<IxxxxQQ8xQQQIIIIxxxxII", body)
        atime, mtime, _ctime, atime_ns, mtime_ns, _ctime_ns, mode, uid, gid = rest
        handle = given if valid & _HANDLE else None
        path = self._path(node, handle)
        if valid & _MODE:
            self._ask("chmod", path, stat.S_IMODE(mode))
        if valid & (_UID | _GID):
            self._ask("chown", path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & _SIZE:
            self._ask("truncate", path, size, *([] if handle is None else [handle]))
        if valid & _ATIME and valid & _MTIME:
            is_now = valid & (_ATIME_NOW | _MTIME_NOW)
            times = None if is_now else (atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns)
            self._ask("utimens", path, times)
        return self._attr(node, handle)

    def _readlink(self, node: int, _body: bytes) -> bytes:
        return os.fsencode(self._ask("readlink", self._path(node, None)))

    def _symlink(self, node: int, body: bytes) -> bytes:
        name, target, _ = body.split(b"\0")
        return self._new("symlink", self._nodes.below(node, name), os.fsdecode(target))

    def _mkdir(self, node: int, body: bytes) -> bytes:
        return self._new("mkdir", self._nodes.below(node, body[8:-1]), struct.unpack_from("<I", body)[0])

    def _mknod(self, node: int, body: bytes) -> bytes:
        return self._new("mknod", self._nodes.below(node, body[16:-1]), *struct.unpack_from("<II", body))

    def _link(self, node: int, body: bytes) -> bytes:
        source = self._path(struct.unpack_from("<Q", body)[0], None)
        return self._new("link", self._nodes.below(node, body[8:-1]), source)

    def _unlink(self, node: int, body: bytes) -> bytes:
        return self._removed("unlink", self._nodes.below(node, body[:-1]))

    def _rmdir(self, node: int, body: bytes) -> bytes:
        return self._removed("rmdir", self._nodes.below(node, body[:-1]))

    def _removed(self, op: str, path: str) -> bytes:
        self._ask(op, path)
        self._nodes.gone(path)
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        old, new, _ = body[8:].split(b"\0")
        before = self._nodes.below(node, old)
        after = self._nodes.below(struct.unpack_from("<Q", body)[0], new)
        self._ask("rename", before, after)
        self._nodes.moved(before, after)
        return b""

    def _access(self, node: int, body: bytes) -> bytes:
        self._ask("access", self._path(node, None), struct.unpack_from("<I", body)[0])
        return b""

    def _statfs(self, node: int, _body: bytes) -> bytes:
        found = self._ask("statfs", self._path(node, None))
        sizes = found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
        return struct.pack("<5Q10I", *sizes, found.f_bsize, found.f_namemax, found.f_frsize, *[0] * 7)

    # --- contents ----------------------------------------------------------------------------------------------------
    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self._nodes.below(node, body[16:-1])
        handle = self._ask("create", path, mode, flags)
        return self._entry(path, self._ask("getattr", path, handle)) + struct.pack("<QII", handle, 0, 0)

    def _open(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", self._ask("open", self._path(node, None), struct.unpack_from("<I", body)[0]), 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        data: bytes = self._ask("read", self._nodes.path(node), handle, size, offset)
        return data

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", self._ask("write", self._nodes.path(node), handle, body[40 : 40 + size], offset), 0)

    def _of_handle(self, op: str, node: int, body: bytes) -> bytes:
        self._ask(op, self._nodes.path(node), struct.unpack_from("<Q", body)[0])
        return b""

    def _flush(self, node: int, body: bytes) -> bytes:
        return self._of_handle("flush", node, body)

    def _fsync(self, node: int, body: bytes) -> bytes:
        return self._of_handle("fsync", node, body)

    def _fsyncdir(self, node: int, body: bytes) -> bytes:
        return self._of_handle("fsyncdir", node, body)

    def _release(self, node: int, body: bytes) -> bytes:
        return self._of_handle("release", node, body)

    def _releasedir(self, node: int, body: bytes) -> bytes:
        self._listings.pop(struct.unpack_from("<Q", body)[0], None)
        return self._of_handle("releasedir", node, body)

    def _opendir(self, node: int, _body: bytes) -> bytes:
        return struct.pack("<QII", self._ask("opendir", self._path(node, None)), 0, 0)

    def _readdir(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        if offset == 0:
            names = self._ask("readdir", self._nodes.path(node), handle)
            self._listings[handle] = [os.fsencode(name) for name in names]
        told = b""
        for number, name in enumerate(self._listings[handle][offset:], int(offset) + 1):
            entry = struct.pack("<QQII", _NO_INODE, number, len(name), 0) + name
            entry += bytes(-len(entry) % 8)
            if len(told) + len(entry) > size:
                break
            told += entry
        return told

    # --- locks -------------------------------------------------------------------------------------------------------
    def _setlk(self, node: int, body: bytes) -> bytes:
        return self._locked(node, body, fcntl.LOCK_NB)

    def _setlkw(self, node: int, body: bytes) -> bytes:
        return self._locked(node, body, 0)

    def _locked(self, node: int, body: bytes, how: int) -> bytes:
        handle, kind = struct.unpack_from("<Q24xI", body)
        operation = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}.get(kind, fcntl.LOCK_UN)
        self._ask("flock", self._nodes.path(node), handle, operation | how)
        return b""


_OPCODES = {
    **{1: ("lookup", False), 2: ("forget", False), 3: ("getattr", False), 4: ("setattr", False)},
    **{5: ("readlink", False), 6: ("symlink", False), 8: ("mknod", False), 9: ("mkdir", False)},
    **{10: ("unlink", False), 11: ("rmdir", False), 12: ("rename", False), 13: ("link", False)},
    **{14: ("open", False), 15: ("read", True)},
    **{16: ("write", True), 17: ("statfs", False), 18: ("release", True), 20: ("fsync", True), 25: ("flush", True)},
    **{26: ("init", False), 27: ("opendir", False), 28: ("readdir", False), 29: ("releasedir", True)},
    **{30: ("fsyncdir", True), 32: ("setlk", True), 33: ("setlkw", True)},
    **{34: ("access", False), 35: ("create", False), 36: ("interrupt", True), 38: ("nothing", False)},
    **{42: ("batch_forget", False)},
}
"""Requests, and whether they go by a handle; of what is not here the kernel is told that there is none."""


def _attributes(found: os.stat_result) -> bytes:
    times = [getattr(found, f"st_{which}time_ns") for which in "amc"]
    return struct.pack(
        "<6Q10I",
        *(found.st_ino, found.st_size, found.st_blocks),
        *(time // 10**9 for time in times),
        *(time % 10**9 for time in times),
        *(found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev, found.st_blksize, 0),
    )
