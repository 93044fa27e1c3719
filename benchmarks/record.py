"""Whether the record of a run names who holds the others back, and what it costs to be recorded.

``--named``: so many jobs in each of which one rank, drawn at random, takes 50 ms longer for one of its stages, drawn at
random; it counts how often that rank and that stage are named, and no other.

``--cost``: in one rank, so many steps that compute, of which some tell their stages and what they came to, and some do
not, drawn at random: how long the telling takes there, where a computation has just emptied the caches; how long in a
loop that does nothing else; and the agent's share of a core.

    python benchmarks/record.py --named 50 --cost 4000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parent / "record_project"
STAGES = ("load", "forward", "backward")
RANKS = 4


def run(call: str, **more: str) -> tuple[str, str]:
    """What a job prints last, and its log."""
    with tempfile.TemporaryDirectory() as scratch:
        given = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "TMPDIR": scratch, **more}
        code = f"import os; os.environ['RECORD_AGENT'] = str(os.getpid()); import record_measure as m; print(m.{call})"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **given}, check=True, capture_output=True, text=True
        )
        return done.stdout.splitlines()[-1], done.stderr


def named(runs: int, seed: int) -> None:
    """Count the runs whose log names the one that was late, and nobody else."""
    chance, hits = random.Random(seed), 0
    for number in range(runs):
        rank, stage = chance.randrange(RANKS), chance.choice(STAGES)
        _, log = run(f"delayed(rank={rank}, stage_='{stage}')")
        found = re.findall(r"rank (\d+) in stage '(\w+)'", log)
        hits += found == [(str(rank), stage)]
        if found != [(str(rank), stage)]:
            print(f"run {number}: rank {rank} in {stage!r} was late, and named was {found}", flush=True)
    print(f"rank and stage named in {hits} of {runs} runs ({RANKS} ranks, 50 ms in one of {len(STAGES)} stages)")


def cost(steps: int) -> None:
    """What it takes to tell a step, between its computations, and alone in a loop."""
    found = json.loads(run(f"steps(steps={steps})")[0])
    told, untold, whole = (statistics.median(found[kind]) for kind in ("told", "untold", "whole"))
    more = told - untold
    print(
        f"three stages and progress() of one step take {more * 1e6:.0f} us of processor between computations (medians; "
        f"{steps} steps of {whole * 1e3:.1f} ms: {more / whole:.2%}; 0.5% of a step of {more * 200 * 1e3:.0f} ms), "
        f"and {found['loop'] * 1e6:.1f} us in a loop"
    )
    print(f"the agent meanwhile: {found['agent']:.2%} of a core")


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--named", type=int, default=50, help="runs with a delay")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--cost", type=int, default=4000, help="steps")
    options = parser.parse_args()
    if options.named:
        named(options.named, options.seed)
    if options.cost:
        cost(options.cost)


if __name__ == "__main__":
    main()
