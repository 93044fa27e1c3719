"""Importing once for all ranks: what makes forking unsafe is named, and a forked rank gets what a fresh one would have.

Every case runs in a process of its own: preloading is for ever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.ranks import known
from flytekitplugins_safedist.ranks.preload import GPU_DEVICES, blas_threads
from tests.harness.procs import DEADLINE

pytestmark = pytest.mark.processes

WAY_OUT = "; do that in the task's function, or set start_method='spawn' to be told no more"

PRELOAD = """
import json, sys
from flytekitplugins_safedist.ranks import preload
libraries, modules = json.loads(sys.argv[1])
done = preload.preload(libraries, modules)
"""
PATIENT = PRELOAD.replace("done =", "preload._LEAVING_SECONDS = 60.0\ndone =")
"""For modules whose threads have ended: the kernel lists one for a moment longer."""

# Forks the process as the rank server does, and prints what each child says.
FORKED = (
    PRELOAD
    + """
import os, random
assert done.unsafe is None, done.unsafe
for _ in range(2):
    reader, writer = os.pipe()
    if os.fork() == 0:
        preload.refresh(done, {"OMP_NUM_THREADS": "1"})
        numpy = sys.modules.get("numpy")
        said = [random.random(), numpy.random.random() if numpy else None]
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    print(os.read(reader, 4096).decode())
    os.wait()
"""
)


def run(code: str, directory: Path, *, libraries: list[str] | None = None, modules: list[str] | None = None) -> str:
    arguments = [sys.executable, "-c", code, json.dumps([libraries or [], modules or []])]
    path = os.pathsep.join([str(directory), str(Path(__file__).parents[3])])
    environment = {**os.environ, "PYTHONPATH": path, **known.VARIABLES}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unsafe(directory: Path, source: str, preloads: str = PRELOAD) -> str | None:
    """Why forking is unsafe after a user's module with this source was imported."""
    (directory / "users.py").write_text(source)
    reason = run(preloads + "print(json.dumps(done.unsafe))", directory, modules=["users"])
    value: str | None = json.loads(reason)
    return value


def numbers(directory: Path, source: str, libraries: list[str] | None = None) -> list[tuple[float, float | None]]:
    """``random.random()`` and ``numpy.random.random()`` of two ranks forked after importing a module of this source."""
    (directory / "users.py").write_text(source)
    lines = run(FORKED, directory, libraries=libraries, modules=["users"]).splitlines()
    return [tuple(json.loads(line)) for line in lines]


# --- what makes forking unsafe ---------------------------------------------------------------------------------------
def test_an_ordinary_module_is_safe(tmp_path: Path) -> None:
    assert unsafe(tmp_path, "import json\nX = 1\n") is None


def test_a_module_that_starts_threads_is_named_with_their_names(tmp_path: Path) -> None:
    source = (
        "import threading\n"
        "stop = threading.Event()\n"
        "for _ in range(2):\n"
        "    threading.Thread(target=stop.wait, daemon=True, name=f'heartbeat {_}').start()\n"
    )
    assert unsafe(tmp_path, source) == (
        "importing users started 2 thread(s) (heartbeat 0, heartbeat 1), and a forked copy of their locks can hang"
        + WAY_OUT
    )


