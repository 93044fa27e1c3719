"""What the user's module keeps of its import."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, os, signal, sys
from flytekitplugins_safedist.ranks import users_code

with users_code.importing():
    from os import _exit, fork
HOW
"""
AFTER = {
    "_exit": ("_exit(7)", 7),
    "fork": (
        # The child of a child that is gone: it goes on.
        """
reading, writing = os.pipe()
if fork() == 0:
    if fork() == 0:
        os.read(reading, 1)
        sys.stdout.write("went on")
        sys.stdout.flush()
    os._exit(0)
os.wait()
os.write(writing, b"x")
""",
        0,
    ),
}


@pytest.mark.parametrize("how", AFTER)
def test_what_a_module_has_taken_by_name_is_the_systems_own_once_it_is_imported(how: str) -> None:
    code, status = AFTER[how]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("HOW", code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (status, "")
    assert ended.stdout == ("went on" if how == "fork" else "")


@pytest.mark.parametrize(
    ("leaves", "status"),
    [("sys.exit(300)", 300 & 255), ("sys.exit('text')", 1), ("sys.exit()", 0), ("1 / 0", 1), ("pass", 0)],
)
def test_a_child_that_returns_from_the_users_code_ends_with_the_status_that_a_script_would_have(
    leaves: str, status: int
) -> None:
    code = f"""
import os, sys
from flytekitplugins_safedist.ranks import users_code

with users_code.without_children():
    child = os.fork()
    if child == 0:
        {leaves}
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == f"{status}\n", ended.stderr
