"""Mutation testing: change a module in many small ways, and see which of the changes its tests notice.

Run by hand (``make mutants``, or ``make mutants MUTANTS=job/rounds``), because it takes many hours for all of them;
``--sample`` takes some of each module, the same ones for the same seed. The tool is mutmut; every module is run in a
copy of the repository, with the fast tests that are about it and no others.
What survives is printed as a diff; docs/mutants.md says why it may.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_WORKER_DIED = 255
"""What mutmut's worker leaves where running the tests raised something (mutmut 3.8, ``workers/isolation.py``); a mutant
that ran out of its time has another."""

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flytekitplugins_safedist"

# Not the race tests: they start processes by the dozen, and there are thousands of mutants.
MODULES: Mapping[str, Sequence[str]] = {
    "job/rounds": ["job/test_deciding.py", "job/test_simulation.py"],
    "ranks/outcome": ["ranks/test_outcome.py"],
    "job/verdict": ["job/test_verdict.py"],
    "topology": ["topology"],
    "job/deciding": ["job/test_deciding.py", "job/test_simulation.py"],
    "fs": ["fs"],
    "container/archive": ["container/test_archive.py", "container/test_archive_words.py"],
    "container/staging": [
        "container/test_staging.py",
        "container/test_staging_keeping.py",
        "container/test_staging_source.py",
        "container/test_staging_store.py",
    ],
}
"""Module or package to what tests it, below tests/unit."""

CHILDREN = max(1, (os.cpu_count() or 2) // 2)
NOTICED = {"killed", "timeout", "segfault"}


def main() -> None:
    """Run the modules that were asked for, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}; without any: all")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants of each, drawn by chance")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="what the draw depends on (default: 1)")
    asked = parser.parse_args()
    unknown = set(asked.modules) - set(MODULES)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(MODULES)}")
    for module in asked.modules or MODULES:
        with tempfile.TemporaryDirectory(prefix="safedist-mutants-") as directory:
            print(run(module, Path(directory), asked.sample, asked.seed), flush=True)


def run(module: str, directory: Path, sample: int | None, seed: int) -> str:
    """Run one module's mutants, or ``sample`` of them, in a copy of the repository; returns what came of it."""
    environment = _copy(module, directory)

    def mutmut(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mutmut", *arguments]
        return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)

    def states() -> dict[str, str]:
        lines = [line.partition(": ") for line in mutmut("results", "--all", "true").stdout.splitlines()]
        return {name.strip(): state.strip() for name, _, state in lines}

    chosen: list[str] = []
    if sample is not None:
        # mutmut cannot only list the mutants, but it makes them before it sees that none is called so.
        mutmut("run", "--max-children", str(CHILDREN), "none-of-them")
        chosen = drawn(list(states()), sample, seed)
    done = mutmut("run", "--max-children", str(CHILDREN), *chosen)
    found = {name: state for name, state in states().items() if not chosen or name in chosen}
    if done.returncode != 0 or not found:
        raise SystemExit(f"{module}: mutmut failed:\n{(done.stdout + done.stderr)[-4000:]}")
    dead = died(directory)
    if dead:
        raise SystemExit(
            f"{module}: {dead} of mutmut's workers died (exit code {_WORKER_DIED}), which it calls a timeout: no "
            "test has judged those mutants"
        )
    left = [name for name, state in found.items() if state not in NOTICED]
    return "\n".join([*(mutmut("show", name).stdout for name in left), summary(module, list(found.values()))])


def died(directory: Path) -> int:
    """How many of the mutants' workers ended without having run a test."""
    found = [json.loads(meta.read_text())["exit_code_by_key"].values() for meta in directory.rglob("*.meta")]
    return sum(code == _WORKER_DIED for codes in found for code in codes)


def drawn(names: Sequence[str], sample: int, seed: int) -> list[str]:
    """``sample`` of the names, or all there are; the same ones for the same seed, in whatever order they come."""
    return sorted(random.Random(seed).sample(sorted(names), min(sample, len(names))))


def summary(module: str, states: Sequence[str]) -> str:
    """One line: how many of these mutants were noticed, and what became of the others."""
    # What never ends is noticed by a time limit; what no test reaches is noticed by nobody.
    noticed = sum(state in NOTICED for state in states)
    share = 100 * noticed / max(1, len(states))
    others = sorted(set(states) - NOTICED - {"survived", "no tests"})
    return (
        f"{module}: {share:.1f} % of {len(states)} noticed ({states.count('timeout')} of them by the time limit); "
        f"{states.count('survived')} survived, {states.count('no tests')} reached by no test"
        + "".join(f", {states.count(state)} {state}" for state in others)
    )


def _copy(module: str, directory: Path) -> dict[str, str]:
    """Copy what mutmut needs into ``directory``; returns the environment in which to start it there."""
    for name in (PACKAGE, "tests", "scripts", "examples"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, directory)
    with (directory / "setup.cfg").open("a") as settings:
        settings.write(_settings(module))
    mutants = directory / "mutants"
    mutants.mkdir()  # before Python looks for modules there: what is not there then is not looked at again
    return {**os.environ, "PYTHONPATH": str(mutants), "COLUMNS": "200"}


def _settings(module: str) -> str:
    place = f"{PACKAGE}/{module}"
    mutated = f"{place}/*.py" if (ROOT / place).is_dir() else f"{place}.py"
    tests = [f"tests/unit/{name}" for name in MODULES[module]]
    lists = {"only_mutate": [mutated], "pytest_add_cli_args_test_selection": tests}
    lists["pytest_add_cli_args"] = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    lists["also_copy"] = ["scripts", "examples", "Makefile"]
    written = "".join(f"{name} =\n" + "".join(f"    {each}\n" for each in values) for name, values in lists.items())
    # forkserver: threads of torch and of hypothesis' databases do not survive a fork from the process that ran them.
    # 4 s more than the tests took, times 15, before a mutant is said never to end: a busy machine is no reason.
    fixed = "process_isolation = forkserver\ntimeout_constant = 4\ndebug = true\n"
    return f"\n[mutmut]\nsource_paths = {PACKAGE}\n{fixed}{written}"


if __name__ == "__main__":
    main()
