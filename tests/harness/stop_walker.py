"""``safedist-execute`` that tries SIGTERM again and again on its way: at every so many imports it forks a copy of
itself, which gets the signal there and then. One run of the imports pays for all points.

Run by :mod:`tests.agents.test_stopping`: ``python -m tests.harness.stop_walker EVERY ARGUMENTS...``; prints how the
copies ended.
"""

from __future__ import annotations

import _thread
import collections
import json
import os
import select
import signal
import sys
from typing import Any

_OURS = "flytekitplugins_safedist"
_PATIENCE = 60.0


class Walker:
    """Counts imports of this process's main thread."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.here = (os.getpid(), _thread.get_ident())
        self.seen = 0
        self.ended: collections.Counter[str] = collections.Counter()

    def look(self, event: str, _arguments: Any) -> None:
        """An audit hook."""
        if event != "import" or self.is_over or self.here != (os.getpid(), _thread.get_ident()):
            return
        self.seen += 1
        if self.seen % self.every == 0:
            self.try_here()

    @property
    def is_over(self) -> bool:
        """Whether the task begins: from here on a copy would upload that it was told to stop."""
        return f"{_OURS}.agent.arrival" in sys.modules

    def try_here(self) -> None:
        pid = os.fork()
        if pid == 0:
            client = sys.modules.get(f"{_OURS}.rank_server.client")
            if hasattr(client, "RankServer"):
                client.RankServer.close = lambda _: None  # it is another's child
            place = sys.modules.get(f"{_OURS}.pod.staging.place")
            if hasattr(place, "Private"):
                place.Private.close = lambda _: None  # it is another's directory
            os.kill(os.getpid(), signal.SIGTERM)
            return
        ended = os.pidfd_open(pid)
        if not select.select([ended], [], [], _PATIENCE)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(ended)
        self.ended[str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))] += 1


def main(arguments: list[str]) -> None:
    walker = Walker(int(arguments[0]))
    from flytekitplugins_safedist import stopping
    from flytekitplugins_safedist.pod import start

    stopping.listen()  # as start.main does, before anything else
    sys.addaudithook(walker.look)
    sys.argv[1:] = arguments[1:]
    leave = stopping.leave

    def leave_and_tell(code: int) -> Any:
        if (os.getpid(), _thread.get_ident()) == walker.here:
            print(json.dumps(walker.ended), flush=True)
        leave(code)

    stopping.leave = leave_and_tell
    start.main()


if __name__ == "__main__":
    main(sys.argv[1:])
