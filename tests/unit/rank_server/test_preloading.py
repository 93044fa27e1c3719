"""Importing once for all ranks: what makes forking unsafe is named, and left to the ranks.

Every case runs in a process of its own: an import is for ever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.rank_server.libraries import GPU_DEVICES
from tests.harness.procs import DEADLINE, ROOT

pytestmark = pytest.mark.processes

TAKE = """
import json, os, sys
from flytekitplugins_safedist.rank_server import libraries
taken, pid = libraries.Libraries(), os.getpid()
steps = [step if isinstance(step, str) else tuple(step) for step in json.loads(sys.argv[1])]
taken.take(steps, needed=bool(sys.argv[2]))
"""
SAY = """
found = {'unsafe': taken.unsafe, 'left': taken.left, 'failed': taken.failed, 'same': os.getpid() == pid}
print(json.dumps(found))
"""
LOCKS = ", and a forked copy of their locks can hang"
NATIVE = (
    "import ctypes\nc = ctypes.CDLL(None)\nthread = ctypes.c_ulong()\n"
    "c.pthread_create(ctypes.byref(thread), None, c.pause, None)\n"
    "assert c.pthread_setname_np(thread, b'of-a-driver') == 0\n"
)
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='one').start()\n"
# A fake: there is no GPU here, so a module of this name stands in for torch.cuda after a kernel was launched.
CUDA = (
    "import sys, types\ntorch_cuda = types.ModuleType('torch.cuda')\n"
    "torch_cuda.is_initialized = lambda: {}\nsys.modules['torch.cuda'] = torch_cuda\n"
)


def take(directory: Path, *steps: Any, needed: bool = False, code: str = SAY, **modules: str) -> Any:
    """What becomes of a process that takes these steps, of *modules* with these sources."""
    for name, source in modules.items():
        (directory / f"{name}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", TAKE + code, json.dumps(steps), "needed" if needed else ""],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (THREAD, f"`import library` starts 1 thread(s) (one){LOCKS}"),
        (NATIVE, f"`import library` starts 1 thread(s) (native 'of-a-driver'){LOCKS}"),
        (
            NATIVE.replace("of-a-driver", r"caf\xe9"),
            rf"`import library` starts 1 thread(s) (native 'caf\\xe9'){LOCKS}",
        ),
        (CUDA.format(True), "`import library` initialises CUDA, which does not survive a fork"),
        (CUDA.format(False), None),
        ("import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()\n", None),
    ],
    ids=[
        "a thread",
        "a native thread",
        "a native thread with a name of any bytes",
        "CUDA",
        "torch.cuda that was only imported",
        "a thread that has ended",
    ],
)
def test_what_makes_forking_unsafe_is_named_and_undone_where_ranks_can_import_it_themselves(tmp_path, source, why):
    steps = ("import before", "import library", "import behind")
    modules = {"before": "", "library": source, "behind": ""}
    there = "found['there'] = [each in sys.modules for each in ('before', 'library', 'behind')]\n"
    code = SAY.replace("print(", f"{there}print(")
    needed = take(tmp_path, *steps, needed=True, code=code, **modules)
    assert (needed["unsafe"], needed["there"]) == (why, [True, True, why is None])
    others = take(tmp_path, *steps, code=code, **modules)
    assert others["unsafe"] is None
    assert others["left"] == ([f"{why}: each rank imports it by itself"] if why else [])
    assert others["same"] == (why is None), "a copy from before goes on"
    assert others["there"] == [True, why is None, True]


def test_what_else_imports_a_library_that_spoils_a_process_is_not_tried_at_its_cost(tmp_path):
    notes = "import builtins\nbuiltins.times = getattr(builtins, 'times', 0) + 1\n"
    steps = ("import library", "from library import Thread", "try:\n import library\nexcept Exception:\n import x")
    code = "print(json.dumps([len(taken.left), taken.steps]))"
    found = take(tmp_path, "import before", *steps, "import behind", code=code, before=notes, library=THREAD, behind="")
    assert found == [1, ["import library", "import before", "import behind"]]


def test_the_process_that_gave_way_ends_as_the_copy_does_and_keeps_nothing_in_memory(tmp_path):
    code = """
