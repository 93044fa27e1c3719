"""What each rank that ``horovodrun`` starts does in test_race_horovod: leaves a file of what has gone wrong.

Nothing is said to the helpers: they find Horovod by themselves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.torch as hvd

from flytekitplugins_safedist.errors import FsTimeoutError
from flytekitplugins_safedist.fs import barrier
from tests.fs.ranks import faults_of
from tests.fs.test_race_group import WORKS


def _one_is_missing() -> str:
    if hvd.rank() == hvd.size() - 1:
        return ""  # on to the end, where it waits for the others
    try:
        barrier("without the last", timeout=5)
    except FsTimeoutError as error:
        return str(error)
    return "passed"


def main() -> None:
    place, web = Path(sys.argv[1]), sys.argv[2]
    hvd.init()
    wrong = faults_of(WORKS, lambda: barrier("behind a work", timeout=240), place, hvd.rank(), web)
    (place / f"{hvd.rank()}.json").write_text(json.dumps([wrong, _one_is_missing()]))
    barrier("end")  # rank 0 holds the store
    hvd.shutdown()


if __name__ == "__main__":
    main()
