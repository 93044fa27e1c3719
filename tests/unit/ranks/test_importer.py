"""Modules come from this process's archive, and look as if they came from the destination directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import json, os, sys
from flytekitplugins_safedist.ranks import importer
tree, dest = sys.argv[1:3]
sys.path.append(dest)
def show(**facts): print(json.dumps(facts))
"""


@pytest.fixture
def places(tmp_path):
    """A tree (the archive's) and a destination (where somebody else's archive came later), and Python between them."""

    class Places:
        tree, dest = tmp_path / "tree", tmp_path / "dest"

        def write(self, place: Path, **files: str) -> None:
            for name, text in files.items():
                path = place / name.replace("__slash__", "/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                os.utime(path, (315532800, 315532800))

        def both(self, files: dict[str, tuple[str | None, str | None]]) -> None:
            for name, texts in files.items():
                for place, text in zip((self.tree, self.dest), texts, strict=True):
                    if text is not None:
                        self.write(place, **{name.replace("/", "__slash__"): text})

        def python(self, code: str, **environment: str) -> dict[str, object]:
            done = subprocess.run(
                [sys.executable, "-c", PRELUDE + textwrap.dedent(code), self.tree, self.dest],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            )
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

    return Places()


def test_code_is_the_archives_and_names_are_the_destinations(places):
    places.both({"m.py": ("V = 'ours'", "V = 'theirs'")})
    found = places.python("importer.install(tree, dest); import m; show(v=m.V, file=m.__file__)")
    assert found == {"v": "ours", "file": str(places.dest / "m.py")}


def test_submodules_imported_later_are_the_archives_too(places):
    places.both({"p/__init__.py": ("", ""), "p/late.py": ("V = 'ours'", "V = 'theirs'")})
    code = "importer.install(tree, dest); import p; from p import late; show(v=late.V, path=list(p.__path__))"
    assert places.python(code) == {"v": "ours", "path": [str(places.dest / "p")]}


def test_another_archive_cannot_turn_a_module_into_a_package(places):
    places.both({"m.py": ("V = 'ours'", "V = 'old'"), "m/__init__.py": (None, "V = 'theirs'")})
    assert places.python("importer.install(tree, dest); import m; show(v=m.V)") == {"v": "ours"}


def test_modules_that_only_the_image_has_are_found_beside_the_archives(places):
    places.both({"p/__init__.py": ("", ""), "p/built.py": (None, "V = 'image'"), "alone.py": (None, "V = 'image'")})
    code = "importer.install(tree, dest); import p.built, alone; show(v=[p.built.V, alone.V])"
    assert places.python(code) == {"v": ["image", "image"]}


def test_data_beside_a_module_is_found_as_with_the_stock_command(places):
    places.both({"p/__init__.py": ("", ""), "p/a.txt": ("archive", "archive"), "p/b.txt": (None, "image")})
    code = """
        importer.install(tree, dest)
        import p, pkgutil, importlib.resources
        beside = lambda name: open(os.path.join(os.path.dirname(p.__file__), name)).read()
        show(
            beside=[beside("a.txt"), beside("b.txt")],
            pkgutil=[pkgutil.get_data("p", "a.txt").decode(), pkgutil.get_data("p", "b.txt").decode()],
            resources=[(importlib.resources.files("p") / name).read_text() for name in ("a.txt", "b.txt")],
        )
    """
    pair = ["archive", "image"]
    assert places.python(code) == {"beside": pair, "pkgutil": pair, "resources": pair}


def test_namespace_packages_span_both(places):
    places.both({"ns/ours.py": ("V = 1", "V = 2"), "ns/image.py": (None, "V = 3")})
    code = "importer.install(tree, dest); import ns.ours, ns.image; show(v=[ns.ours.V, ns.image.V])"
    assert places.python(code) == {"v": [1, 3]}


@pytest.mark.parametrize("prefix", ["", "cache"])
def test_bytecode_of_another_archive_is_never_taken(places, tmp_path, prefix):
    # Same name, same size, same modification time (flytekit's): Python alone would take the other's bytecode.
    environment = {"PYTHONPYCACHEPREFIX": str(tmp_path / prefix)} if prefix else {}
    environment["PYTHONDONTWRITEBYTECODE"] = ""
    places.both({"m.py": ("V = 'ours11'", "V = 'theirs'")})
    assert places.python("import m; show(v=m.V)", **environment) == {"v": "theirs"}
    for _ in range(2):
        found = places.python("importer.install(tree, dest); import m; show(v=m.V)", **environment)
        assert found == {"v": "ours11"}
    assert places.python("import m; show(v=m.V)", **environment) == {"v": "theirs"}


def test_the_images_version_imported_before_is_forgotten_and_other_modules_are_not(places):
    places.both({"m.py": ("V = 'ours'", "V = 'image'"), "other.py": (None, "V = []")})
    code = """
        import m, other
        other.V.append(1)
        importer.install(tree, dest)
        import m as again, other as same
        show(v=[again.V, same.V])
    """
    assert places.python(code) == {"v": ["ours", [1]]}


def test_fresh_interpreters_of_ours_learn_it_from_their_variables(places):
    places.both({"m.py": ("V = 'ours'", "V = 'theirs'")})
    code = """
        environment = {}
        importer.export(tree, dest, environment)
        importer.install_from({})
        import m
        before = m.V
        importer.install_from(environment)
        import m
        show(v=[before, m.V])
    """
    assert places.python(code) == {"v": ["theirs", "ours"]}


def test_a_tree_that_was_cleaned_away_leaves_the_destination(places):
    places.both({"m.py": (None, "V = 'dest'")})
    assert places.python("importer.install(tree, dest); import m; show(v=m.V)") == {"v": "dest"}


def test_compiled_extensions_of_the_archive_are_loaded_from_the_tree(places):
    import importlib.machinery
    import importlib.util
    import shutil

    spec = importlib.util.find_spec("_asyncio")
    if spec is None or not spec.origin or not spec.origin.endswith(".so"):
        spec = importlib.util.find_spec("_json")
    assert spec is not None
    assert spec.origin is not None
    name = "_asyncio" if "_asyncio" in spec.origin else "_json"
    places.both({"p/__init__.py": ("", "")})
    shutil.copy(spec.origin, places.tree / "p" / Path(spec.origin).name)
    code = f"importer.install(tree, dest); import p.{name} as e; show(file=e.__file__)"
    assert str(places.python(code)["file"]).startswith(str(places.tree))