def test_a_thread_that_python_does_not_know_is_named_as_the_kernel_does(tmp_path: Path) -> None:
    source = (
        "import ctypes\n"
        "c = ctypes.CDLL(None)\n"
        "thread = ctypes.c_ulong()\n"
        "c.pthread_create(ctypes.byref(thread), None, c.pause, None)\n"
        "assert c.pthread_setname_np(thread, b'of-a-driver') == 0\n"
    )
    assert unsafe(tmp_path, source) == (
        "importing users started 1 thread(s) (native 'of-a-driver'), and a forked copy of their locks can hang"
        + WAY_OUT
    )


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("import os\nLOCAL_RANK = int(os.environ.get('LOCAL_RANK', 0))\n", "LOCAL_RANK (in users, line 2)"),
        ("import os\nRANK = os.environ['RANK']\n", "RANK (in users, line 2)"),
        ("import os\n\nif 'HOROVOD_RANK' in os.environ:\n    pass\n", "HOROVOD_RANK (in users, line 3)"),
        ("import os\nos.getenv('WORLD_SIZE')\nos.getenv('WORLD_SIZE')\n", None),
        ("import os\nos.getenvb(b'MASTER_PORT')\n", "MASTER_PORT (in users, line 2)"),
        ("import os\nfor name, value in os.environ.items():\n    pass\n", "all variables (in users, line 2)"),
        ("import os\nBEFORE = dict(os.environ)\n", "all variables (in users, line 2)"),
        ("import os\nNAMES = list(os.environb)\n", "all variables (in users, line 2)"),
    ],
)
def test_a_module_that_reads_who_its_rank_is_is_named_with_variable_and_line(tmp_path, monkeypatch, source, reads):
    monkeypatch.setenv("RANK", "0")  # the operator's: the index of the pod
    found = reads or "WORLD_SIZE (in users, line 2); WORLD_SIZE (in users, line 3)"
    assert unsafe(tmp_path, source) == f"importing users reads {found}: only a rank has it, and each its own" + WAY_OUT


