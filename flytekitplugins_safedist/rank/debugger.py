"""``breakpoint()`` in a rank: rank 0's, at the terminal on which the job was started.

A rank has neither a terminal nor an input of its own, so that Python's debugger would quit at its first question. It
opens the agent's terminal, which stays the agent's: Ctrl-C in the debugger still ends the job. While a person is asked,
the agent's deadline for this round's start waits.
"""

from __future__ import annotations

import logging
import os
import pdb
import sys

from ..errors import NoTerminalError
from ..record.line import GONE
from .context import RankContext
from .shared_page import RankPage

logger = logging.getLogger(__name__)


def terminal() -> str:
    """The path of this process's terminal; "" where nobody sits at one."""
    try:
        return os.ttyname(0) if os.isatty(0) else ""
    except OSError:  # it is not in this container's /dev
        return ""


def take_breakpoints(terminal: str, place: RankContext, page: RankPage) -> None:
    """Have ``breakpoint()`` come here, unless the user has a debugger of another kind (PYTHONBREAKPOINT, or a hook of a
    module's)."""

    def stop(*_: object, **__: object) -> None:
        if not terminal:
            raise NoTerminalError(
                "breakpoint() was called where there is no terminal",
                where={"rank": place.rank},
                hint="run the task locally, on a terminal; or set PYTHONBREAKPOINT to a debugger that needs none, or "
                "to 0 to ignore breakpoint()",
            )
        if place.rank != 0:
            logger.warning("breakpoint() stops only rank 0; this rank continues")
            return
        # Last: whatever is called after it is where the debugger would stop.
        _Debugger(terminal, page).set_trace(sys._getframe(1))

    if sys.breakpointhook is sys.__breakpointhook__ and not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = stop


class _Debugger(pdb.Pdb):
    def __init__(self, terminal: str, page: RankPage) -> None:
        both = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
        # nosigint: Ctrl-C after "continue" ends the job, too, rather than come back to the prompt.
        super().__init__(stdin=open(both), stdout=open(both, "w", buffering=1, closefd=False), nosigint=True)  # noqa: SIM115
        self._page = page

    def interaction(self, *args: object, **kwargs: object) -> None:
        with self._page.debugging():
            self.stdout.write(GONE)  # what the agent has drawn there
            super().interaction(*args, **kwargs)  # type: ignore[arg-type]

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's own goes on after a KeyboardInterrupt, and the agent would have to kill this rank
