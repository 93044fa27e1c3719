"""Whether what Kubernetes tells a container reaches this process: it tells the container's first one alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_INITS = ("tini", "docker-init", "dumb-init", "catatonit")
"""What hands signals on that it waits for (``sigtimedwait``), which /proc does not show."""


def deaf_parent() -> str | None:
    """Of the processes from the container's first one to this, the nearest that neither catches nor blocks SIGTERM, and
    so hands it on to nobody: a shell that waits for its command, or ``conda run``. None, too, where /proc hides it."""
    with suppress(OSError, LookupError, ValueError):
        pid = os.getppid()
        while pid > 0:
            facts = _facts(pid)
            taken = int(facts["SigCgt"], 16) | int(facts["SigBlk"], 16)
            if not taken >> (signal.SIGTERM - 1) & 1 and not facts["Name"].startswith(_INITS):
                return f"{facts['Name']} (process {pid})"
            pid = int(facts["PPid"])
    return None


def _facts(pid: int) -> Mapping[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}
