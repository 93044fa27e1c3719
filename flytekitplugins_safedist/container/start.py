"""Where ``safedist-execute`` begins: SIGTERM first, then everything that takes time to import."""

from __future__ import annotations

from typing import NoReturn

from .. import stopping


def main() -> NoReturn:
    """The console script; see :func:`.entrypoint.main`."""
    stopping.listen()
    from . import entrypoint

    entrypoint.main()
