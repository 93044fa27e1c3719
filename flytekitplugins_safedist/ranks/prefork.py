"""What a pod imports before it does anything else, and the rank server that is forked from that.

A node imports torch, flytekit and the user's module once, for its agent, its rank server and its ranks: the container's
first process imports them, looks whether it still has one thread and no CUDA, forks the server, and goes on as the
agent. What needs threads before that (fetching the code) runs in a child process. Where it is not safe to fork, ranks
are fresh interpreters.

The first process becomes the agent, and not the server: the end of a container's first process takes all others with
it, and a rank server that is killed must leave an agent that uploads why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import envvars
from ..config.registered import Registered
from ..flyte import task_context
from ..handoff import Slot
from . import backends, known, preload, scratch, users_code
from .forkserver_client import RankServer


@dataclass(frozen=True)
class Prefork:
    """What became of it.

    Attributes:
        server: forked, with everything imported; None where that is not safe, or nothing was tried.
        unsafe: why it is not.
        error: what importing the user's module has raised.
    """

    server: RankServer | None = None
    unsafe: str | None = None
    error: BaseException | None = None

    def raise_error(self) -> None:
        """Raise what importing the user's module has raised: a second import might fail of what the first one left."""
        if self.error is not None:
            raise self.error


PREFORK: Slot[Prefork] = Slot()
"""From the entrypoint to the task's agent."""


def inherited(asked: Registered, environment: Mapping[str, str]) -> dict[str, str]:
    """What the ranks of a node inherit, but for what the task itself sets. Modules are imported under it: what they
    read then every rank has."""
    defaults = {envvars.OMP_NUM_THREADS: "1"} if asked.nproc_per_node > 1 else {}  # as torchrun does
    return {**defaults, **environment}


def import_libraries(names: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Import what every rank needs; why this process must not be forked then, or None."""
    unsafe = preload.unsafe_to_fork("starting this process")
    if unsafe is not None:
        return unsafe
    # One thread: whoever imports the user's module, and knows their number, gives it to what is loaded here.
    with variables({**environment, envvars.OMP_NUM_THREADS: "1", **known.VARIABLES}):
        return preload.import_libraries(names)


def libraries(asked: Registered) -> list[str]:
    """What every rank of this job needs, and its agent."""
    return [*backends.create(asked.backend).libraries, "flytekitplugins_safedist.job.run"]


def import_and_fork(asked: Registered, module: str | None, environment: Mapping[str, str], caches: Path) -> Prefork:
    """Import the user's module, where it can be told, and fork the server.

    Args:
        asked: as the job was registered.
        module: that the task is in.
        environment: this process's variables: the task's own are among them.
        caches: for what compiles as it is imported.
    """
    inside = {**inherited(asked, environment), **scratch.make_caches(caches, asked.shared_caches)}
    with variables({**inside, **known.VARIABLES}):
        preload.limit_openmp(inside)
        with users_code.in_time(asked.timeouts.start):
            imported = preload.import_modules([module] if module is not None else [], task_context.IN_POD)
        inside = dict(os.environ)  # with what the module has set
    if imported.unsafe is not None:
        return Prefork(None, imported.unsafe, imported.error)
    preload.keep()
    server = RankServer.fork(imported)
    late = backends.create(asked.backend).late
    server.prepare(cwd=Path.cwd(), environment=inside, sys_path=sys.path, late=late)
    return Prefork(server)


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Modules read these when they are loaded; ranks and the agent must not inherit what is meant for that alone. What
    a module sets or removes itself stays so."""
    before = dict(os.environ)
    os.environ.update(values)
    given = dict(os.environ)
    try:
        yield
    finally:
        left = {name: value for name, value in os.environ.items() if given.get(name) != value}
        kept = {name: value for name, value in before.items() if name in os.environ}
        os.environ.clear()
        os.environ.update({**kept, **left})
