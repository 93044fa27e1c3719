#!/usr/bin/env python3
"""Say beforehand that pip is about to fetch gigabytes, and how to avoid it: torch_download.py REQUIREMENT [OPTION]...

On Linux the default index's torch is a CUDA build, which brings CUDA's libraries as further wheels. pip is asked what
it would install, without installing it; whatever else goes wrong here is left to the installation itself to say.

Standard library only. Exit status: 0 always.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CUDA_WHEEL = re.compile(r"(nvidia-|cuda-toolkit)")
MEASURED = "with torch 2.15.0, 2.6 GB to download and 5.5 GB installed"


def planned(requirement: str, options: Sequence[str]) -> dict[str, object] | None:
    """The metadata of the torch that pip would install; None when pip does not say, or it is installed already."""
    with tempfile.TemporaryDirectory(prefix="safedist-plan-") as directory:
        report = Path(directory, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", str(report)]
        done = subprocess.run([*command, *options, requirement], capture_output=True, check=False)
        if done.returncode != 0:
            return None
        installs = json.loads(report.read_text())["install"]
    return next((dict(item["metadata"]) for item in installs if item["metadata"]["name"] == "torch"), None)


def warning(metadata: dict[str, object]) -> str | None:
    """What to say about this torch; None when it brings no CUDA wheels."""
    required = metadata.get("requires_dist", [])
    if not isinstance(required, list) or not any(CUDA_WHEEL.match(line) for line in required):
        return None
    return (
        f"make: torch {metadata.get('version')} from this index is a CUDA build with its libraries: gigabytes "
        f"({MEASURED}).\n"
        "      A CPU build is 0.2 GB and does without a GPU: stop here (Ctrl-C), and hand in an index that has CPU\n"
        '      builds (pytorch.org/get-started names it): make PIP_OPTIONS="--extra-index-url URL" ...'
    )


def main(arguments: list[str]) -> int:
    metadata = planned(arguments[0], arguments[1:])
    if metadata is not None and (text := warning(metadata)):
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
