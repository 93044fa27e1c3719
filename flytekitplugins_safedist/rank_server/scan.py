"""What the user's files import from installed packages, as statements that can be run once for all ranks of a node.

Nothing of the user's is executed. A file is reduced to its module-level imports, and the task's to those that its
function begins with, too: what stands in other functions and in classes is left out, ``try`` keeps its shape, ``if`` is
decided where that can be done from the text alone, and ``with`` is entered where it changes nothing. A variable that is
set to a constant before an import is set for that import, too; after anything else that may change what an import
finds, the rest is left to the ranks.

Installed is what lies where ``pip`` puts it. All else, editable installs and directories of PYTHONPATH among it, is the
user's: it is read, and each rank imports it.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

from ..rank.fork import places_of
from ..rank.users_code import parsed
from .launch import NEEDED, by_finders, is_installed

Step: TypeAlias = "str | tuple[str, str, bool]"
"""An import statement; or a variable that is set before the next one: name, value, and whether only by default."""

_MOST_FILES = 2000
"""Of a project that are read: more are no project."""

_CHANGES_IMPORTS = {
    *("putenv", "unsetenv", "load_dotenv", "patch_all", "monkey_patch"),
    *("import_module", "__import__", "exec", "addsitedir"),
}


@dataclass(frozen=True)
class Scan:
    """What was found.

    Attributes:
        steps: in the order in which the interpreter would come to them.
        stopped: where reading ended early, and why.
    """

    steps: tuple[Step, ...] = ()
    stopped: str = ""


def scan(modules: Sequence[str], files: Sequence[str], path: Sequence[str], task: str) -> Scan:
    """Read modules and files of the user's, and all of the user's that these import.

    Args:
        modules: their names.
        files: of scripts.
        path: the module search path.
        task: the name of the one that is run, in the first of the files, or else of the modules.
    """
    importlib.invalidate_caches()  # the code may have come a moment ago
    reading = _Reading(path, task)
    reading.home = Path(files[0]) if files else reading.file_of(modules[0]) if modules else None
    try:
        for file in files:
            reading.file(Path(file), ())
        for name in modules:
            reading.imported(name, (), f"import {name}")
    except _StopError as stop:
        return Scan(tuple(reading.steps), str(stop))
    return Scan(tuple(reading.steps))


class _StopError(Exception):
    """From here on an import may find something else than it would alone."""


@dataclass
class _Reading:
    path: Sequence[str]
    task: str
    home: Path | None = None
    steps: list[Step] = field(default_factory=list)
    _read: set[Path] = field(default_factory=set)
    _specs: dict[str, ModuleSpec | None] = field(default_factory=dict)

    # --- where a module is ---------------------------------------------------------------------------------------
    def spec(self, name: str) -> ModuleSpec | None:
        """Of a module, or of a package; nothing is imported."""
        if name not in self._specs:
            self._specs[name] = self._find(name)
        return self._specs[name]

    def _find(self, name: str) -> ModuleSpec | None:
        above, _, _ = name.rpartition(".")
        with suppress(Exception):  # whatever finders of others raise
            if above:
                package = self.spec(above)
                places = package and package.submodule_search_locations
                return PathFinder.find_spec(name, list(places)) if places else None
            return PathFinder.find_spec(name, list(self.path)) or by_finders(name)
        return None

    def is_own(self, spec: ModuleSpec) -> bool:
        """Whether a module is the user's."""
        return spec.origin not in ("built-in", "frozen") and not any(map(is_installed, places_of(spec)))

    def file_of(self, name: str) -> Path | None:
        """A module's."""
        spec = self.spec(name)
        return Path(spec.origin) if spec is not None and spec.origin is not None else None

    # --- reading -------------------------------------------------------------------------------------------------
    def module(self, name: str) -> None:
        """Read a module of the user's, and first the packages that it is in."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            spec = self.spec(".".join(parts[:count]))
            if spec is None or not self.is_own(spec):
                return
            if spec.has_location and spec.origin is not None and spec.origin.endswith(".py"):
                is_package = spec.submodule_search_locations is not None
                self.file(Path(spec.origin), parts[: count if is_package else count - 1])

    def file(self, file: Path, package: Sequence[str]) -> None:
        """Read a file that is in a package."""
        if file in self._read or len(self._read) >= _MOST_FILES:
            return
        self._read.add(file)
        try:
            tree = parsed(file)
        except (OSError, SyntaxError, ValueError, RecursionError):
            return  # ranks will say so
        late: list[ast.stmt] = []
        for node in tree.body:
            self.statement(node, package, file, late)
        for node in late:
            self.statement(node, package, file, [])

    def statement(self, node: ast.stmt, package: Sequence[str], file: Path, late: list[ast.stmt]) -> None:
        """Read one statement of a module; imports in a task's body come *late*."""
        match node:
            case ast.Import():
                for alias in node.names:
                    self.imported(alias.name, (), f"import {alias.name}")
            case ast.ImportFrom(module=module, level=level, names=names):
                base = [*package[: len(package) - level + 1], *(module or "").split(".")] if level else [module or ""]
                if level <= len(package):  # else ranks will say so
                    name = ".".join(filter(None, base))
                    self.imported(name, [alias.name for alias in names], ast.unparse(node))
            case ast.With() | ast.If() if (body := _surely_run(node)) is not None:
                for each in body:
                    self.statement(each, package, file, late)
            case ast.Try():
                self._try(node, package, file, late)
            case ast.FunctionDef(name=self.task, decorator_list=[_]) if file == self.home:
                late += _at_the_top(node.body)  # with a second decorator nobody knows what runs before these
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return
            case _ if (variable := _constant(node)) is not None:
                self.steps.append(variable)
            case _ if (why := _change(node)) is not None:
                raise _StopError(f"{file.name}, line {node.lineno}: {why}")

    def imported(self, name: str, listed: Sequence[str], statement: str) -> None:
        """An import: a step where it is of an installed package; where it is the user's, what that imports itself."""
        top = name.partition(".")[0]
        spec = self.spec(top)
        if spec is None or top == "__future__" or (top in sys.builtin_module_names):
            return
        targets = [name, *(f"{name}.{each}" for each in listed)]
        found = [self.spec(each) for each in targets]
        is_own = any(each is not None and self.is_own(each) for each in (spec, *found))
        if is_own and top not in NEEDED:
            for each in targets:
                self.module(each)
        elif top not in sys.stdlib_module_names:
            self.steps.append(statement)

    def _try(self, node: ast.Try, package: Sequence[str], file: Path, late: list[ast.stmt]) -> None:
        def read(body: Sequence[ast.stmt]) -> list[Step]:
            kept, self.steps = self.steps, []
            try:
                for each in body:
                    self.statement(each, package, file, late)
            finally:
                found, self.steps = self.steps, kept
            return found

        body, otherwise = read(node.body), read([each for handler in node.handlers for each in handler.body])
        if otherwise and all(isinstance(step, str) for step in [*body, *otherwise]) and body:
            body = [f"try:\n{_indented(body)}\nexcept Exception:\n{_indented(otherwise)}"]
        self.steps += body  # a step that fails is passed over anyway
        self.steps += read([*node.orelse, *node.finalbody])


