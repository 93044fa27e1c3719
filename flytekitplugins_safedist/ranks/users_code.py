"""Around the user's code: it runs in processes whose end means something to others, and may fork and end them.

An agent that a module ends with status 0 has a pod that looks done, without a verdict; a child that comes back from an
import, or from the task's function, would go on as a second agent, rank server or rank.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from .. import stopping
from ..errors import PayloadError
from ..texts import said
from . import descriptors, process_tree


@contextmanager
def without_children() -> Iterator[None]:
    """Inside, the user's code runs: a child that it forks, and that returns from it or raises, ends with the status
    that a script would have, and does nothing that is this process's to do."""
    process, status = os.getpid(), 1
    try:
        yield
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise
    except BaseException as error:
        if os.getpid() != process:
            traceback.print_exception(error)
        raise
    finally:
        if os.getpid() != process:
            stopping.end_now(status & 0xFF)


class _Ended(BaseException):
    """In the place of ``os._exit``: unwinds the import."""

    def __str__(self) -> str:
        return f"os._exit({self.args[0]})"


@contextmanager
def importing() -> Iterator[None]:
    """Inside, the user's module is imported: what would end this process is an error, and what it closes of this
    process is open again; a child that it forks ends with this process. Native code is not held.

    Raises:
        PayloadError: the module would have ended this process, or has closed what cannot be had back.
    """
    process, thread, before, forks = os.getpid(), threading.get_ident(), os._exit, os.fork
    ended: list[BaseException] = []
    is_over = False  # what the module has taken by name (``from os import _exit``) outlives its import

    def leave(status: int) -> NoReturn:
        if is_over or os.getpid() != process:
            stopping.end_now(status)
        if threading.get_ident() != thread:  # nobody waits for it here: it may end all, but not say that all is well
            stopping.end_now(status or 1)
        ended.append(_Ended(status))
        raise ended[-1]

    def fork() -> int:
        child = forks()
        if child == 0 and not is_over and threading.get_ident() == thread:
            # It holds what this process has open: as long as it lives, nobody sees that this process is gone.
            process_tree.die_with_parent(signal.SIGKILL)
        return child

    os._exit, os.fork = leave, fork
    try:
        with descriptors.kept(), without_children():
            yield
    except (Exception, stopping.StopRequested):
        raise
    except BaseException as error:
        ended.insert(0, error)
    finally:
        os._exit, os.fork, is_over = before, forks, True
    if ended:  # also where the module has swallowed it
        raise _refused(ended[0]) from ended[0]


def _refused(ended: BaseException) -> PayloadError:
    text = said(ended)
    called = text if isinstance(ended, _Ended) else f"{type(ended).__name__}{text and f': {text}'}"
    return PayloadError(
        f"importing the task's module would have ended this process by {called}",
        expected="a module that can be imported by the agent, the rank server and every rank",
        hint="put what only a script is to do below: if __name__ == '__main__'",
    )
