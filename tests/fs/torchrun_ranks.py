"""One rank under the real torchrun: agrees with the others on a value of this life, and leaves what it got.

Run as: torchrun ... torchrun_ranks.py PLACE VALUE LIVES WHEN

Rank 1 ends LIVES - 1 times with status 1; then all return. WHEN: "before" a process group is there, or "after".
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flytekitplugins_safedist.fs import barrier, once_per_job


def main() -> None:
    place, value, lives, when = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if when == "after":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    me = f"{value}-{rank}-{os.getpid()}"
    agreed = once_per_job("vocabulary", lambda: me)
    once_per_job(f"greeting of {rank}", lambda: me)
    barrier("greeted")
    said = [once_per_job(f"greeting of {other}", str) for other in range(size)]
    with (place / f"{value}-{rank}").open("a") as file:
        file.write(f"{agreed} {' '.join(said)}\n")
    barrier("end")
    if len((place / f"{value}-{rank}").read_text().splitlines()) < lives:
        if rank == 1:
            os._exit(1)
        barrier("that nobody passes: rank 1 is gone, and the agents end all")
        (place / "passed").touch()


if __name__ == "__main__":
    main()
