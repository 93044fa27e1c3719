from __future__ import annotations

import math
import socket
import subprocess
import sys

import pytest

from flytekitplugins_safedist.errors import FsIdentityError
from flytekitplugins_safedist.fs.identity import Identity, current_identity, timeout_s

TORCH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
HOROVOD = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
ALONE = Identity(0, 1, 0, 1, 0, 1, 0, 0)
PLACE = Identity(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, nnodes=2, round=0, attempt=0)


@pytest.mark.parametrize("env", [TORCH, HOROVOD, {**TORCH, **HOROVOD}, {**TORCH, "GROUP_WORLD_SIZE": "2"}])
def test_each_launchers_variables_name_the_same_rank(env):
    assert current_identity(env) == PLACE


def test_no_variables_are_a_single_process():
    assert current_identity({"PATH": "/bin"}) == ALONE
    assert current_identity({"FLYTE_ATTEMPT_NUMBER": "2"}).attempt == 2


def test_seconds_without_end_are_as_many_as_a_socket_takes():
    with socket.socket() as sock:
        sock.settimeout(timeout_s(math.inf) + 60)


@pytest.mark.parametrize(
    ("env", "round_"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"SAFEDIST_ROUND": "3"}, 3),
        ({"TORCHELASTIC_RESTART_COUNT": "2", "SAFEDIST_ROUND": "3"}, 2),  # a torchrun that a rank of ours has started
    ],
)
def test_the_round_is_the_launchers_count_of_restarts(env, round_):
    assert current_identity({**HOROVOD, **env}).round == round_


def test_what_is_wrong_with_a_rank_is_told_with_what_was_seen_and_what_to_do():
    def told(env):
        with pytest.raises(FsIdentityError) as caught:
            current_identity(env)
        return str(caught.value)

    assert told({**TORCH, "RANK": "x"}) == "RANK is not a number [variable=RANK] (seen: x; expected: a whole number)"
    assert told({**TORCH, "RANK": "-1"}).startswith("rank must be at least 0")
    assert told({"RANK": "1", "WORLD_SIZE": "2"}) == (
        "the environment names this process's rank only in part (seen: RANK=1, WORLD_SIZE=2; expected: also "
        "LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK). Fix: start the ranks with torchrun or as a safedist task, or "
        "unset these for a single process"
    )
    assert told({**TORCH, "WORLD_SIZE": "9"}) == (
        "the number of nodes is not known (seen: world size 9, 4 on this node, GROUP_WORLD_SIZE not set). "
        "Fix: set GROUP_WORLD_SIZE"
    )
    assert told({**TORCH, **HOROVOD, "HOROVOD_RANK": "4"}).endswith(
        "Fix: start the ranks with one launcher, or unset the other's variables"
    )
    assert told({**TORCH, "RANK": "8"}) == (
        "rank must be at least 0 and less than world_size (seen: rank=8, world_size=8). Fix: look at what sets "
        "these variables: two launchers may be at work at once"
    )


def test_importing_all_of_fs_imports_neither_torch_nor_horovod_nor_flytekit():
    code = (
        "import sys; from flytekitplugins_safedist.fs import *; "
        "print([m for m in ('torch', 'horovod', 'flytekit', 'fsspec', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