def _indented(steps: Sequence[Step]) -> str:
    return "\n".join(f" {line}" for step in steps for line in str(step).splitlines())


def _at_the_top(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The imports that a function begins with. Those below may find what the lines above have set, in this process or
    in a library."""
    lines = body[1:] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body
    return list(takewhile(lambda each: isinstance(each, (ast.Import, ast.ImportFrom)), lines))


def _surely_run(node: ast.With | ast.If) -> list[ast.stmt] | None:
    """The statements of a block that are run; None where the text does not say."""
    if isinstance(node, ast.With):
        return node.body if all(map(_changes_nothing, node.items)) else None
    is_so = _decided(node.test)
    return None if is_so is None else node.body if is_so else node.orelse


def _changes_nothing(item: ast.withitem) -> bool:
    """Whether imports find inside a block what they find outside. Of other ones (``mock.patch.dict(os.environ)``) the
    text does not say, and what they change may be back before a rank can see it."""
    called = item.context_expr
    named = called.func if isinstance(called, ast.Call) else called
    return ast.unparse(named).rpartition(".")[2] in ("suppress", "catch_warnings", "nullcontext", "imports")


def _decided(test: ast.expr) -> bool | None:
    """The value of a condition that is known from the text and the interpreter; None where it is not."""
    text = ast.unparse(test)
    if text.removeprefix("not ").rpartition(".")[2] == "TYPE_CHECKING":
        return text.startswith("not ")
    if text == "__name__ == '__main__'":
        return False
    if isinstance(test, ast.Compare) and ast.unparse(test.left) in ("sys.version_info", "sys.platform"):
        with suppress(Exception):
            constants = all(isinstance(each, (ast.Constant, ast.Tuple)) for each in test.comparators)
            return bool(eval(text, {"sys": sys})) if constants else None  # noqa: S307  (sys against constants)
    return None


_ENVIRON = ("os.environ", "environ")
_FOUND_BY = (*_ENVIRON, "sys.path", "sys.modules", "sys.meta_path", "sys.path_hooks")
"""What an import goes by."""


def _constant(node: ast.stmt) -> tuple[str, str, bool] | None:
    """``os.environ["X"] = "1"`` and ``os.environ.setdefault("X", "1")``."""
    match node:
        case ast.Assign(
            targets=[ast.Subscript(value=environ, slice=ast.Constant(value=str(name)))],
            value=ast.Constant(value=str(value)),
        ) if ast.unparse(environ) in _ENVIRON:
            return name, value, False
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=environ, attr="setdefault"),
                args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
            )
        ) if ast.unparse(environ) in _ENVIRON:
            return name, value, True
    return None


def _change(node: ast.stmt) -> str | None:
    """Why imports that follow may find something else than they would alone; None where nothing says so."""
    for inner in _outside_functions(node):
        match inner:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _CHANGES_IMPORTS:
                return f"{name}() is called"
            case ast.Call(func=ast.Attribute(value=changed, attr=name)) if (
                name not in _READS and ast.unparse(changed) in _FOUND_BY
            ):
                return f"{ast.unparse(changed)} is changed"
            case ast.Subscript(value=changed, ctx=ast.Store() | ast.Del()) if ast.unparse(changed) in _FOUND_BY:
                return f"{ast.unparse(changed)} is changed"
            case ast.Attribute(ctx=ast.Store() | ast.Del()) if ast.unparse(inner) in _FOUND_BY:
                return f"{ast.unparse(inner)} is changed"
    return None


_READS = {"get", "copy", "keys", "values", "items", "index", "count"}


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _outside_functions(child)
