"""A process that stages, says each named point on stdout, and stops at chosen ones until told to go on by stdin.

    python staging_actor.py '{"uri": ..., "dest": ..., "stop_at": ["fetch"]}'

It says "ready" first and waits for a line, so that many of them can be let go at one moment.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path


def main() -> None:
    order = json.loads(sys.argv[1])
    # Imported before "ready": the race under test is staging, not the interpreter's start.
    import fsspec.implementations.local  # noqa: F401

    from flytekitplugins_safedist.errors import SafedistError
    from tests.harness.product import Options, patience, points, stage

    def say(**what: object) -> None:
        print(json.dumps(what), flush=True)

    stop_at = list(order.get("stop_at", []))

    def at(point: str) -> None:
        say(point=point)
        if point in stop_at:
            stop_at.remove(point)
            sys.stdin.readline()

    if "user" in order:  # after the imports: the interpreter itself may lie where that user cannot read
        os.setgroups([])
        os.setgid(order["user"])
        os.setuid(order["user"])
    if "descriptors" in order:
        resource.setrlimit(resource.RLIMIT_NOFILE, (order["descriptors"], order["descriptors"]))
    say(point="ready")
    sys.stdin.readline()
    points.at, patience.FIRST_PAUSE = at, 0.01
    try:
        code = stage(order["uri"], Path(order["dest"]), Options(deadline=order.get("deadline", 1800.0)))
    except SafedistError as error:
        say(error=type(error).__name__, message=str(error))
        sys.exit(1)
    say(files=code.files, new=code.new, digest=code.digest)


main()
