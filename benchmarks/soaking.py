"""What the soaks have in common: runs drawn from a seed, each of which replays by its number."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness.procs import Warm, listening_for_workers

Run = TypeVar("Run")


def main(about: str | None, drawn: Callable[[int, int], Run], once: Callable[[Run, Path, Warm], str]) -> int:
    """As the command line says.

    Args:
        about: the soak's own text.
        drawn: the run of a seed and a number: the same whatever ran before.
        once: does a run in a new directory, and says what is to be counted of it (words, with blanks between); raises
            when something is not as it must be.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--only", type=int, nargs="*", default=None, help="numbers of runs, from 0")
    parser.add_argument("--keep", type=Path, default=None, help="where what failing runs wrote is kept")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="safedist-soak-"))
    warm = Warm(listening_for_workers(root))
    failed, counted, seconds = [], Counter[str](), []
    for number in range(options.runs) if options.only is None else options.only:
        run, started = drawn(seed, number), time.monotonic()
        directory = root / f"soak-{seed}-{number}"
        try:
            counted.update(once(run, directory, warm).split())
            how = "ok"
        except KeyboardInterrupt:
            break
        except Exception:
            how = "FAILED"
            failed.append(number)
            traceback.print_exc()
            if options.keep is not None:
                shutil.copytree(directory, options.keep / directory.name, ignore=shutil.ignore_patterns("said", "word"))
        seconds.append(time.monotonic() - started)
        print(f"{how}: run {number}, {seconds[-1]:.0f} s: {run}; {dict(counted)} so far", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
    warm.close()
    shutil.rmtree(root, ignore_errors=True)
    print(f"{len(seconds)} runs of seed {seed} ({dict(counted)}); longest {max(seconds):.0f} s; failed: {failed}")
    return 1 if failed else 0
