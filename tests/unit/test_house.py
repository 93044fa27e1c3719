"""The house's measures: functions that fit a screen, one meaning for each name, state only where it is written down."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "flytekitplugins_safedist"
MODULES = sorted(SOURCE.rglob("*.py"))

FUNCTION_LINES = 40
"""Of code, from ``def`` to the last line, without the docstring."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """Those of a module, itself first; each text is parsed once for all tests."""
    return [*ast.walk(ast.parse(source))]


def code_lines(function: Function) -> int:
    """Lines of a function without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def too_long(source: str) -> list[str]:
    """Functions of a module that have more lines than they may, nested ones and methods included."""
    functions = [node for node in nodes(source) if isinstance(node, Function)]
    return [f"{at.name}: {code_lines(at)}" for at in functions if code_lines(at) > FUNCTION_LINES]


def public_classes(source: str) -> Iterator[str]:
    """Names of a module's public classes."""
    for node in ast.iter_child_nodes(nodes(source)[0]):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def told_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Names that two modules give to a public class, with the modules."""
    homes: dict[str, list[str]] = {}
    for module, source in sources.items():
        for name in public_classes(source):
            homes.setdefault(name, []).append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


# --- state --------------------------------------------------------------------------------------------------------
STATE = {
    "checkpoint.agreement": "what all of a rank's Checkpoints have to do with its agent's agreements",
    "checkpoint.manager": "saves that this process has begun: who else saves at their place may be in it",
    "fs.identity": "who this rank is, for code that clears its environment",
    "fs.store": "a cache: where this process's ranks have met, by process and place",
    "stopping": "the process's signals, and what they have decided: there is one of each",
    # What is left for another part of the process, with flytekit or the user's code in between (handoff.Slot):
    "agent.life": "how this container ended when it was started before, and its sign of now",
    "agent.ending": "node 0's coordinator, to be closed after the upload",
    "meeting": "where this rank meets the others, for code that clears its environment",
    "lastwords": "why the job failed",
    "rank.context": "who this rank is, and what is to be done at the end of its function",
    "rank.task": "what is being imported: the task may be called meanwhile",
    "record.summary": "how long staging took",
    "record.writer": "what notes this rank's stages",
}
"""Modules that hold state, and why; every other one is the same after a call as before it."""

ENVIRONMENT = {
    "pod.entrypoint": "where code lies, for the task's command",
    "pod.scratch": "where temporary files go, for the task's command",
    "pod.task_command": "takes out what Flyte says to this command alone",
    "rank.fork": "takes out what a library sets that this package imports",
    "rank.main": "a rank's whole environment, before anything of the user's runs",
    "rank_server.libraries": "what libraries read as they are imported for all ranks; put back",
    "rank_server.server": "what a job has libraries imported under",
}
"""Modules that write ``os.environ``, and why."""

MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)


EMPTY = ("Slot()", "ExitStack()", "[]", "{}", "set()")
"""To be filled, whatever its name looks like."""


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def holds_state(source: str) -> bool:
    """Whether a module has names that functions assign anew, or a container in a name that is written like a variable.

    Names in capitals are constants, unless they are empty at first; ``__all__`` and loggers are everybody's, and locks
    guard what is elsewhere.
    """
    if any(isinstance(node, ast.Global) for node in nodes(source)):
        return True
    for node in ast.iter_child_nodes(nodes(source)[0]):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = ast.unparse(node.value) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else ""
        if value in EMPTY or value.startswith("contextvars.ContextVar("):
            return True
        if not isinstance(target, ast.Name) or target.id.isupper() or target.id.startswith("__"):
            continue
        is_variable = isinstance(node, ast.AnnAssign) and value == "None"
        is_container = isinstance(getattr(node, "value", None), MUTABLE)
        if (is_variable or is_container) and not value.startswith(("logging.getLogger", "threading.", "TypeVar")):
            return True
    return False


def writes_environment(source: str) -> bool:
    """Whether a module changes ``os.environ``."""
    changes = ("update", "pop", "setdefault", "clear", "popitem")
    for node in nodes(source):
        is_item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        is_change = isinstance(node, ast.Attribute) and node.attr in changes
        if (is_item or is_change) and ast.unparse(node.value) == "os.environ":
            return True
    return any(name in source for name in ("os.putenv", "os.unsetenv"))


def test_state_is_where_it_is_written_down() -> None:
    assert {dotted(path) for path in MODULES if holds_state(path.read_text())} <= STATE.keys()


def test_the_environment_is_written_where_the_design_says() -> None:
    assert {dotted(path) for path in MODULES if writes_environment(path.read_text())} == ENVIRONMENT.keys()


def test_every_private_module_is_one_that_lint_keeps_black_box_tests_from() -> None:
    public = {"checkpoint", "checkpoint.lightning", "checkpoint.transformers", "errors", "fs", "run"}
    below = [SOURCE, SOURCE / "fs", SOURCE / "checkpoint"]
    there = {dotted(path) for parent in below for path in [*parent.glob("*.py"), *parent.iterdir()] if is_module(path)}
    listed = re.findall(
        r'^"flytekitplugins_safedist\.([\w.]+)"\.msg', (SOURCE.parent / "pyproject.toml").read_text(), re.M
    )
    assert set(listed) == there - public


def is_module(path: Path) -> bool:
    return path.stem != "__init__" and (path.suffix == ".py" or (path / "__init__.py").is_file())


def test_a_function_fits_a_screen() -> None:
    sources = {dotted(path): path.read_text() for path in MODULES}
    assert {name: found for name, source in sources.items() if (found := too_long(source))} == {}


def test_no_two_public_classes_have_one_name() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in MODULES}
    twice = told_twice(sources)
    # How a rank ended, and what a node says it is; the end of a job in its books, and as it is uploaded.
    assert twice.keys() == {"Status", "Verdict"}


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by it: where two have one, a run of both collects the first only, a run of either passes."""
    names = Counter(path.name for path in (SOURCE.parent / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_docstring_does_not_count_and_code_does() -> None:
    docstring, statement = '    """What it is.\n' + "    More.\n" * 50 + '    """\n', "    x = 1\n"
    assert too_long("def f():\n" + docstring + 39 * statement) == []
    assert too_long("def f():\n" + docstring + 40 * statement) == ["f: 41"]
    assert too_long("class C:\n    async def m(self):\n" + 40 * f"    {statement}") == ["m: 41"]


def test_what_breaks_the_rules_would_be_seen() -> None:
    sources = {"a": "class Group: pass", "b": "class Group: pass\nclass _Own: pass", "c": "class _Own: pass"}
    assert told_twice(sources) == {"Group": ["a", "b"]}
    assert all(map(holds_state, ["def f():\n    global _x\n    _x = 1", "_m: dict[str, int] = {}", "k = []"]))
    assert all(map(holds_state, ["_given: int | None = None", "GIVEN: Slot[int] = Slot()", "_ALL: list[int] = []"]))
    assert not any(map(holds_state, ['logger = logging.getLogger("a")', "_lock = threading.Lock()", "NAMES = {1: 2}"]))
    writes = ["os.environ['A'] = 'b'", "del os.environ['A']", "x = os.environ.pop('A')", "os.putenv('A', 'b')"]
    assert all(map(writes_environment, writes))
    assert not writes_environment("x = os.environ['A']; y = dict(os.environ)")
