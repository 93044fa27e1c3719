"""What a pod imports before its ranks, and under which variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.registered import registered

FORKS = """
import json, os, sys
from pathlib import Path
from flytekitplugins_safedist.config.registered import Registered
from flytekitplugins_safedist.ranks import prefork
from flytekitplugins_safedist.ranks.forkserver_client import RankServer

def no_server(preloaded):
    import gc
    print(json.dumps({"frozen": gc.get_freeze_count() > 10_000, "handlers": len(preloaded.at_exit)}))
    raise SystemExit

RankServer.fork = no_server
sys.path.insert(0, str(Path.cwd()))
made = prefork.import_and_fork(Registered.from_env(os.environ), "users", os.environ, Path("caches"))
print(json.dumps({"unsafe": made.unsafe, "error": repr(made.error), "server": made.server is not None}))
"""


def fork(directory: Path, users: str, **environment: str) -> dict[str, object]:
    (directory / "users.py").write_text(users)
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        cwd=directory,
        env={**os.environ, **registered(nproc_per_node=2), "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_imported_before_the_fork_is_kept_from_the_collector_whose_marks_would_copy_its_pages(tmp_path):
    assert fork(tmp_path, "import atexit\natexit.register(len, 'bye')") == {"frozen": True, "handlers": 1}


def test_a_handler_that_a_module_takes_back_is_none_of_its_ranks(tmp_path):
    assert fork(tmp_path, "import atexit\natexit.unregister(atexit.register(print))")["handlers"] == 0


@pytest.mark.parametrize("users", ["raise ValueError('of mine')", "import users_elsewhere"])
def test_an_error_of_the_users_module_is_kept_and_nothing_forked(tmp_path, users):
    made = fork(tmp_path, users)
    assert made["server"] is False
    assert str(made["error"]).startswith(("ValueError('of mine')", "ModuleNotFoundError"))


def test_a_module_that_needs_a_ranks_variables_is_imported_again_by_each_rank(tmp_path):
    made = fork(tmp_path, "import os\nRANK = os.environ['RANK']", RANK="0")
    assert made["error"] == "None", "the agent, which has the pod's, does not fail for it"
    assert "reads RANK" in str(made["unsafe"])


def test_modules_see_the_variables_of_ranks_and_what_they_set_stays(tmp_path):
    users = """
import os
seen = [os.environ[name] for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")]
assert seen[0] == "1" and seen[1].endswith("caches/inductor"), seen
assert "TORCH_FR_BUFFER_SIZE" not in os.environ, "how much torch remembers is the user's"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
del os.environ["TEST_GONE"]
raise SystemExit(1)
"""
    program = FORKS + "print(os.environ.get('TOKENIZERS_PARALLELISM'), 'TEST_GONE' in os.environ, end=' ')\n"
    program += "print(os.environ.get('OMP_NUM_THREADS'), 'TORCHINDUCTOR_CACHE_DIR' in os.environ)\n"
    (tmp_path / "users.py").write_text(users)
    environment = {**os.environ, **registered(nproc_per_node=2), "TEST_GONE": "no"}
    unset = ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")
    environment = {name: value for name, value in environment.items() if name not in unset}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "false False None False"