status = open(f"/proc/{pid}/status").read()
size = int(status.partition("RssAnon:")[2].split()[0])
print(json.dumps([size < 10_000, len(os.listdir(f"/proc/{pid}/task"))]), flush=True)
os._exit(0)
"""
    grown = "GROWN = bytearray(50 << 20)\n"
    assert take(tmp_path, "import before", "import library", before=grown, library=THREAD, code=code) == [True, 1]


def test_an_open_gpu_driver_is_seen_even_where_torch_does_not_know(tmp_path):
    # A fake: there is no GPU here, so another device stands in for the driver's.
    device = "from flytekitplugins_safedist.rank_server import libraries\nlibraries.GPU_DEVICES += ('/dev/zero',)\n"
    found = take(tmp_path, "import library", needed=True, library=device + "device = open('/dev/zero', 'rb')\n")
    assert found["unsafe"] == "`import library` opens the GPU driver, whose state does not survive a fork"


def test_asking_nvml_is_no_work_on_a_gpu():
    """``torch.cuda.is_available()`` asks it, and leaves open what it opens: these two."""
    assert not any(path.startswith(GPU_DEVICES) for path in ("/dev/nvidiactl", "/dev/nvidia0"))
    assert all(path.startswith(GPU_DEVICES) for path in ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/kfd"))


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ValueError('bad')", "ValueError: bad"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
    ],
)
def test_an_import_that_fails_is_passed_over_and_its_error_kept(tmp_path, source, error):
    found = take(tmp_path, "import library", "import json", library=source)
    assert found == {"unsafe": None, "left": [], "failed": {"import library": error}, "same": True}


def test_variables_are_set_for_the_imports_behind_them_alone(tmp_path):
    reads = "import os\nSAW = os.environ.get('HF_HOME'), os.environ.get('TOKENS')\n"
    steps = ("import early", ("HF_HOME", "/mine", False), ("TOKENS", "x", True), ("TOKENS", "y", True), "import late")
    code = "print(json.dumps([early.SAW, late.SAW, os.environ.get('HF_HOME')]))"
    found = take(tmp_path, *steps, code="import early, late\n" + code, early=reads, late=reads)
    assert found == [[None, None], ["/mine", "x"], None]


def test_identity_is_withheld_and_what_libraries_set_stays_for_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    sets = "import os\nSAW = os.environ.get('RANK')\nos.environ['SET_BY_ONE'] = '1'\n"
    reads = "import os\nSAW = os.environ.get('SET_BY_ONE')\n"
    code = "import one, two\nprint(json.dumps([one.SAW, two.SAW, taken.sets, os.environ['RANK']]))"
    taken = take(tmp_path, "import one", "import two", code=code, one=sets, two=reads)
    assert taken == [None, "1", {"SET_BY_ONE": [None, "1"]}, "3"]


def test_a_second_call_imports_only_what_is_new(tmp_path):
    again = "for _ in range(2):\n    taken.take(['import one', 'import two'], needed=False)\n"
    noted = "import builtins\nbuiltins.noted = getattr(builtins, 'noted', []) + [__name__]\n"
    code = again + "import builtins\nprint(json.dumps([builtins.noted, taken.steps]))"
    found = take(tmp_path, "import one", code=code, one=noted, two=noted)
    assert found == [["one", "two"], ["import one", "import two"]]


@pytest.mark.parametrize("fails", ["", "raise OSError"])
def test_the_garbage_collector_rests_while_libraries_are_imported_and_no_longer(tmp_path, fails):
    code = "import gc, builtins\nprint(json.dumps([builtins.collected, gc.isenabled()]))"
    library = f"import gc, builtins\nbuiltins.collected = gc.isenabled()\n{fails}"
    assert take(tmp_path, "import library", code=code, library=library) == [False, True]
