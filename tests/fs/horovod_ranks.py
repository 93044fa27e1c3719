"""What each rank that ``horovodrun`` starts does in test_race_horovod; prints nothing, leaves files.

Nothing is said to the helpers: they find Horovod by themselves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.torch as hvd

from flytekitplugins_safedist.errors import FsTimeoutError, WorkFailedError
from flytekitplugins_safedist.fs import barrier, download_once, once_per_job, once_per_node, rank_zero_first


def _all_meet(place: Path) -> dict[str, object]:
    (place / f"came-{hvd.rank()}").touch()
    barrier(timeout=240)
    return {"seen_after_the_barrier": len(list(place.glob("came-*")))}


def _one_works(place: Path) -> dict[str, object]:
    def work() -> int:
        (place / f"worked-{hvd.rank()}").touch()
        return hvd.rank()

    def fail() -> None:
        raise ValueError("no such bucket")

    found: dict[str, object] = {"by_job": once_per_job("load", work), "by_node": once_per_node("load", hvd.rank)}
    try:
        once_per_job("fails", fail)
    except WorkFailedError as error:
        found["failed"] = "ValueError: no such bucket" in str(error)
    return found


def _first(place: Path) -> dict[str, object]:
    with rank_zero_first():
        (place / f"began-{hvd.rank()}").touch()
        found = (place / "began-0").exists()
        if hvd.rank() == 0:  # alone: who opened it again to write would empty it under the rank that fetches
            (place / "source").write_text("weights")
    fetched = download_once(place / "source", place / "copies" / "copy", shared=True)
    return {"first": found, "fetched": fetched.read_text()}


def _one_is_missing() -> str:
    if hvd.rank() == hvd.size() - 1:
        return ""  # on to the end, where it waits for the others
    try:
        barrier("without the last", timeout=5)
    except FsTimeoutError as error:
        return str(error)
    return "passed"


def main() -> None:
    place = Path(sys.argv[1])
    hvd.init()
    found = {**_all_meet(place), **_one_works(place), **_first(place)}
    found["missing"] = _one_is_missing()
    (place / f"found-{hvd.rank()}.json").write_text(json.dumps(found))
    barrier("end")  # rank 0 holds the store
    hvd.shutdown()


if __name__ == "__main__":
    main()
