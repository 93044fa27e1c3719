"""Where ``safedist-execute`` begins: SIGTERM first, then the rank server, which imports most, then the rest."""

from __future__ import annotations

import gc
import os
from typing import NoReturn

from .. import envvars, stopping
from ..errors import LaunchError
from ..rank_server.launch import Launched, launch


def main() -> NoReturn:
    """The console script; see :func:`.entrypoint.main`."""
    stopping.listen()
    gc.disable()  # hundreds of looks through modules that are there to stay; on again before the task's own code
    launched: Launched | LaunchError | None = None
    try:
        launched = launch(os.environ) if envvars.JOB in os.environ else None
    except LaunchError as error:
        launched = error  # told where all errors are
    from . import entrypoint

    entrypoint.main(launched=launched)
