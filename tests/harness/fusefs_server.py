"""The process behind ``tests.harness.fusefs``: one mount of the backing directory, and the rules it misbehaves by."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import json
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

from tests.harness import fusefs_kernel

BORN = "user.born"
"""The extended attribute of an entry in the backing directory that says when (seconds since 1970) it was made."""

DEFAULTS: dict[str, Any] = {
    "late": None,  # [least, most] seconds that an entry of another client stays out of sight, from its making
    "late_match": "*",  # which paths (relative to the mount, fnmatch) are late
    "hidden": [],  # patterns of entries of other clients that stay out of sight until this list changes
    "stale_attrs": 0.0,  # seconds for which stat() answers from what it saw first
    "not_there": 0.0,  # seconds for which a name that was not found stays so, unless its directory is opened
    # [{"op", "errno" or "seconds" that it takes, "when": "before"|"after", "first": n | "chance": p, "match": glob}]
    "faults": [],
    "locks": "local",  # "local" (this kernel), "shared" (between clients), "dropped" (always granted), or an errno
    "replaces": True,  # False: rename() onto a file that is there fails with EEXIST, as object mounts have it
    "links": True,  # False: link() fails with EPERM, as on FAT, SMB or object stores
    "seed": 0,
}


class _Rules:
    """The rules in force and what they have decided so far; shared by the server's threads."""

    def __init__(self, rules: dict[str, Any]) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, Any] = dict(DEFAULTS)
        self.counts: Counter[str] = Counter()
        self.hits: Counter[int] = Counter()
        self.random = random.Random(rules.get("seed", 0))

        self.update(rules)

    def update(self, rules: dict[str, Any]) -> None:
        unknown = set(rules) - set(DEFAULTS)
        if unknown:
            raise TypeError(f"unknown rules: {sorted(unknown)}")
        with self.lock:
            self.values.update(rules)
            if "faults" in rules:
                self.hits.clear()

    def fault(self, op: str, path: str, when: str) -> None:
        faults = self.values["faults"]
        if not faults:
            return
        with self.lock:
            for index, rule in enumerate(faults):
                if rule["op"] not in (op, "*") or rule.get("when", "before") != when:
                    continue
                if not fnmatch.fnmatch(path, rule.get("match", "*")):
                    continue
                self.hits[index] += 1
                hit = self.hits[index]
                strikes = hit <= rule["first"] if "first" in rule else self.random.random() < rule.get("chance", 1.0)
                if strikes and "seconds" in rule:
                    time.sleep(rule["seconds"])
                elif strikes:
                    code = getattr(errno, rule["errno"])
                    raise OSError(code, os.strerror(code), path)


