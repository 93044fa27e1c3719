"""The real ``pyflyte``, as a process, against an endpoint of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent / "project"
PACKAGE = Path(__file__).parents[3]
IMAGE = "registry.example/shop:1"


def pyflyte(*args: str, cwd: Path, endpoint: str = "127.0.0.1:1") -> str:
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FLYTE")},
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(cwd)]),
        "FLYTE_PLATFORM_URL": endpoint,
        "FLYTE_PLATFORM_INSECURE": "true",
        "FLYTE_SDK_DISABLE_PROGRESS_BAR": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # The console script, by its module: the same entry point, whatever PATH says.
    program = "import sys; from flytekit.clis.sdk_in_container.pyflyte import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
