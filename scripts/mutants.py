"""Mutation testing: change the package in small ways, one at a time, and see which of the changes its tests notice.

Run by hand (``make mutants``): a hundred take an hour or two. They are drawn by chance over the rooms that are asked
for, the same ones for the same seed. The changes are cosmic-ray's; each is made in a copy of the repository, and judged
there by the room's tests, until one fails: those that are named as its module, the other fast ones, and those with real
processes. The same tests are run first without a change, and must pass: what fails by itself notices nothing.
What survives is printed as a diff; docs/mutants.md says why it may.

This runs in an environment that has cosmic-ray; the tests in the repository's own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flytekitplugins_safedist"

ROOMS: Mapping[str, Sequence[str]] = {
    "checkpoint": ["unit/checkpoint", "checkpoint", "agents/test_preemption.py"],
    "config": ["unit/config", "unit/plugin", "contracts/golden", "contracts/oracle"],
    "container": [
        "unit/container",
        "agents/test_entrypoint.py",
        "agents/test_staging_race.py",
        "agents/test_staging_disks.py",
    ],
    "fs": ["unit/fs", "fs"],
    "job": [
        *("unit/job", "agents/test_failures.py", "agents/test_nodes.py", "agents/test_node_0_lost.py"),
        *("agents/test_arrival.py", "agents/test_stopping.py", "agents/test_elastic.py", "agents/test_outputs.py"),
        "agents/test_hangs.py",
    ],
    "plugin": ["unit/plugin", "contracts/golden", "contracts/oracle", "agents/test_local_runs.py"],
    "ranks": [
        *("unit/ranks", "agents/test_startmethods.py", "agents/test_isolation.py", "agents/test_errors_in_ranks.py"),
        *("agents/test_failures.py", "agents/test_environment.py", "agents/test_logs.py", "agents/test_leftovers.py"),
        "agents/test_groups_meet.py",
    ],
    "topology": ["unit/topology"],
}
"""Package to what tests it, below tests/, the fastest first."""

_NO_CHANGE = ("core/Variable", "core/ReplaceBinaryOperator_BitOr_")
"""Not drawn: those that need arguments, and "|", which here stands in annotations."""

_DECLARING = ("from ", "import ", "class ", "def ", "@", '"', "#")
"""How lines begin that do nothing when they run."""


@dataclass(frozen=True)
class Mutant:
    """One change: the operator's ``occurrence``-th place in a module of the package."""

    room: str
    module: str
    operator: str
    occurrence: int
    line: int


