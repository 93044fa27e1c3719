"""A FUSE file system that misbehaves on order, for tests: what NFS, BeeGFS or an object-store mount do to programs.

One backing directory plays the server; every mount of it is one *client* (one node), in a process of its own.
A client can

* show entries that other clients made late (``late``: seconds since they were made) or not until told (``hidden``);
* answer ``stat`` from a cache that is ``stale_attrs`` seconds old, until the file is opened (close-to-open);
* remember for ``not_there`` seconds that a name was not found, until the directory it is in is opened;
* fail an operation with any errno, before it is done or after (a lost reply), or take its time (``faults``);
* drop locks, refuse them, or arbitrate them between clients (``locks``); refuse hard links (``links``), or
  renames onto a file that is there (``replaces``).

As in every FUSE file system, ``close`` is asynchronous: a lock that is dropped only by closing is free a little later.
A first ESTALE is retried by the kernel itself; two in a row reach the program.

What it cannot show: caches of file *contents* that outlive a close, and a server that loses data it had acknowledged.

Needs Linux, ``/dev/fuse`` and root, and no library (:mod:`tests.harness.fusefs_kernel`)::

    with FuseMount(backing, mountpoint, late=[0, 3]) as client:
        client.set(faults=[{"op": "mkdir", "errno": "ESTALE", "first": 2}])
        assert client.counts()["mkdir"] == 0
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from tests.harness import fusefs_kernel


def require() -> None:
    """Leave the calling test out, saying why, on a machine that cannot mount; in CI (``SAFEDIST_CI``) fail it."""
    from tests.harness import needs

    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except PermissionError as error:
        needs.missing(f"a FUSE file system cannot be mounted ({error})", bring="sudo make test")
    except OSError as error:
        bring = "modprobe fuse (a container: docker run --device /dev/fuse --cap-add SYS_ADMIN)"
        needs.missing(f"there is no FUSE here ({error})", bring=bring)


class FuseMount:
    """One client: a mount of ``backing`` at ``mountpoint``, served by a process of its own until ``close``."""

    def __init__(self, backing: str | os.PathLike[str], mountpoint: str | os.PathLike[str], **rules: Any) -> None:
        self.backing = Path(backing)
        self.path = Path(mountpoint)
        self.backing.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        places = [str(self.backing.absolute()), str(self.path.absolute())]
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.fusefs_server", *places, json.dumps(rules)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        ready = self._readline()
        if ready != {"ready": True}:
            self.close()
            raise RuntimeError(f"the FUSE server did not start: {ready}")

    def _readline(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        return json.loads(line) if line else {"ended": self._server.wait()}

    def _ask(self, **message: Any) -> Any:
        assert self._server.stdin is not None
        with self._lock:
            self._server.stdin.write(json.dumps(message) + "\n")
            self._server.stdin.flush()
            return self._readline()

    def set(self, **rules: Any) -> None:
        """Change rules; when this returns they hold for every operation that starts from now on."""
        self._ask(set=rules)

    def counts(self) -> Counter[str]:
        """How often each operation was asked of this client's file system since the mount."""
        return Counter(self._ask(counts=True))

    def close(self) -> None:
        """Unmount and end the server; open files are cut off."""
        fusefs_kernel.unmount(self.path)
        with contextlib.suppress(OSError):
            if self._server.stdin is not None:
                self._server.stdin.close()  # its control thread sees the end and leaves, also when the test runner dies
        self._server.wait()
        if self._server.stdout is not None:
            self._server.stdout.close()

    def __enter__(self) -> FuseMount:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
