"""Jobs for a person at a terminal; also a script."""

from __future__ import annotations

import os
import sys
import time

from flytekit import task

from flytekitplugins_safedist import SafeTorch

if os.environ.get("TEST_HOW") == "import" and any("forkserver" in argument for argument in sys.orig_argv):
    print("imported again", flush=True)
    time.sleep(600)


@task(task_config=SafeTorch(nproc_per_node=2))
def waits() -> None:
    print("here", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
