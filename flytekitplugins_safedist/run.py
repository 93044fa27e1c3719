"""An existing script, with a command line of its own, on several ranks.

On this machine, with no change to the script::

    python -m flytekitplugins_safedist.run --nproc-per-node 4 train.py --lr 3

On a cluster, in a task of two lines::

    @task(task_config=SafeTorch(nnodes=2, nproc_per_node=8))
    def train(arguments: list[str]) -> None:
        run_script("train.py", arguments)
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import PayloadError, SafedistError


def run_script(script: str | os.PathLike[str], arguments: Sequence[str] = ()) -> None:
    """Run a script in this process, as ``python SCRIPT ARGUMENTS`` would; in a task's function: on every rank.

    It is ``__main__``, so that what stands below ``if __name__ == "__main__"`` runs, and its directory comes first on
    the module search path. Whether it ends or calls ``sys.exit(0)``, this returns.

    Args:
        script: its path; a relative one is looked for in the working directory.
        arguments: its command line, without its own name.

    Raises:
        PayloadError: there is no such file.
        SystemExit: it has ended with another status than 0; that is the task's failure.
        Exception: whatever the script raises.
    """
    path = Path(script).absolute()
    if not path.is_file():
        raise PayloadError(
            "there is no such script here",
            where={"script": str(path)},
            expected="a Python file that is part of what is registered",
            hint="give its path from the working directory, or make it absolute: Path(__file__).with_name(...)",
        )
    argv, search = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path[:] = argv, search


def script(path: str, arguments: list[str]) -> None:
    """The function of the task that the command line makes."""
    run_script(path, arguments)


def main() -> None:
    """``python -m flytekitplugins_safedist.run``; exits with 1 where a rank has failed, and with 2 at wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m flytekitplugins_safedist.run",
        description="Run a script on several ranks of this machine, as a task with SafeTorch or SafeHorovod would.",
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks (default: 1)")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="restarts in place (default: 0)")
    parser.add_argument("--horovod", action="store_true", help="ranks meet by Horovod, not by torch.distributed")
    parser.add_argument("script", help="a Python file")
    others = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own")
    others.required = False  # before Python 3.12 argparse names them as missing where there is no script
    options = parser.parse_args()
    path = Path(options.script).absolute()
    if not path.is_file():
        parser.error(f"there is no such file: {path}")
    from flytekit import task

    from . import SafeHorovod, SafeTorch
    from . import run as here  # noqa: PLW0406  (ranks import the function by its module; this one is __main__)

    kind = SafeHorovod if options.horovod else SafeTorch
    try:
        config = kind(nproc_per_node=options.nproc_per_node, max_restarts=options.max_restarts)
        task(task_config=config)(here.script)(path=str(path), arguments=options.arguments)
    except SafedistError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