class _Sight:
    """Which entries this client has come to see."""

    def __init__(self, root: str, rules: _Rules) -> None:
        self.root, self.rules = root, rules
        self.visible_at: dict[str, float] = {}
        self.mine: set[str] = set()
        self.attrs: dict[str, tuple[float, os.stat_result]] = {}
        self.missed: dict[str, float] = {}

    def made(self, path: str) -> None:
        """This client made ``path``: it sees it at once; the others count from now."""
        self.mine.add(path)
        self.attrs.pop(path, None)
        self.missed.pop(path, None)
        with contextlib.suppress(OSError):
            os.setxattr(self.root + path, BORN, repr(time.time()).encode(), follow_symlinks=False)

    def gone(self, path: str) -> None:
        for table in (self.visible_at, self.attrs):
            table.pop(path, None)
        self.mine.discard(path)

    def moved(self, old: str, new: str) -> None:
        """This client renamed ``old``, with what is below it."""
        self.gone(old)
        for table in (self.visible_at, self.attrs):
            for path in [path for path in list(table) if path.startswith(old + "/")]:
                table.pop(path, None)
        # Of a copy: other threads make entries meanwhile, and a set that grows ends the walk over it.
        below = {path for path in list(self.mine) if path.startswith(old + "/")}
        self.mine.difference_update(below)
        self.mine.update(new + path[len(old) :] for path in below)
        self.made(new)

    def looked(self, path: str, answer: BaseException | None) -> None:
        """This client has asked the server for ``path``."""
        if isinstance(answer, FileNotFoundError):
            self.missed.setdefault(path, time.monotonic())
        elif answer is None:
            self.missed.pop(path, None)

    def opened(self, directory: str) -> None:
        """Opening a directory makes this client ask again for what it did not find there (close-to-open)."""
        for path in [path for path in list(self.missed) if os.path.dirname(path) == directory]:
            self.missed.pop(path, None)

    def remembers_no(self, path: str) -> bool:
        """Whether this client says "no such file" without asking."""
        return time.monotonic() < self.missed.get(path, -math.inf) + self.rules.values["not_there"]

    def check(self, path: str) -> None:
        """ENOENT unless this client sees ``path`` and every directory above it."""
        values = self.rules.values
        if path == "/" or not (values["late"] or values["hidden"]):
            return
        parts = path.split("/")[1:]
        for end in range(1, len(parts) + 1):
            if not self._sees("/" + "/".join(parts[:end])):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _sees(self, path: str) -> bool:
        values = self.rules.values
        if not os.path.lexists(self.root + path):
            self.gone(path)
            return False
        if path in self.mine:
            return True
        relative = path[1:]
        if any(fnmatch.fnmatch(relative, pattern) for pattern in values["hidden"]):
            return False
        if not values["late"] or not fnmatch.fnmatch(relative, values["late_match"]):
            return True
        if path not in self.visible_at:
            try:
                born = float(os.getxattr(self.root + path, BORN, follow_symlinks=False))
            except OSError:
                return False  # being made this moment, and not yet dated
            delay = random.Random(f"{values['seed']}:{path}").uniform(*values["late"])
            self.visible_at[path] = born + delay
        return time.time() >= self.visible_at[path]


