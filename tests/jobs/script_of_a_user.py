"""A script with a command line of its own, as people have them."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

from exchanging import exchange  # of the script's own directory

from flytekitplugins_safedist import current_rank


class Doubled(int):
    """A class of the script's own, which a process that it spawns sends back."""


def double(number: int) -> Doubled:
    return Doubled(2 * number)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=int, required=True)
    ends = ["well", "with 256", "with 3", "badly", "at once with 0", "at once with 3"]
    parser.add_argument("--ends", choices=ends, default="well")
    options = parser.parse_args()
    doubled = [double(options.lr)]
    if options.ends == "well":  # once is enough: it is two more interpreters
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            doubled = pool.map(double, [options.lr])
    me = current_rank()
    print(f"{me.rank} of {me.world_size} doubles to {doubled}", exchange("rates", str(options.lr)), flush=True)
    print(f"a word of {me.rank}'s on errors", file=sys.stderr, flush=True)
    if options.ends.startswith("at once"):
        os._exit(int(options.ends[-1]))
    if options.ends.startswith("with"):
        sys.exit(int(options.ends.split()[-1]))
    if options.ends == "badly" and me.rank == 1:
        raise ValueError("bad data")


if __name__ == "__main__":
    main()
