"""Everything that a module may make as it is imported, and that must be its own process's; the tasks tell what each
rank has got."""

from __future__ import annotations

import atexit
import json
import logging
import logging.handlers
import multiprocessing
import os
import random
import secrets
import signal
import socket
import sys
import tempfile
import threading
import uuid
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from flytekit import FlyteContextManager, current_context, task
from torch.utils.data import DataLoader, Dataset

from flytekitplugins_safedist import SafeTorch, current_rank
from tests.harness.procs import say

RANK = os.environ.get("RANK")
COPY = {**os.environ}
DEFAULT_RNG, LEGACY_RNG, PY_RNG = np.random.default_rng(), np.random.RandomState(), random.Random()
NP, PY = float(np.random.rand()), random.random()
TORCH, SEED = torch.randint(0, 2**31, (2,)).tolist(), torch.initial_seed()
GENERATOR = torch.Generator()
ORDER = [int(each) for each in DataLoader(range(100), shuffle=True)]  # type: ignore[arg-type, call-overload]
DATA = open(Path(__file__).with_name("job_own.py"), "rb")  # noqa: SIM115
SOCKET = socket.create_connection(("127.0.0.1", int(os.environ["TEST_ECHO"]))) if "TEST_ECHO" in os.environ else None
SEEN: list[str] = []
torch.set_num_threads(3)
TEMPORARY = tempfile.mkdtemp()
UUID, TOKEN, PID = uuid.uuid4().hex, secrets.token_hex(4), os.getpid()
LOCK = threading.Lock()
LOCK.acquire()  # held by nobody else
THREAD_SAW: list[int] = []
thread = threading.Thread(target=lambda: THREAD_SAW.append(os.getpid()))
thread.start()
thread.join()
STAYS = threading.Thread(target=threading.Event().wait, daemon=True)
STAYS.start()
LOGGED = logging.getLogger("job_own")
HELD = logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stdout))
LOGGED.addHandler(HELD)
AUTHKEY = bytes(multiprocessing.current_process().authkey).hex()
CUDA = torch.cuda.is_available()
EXECUTION = str(current_context().execution_id.name)
try:
    KNOWN: Any = current_rank().rank
except Exception as error:
    KNOWN = type(error).__name__
os.environ["SET_AT_IMPORT"] = f"by {RANK}"
if RANK is not None:
    signal.signal(signal.SIGTERM, lambda *_: SEEN.append("SIGTERM"))
    KEPT_TO_THE_END = threading.Event()
    weakref.finalize(KEPT_TO_THE_END, lambda: print(f"finalizer of rank {RANK}"))
    atexit.register(lambda: print(f"exit handler of rank {RANK} in its process: {os.getpid() == PID}"))


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[str, int, int]:
        return os.environ["RANK"], int(np.random.randint(1 << 30)), random.randrange(1 << 30)


def misread() -> int:
    """Bytes that are not where they were: another process moves in the same file."""
    size = os.path.getsize(DATA.name)
    whole, wrong = Path(DATA.name).read_bytes(), 0
    for _ in range(2000):
        place = random.randrange(size - 4)
        DATA.seek(place)
        wrong += DATA.read(4) != whole[place : place + 4]
    return wrong


def answered_wrong() -> int:
    assert SOCKET is not None
    wrong = 0
    for number in range(300):
        text = f"{RANK}:{number}".encode().ljust(32)
        SOCKET.sendall(text)
        wrong += SOCKET.recv(32, socket.MSG_WAITALL) != text
    return wrong


def summed() -> int:
    """What the ones of all ranks come to, or of what each has started."""
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return int(value)


def summed_in_a_child() -> int:
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(summed()))
    child.start()
    child.join()
    return child.exitcode or 0


def look() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    Path(TEMPORARY, "mine").write_text(str(RANK))
    LOGGED.warning("held back until the end by rank %s", RANK)
    workers = [each for batch in DataLoader(Numbers(), num_workers=2, batch_size=2) for each in batch[0]]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(abs, (-7,))
    random_ones = {
        **{
            "RANK": RANK,
            "copy": COPY.get("RANK"),
            "default_rng": DEFAULT_RNG.random(),
            "RandomState": LEGACY_RNG.rand(),
        },
        **{"np.random": NP, "random": PY, "Random()": PY_RNG.random(), "torch": TORCH, "torch.initial_seed": SEED},
        **{"loader's order": ORDER, "mkdtemp": TEMPORARY, "read back": Path(TEMPORARY, "mine").read_text()},
        **{"uuid": UUID, "token": TOKEN, "authkey": AUTHKEY, "environ": os.environ["SET_AT_IMPORT"]},
        **{"workers": sorted(set(workers)), "TMPDIR": os.environ["TMPDIR"], "current_rank() at import": KNOWN},
        "np.random now": float(np.random.rand()),
        "where flytekit uploads": FlyteContextManager.current_context().file_access.get_random_remote_path(),
    }
    same_ones = {
        **{"Generator()": GENERATOR.initial_seed(), "misread": misread(), "answered wrong": answered_wrong()},
        **{"SIGTERM": SEEN, "threads": torch.get_num_threads(), "pid": os.getpid() == PID, "cuda": CUDA},
        **{"thread": [os.getpid()] == THREAD_SAW, "thread stays": STAYS.is_alive(), "spawned": spawned},
        **{"execution": EXECUTION, "name": __name__, "main": sys.modules["__main__"].__name__},
        **{"children's groups": summed_in_a_child(), "the ranks' group": summed()},
        "replicas guarded": hasattr(dist.Reducer, "__wrapped__"),
        "argv": sys.argv[0],
        "SIGINT": str(signal.getsignal(signal.SIGINT)),
        "SIGHUP": str(signal.getsignal(signal.SIGHUP)),
        "signals": [
            line.split()[1]
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(("SigBlk", "SigIgn"))
        ],
        "open": sorted({_kind(each) for each in os.listdir("/proc/self/fd")} - {"gone"}),
    }
    say(json.dumps({"distinct": random_ones, "same": same_ones}))


def _kind(descriptor: str) -> str:
    """What is open, without what is each process's own."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return "gone"  # it was the directory itself
    return target.partition(":")[0] if not target.startswith("/") else Path(target).suffix or target


@task(task_config=SafeTorch(nproc_per_node=2))
def forked() -> None:
    look()


@task(task_config=SafeTorch(nproc_per_node=2, start_method="spawn"))
def fresh() -> None:
    look()