def main() -> None:
    """Draw mutants, try them, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}; without any: all")
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="what the draw depends on (default: 1)")
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="runs the tests")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="W")
    asked = parser.parse_args()
    unknown = set(asked.rooms) - set(ROOMS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(ROOMS)}")
    chosen = drawn(places(asked.rooms or list(ROOMS)), asked.sample, asked.seed)
    with contextlib.ExitStack() as stack:
        copies: SimpleQueue[Path] = SimpleQueue()
        for _ in range(asked.workers):
            copies.put(stack.enter_context(copy()))
        limits = {room: control(room, copies, asked.python) for room in sorted({each.room for each in chosen})}
        with ThreadPoolExecutor(asked.workers) as pool:
            fates = list(pool.map(lambda each: fate(each, copies, asked.python, limits[each.room]), chosen))
    for room in [*limits, ""]:
        print(summary(room or "all", [f for each, f in zip(chosen, fates, strict=True) if room in ("", each.room)]))


# --- which ------------------------------------------------------------------------------------------------------------
def places(rooms: Sequence[str]) -> list[list[Mutant]]:
    """All places of some rooms at which a mutant can be made; of each place, its mutants."""
    from cosmic_ray.commands.init import _all_work_items  # noqa: PLC0415

    found: dict[tuple[str, object], list[Mutant]] = {}
    for room in rooms:
        for path in sorted((ROOT / PACKAGE / room).rglob("*.py")):
            lines = path.read_text(encoding="utf-8").splitlines()
            for item in _all_work_items([path], {}):
                (spec,) = item.mutations
                text = lines[spec.start_pos[0] - 1].strip()
                if not spec.operator_name.startswith(_NO_CHANGE) and not text.startswith(_DECLARING):
                    module = str(path.relative_to(ROOT))
                    mutant = Mutant(room, module, spec.operator_name, spec.occurrence, spec.start_pos[0])
                    found.setdefault((module, spec.start_pos), []).append(mutant)
    return list(found.values())


def drawn(there: Sequence[Sequence[Mutant]], sample: int, seed: int) -> list[Mutant]:
    """One mutant at each of ``sample`` places; the same ones for the same seed."""
    pick = random.Random(seed)
    return [pick.choice(of_place) for of_place in pick.sample(list(there), min(sample, len(there)))]


# --- what becomes of it -----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def copy() -> Iterator[Path]:
    """A copy of what git has of the repository."""
    with tempfile.TemporaryDirectory(prefix="safedist-mutants-") as directory:
        Path(directory).chmod(0o755)  # some tests become another user
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            target = Path(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        yield Path(directory)


def control(room: str, copies: SimpleQueue[Path], python: str) -> float:
    """Run a room's tests without a change; how many seconds a mutant's may take.

    Raises:
        SystemExit: they fail, or do not look at the copy.
    """
    where, began = copies.get(), time.monotonic()
    code, output = tested(room, where, python, 3600, module=None)
    look = [python, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
    seen = subprocess.run(look, cwd=where, env=_environment(where), capture_output=True, text=True, check=False).stdout
    copies.put(where)
    if code != 0 or not seen.startswith(str(where)):
        text = f"{room}: the tests fail without a change, or are not of the copy ({code}, {seen.strip()})"
        raise SystemExit(f"{text}:\n{output[-4000:]}")
    print(f"{room}: the tests pass without a change in {time.monotonic() - began:.0f} s", flush=True)
    return 60 + 3 * (time.monotonic() - began)


def fate(mutant: Mutant, copies: SimpleQueue[Path], python: str, limit: float) -> str:
    """Make the change, and let the tests judge: ``noticed``, ``late`` (noticed by the time limit), ``survived``."""
    from cosmic_ray.mutating import mutate_code  # noqa: PLC0415
    from cosmic_ray.plugins import get_operator  # noqa: PLC0415

    where = copies.get()
    path = where / mutant.module
    before = path.read_text(encoding="utf-8")
    try:
        after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
        path.write_text(after, encoding="utf-8")
        code, output = tested(mutant.room, where, python, limit, module=mutant.module)
        changed = subprocess.run(
            ["diff", "-U2", str(ROOT / mutant.module), str(path)], capture_output=True, text=True, check=False
        ).stdout
    finally:
        path.write_text(before, encoding="utf-8")
        copies.put(where)
    found = "late" if code is None else "survived" if code == 0 else "noticed"
    by = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    shown = "\n".join(changed.splitlines()[2:]) if found == "survived" else by[:150]
    print(f"{found}: {mutant.module}:{mutant.line} {mutant.operator}\n{shown}", flush=True)
    return found


def tested(room: str, where: Path, python: str, limit: float, *, module: str | None) -> tuple[int | None, str]:
    """The exit code of a room's tests in a copy, None past the limit in seconds, and their output.

    Args:
        room: whose tests.
        where: the copy.
        python: runs them.
        limit: seconds.
        module: of the change, None without one; the tests that have its name, or its folder's, come first.
    """
    command = [python, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "300"]
    command += [f"tests/{name}" for name in tests_of(room, module, where)]
    running = subprocess.Popen(
        command,
        cwd=where,
        env=_environment(where),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = running.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return None, ""
    else:
        return running.returncode, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


def tests_of(room: str, module: str | None, where: Path) -> list[str]:
    """The room's tests below a copy's ``tests``, each once; those named as the module or its folder first."""
    names = [Path(module).stem, Path(module).parent.name] if module else []
    own = [
        str(path.relative_to(where / "tests"))
        for name in names
        for path in sorted((where / "tests" / "unit" / room).rglob(f"test_*{name}*.py"))
    ]
    return list(dict.fromkeys([*own, *(name for name in ROOMS[room] if (where / "tests" / name).exists())]))


def _environment(where: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"}


def summary(room: str, fates: Sequence[str]) -> str:
    """One line: how many of these mutants were noticed."""
    survived, late = fates.count("survived"), fates.count("late")
    noticed = len(fates) - survived
    return f"{room}: {100 * noticed / max(1, len(fates)):.1f} % of {len(fates)} noticed ({late} by the time limit)"


if __name__ == "__main__":
    main()