def test_a_module_that_starts_a_program_or_reads_the_environment_in_a_function_is_safe(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    source = (
        "import os, subprocess\nSAID = subprocess.check_output(['env'], env=os.environ)\n"
        "HOME = os.environ.get('HOME')\ndef f():\n    os.environ['RANK']\n    return dict(os.environ)\n"
    )
    assert unsafe(tmp_path, source) is None
    (tmp_path / "users.py").write_text(source)
    restored = PRELOAD + "import os, users\nprint(b'RANK=' in users.SAID, os.environ['RANK'])"
    assert run(restored, tmp_path, modules=["users"]) == "False 0\n"


LAUNCH_PLAN = """
from flytekit import LaunchPlan, task, workflow

@task
def plus_one(n: int) -> int:
    return n + 1

@workflow
def shop(n: int = 1) -> int:
    return plus_one(n=n)

daily = LaunchPlan.get_or_create(shop, name="daily", default_inputs={"n": 4})
"""


def test_a_launch_plan_with_default_inputs_beside_the_tasks_is_safe(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(LAUNCH_PLAN)
    code = PATIENT + "import threading, users\nprint(done.unsafe, threading.active_count(), users.daily.name)"
    assert run(code, tmp_path, libraries=["flytekit"], modules=["users"]) == "None 1 daily\n"


def test_flytekit_converts_on_after_its_thread_was_ended_here_and_in_a_forked_process(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(LAUNCH_PLAN)
    code = PATIENT + (
        "import os, users\n"
        "from flytekit import LaunchPlan\n"
        "assert done.unsafe is None, done.unsafe\n"
        "if os.fork() == 0:\n"
        "    plan = LaunchPlan.get_or_create(users.shop, name='weekly', default_inputs={'n': 7})\n"
        "    os.write(1, f'{plan.name} {users.shop(n=1)}\\n'.encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print(LaunchPlan.get_or_create(users.shop, name='weekly', default_inputs={'n': 7}).name)\n"
    )
    assert run(code, tmp_path, modules=["users"]) == "weekly 2\nweekly\n"


def test_a_flytekit_whose_threads_are_kept_otherwise_is_named_with_its_version(tmp_path: Path) -> None:
    source = "import flytekit.utils.asyn as asyn\ndel asyn.loop_manager._runner_map\n"
    said = unsafe(tmp_path, source)
    assert said is not None
    assert "_AsyncLoopManager._runner_map" in said
    assert "seen: flytekit 1." in said
    assert "(tested)" in said


def test_a_thread_that_has_ended_by_the_time_of_the_fork_is_no_danger(tmp_path: Path) -> None:
    source = "import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()\n"
    assert unsafe(tmp_path, source, PATIENT) is None


FAILED = "importing users once for all ranks failed with"
ENDS = f"{FAILED} PayloadError: importing the task's module would have ended this process by"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ValueError('bad')", f"{FAILED} ValueError: bad"),
        ("import no_such_module", f"{FAILED} ModuleNotFoundError: No module named 'no_such_mo"),
        ("def broken(:", f"{FAILED} SyntaxError: "),
        ("import sys; sys.exit(3)", f"{ENDS} SystemExit: 3"),
        ("raise KeyboardInterrupt", f"{ENDS} KeyboardInterrupt"),
    ],
)
def test_a_module_that_cannot_be_imported_is_left_to_the_ranks_and_the_process_lives_on(
    tmp_path: Path, source: str, reason: str
) -> None:
    said = unsafe(tmp_path, source)
    assert said is not None
    assert said.startswith(reason)


# A fake: there is no GPU here, so a module of this name stands in for torch.cuda after a kernel was launched.
FAKE_CUDA = """
import sys, types
torch_cuda = types.ModuleType("torch.cuda")
torch_cuda.is_initialized = lambda: {initialised}
sys.modules["torch.cuda"] = torch_cuda
"""


def test_a_module_that_touches_cuda_is_named(tmp_path: Path) -> None:
    assert unsafe(tmp_path, FAKE_CUDA.format(initialised=True)) == (
        "importing users initialised CUDA, which does not survive a fork" + WAY_OUT
    )


def test_torch_cuda_that_was_only_imported_is_safe(tmp_path: Path) -> None:
    assert unsafe(tmp_path, FAKE_CUDA.format(initialised=False)) is None


def test_an_open_gpu_driver_is_seen_even_where_torch_does_not_know(tmp_path: Path) -> None:
    # A fake: there is no GPU here, so another device stands in for the driver's.
    (tmp_path / "users.py").write_text("device = open('/dev/zero', 'rb')")
    code = PRELOAD.replace("done =", "preload.GPU_DEVICES += ('/dev/zero',)\ndone =")
    assert run(code + "print(done.unsafe)", tmp_path, modules=["users"]) == (
        "importing users opened the GPU driver, whose state does not survive a fork" + WAY_OUT + "\n"
    )


def test_the_device_files_of_both_vendors_are_known() -> None:
    assert all(
        path.startswith(GPU_DEVICES) for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd")
    )


def test_importing_stops_at_the_first_module_that_makes_forking_unsafe(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("import sys; sys.exit()")
    (tmp_path / "second.py").write_text("")
    code = PRELOAD + "print('second' in sys.modules)"
    assert run(code, tmp_path, modules=["first", "second"]) == "False\n"


def test_a_library_that_makes_forking_unsafe_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("raise OSError('undefined symbol')")
    said = run(PRELOAD + "print(done.unsafe)", tmp_path, libraries=["library"])
    assert said == "importing library once for all ranks failed with OSError: undefined symbol\n"


def test_threads_that_a_library_starts_are_told_with_its_module_and_file(tmp_path: Path) -> None:
    inner = tmp_path / "library" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "library" / "__init__.py").write_text("import json.tool\nimport library.inner.starts\nimport csv\n")
    (inner / "starts.py").write_text(
        "import ctypes\nc = ctypes.CDLL(None)\nthread = ctypes.c_ulong()\n"
        "c.pthread_create(ctypes.byref(thread), None, c.pause, None)\n"
        "assert c.pthread_setname_np(thread, b'of-a-driver') == 0\n"
    )
    assert unsafe(tmp_path, "import library\nimport sched\n") == (
        "importing users started 1 thread(s) (native 'of-a-driver') in library.inner.starts "
        f"({inner / 'starts.py'}), and a forked copy of their locks can hang" + WAY_OUT
    )


def test_what_libraries_import_late_comes_after_the_module_and_its_seeds(tmp_path: Path) -> None:
    source = "import sys, random\nrandom.seed(7)\nassert 'later' not in sys.modules\n"
    (tmp_path / "users.py").write_text(source)
    (tmp_path / "later.py").write_text("import random, users\nDRAWN = random.random()\n")
    code = FORKED.replace("libraries, modules)", "libraries, modules, ['later', 'no_such_module'])")
    import random

    said = [json.loads(line)[0] for line in run(code, tmp_path, modules=["users"]).splitlines()]
    assert said == [random.Random(7).random()] * 2


def test_what_is_imported_late_may_start_no_thread_either(tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\n")
    code = PRELOAD.replace("libraries, modules)", "libraries, modules, ['later'])")
    said = run(code + "import os\nprint(done.unsafe, flush=True)\nos._exit(0)", tmp_path)
    assert said.startswith("importing later started 1 thread(s)")


def stand_in(directory: Path, module: str, source: str) -> None:
    """A module in the place of an installed one."""
    *packages, name = module.split(".")
    for depth in range(len(packages)):
        package = directory.joinpath(*packages[: depth + 1])
        package.mkdir()
        (package / "__init__.py").touch()
    directory.joinpath(*packages, f"{name}.py").write_text(source)


def test_a_known_library_in_a_version_that_keeps_its_rank_otherwise_is_told(tmp_path: Path) -> None:
    stand_in(tmp_path, "torchmetrics.utilities.prints", "import os\nRANK = os.getenv('LOCAL_RANK')\n")
    said = unsafe(tmp_path, "import torchmetrics.utilities.prints\n")
    assert said is not None
    assert said.startswith("after importing users, what a library keeps of a rank cannot be put right: AttributeError")


def test_a_known_library_that_is_asked_for_its_rank_by_the_module_is_told(tmp_path: Path) -> None:
    keeps = "import os\ndef _get_rank(): return os.environ.get('RANK')\ndef rank_zero_only(): ...\n"
    keeps += "rank_zero_only.rank = _get_rank() or 0\n"
    stand_in(tmp_path, "lightning_fabric.utilities.rank_zero", keeps)
    source = "from lightning_fabric.utilities import rank_zero\n"
    assert unsafe(tmp_path, source) is None
    said = unsafe(tmp_path, f"{source}MINE = rank_zero._get_rank()\n")
    assert said is not None
    assert said.startswith("importing users reads RANK (in lightning_fabric.utilities.rank_zero, line 2)")


def test_what_every_job_preloads_is_safe_to_fork(tmp_path: Path) -> None:
    libraries = ["torch", "torch.distributed", "flytekit", "flytekitplugins_safedist.plugin.task"]
    assert run(PRELOAD + "print(done.unsafe)", tmp_path, libraries=libraries) == "None\n"


@pytest.mark.horovod
def test_horovod_is_safe_to_fork_too(tmp_path: Path) -> None:
    assert run(PRELOAD + "print(done.unsafe)", tmp_path, libraries=["torch", "horovod.torch"]) == "None\n"


def test_preloaded_objects_are_frozen_out_of_the_garbage_collector(tmp_path: Path) -> None:
    assert int(run(PRELOAD + "import gc; print(gc.get_freeze_count())", tmp_path, modules=["json"])) > 1000


@pytest.mark.parametrize("fails", ["", "raise OSError"])
def test_the_garbage_collector_rests_while_libraries_are_imported_and_no_longer(tmp_path: Path, fails: str) -> None:
    (tmp_path / "library.py").write_text(f"import gc\nprint(gc.isenabled())\n{fails}")
    (tmp_path / "users.py").write_text("import gc\nprint(gc.isenabled())\n")
    said = run(PRELOAD + "import gc; print(gc.isenabled())", tmp_path, libraries=["library"], modules=["users"]).split()
    assert said == (["False", "True"] if fails else ["False", "True", "True"])


def test_a_garbage_collector_that_is_off_stays_off(tmp_path: Path) -> None:
    said = run("import gc; gc.disable()" + PRELOAD + "print(gc.isenabled())", tmp_path, libraries=["json"])
    assert said == "False\n"


# --- random numbers --------------------------------------------------------------------------------------------------
def test_ranks_do_not_share_random_numbers_that_nobody_seeded(tmp_path: Path) -> None:
    first, second = numbers(tmp_path, "import random, numpy\n", libraries=["numpy"])
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_seed_that_the_module_set_on_import_holds_in_every_rank(tmp_path: Path) -> None:
    import random

    import numpy

    source = "import random, numpy\nrandom.seed(7)\nnumpy.random.seed(7)\n"
    expected = (random.Random(7).random(), float(numpy.random.RandomState(7).random()))
    assert numbers(tmp_path, source, libraries=["numpy"]) == [expected, expected]


def test_a_module_that_is_the_first_to_import_numpy_can_seed_it_as_well(tmp_path: Path) -> None:
    import numpy

    expected = float(numpy.random.RandomState(7).random())
    drawn = numbers(tmp_path, "import numpy\nnumpy.random.seed(7)\n")
    assert [each[1] for each in drawn] == [expected, expected]


def test_ranks_do_not_share_numpys_numbers_when_the_module_is_the_first_to_import_it(tmp_path: Path) -> None:
    first, second = numbers(tmp_path, "import numpy\n")
    assert first[1] != second[1]


def test_another_bit_generator_of_numpys_does_not_break_preloading(tmp_path: Path) -> None:
    source = "import numpy\nnumpy.random.set_bit_generator(numpy.random.PCG64(7))\n"
    first, second = numbers(tmp_path, source, libraries=["numpy"])
    assert first[1] == second[1], "the module's seed holds"


def test_seeding_one_of_the_two_generators_leaves_the_other_private(tmp_path: Path) -> None:
    first, second = numbers(tmp_path, "import random\nrandom.seed(1)\n", libraries=["numpy"])
    assert first[0] == second[0]
    assert first[1] != second[1]


# --- threads of BLAS -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        ({"GOTO_NUM_THREADS": "4", "OMP_NUM_THREADS": "5"}, 4),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "1,2"}, 1),
        ({"OMP_NUM_THREADS": " 3 , 2"}, 3),
        ({"OMP_NUM_THREADS": "0"}, len(os.sched_getaffinity(0))),
        ({"OPENBLAS_NUM_THREADS": "many", "OMP_NUM_THREADS": "5"}, 5),
        ({}, len(os.sched_getaffinity(0))),
    ],
)
def test_the_number_of_blas_threads_is_what_openblas_would_take(environment: dict[str, str], threads: int) -> None:
    assert blas_threads(environment) == threads