class _Operations:
    """The file system: every operation goes through ``__call__``, where the rules strike."""

    MAKING = ("mkdir", "create", "symlink", "link", "mknod")
    BY_HANDLE = ("read", "write", "flush", "fsync", "release", "readdir", "releasedir", "fsyncdir", "flock")

    def __init__(self, backing: str, rules: dict[str, Any]) -> None:
        self.root = os.path.realpath(backing)
        self.rules = _Rules(rules)
        self.sight = _Sight(self.root, self.rules)
        self.has_locks = self.rules.values["locks"] != "local"

    def __call__(self, op: str, path: str | None, *args: Any) -> Any:
        with self.rules.lock:
            self.rules.counts[op] += 1
        name = (path or "/")[1:]
        self.rules.fault(op, name, "before")
        if op in self.MAKING and path is not None:
            self.sight.check(os.path.dirname(path))
        elif path is not None and op not in self.BY_HANDLE:
            self.sight.check(path)
        result = self._asked(op, path, *args) if op in ("getattr", "open") else getattr(self, op)(path, *args)
        self.rules.fault(op, name, "after")
        return result

    def _asked(self, op: str, path: str | None, *args: Any) -> Any:
        """What finds a file by its name, unless this client remembers that there is none."""
        if path is None or not self.rules.values["not_there"]:
            return getattr(self, op)(path, *args)
        if self.sight.remembers_no(path):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        try:
            result = getattr(self, op)(path, *args)
        except OSError as error:
            self.sight.looked(path, error)
            raise
        self.sight.looked(path, None)
        return result

    # --- names -----------------------------------------------------------------------------------------------------
    def getattr(self, path: str | None, handle: int | None = None) -> os.stat_result:
        if handle is not None:
            return os.fstat(handle)
        assert path is not None
        stale = self.rules.values["stale_attrs"]
        seen = self.sight.attrs.get(path)
        if stale and seen and time.monotonic() < seen[0] + stale:
            return seen[1]
        stat = os.lstat(self.root + path)
        if stale:
            self.sight.attrs[path] = (time.monotonic(), stat)
        return stat

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self.root + path, mode)
        self.sight.made(path)

    def mknod(self, path: str, mode: int, device: int) -> None:
        os.mknod(self.root + path, mode, device)
        self.sight.made(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(self.root + path)
        self.sight.gone(path)

    def unlink(self, path: str) -> None:
        os.unlink(self.root + path)
        self.sight.gone(path)

    def symlink(self, path: str, target: str) -> None:
        os.symlink(target, self.root + path)
        self.sight.made(path)

    def readlink(self, path: str) -> str:
        return os.readlink(self.root + path)

    def rename(self, old: str, new: str) -> None:
        if not self.rules.values["replaces"] and os.path.isfile(self.root + new):
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        os.rename(self.root + old, self.root + new)
        self.sight.moved(old, new)

    def link(self, path: str, source: str) -> None:
        if not self.rules.values["links"]:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        os.link(self.root + source, self.root + path, follow_symlinks=False)
        self.sight.made(path)

    def opendir(self, path: str) -> int:
        self.sight.opened(path)
        return os.open(self.root + path, os.O_RDONLY | os.O_DIRECTORY)

    def readdir(self, path: str | None, handle: int) -> list[str]:
        names = []
        for name in os.listdir(handle):
            with contextlib.suppress(FileNotFoundError):
                self.sight.check(f"{(path or '').rstrip('/')}/{name}")
                names.append(name)
        return [".", "..", *names]

    def releasedir(self, path: str | None, handle: int) -> None:
        os.close(handle)

    def fsyncdir(self, path: str | None, handle: int) -> None:
        os.fsync(handle)

    def access(self, path: str, mode: int) -> None:
        if not os.access(self.root + path, mode):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self.root + path, mode)
        self.sight.attrs.pop(path, None)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.lchown(self.root + path, uid, gid)
        self.sight.attrs.pop(path, None)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(self.root + path, ns=times, follow_symlinks=False)
        self.sight.attrs.pop(path, None)

    def statfs(self, path: str) -> os.statvfs_result:
        return os.statvfs(self.root + path)

    # --- contents --------------------------------------------------------------------------------------------------
    def create(self, path: str, mode: int, flags: int) -> int:
        handle = os.open(self.root + path, (flags | os.O_CREAT) & ~os.O_APPEND, mode)
        self.sight.made(path)
        return handle

    def open(self, path: str, flags: int) -> int:
        handle = os.open(self.root + path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_APPEND))
        self.sight.attrs.pop(path, None)
        return handle

    def read(self, path: str | None, handle: int, size: int, offset: int) -> bytes:
        return os.pread(handle, size, offset)

    def write(self, path: str | None, handle: int, data: bytes, offset: int) -> int:
        self.sight.attrs.pop(path or "", None)
        return os.pwrite(handle, data, offset)

    def truncate(self, path: str | None, length: int, handle: int | None = None) -> None:
        os.truncate(self.root + (path or "") if handle is None else handle, length)
        self.sight.attrs.pop(path or "", None)

    def flush(self, path: str | None, handle: int) -> None:
        """A close: there is nothing to do, and it may be told to fail."""

    def fsync(self, path: str | None, handle: int) -> None:
        os.fsync(handle)

    def release(self, path: str | None, handle: int) -> None:
        os.close(handle)

    # --- locks -----------------------------------------------------------------------------------------------------
    def flock(self, path: str | None, handle: int, op: int) -> None:
        kind = self.rules.values["locks"]
        if kind == "shared":
            fcntl.flock(handle, op)
        elif kind != "dropped":
            code = getattr(errno, kind)
            raise OSError(code, os.strerror(code), path)


def _serve(backing: str, mountpoint: str, rules: dict[str, Any]) -> None:
    output = threading.Lock()

    def say(message: Any) -> None:
        with output:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    os.umask(0)  # the caller's umask was applied by its kernel side
    operations = _Operations(backing, rules)
    mount = fusefs_kernel.Mount(operations, mountpoint)

    def control() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "set" in message:
                operations.rules.update(message["set"])
                say({"done": True})
            else:
                with operations.rules.lock:
                    counts = dict(operations.rules.counts)
                say(counts)
        fusefs_kernel.unmount(mountpoint)
        os._exit(0)

    threading.Thread(target=control, daemon=True).start()
    say({"ready": True})
    mount.serve()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
