"""That the installed torch does not hang where 2.4.0 does: the reason for the floor that setup.cfg sets.

Under 2.4.0 the replica's end joins Gloo's threads while it holds Python's lock (the GIL), and one of them waits for
that lock to let go of a tensor that Python no longer holds. Here that order is forced.
"""

from __future__ import annotations

import subprocess
import sys

from tests.procs import DEADLINE

TWO_RANKS = """
import ctypes, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

to_child, to_parent = os.pipe(), os.pipe()
os.set_blocking(to_parent[0], False)
rank = 0 if os.fork() else 1

def train():
    store = dist.FileStore(sys.argv[1], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    replica = DistributedDataParallel(torch.nn.Linear(2, 1))
    if rank == 1:
        os.read(to_child[0], 1)
        dist.all_reduce(torch.ones(1000))
        os.write(to_parent[1], b"x")
    else:
        read = ctypes.PyDLL(None).read  # keeps the lock, as os.read does not
        sys.setswitchinterval(1000)  # and nobody may ask for it
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        del work  # from here on Gloo's thread alone holds the tensor
        os.write(to_child[1], b"x")
        received = ctypes.create_string_buffer(1)
        while read(to_parent[0], received, 1) != 1:
            pass
        for _ in range(3_000_000):  # our own thread is about to be done as well
            pass
    dist.destroy_process_group()

train()
os.write(1, b"returned\\n")
if rank == 0:
    os.wait()
os._exit(0)
"""


def test_a_function_that_made_a_replica_returns_while_gloos_thread_waits_for_pythons_lock(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TWO_RANKS, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("returned") == 2, done.stderr
