"""Mutation testing: change the package in small ways, one at a time, and see which of the changes its tests notice.

Run by hand (``make mutants``): about a minute each. They are drawn by chance over the rooms that are asked for, the
same ones for the same seed and commit. The changes are cosmic-ray's; each is made in a copy of the repository, and
judged there by the tests that run the changed statement, the cheap ones first, until one fails. Which those are, in
agents and ranks as well, `make coverage` has noted; run it first where the package has changed.
What survives is printed as a diff; docs/mutants.md says why it may.

This runs in an environment that has cosmic-ray and coverage, the tests in the repository's own.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flytekitplugins_safedist"
CHEAP = ("tests/unit/", "tests/contracts/")
DEAR_TESTS = 25
"""All cheap tests that run a statement are asked, and this many of the others, of each file the quickest first: a
change that they do not notice, hardly any other does."""

_NO_CHANGE = ("core/Variable", "core/ReplaceBinaryOperator_BitOr_", "core/RemoveDecorator")
"""Not drawn: those that need arguments; "|", which here stands in annotations; and what makes a module that
nothing can import."""

_OF_NUMBERS = (ast.Constant, ast.BinOp, ast.operator, ast.Tuple, ast.expr_context)


@dataclass(frozen=True)
class Mutant:
    """One change: the operator's ``occurrence``-th place in a module of the package."""

    room: str
    module: str
    operator: str
    occurrence: int
    line: int
    statement: range
    """The lines of the statement that is changed; of one with a body, its head."""


def main() -> None:
    """Draw mutants, try them, and print what became of each."""
    rooms = sorted(path.name for path in (ROOT / PACKAGE).iterdir() if (path / "__init__.py").exists())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(rooms)}; without any: all")
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="what the draw depends on (default: 1)")
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="runs the tests")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="W")
    asked = parser.parse_args()
    if unknown := set(asked.rooms) - set(rooms):
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(rooms)}")
    known = Known.read(ROOT / "build" / "coverage")
    chosen = drawn(places(asked.rooms or rooms), asked.sample, asked.seed)
    with contextlib.ExitStack() as stack:
        copies: SimpleQueue[Path] = SimpleQueue()
        for _ in range(asked.workers):
            copies.put(stack.enter_context(copy()))
        control(known, copies, asked.python)
        with ThreadPoolExecutor(asked.workers) as pool:
            fates = list(pool.map(lambda each: fate(each, copies, asked.python, known), chosen))
    for room in [*sorted({each.room for each in chosen}), ""]:
        print(summary(room or "all", [f for each, f in zip(chosen, fates, strict=True) if room in ("", each.room)]))


# --- which ------------------------------------------------------------------------------------------------------------
def places(rooms: Sequence[str]) -> list[list[Mutant]]:
    """All places of some rooms at which a mutant can be made that does something; of each place, its mutants."""
    from cosmic_ray.ast import ast_nodes, get_ast  # noqa: PLC0415
    from cosmic_ray.plugins import get_operator, operator_names  # noqa: PLC0415

    operators = [(name, get_operator(name)()) for name in sorted(operator_names()) if not name.startswith(_NO_CHANGE)]
    found: dict[tuple[str, object], list[Mutant]] = {}
    for room in rooms:
        for path in sorted((ROOT / PACKAGE / room).rglob("*.py")):
            module, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            idle, nodes = list(does_nothing(tree)), list(ast_nodes(get_ast(source)))
            lines = [statement(tree, number) for number, _ in enumerate(source.splitlines(), 1)]
            for name, operator in operators:
                there = (place for node in nodes for place, _ in operator.mutation_positions(node))
                for occurrence, place in enumerate(there):
                    if not any(begin <= place < end for begin, end in idle):
                        mutant = Mutant(room, module, name, occurrence, place[0], lines[place[0] - 1])
                        found.setdefault((module, place), []).append(mutant)
    return list(found.values())


