"""Runs a command on a terminal of its own, types what it is told to, and shows what comes.

``python -m tests.harness.terminal TYPED COMMAND...``; TYPED is JSON, ``[[texts to wait for, what to type then], ...]``.
Its exit status is the command's.
"""

from __future__ import annotations

import json
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

COLUMNS = 200


def screen(file: Path) -> list[str]:
    """What a person sees of what a command has written: lines that are not empty."""
    import pyte  # not in the environments of the corners, whose warm process imports this module

    written = file.read_bytes()
    seen = pyte.Screen(COLUMNS, 2 * written.count(b"\n") + 1)
    pyte.ByteStream(seen).feed(written)
    return [line.rstrip() for line in seen.display if line.strip()]


def on_a_terminal(typed: list[tuple[list[str], str]], become: Callable[[], NoReturn]) -> int:
    """The exit status of what a forked process becomes on a terminal, where that is typed."""
    pid, terminal = pty.fork()
    if pid == 0:
        become()
    seen = b""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # EIO: nobody has the other end any more
            break
        os.write(1, data)
        seen += data
        while typed and all(text.encode() in seen for text in typed[0][0]):
            seen = b""
            os.write(terminal, typed.pop(0)[1].encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(on_a_terminal(json.loads(sys.argv[1]), lambda: os.execvp(sys.argv[2], sys.argv[2:])))
