"""What the tables of docs/failures.md promise of each end of a job, and whether an end is that.

A test that proves a row is tagged with it, and with the code if the row has one: ``@pytest.mark.end(row, code)``; a row
of the table of failures by its :class:`Failure`, others by their first column. Its
fixture ``as_promised`` compares; ``tests/agents/test_every_end.py`` sees that every row and code has such a test. One
whose end is not the real one, for what it comes of cannot be had, says ``imitated=True``, and tests/README.md why.
"""

from __future__ import annotations

import socket

from flyteidl.core import errors_pb2, execution_pb2

from flytekitplugins_safedist.failures import Failure
from tests.harness.procs import ROOT, Ended, uploaded_error

PAYS = {
    (errors_pb2.ContainerError.NON_RECOVERABLE, execution_pb2.ExecutionError.USER): "none: the task fails",
    (errors_pb2.ContainerError.RECOVERABLE, execution_pb2.ExecutionError.USER): "the task's `retries`",
    (errors_pb2.ContainerError.RECOVERABLE, execution_pb2.ExecutionError.SYSTEM): "Flyte",
}


HOST = "h" * 40
"""In the place of a node's name: as long as those of pods are."""

RANK_0, RANK_1 = (f"rank {rank} (local_rank {rank}) on node 0 ({HOST}) " for rank in range(2))
BEGINS = {
    "USER:ValueError": RANK_1 + "raised ValueError: n",
    "USER:FlyteRecoverableException": RANK_1 + "raised FlyteRecovera",
    "SYSTEM:SIGKILL": RANK_1 + "was killed by SIGKIL",
    "SYSTEM:SIGTERM": RANK_1 + "was killed by SIGTER",
    "USER:SIGSEGV": RANK_1 + "was killed by SIGSEG",
    "USER:SIGABRT": RANK_1 + "was killed by SIGABR",
    "USER:ModuleNotFoundError": RANK_1 + "raised ModuleNotFoun",
    "USER:SyntaxError": RANK_1 + "raised SyntaxError:",
    "USER:DistNetworkError": (RANK_0 + "raised torch.distrib", RANK_1 + "raised torch.distrib"),
    "USER:RuntimeError": (
        RANK_0 + "raised RuntimeError:",
        RANK_1 + "raised RuntimeError:",
        "rank 1 found the node's shared memory (/dev/shm) full.",
    ),
    "USER:Exit3": RANK_1 + "ended with exit code",
    "USER:OSError": "rank 1 ran out of disk space. Scratch is ",
    "USER:ScratchError": RANK_1[:-1] + ": ",
    "USER:PeersLost": "rank 1 finished early, and the others then lost the connection to it. The first of them is:",
    "USER:CollectiveTimeout": "a collective timed out: most likely ranks called different collectives. rank 0",
    "USER:RanksNotMet": "the ranks did not come together in init_process_group, and none failed otherwise. The first",
    "USER:HangError": "rank 3 (local_rank 1) on node 1 (" + HOST + "): the job does not mov",
    "USER:RanksNotReady": RANK_0[:-1] + ": ranks have not begun",
    "SYSTEM:NodeDisk": RANK_1 + "raised OSError: [Er",
    "SYSTEM:GpuHardware": RANK_1 + "raised RuntimeError:",
    "SYSTEM:GpuFallenOffBus": "Xid 79: GPU has fallen off the bus, reported by GPU 1 (GPU-",
    "SYSTEM:GpuEccError": "Xid 48: double-bit ECC error, reported by GPU 1 (GPU-",
    "SYSTEM:GpuNvlinkError": "Xid 74: NVLink error, reported by GPU 1 (GPU-",
    "SYSTEM:GpuXidError": "Xid 119: GSP RPC timeout, reported by GPU 1 (GPU-",
    "USER:GpuXidError": "Xid 31: GPU memory page fault (an illegal address), reported by GPU 1 (GPU-",
    "SYSTEM:Storage": (
        RANK_1 + "raised FlyteUploadD",
        RANK_0 + "raised StorageError:",
        "the task's inputs cannot be fetched from /nowhere/inputs.pb (seen: ",
        "The store refused access to the task's code archive [uri=",
        f"node 1 ({HOST}) cannot begin: ",
    ),
    "SYSTEM:RanksNotStarted": (
        "the process that starts and watches this node's ranks is gone, and its ranks with it",
        f"node 0 ({HOST}) cannot begin: it raised LaunchTimeoutError: import",
    ),
    "SYSTEM:Stopped": "told to stop by SIGTERM; every rank has been ended",
    **{
        f"SYSTEM:Preflight{subject}": "before the first rank: node 0 ("
        for subject in ("Checks", "Disk", "Gpu", "Network", "SharedMemory")
    },
    "SYSTEM:PreflightSpeed": "before the first rank: node 1 (",
    "SYSTEM:RendezvousTimeout": "node 1 of 2 did not arrive within 1 s",
    "SYSTEM:NodeLost": (
        "node 0 was lost, and none took its place within 12 s",
        "node 1: its connection was lost, and it did not come back within 3 s; node 1 of 2 did not ",
    ),
}
"""How the first 100 characters of each verdict begin: they are all that a list of executions shows."""


def rows(title: str) -> dict[str, list[str]]:
    """A table of docs/failures.md by its first column: the others, as text."""
    lines = (ROOT / "docs" / "failures.md").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("| What happens |") and title in line)
    found = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        found[first] = others
    return found


NAMES = {each.row.what: each.value for each in Failure}
CODES = {NAMES.get(what, what): cells for what, cells in rows("Who pays").items()}
NODES = rows("What it takes")


def codes(row: str) -> set[str]:
    """Those of a row."""
    cells = CODES[row][1] if row in CODES else ""
    return {code for code in cells.split("`")[1::2] if code.startswith(("USER:", "SYSTEM:"))}


def as_promised(ended: Ended, row: str, code: str) -> None:
    """Assert that a node 0 has ended as a row says: what is uploaded, who pays, the exit status, the last words."""
    assert (ended.code, ended.left, ended.uploaded) == (0, [], ["error.pb"]), ended.err
    error = uploaded_error(ended)
    assert (error.code, PAYS[error.kind, error.origin]) == (code, CODES[row][2])
    shown = error.message.replace(f"({socket.gethostname()})", f"({HOST})")[:100]
    assert shown.startswith(BEGINS[code]), shown
    assert said_at_last(ended) == error.message.splitlines()[0]


def said_at_last(ended: Ended) -> str:
    """The last line of a failed pod's log, which is the first of its termination message: all of that is the verdict's
    first lines, for where a rank was OOM-killed the kubelet says OOMKilled of the container, and Flyte
    reads no verdict."""
    message = (ended.files / "termination-log").read_bytes()
    assert message
    assert len(message) <= 4096
    first, *_ = message.decode().splitlines()
    assert f"{uploaded_error(ended).message}\n".startswith(message.decode().rstrip())
    assert f"[safedist] the job failed: {first}".startswith(ended.err.splitlines()[-1].removesuffix("..."))
    return first
