"""No ``DistributedDataParallel`` replica is the last owner of its process group: torch can hang where one is.

``destroy_process_group()`` only takes a group out of torch's own list; its threads end with its last owner. Where that
is a replica, gone with the function's frame, Gloo's threads are joined while Python's lock is held
(``Reducer::~Reducer``, ``ProcessGroupGloo::~ProcessGroupGloo``), and one of them may be waiting for that lock to free
the tensor of the last collective. Both then wait for ever (docs/versions.md has the stacks,
tests/agents/test_replica_outlives_group.py the order).

Python's own reference to what has the threads does it right: when it is the last to go, the lock is let go of first
(c10d's ``intrusive_ptr_no_gil_destructor_class_``). So here one stays until the native parts of the replica are gone,
and not a moment longer: the group holds its store, and with it a port and keys that the next group must not find.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..compat import lookup
from ..compat import torch as torch_inside


def install() -> None:
    """From now on, in this process and those forked from it, replicas do not outlive Python's hold on their group.

    Imports nothing: what a module may set before it imports torch, it still may. To be called once.

    Raises:
        IncompatibleVersionError: torch makes its replicas otherwise. Where torch comes later, importing it raises.
    """
    torch_inside.at_distributed(_guard)


class _Hold:
    """A reference of Python's to groups and to what has their threads, let go of in that order: under torch 2.5 the end
    of a group itself holds Python's lock, of whatever it is then the last owner."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups
        self.backends = [backend for group in groups for backend in torch_inside.backends(group)]

    def __del__(self) -> None:
        self.groups.clear()
        self.backends.clear()


def _guard(dist: ModuleType) -> None:
    """Have the two native parts of a replica, which own its group together, each come with a hold on it."""
    if not dist.is_available():
        return  # a torch that was built without
    new_reducer: Callable[..., Any] = lookup(dist, "Reducer", of="torch")
    new_logger: Callable[..., Any] = lookup(dist, "Logger", of="torch")
    holds: weakref.WeakKeyDictionary[Any, _Hold] = weakref.WeakKeyDictionary()  # an entry goes after its key has gone

    @functools.wraps(new_reducer)
    def reducer(*args: Any, **kwargs: Any) -> Any:
        made = new_reducer(*args, **kwargs)
        holds[made] = _Hold([one for one in (*args, *kwargs.values()) if isinstance(one, dist.ProcessGroup)])
        return made

    @functools.wraps(new_logger)
    def logger(of: Any, *args: Any, **kwargs: Any) -> Any:
        made = new_logger(of, *args, **kwargs)
        holds[made] = holds[of]
        return made

    setattr(dist, new_reducer.__name__, reducer)
    setattr(dist, new_logger.__name__, logger)
