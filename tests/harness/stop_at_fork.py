"""``safedist-execute`` whose first fork meets SIGTERM: this process has it, and passes it on to a child that is not yet
ready for it.

Run by :mod:`tests.agents.test_stopping`: ``python -m tests.harness.stop_at_fork ARGUMENTS...``.
"""

from __future__ import annotations

import os
import signal

from flytekitplugins_safedist import stopping
from flytekitplugins_safedist.container import start


def main() -> None:
    stopping.listen()  # as start.main does, before anything else
    here, ready = os.getpid(), os.eventfd(0)

    def in_child() -> None:
        if os.getppid() == here:
            os.kill(here, signal.SIGTERM)
            os.eventfd_write(ready, 1)
            os.kill(os.getpid(), signal.SIGTERM)

    os.register_at_fork(after_in_child=in_child, after_in_parent=lambda: os.eventfd_read(ready))
    start.main()


if __name__ == "__main__":
    main()
