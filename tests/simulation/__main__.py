"""Plays random orders of faults.

python -m tests.simulation 20000              orders 0 to 19,999
python -m tests.simulation 1 4711             one order, and what happens in it
python -m tests.simulation 500 --profile late orders of one kind
python -m tests.simulation 200000 --workers 8 on so many cores
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable

from .faults import PROFILES
from .world import Broken, World

_AT_ONCE = 200
"""Orders that a worker plays before it says what came of them."""


def play(
    seeds: Iterable[int],
    profile: str | None = None,
    *,
    seconds: float = float("inf"),
    is_shown: bool = False,
    stops: bool = False,
) -> tuple[Counter[str], list[str]]:
    """What came of each order, counted; and the promises that were broken; ``stops``: only the first."""
    ends, broken, begun = Counter[str](), [], time.monotonic()
    for seed in seeds:
        world = World(seed, profile, is_shown=is_shown)
        try:
            ends[world.play()] += 1
        except Broken as error:
            broken.append(f"order {seed} ({world.plan.profile}): {error}")
        ends["orders"] += 1
        ends["rounds"] += world.promises.rounds_begun
        ends["saves before a pod left"] += world.promises.saved_well
        ends["saves before a node joined"] += world.promises.saved_before_join
        if time.monotonic() - begun > seconds or (stops and broken):
            break
    return ends, broken


def play_side_by_side(seeds: range, profile: str | None, workers: int) -> tuple[Counter[str], list[str]]:
    """The same, on several cores."""
    parts = [seeds[at : at + _AT_ONCE] for at in range(0, len(seeds), _AT_ONCE)]
    ends, broken = Counter[str](), []
    with multiprocessing.Pool(workers) as pool:
        for some, more in pool.starmap(play, [(part, profile) for part in parts], chunksize=1):
            ends += some
            broken += more
    return ends, broken


def _alike(text: str) -> str:
    return "".join(letter for letter in text.partition(": ")[2][:60] if not letter.isdigit())


def main() -> int:
    """Play what the command line says; 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("orders", type=int)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--profile", choices=PROFILES, help="orders of this kind alone")
    parser.add_argument("--stop", action="store_true", help="at the first broken promise")
    parser.add_argument("--workers", type=int, default=1)
    chosen = parser.parse_args()
    seeds = range(chosen.first, chosen.first + chosen.orders)
    if chosen.workers > 1:
        ends, broken = play_side_by_side(seeds, chosen.profile, chosen.workers)
    else:
        is_shown = chosen.orders == 1
        ends, broken = play(seeds, chosen.profile, seconds=chosen.seconds, is_shown=is_shown, stops=chosen.stop)
    print(dict(ends))
    for start, count in Counter(map(_alike, broken)).most_common():
        print(count, "|", next(text for text in broken if _alike(text) == start))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