def does_nothing(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """From where to where (line, column) no test should see a change: types, whether a value is frozen, what is logged
    and said, and how long a module's named durations and sizes are."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.AnnAssign | ast.arg):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.ClassDef):
            parts = list(node.decorator_list)
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            parts = [node]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            parts = list(node.args) if re.match(r"_?log(ger)?\.", called) else []
        for part in filter(None, parts):
            yield _extent(part)
    for top in tree.body:
        value = top.value if isinstance(top, ast.Assign | ast.AnnAssign) else None
        if value is not None and all(isinstance(part, _OF_NUMBERS) for part in ast.walk(value)):
            yield _extent(top)


def _extent(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    where: ast.expr = node  # type: ignore[assignment]  # all that have a place have these
    return (where.lineno, where.col_offset), (where.end_lineno or 0, where.end_col_offset or 0)


def statement(tree: ast.Module, line: int) -> range:
    """The lines of the innermost statement that is on a line; without its body, if it has one."""
    found = range(line, line + 1)
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            found = range(node.lineno, max(body[0].lineno, node.lineno + 1) if body else (node.end_lineno or 0) + 1)
    return found if line in found else range(line, line + 1)


def drawn(there: Sequence[Sequence[Mutant]], sample: int, seed: int) -> list[Mutant]:
    """One mutant at each of ``sample`` places; the same ones for the same seed."""
    pick = random.Random(seed)
    return [pick.choice(of_place) for of_place in pick.sample(list(there), min(sample, len(there)))]


# --- by what ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Known:
    """What a run of all tests has noted: module -> line -> tests, and how many seconds each test takes."""

    tests: Mapping[str, Mapping[int, Collection[str]]]
    seconds: Mapping[str, float]

    @classmethod
    def read(cls, directory: Path) -> Known:
        """Raises:
        SystemExit: there is none, or the package has been changed since.
        """
        from coverage import CoverageData  # noqa: PLC0415

        made = directory / "seconds.json"
        modules = list((ROOT / PACKAGE).rglob("*.py"))
        if not made.exists() or any(path.stat().st_mtime > made.stat().st_mtime for path in modules):
            raise SystemExit(f"{made} is not there, or older than the package: run `make coverage` first")
        data = CoverageData(str(directory / "data"))
        data.read()
        tests = {str(path.relative_to(ROOT)): data.contexts_by_lineno(str(path)) for path in modules}
        return cls(tests, json.loads(made.read_text()))

    def judges(self, mutant: Mutant) -> list[str]:
        """The tests that run what is changed, in the order in which they are asked: the cheap ones, then the others, of
        each file the quickest, the second, and so on; before all others those in which what comes next is run where it
        mostly is not, or is not where it mostly is. Of what runs at import, those that run anything of its module.
        And those that are named as the module or its folder: what runs it may be a process that notes nothing."""
        of_module, path = self.tests[mutant.module], Path(mutant.module)
        of_it = {test for line in mutant.statement for test in of_module.get(line, ())}
        if "" in of_it:
            of_it = {test for tests in of_module.values() for test in tests}
        own = re.compile(rf"tests/unit/{mutant.room}/.*test_\w*({path.stem}|{path.parent.name})\w*\.py::")
        of_it |= set(filter(own.match, self.seconds))
        goes_on = of_it.intersection(of_module.get(mutant.statement.stop, ()))
        rare = min(goes_on, of_it - goes_on, key=len)
        of_file: Counter[str] = Counter()
        cheap: list[tuple[int, str]] = []
        dear: list[tuple[int, str]] = []
        for test in sorted(of_it & self.seconds.keys(), key=self.seconds.__getitem__):
            file = test.partition("::")[0]
            of_file[file] += 1
            (cheap if file.startswith(CHEAP) else dear).append((of_file[file], test))
        dear.sort(key=lambda one: (one[1] not in rare, one[0]))
        return [test for _, test in (*cheap, *dear[:DEAR_TESTS])]


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


def control(known: Known, copies: SimpleQueue[Path], python: str) -> None:
    """Run a test without a change.

    Raises:
        SystemExit: it fails, or does not look at the copy: else every mutant would be noticed.
    """
    where = copies.get()
    test = min((test for test in known.seconds if test.startswith(CHEAP)), key=known.seconds.__getitem__)
    code, output = tested([test], where, python, known)
    copies.put(where)
    if code != 0:
        raise SystemExit(f"{test} fails without a change ({code}):\n{output[-4000:]}")


def fate(mutant: Mutant, copies: SimpleQueue[Path], python: str, known: Known) -> str:
    """Make the change, and let the tests judge: ``noticed``, ``survived``, ``unseen`` where no test runs it."""
    from cosmic_ray.mutating import mutate_code  # noqa: PLC0415
    from cosmic_ray.plugins import get_operator  # noqa: PLC0415

    judges = known.judges(mutant)
    where = copies.get()
    path, after = where / mutant.module, None
    before = path.read_text(encoding="utf-8")
    try:
        with contextlib.suppress(AttributeError):  # the tool's own, of an exception with a dot in its name
            after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
        if after is None:
            return "not made"
        path.write_text(after, encoding="utf-8")
        code, output = tested(judges, where, python, known) if judges else (0, "no test runs it")
        changed = subprocess.run(
            ["diff", "-U2", str(ROOT / mutant.module), str(path)], capture_output=True, text=True, check=False
        ).stdout
    finally:
        path.write_text(before, encoding="utf-8")
        copies.put(where)
    found = ("survived" if judges else "unseen") if code == 0 else "noticed"
    lines = output.splitlines()
    by = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR", "E  "))][-3:]
    shown = [*changed.splitlines()[2:], *lines[-1:]] if found != "noticed" else by
    what = f"{mutant.module}:{mutant.line} {mutant.operator}, of {len(judges)} tests"
    print(f"{found}: {what}", *shown, sep="\n", flush=True)
    return found


def tested(judges: Sequence[str], where: Path, python: str, known: Known) -> tuple[int, str]:
    """The exit code of some tests in a copy, in this order until one fails, and their output.

    A test that takes ten times as long as without a change, and a minute, has noticed it.
    """
    output = where / "output"
    (where / "judges.json").write_text(json.dumps({test: 60 + 10 * known.seconds[test] for test in judges}))
    files = list(dict.fromkeys(test.partition("::")[0] for test in judges))
    running = subprocess.Popen(
        [python, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "chosen", *files],
        cwd=where,
        env={**os.environ, "PYTHONPATH": f"{where}:{where / 'scripts' / 'contexts'}", "PYTHONDONTWRITEBYTECODE": ""},
        # No pipe: what a changed cleanup leaves behind would hold it, and its reader, for ever.
        stdout=output.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        running.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        end_all_of(where)
    return running.returncode, output.read_text(errors="replace")


def end_all_of(where: Path) -> None:
    """End what a changed agent or rank has left running, for it may run for ever: whatever started with this path."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{where}:".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def summary(room: str, fates: Sequence[str]) -> str:
    """One line: how many of these mutants were noticed."""
    noticed, made = fates.count("noticed"), len(fates) - fates.count("not made")
    return f"{room}: {noticed} of {made} noticed ({100 * noticed / max(1, made):.1f} %)"


if __name__ == "__main__":
    main()
