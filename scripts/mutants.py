"""Mutation testing: change a module in many small ways, and see which of the changes its tests notice.

Run by hand (``make mutants``, or ``make mutants MUTANTS=job/policy``), because it takes many hours for all of them. The
tool is mutmut; every module is run in a copy of the repository, with the fast tests that are about it and no others.
What survives is printed as a diff; docs/mutants.md says why it may.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flytekitplugins_safedist"

# Not the race tests: they start processes by the dozen, and there are thousands of mutants.
MODULES: Mapping[str, Sequence[str]] = {
    "job/policy": ["job/test_policy.py"],
    "ranks/outcome": ["ranks/test_outcome.py"],
    "job/verdict": ["job/test_verdict.py"],
    "topology": ["topology"],
    "job/coordinator": ["job/test_coordinator.py", "job/test_agreement.py", "rendezvous/test_rendezvous.py"],
    "fs": ["fs"],
    "container/archive": ["container/test_archive.py", "container/test_archive_properties.py"],
    "container/staging": [
        "container/test_staging.py",
        "container/test_staging_keeping.py",
        "container/test_staging_source.py",
    ],
}
"""Module or package to what tests it, below tests/unit."""


def main() -> None:
    """Run the modules that were asked for, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}; without any: all")
    asked = parser.parse_args()
    unknown = set(asked.modules) - set(MODULES)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(MODULES)}")
    for module in asked.modules or MODULES:
        with tempfile.TemporaryDirectory(prefix="safedist-mutants-") as directory:
            print(run(module, Path(directory)), flush=True)


def run(module: str, directory: Path) -> str:
    """Run one module's mutants in a copy of the repository; returns what came of it."""
    for name in (PACKAGE, "tests", "scripts", "examples"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, directory)
    with (directory / "setup.cfg").open("a") as settings:
        settings.write(_settings(module))
    mutants = directory / "mutants"
    mutants.mkdir()  # before Python looks for modules there: what is not there then is not looked at again
    environment = {**os.environ, "PYTHONPATH": str(mutants), "COLUMNS": "200"}

    def mutmut(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mutmut", *arguments]
        return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)

    done = mutmut("run", "--max-children", str(max(1, (os.cpu_count() or 2) // 2)))
    if done.returncode != 0 or mutmut("export-cicd-stats").returncode != 0:
        raise SystemExit(f"{module}: mutmut failed:\n{(done.stdout + done.stderr)[-4000:]}")
    counts = json.loads((mutants / "mutmut-cicd-stats.json").read_text())
    lines = mutmut("results").stdout.splitlines()
    left = [line.partition(":")[0].strip() for line in lines if line.strip().endswith(("survived", "no tests"))]
    return "\n".join([*(mutmut("show", name).stdout for name in left), _summary(module, counts)])


def _summary(module: str, counts: Mapping[str, int]) -> str:
    # What never ends is noticed by a time limit; what no test reaches is noticed by nobody.
    noticed = counts["killed"] + counts["timeout"]
    missed = counts["survived"] + counts["no_tests"]
    share = 100 * noticed / max(1, noticed + missed)
    return (
        f"{module}: {share:.1f} % of {noticed + missed} noticed ({counts['timeout']} of them by the time limit); "
        f"{counts['survived']} survived, {counts['no_tests']} reached by no test"
    )


def _settings(module: str) -> str:
    place = f"{PACKAGE}/{module}"
    mutated = f"{place}/*.py" if (ROOT / place).is_dir() else f"{place}.py"
    tests = [f"tests/unit/{name}" for name in MODULES[module]]
    lists = {"only_mutate": [mutated], "pytest_add_cli_args_test_selection": tests}
    lists["pytest_add_cli_args"] = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    lists["also_copy"] = ["scripts", "examples", "Makefile"]
    written = "".join(f"{name} =\n" + "".join(f"    {each}\n" for each in values) for name, values in lists.items())
    # forkserver: threads of torch and of hypothesis' databases do not survive a fork from the process that ran them.
    return f"\n[mutmut]\nsource_paths = {PACKAGE}\nprocess_isolation = forkserver\ndebug = true\n{written}"


if __name__ == "__main__":
    main()
