"""This package in another interpreter: the very same there, whatever else has its name on that one's search path."""

from __future__ import annotations

from pathlib import Path

NAME = __name__.partition(".")[0]
_HOME = str(Path(__file__).parents[1])


def program(text: str, *arguments: str, path: str = "pass") -> list[str]:
    """What follows an interpreter on a command line, for it to run a text of ours with arguments.

    A code archive that was made where this package lies (its own repository, one that has a copy) holds another version
    of it, or the part that registration has imported; and ``PYTHONPATH`` names that before what is installed. The path
    stays as it is: what else lies beside this package may have the name of a module of Python's.

    Args:
        text: to run.
        arguments: of it, from ``sys.argv[1]`` on.
        path: what is done to ``sys.path`` first; ``home`` is where this package is.
    """
    found = (
        f"from importlib import machinery, util; spec = machinery.PathFinder.find_spec({NAME!r}, [home]); "
        f"sys.modules[{NAME!r}] = util.module_from_spec(spec); spec.loader.exec_module(sys.modules[{NAME!r}])"
    )
    return ["-c", f"import sys; home = sys.argv.pop(1); {path}; {found}; {text}", _HOME, *arguments]
