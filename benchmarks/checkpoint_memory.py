"""Memory of a process that saves one large tensor to S3 (moto's server), and restores it into the live one.

    python benchmarks/checkpoint_memory.py --megabytes 512

The copy that a save is written from is as large as the tensor, and stays for the next save.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    """As the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="of the tensor, in MiB")
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.place:
        _measure(options.place, options.megabytes)
        return
    from tests.harness.moto_s3 import BUCKET, S3

    with tempfile.TemporaryDirectory() as root:
        server = S3(Path(root))
        try:
            server.put("there", b"")
            command = [sys.executable, __file__, "--megabytes", str(options.megabytes), "--place", f"s3://{BUCKET}/run"]
            subprocess.run(command, env={**os.environ, **server.environment}, check=True)
        finally:
            server.close()


def _measure(place: str, megabytes: int) -> None:
    import torch

    from flytekitplugins_safedist.checkpoint import Checkpoints
    from tests.checkpoint.saving import reach_stores

    reach_stores()
    state = {"x": torch.ones(megabytes << 18)}
    with Checkpoints(place, every=None) as ckpt:  # imports what there is to import
        ckpt.save(0, {"x": 1}, force=True)
    for what, work in (
        ("save", lambda: _save(ckpt, state)),
        ("again", lambda: _save(ckpt, state)),
        ("restore", _restorer(place, state)),
    ):
        before = _resident()
        print(
            f"{what:8} of {megabytes} MiB: at most {_peak(work) - before:+} MiB, after it {_resident() - before:+} MiB"
        )


def _save(ckpt: Any, state: dict[str, Any]) -> None:
    ckpt.save((ckpt.latest or 0) + 1, state, force=True)
    ckpt.wait()


def _restorer(place: str, state: dict[str, Any]) -> Any:
    from flytekitplugins_safedist.checkpoint import Checkpoints

    return lambda: Checkpoints(place, every=None).restore(state)


def _resident() -> int:
    """MiB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def _peak(work: Any) -> int:
    """The most that is resident while ``work`` is done, looked at every two milliseconds."""
    seen, over = [_resident()], threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            seen.append(_resident())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return max(seen)


if __name__ == "__main__":
    main()
