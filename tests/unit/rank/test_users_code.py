"""Children that the user's code forks."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, sys
from flytekitplugins_safedist.rank import users_code

for leaves in sys.argv[1:]:
    with users_code.without_children():
        child = os.fork()
        if child == 0:
            exec(leaves)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_child_that_returns_from_the_users_code_ends_with_the_status_that_a_script_would_have() -> None:
    leaves = {"sys.exit(300)": 300 & 255, "sys.exit('text')": 1, "sys.exit()": 0, "1 / 0": 1, "pass": 0}
    ended = subprocess.run(
        [sys.executable, "-c", CODE, *leaves], capture_output=True, text=True, timeout=60, check=False
    )
    assert dict(zip(leaves, map(int, ended.stdout.split()), strict=False)) == leaves, ended.stderr