def test_a_forked_rank_gets_its_own_number_of_blas_threads_back(tmp_path: Path) -> None:
    code = PRELOAD + (
        "import threadpoolctl, os\n"
        "def count(): return [p['num_threads'] for p in threadpoolctl.threadpool_info() if p['user_api'] == 'blas']\n"
        "before = count()\n"
        "if os.fork() == 0:\n"
        "    preload.refresh(done, {'OMP_NUM_THREADS': '2'})\n"
        "    os.write(1, json.dumps([before, count()]).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    said: Any = json.loads(run(code, tmp_path, libraries=["numpy"]))
    # numpy's own OpenBLAS is the one here; a machine whose numpy has none would say [] and fail, rightly
    assert said == [[1], [2]]


def test_importing_runs_under_variables_that_keep_openblas_and_cuda_quiet() -> None:
    assert known.VARIABLES == {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }


def test_torch_gets_openmps_number_of_threads_and_not_openblas(tmp_path: Path) -> None:
    code = PRELOAD + (
        "import torch\n"
        "if os.fork() == 0:\n"
        "    preload.refresh(done, {'OMP_NUM_THREADS': '2', 'OPENBLAS_NUM_THREADS': '3'})\n"
        "    os.write(1, str(torch.get_num_threads()).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    assert run("import os\n" + code, tmp_path, libraries=["torch"]) == "2"


def test_drawing_at_import_is_no_seed(tmp_path: Path) -> None:
    source = "import random, numpy\nX = random.random(), numpy.random.random(1000).sum()\n"
    first, second = numbers(tmp_path, source, libraries=["numpy"])
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_state_that_a_module_sets_is_every_ranks(tmp_path: Path) -> None:
    source = (
        "import random, numpy\n"
        "random.setstate(random.Random(7).getstate())\n"
        "numpy.random.set_state(numpy.random.RandomState(7).get_state())\n"
    )
    first, second = numbers(tmp_path, source, libraries=["numpy"])
    assert first == second == (pytest.approx(0.32383276483316237), pytest.approx(0.07630828937395717))
