"""Fork the rank server out of the entrypoint's own process, so that a node imports torch and flytekit only once.

The order is what makes it safe: import everything heavy, look whether this process still has one thread and no CUDA,
fork, and only then do anything that may start threads or open channels (staging, flytekit's clients). Where it is not
safe, the agent starts its rank server as a fresh interpreter later on, which costs the imports a second time.

The container's first process becomes the agent, and not the server. The server imports the user's module, which may
end it, crash it or take its signals; the first process of a container takes all others with it, and nobody could upload
why. And it imports before it forks: to run the task at all flytekit imports the user's module in the agent, and with it
torch in nearly every job, which is there already, in pages that agent, server and ranks share.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping

from .. import envvars
from ..config.options import BACKENDS
from ..handoff import HERE
from . import backends, known, preload
from .forkserver_client import RankServer

logger = logging.getLogger(__name__)


def prepare(environment: Mapping[str, str]) -> None:
    """Start the rank server for the task that this pod is going to run, if it is known to be one of ours.

    Args:
        environment: the pod's variables; ``SAFEDIST_BACKEND`` and others were pinned into them when
            the task was registered. Without them this does nothing.
    """
    backend = next((name for name in BACKENDS if name == environment.get(envvars.BACKEND)), None)
    if backend is None or environment.get(envvars.START_METHOD, "preload") != "preload":
        return
    if preload.unsafe_to_fork("starting this process") is not None:
        return
    libraries = [
        *backends.create(backend).libraries,
        "flytekit",
        "flytekitplugins_safedist.plugin.task",
        "flytekitplugins_safedist.job.run",
    ]
    # One thread: the server, which knows the task's own word for their number, gives it to what is loaded here.
    with _variables({**environment, envvars.OMP_NUM_THREADS: "1", **known.VARIABLES}):
        unsafe = preload.import_libraries(libraries)
    if unsafe is None:
        preload.keep()
        HERE.rank_server = RankServer.fork()
    else:
        logger.info(f"ranks are not forked from this process: {unsafe}")


def take() -> RankServer | None:
    """The server that :func:`prepare` forked, once; None when there is none."""
    server: RankServer | None = HERE.take("rank_server")
    return server


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Libraries read these when they are loaded; ranks and the agent must not inherit what is meant for that alone."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
