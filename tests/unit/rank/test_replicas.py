"""A replica's group ends with it, or before, and by a hand that does not hold Python's lock; however torch comes in."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from flytekitplugins_safedist.compat import torch as torch_inside
from flytekitplugins_safedist.errors import IncompatibleVersionError
from flytekitplugins_safedist.rank import replicas

PRELUDE = """
import sys
from flytekitplugins_safedist.rank import replicas
from flytekitplugins_safedist.compat import torch as torch_inside
"""
BEFORE = """
finders = list(sys.meta_path)
replicas.install()
assert 'torch' not in sys.modules
met = []
torch_inside.call_at_groups(met.append)
"""
IMPORTED = """
import inspect
import torch.distributed as dist
assert [finder for finder in sys.meta_path if finder in finders] == finders
assert not any('compat.torch' in repr(finder) for finder in sys.meta_path)
assert dist.__loader__ is dist.__spec__.loader and 'compat.torch' not in repr(dist.__loader__), "as it would without"
assert 'is_available' in inspect.getsource(dist)
assert dist.Reducer.__name__ == 'Reducer' and dist.Logger.__wrapped__.__name__ == 'Logger'
assert met == []
"""
AFTER = """
assert 'torch.distributed' in sys.modules
replicas.install()
met = []
torch_inside.call_at_groups(met.append)
"""
GROUPS = """
import gc, os, time, weakref
import torch, torch.distributed as dist, torch.distributed.nn, torch._dynamo
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
module = torch.nn.Linear(2, 1)
threads = lambda: len(os.listdir("/proc/self/task"))
alone = threads()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
replica = DistributedDataParallel(module, process_group=dist.new_group([0]))
at_the_end = []
for part in (replica.reducer, replica.logger):  # called before the guard's own: the newest is first
    weakref.finalize(part, lambda: at_the_end.append(threads()))
del part
dist.destroy_process_group()
assert threads() > alone, "the replica's group lives"
del replica
until = time.monotonic() + 60
while threads() != alone and time.monotonic() < until:  # one that has ended is listed for a moment
    time.sleep(0.01)
assert threads() == alone, "and ends with the replica, with its store's port and keys"
assert met == ["0", "1"] and not dist.is_initialized(), "whoever looks at the end finds none"
print([count > alone for count in at_the_end])
"""


def test_a_group_outlives_the_last_native_part_of_its_replica_by_nothing_and_is_noticed(warm, tmp_path) -> None:
    """Without the guard the replica's end would be the group's: no thread of Gloo's were left for the last part. It is
    so too where torch comes in later, as test_as_fresh shows."""
    (tmp_path / "after.py").write_text(PRELUDE + AFTER + GROUPS)
    after = warm.run(f"{tmp_path}/after.py:__main__", tmp_path / "job", kind="main", libraries=False)
    assert (after.code, after.out) == (0, "[True, True]\n"), after.err


@pytest.mark.parametrize("gone", ["Reducer", "Logger"])
def test_a_torch_that_makes_its_replicas_otherwise_is_said_to(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    other = ModuleType(torch_inside.DISTRIBUTED)
    other.is_available = lambda: True  # type: ignore[attr-defined]
    for name in {"Reducer", "Logger"} - {gone}:
        setattr(other, name, object)
    monkeypatch.setitem(sys.modules, torch_inside.DISTRIBUTED, other)
    with pytest.raises(IncompatibleVersionError, match=gone):
        replicas.install()


def test_a_torch_that_was_built_without_its_distributed_part_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType(torch_inside.DISTRIBUTED)
    other.is_available = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, torch_inside.DISTRIBUTED, other)
    replicas.install()
    assert not hasattr(other, "Reducer")
