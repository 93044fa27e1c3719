"""What docs/failures.md promises of each failure, and what is uploaded of it; exits of real pods: tests/agents."""

from __future__ import annotations

import errno
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import (
    JobInterruptedError,
    LaunchError,
    NodeLostError,
    PreflightError,
    RendezvousTimeoutError,
    SafedistError,
)
from flytekitplugins_safedist.failures import ROWS, Failure
from flytekitplugins_safedist.hangs.gpus import GpuUse, fault_of
from flytekitplugins_safedist.job.verdict import Kind, Origin, Verdict, judge, of_error
from flytekitplugins_safedist.rank.outcome import RankOutcome, Status
from tests.harness.outcomes import failed, outcome, raised

FAILURES = Path(__file__).parents[3] / "docs" / "failures.md"
NOBODY, RETRIES, FLYTE = "none: the task fails", "the task's `retries`", "Flyte"
PAYS = {
    (Kind.NON_RECOVERABLE, Origin.USER): NOBODY,
    (Kind.RECOVERABLE, Origin.USER): RETRIES,
    (Kind.RECOVERABLE, Origin.SYSTEM): FLYTE,
}


def killed(number: int, *, out_of_memory: bool = False) -> RankOutcome:
    return outcome(0, Status.KILLED, exit_code=-number, out_of_memory=out_of_memory)


def unfit(subject: str) -> SafedistError:
    error = PreflightError("before the first rank: node 1 is slow")
    error.platforms = f"SYSTEM:Preflight{subject}"
    return error


ENDS: dict[str, tuple[RankOutcome | SafedistError, str]] = {
    "USER:ValueError": (failed(), "raised ValueError: bad"),
    "USER:FlyteRecoverableException": (
        failed(of=raised("flytekit.exceptions.user.FlyteRecoverableException", failure=Failure.RECOVERABLE)),
        "raised FlyteRecoverableException",
    ),
    "USER:OutOfMemory": (killed(signal.SIGKILL, out_of_memory=True), "out-of-memory killer"),
    "SYSTEM:SIGKILL": (killed(signal.SIGKILL), "was killed by SIGKILL"),
    "SYSTEM:SIGTERM": (killed(signal.SIGTERM), "was killed by SIGTERM"),
    "USER:SIGSEGV": (killed(signal.SIGSEGV), "was killed by SIGSEGV: invalid memory access in native code"),
    "USER:Exit3": (outcome(0, Status.EXITED, exit_code=3), "ended with exit code 3 and no result"),
    "USER:OSError": (failed(of=raised("OSError", errnos=(errno.ENOSPC,))), "rank 0 ran out of disk space"),
    "USER:ScratchError": (
        failed(of=raised("flytekitplugins_safedist.errors.ScratchError")),
        "raised ScratchError",
    ),
    "USER:PeersLost": (
        failed(of=raised("RuntimeError", failure=Failure.PEER_LOST)),
        "none failed by itself, and no node was lost",
    ),
    "USER:RanksNotMet": (
        failed(of=raised("DistStoreError", failure=Failure.NOT_MET)),
        "the ranks did not come together in init_process_group",
    ),
    "USER:CollectiveTimeout": (
        replace(failed(of=raised("RuntimeError", failure=Failure.PEER_LOST)), timed_out=True),
        "most likely ranks called different collectives",
    ),
    "USER:HangError": (
        failed(of=raised("HangError", "the job does not move", failure=Failure.RECOVERABLE, code="USER:HangError")),
        "raised HangError: the job does not move",
    ),
    "USER:RanksNotReady": (
        failed(of=raised("LaunchError", "not begun in time", failure=Failure.RECOVERABLE, code="USER:RanksNotReady")),
        "raised LaunchError: not begun in time",
    ),
    "SYSTEM:NodeDisk": (failed(of=raised("OSError", errnos=(errno.EIO,))), "raised OSError"),
    "SYSTEM:GpuHardware": (
        failed(of=raised("RuntimeError", "CUDA error: uncorrectable ECC error encountered")),
        "raised RuntimeError: CUDA error: uncorrectable ECC error",
    ),
    **{
        code: (
            failed(of=raised("RuntimeError", "CUDA error"), gpu=fault_of(xid, GpuUse(1, "GPU-a"), 0)),
            f"Xid {xid}: ",
        )
        for xid, code in [
            (79, "SYSTEM:GpuFallenOffBus"),
            (48, "SYSTEM:GpuEccError"),
            (74, "SYSTEM:GpuNvlinkError"),
            (119, "SYSTEM:GpuXidError"),
            (31, "USER:GpuXidError"),
        ]
    },
    "SYSTEM:Storage": (
        failed(of=raised("FlyteUploadDataException", failure=Failure.STORAGE)),
        "FlyteUploadDataException",
    ),
    "SYSTEM:RanksNotStarted": (LaunchError("the rank server died"), "the rank server died"),
    "SYSTEM:Stopped": (JobInterruptedError("told to stop by SIGTERM"), "told to stop by SIGTERM"),
    **{
        f"SYSTEM:Preflight{subject}": (unfit(subject), "before the first rank: node 1")
        for subject in ("Speed", "Network", "Gpu", "Disk", "SharedMemory", "Checks")
    },
    "SYSTEM:RendezvousTimeout": (RendezvousTimeoutError("node 1 did not arrive"), "node 1 did not arrive"),
    "SYSTEM:NodeLost": (NodeLostError("node 1 is gone"), "node 1 is gone"),
}
"""An example of each, and a part of what the user reads."""


def promised() -> dict[str, str]:
    """Who pays, by code, as the table says it."""
    rows = [line.split(" | ") for line in FAILURES.read_text().splitlines() if line.startswith("| ")]
    codes = [row for row in rows if len(row) == 4 and row[2].startswith("`")]
    return {
        code: row[3].removesuffix(" |")
        for row in codes
        for code in row[2].split("`")[1::2]
        if code.partition(":")[0] in ("USER", "SYSTEM")
    }


def verdict(end: RankOutcome | SafedistError) -> Verdict | None:
    if isinstance(end, SafedistError):
        return of_error(end)
    return judge(end, "max_restarts=0", disk="", limit=None)


def test_the_table_tells_of_every_code() -> None:
    assert set(promised()) == set(ENDS)
    assert {row.code for row in ROWS.values()} - {""} <= set(ENDS)


@pytest.mark.end("a rank, or a DataLoader worker of it, is OOM-killed", "USER:OutOfMemory")
@pytest.mark.parametrize("code", ENDS)
def test_what_the_table_says_is_what_is_uploaded(code: str) -> None:
    end, text = ENDS[code]
    judged = verdict(end)
    assert judged is not None
    assert judged.code == code
    assert PAYS[judged.kind, judged.origin] == promised()[code]
    assert text in str(judged.error)


def test_the_loss_of_node_0_has_the_code_of_every_lost_node() -> None:
    judged = of_error(NodeLostError("node 0 is gone"))
    assert judged is not None
    assert judged.code == "SYSTEM:NodeLost"
