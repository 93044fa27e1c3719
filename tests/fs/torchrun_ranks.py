"""One rank under the real torchrun: all ranks agree on a value of this run, and leave what they got.

Run as: torchrun ... torchrun_ranks.py PLACE VALUE
"""

from __future__ import annotations

import sys
from pathlib import Path

from flytekitplugins_safedist.fs import barrier, exchange, once_per_job
from tests.harness.product import current_identity


def main() -> None:
    place, value = Path(sys.argv[1]), sys.argv[2]
    rank = current_identity().rank
    agreed = once_per_job("vocabulary", lambda: value)
    said = exchange("greeting", f"{value}-{rank}")
    barrier("end")
    (place / f"{value}-{rank}").write_text(f"{agreed} {said}")


if __name__ == "__main__":
    main()
