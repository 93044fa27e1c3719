"""A rank keeps the process groups that its function destroys, however torch comes into it."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from flytekitplugins_safedist.errors import IncompatibleVersionError
from flytekitplugins_safedist.ranks import kept_groups

TAKE = "from torch.distributed import destroy_process_group\n"
BEFORE = "kept_groups.install()\nassert 'torch' not in sys.modules\n" + TAKE
AFTER = "import torch.distributed\nkept_groups.install()\n" + TAKE
GROUPS = """
import gc, os, torch.distributed as dist
named = lambda task: open(f"/proc/self/task/{task}/comm").read()
gloos = lambda: [task for task in os.listdir("/proc/self/task") if "gloo" in named(task)]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group([0])
before = gloos()
destroy_process_group()
gc.collect()
assert before and set(before) <= set(gloos()), (before, gloos())
assert not dist.is_initialized()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_world_size() == 1
print("kept")
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """An interpreter in which nothing has imported torch."""
    prelude = "import sys\nfrom flytekitplugins_safedist.ranks import kept_groups\n"
    return subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("installed", [BEFORE, AFTER], ids=["before torch", "after torch"])
def test_threads_of_a_group_outlive_its_destruction_and_another_can_be_made(installed: str) -> None:
    done = python(installed + GROUPS)
    assert done.stdout == "kept\n", done.stderr


def test_without_it_the_threads_end_with_the_group() -> None:
    done = python(TAKE + GROUPS)
    assert "AssertionError" in done.stderr


def test_torch_looks_as_it_would_without() -> None:
    done = python(
        "import inspect, importlib\n"
        "finders = list(sys.meta_path)\n"
        "kept_groups.install()\n"
        "import torch.distributed as dist\n"
        "from torch.distributed import distributed_c10d as home\n"
        "assert sys.meta_path[-len(finders):] == finders and not any('kept' in repr(f) for f in sys.meta_path)\n"
        "assert home.__loader__ is home.__spec__.loader and 'kept' not in repr(home.__loader__)\n"
        "assert dist.destroy_process_group is home.destroy_process_group\n"
        "assert 'Destroy a given process group' in dist.destroy_process_group.__doc__\n"
        "assert 'def destroy_process_group' in inspect.getsource(home)\n"
        "try: dist.destroy_process_group()\n"
        "except AssertionError as error: print(error)\n"
    )
    assert done.stdout == "Process group cannot be None\n", done.stderr


def test_a_torch_that_has_its_groups_elsewhere_is_said_to_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType(kept_groups.MODULE)
    other.destroy_process_group = lambda group=None: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kept_groups.MODULE, other)
    with pytest.raises(IncompatibleVersionError, match="_world"):
        kept_groups.install()
