#!/usr/bin/env python3
"""Prove that the installed Horovod works: what it was built with, and one real allreduce on two ranks.

With ``--nccl`` the tensors are on GPUs, where there are any; where there are none, they stay on the CPU, and the last
line says so.

The ranks are started by horovodrun, through Gloo: no ssh, no MPI, and all of it on the loopback interface. Used by
``build.py`` before a wheel enters the cache and after it was installed, and by the image's own test.

Exit status: 0 it works; 1 it does not, and the last line says why.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

RANKS = 2
DEADLINE_S = 180.0
"""For one step. A cold import of torch from a slow disk takes tens of seconds; a hang is what this bounds."""
TAIL_LINES = 60
REDUCED = "reduced: "
"""What rank 0 prints before the place and the way of the reduction."""
RUN = """
import contextlib
from horovod.runner.launch import run_commandline
with contextlib.suppress(ImportError):
    import torch
run_commandline()
"""
"""What the console script ``horovodrun`` runs. It asks each feature of a forked process: all have torch then, where
each would import it."""


class VerifyError(Exception):
    """Horovod is not installed, lacks a feature that safedist needs, or does not reduce."""


def horovodrun(*arguments: str) -> str:
    """What ``horovodrun`` prints.

    Raises:
        VerifyError: it fails, or does not end; with what it printed last.
    """
    command = [sys.executable, "-c", RUN, *arguments]
    what = f"horovodrun {' '.join(arguments[:2])}"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as running:
        try:
            said, _ = running.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            os.killpg(running.pid, signal.SIGKILL)  # its ranks too: one whose peer failed waits in the allreduce
            raise VerifyError(f"{what} did not end within {DEADLINE_S:.0f} s") from error
    if running.returncode != 0:
        raise VerifyError(f"{what} failed (exit status {running.returncode}):\n{tail(said)}")
    return said


def tail(said: str) -> str:
    return "\n".join(said.splitlines()[-TAIL_LINES:])


def missing_features(check_build: str, *, nccl: bool) -> list[str]:
    """The features that safedist needs and ``horovodrun --check-build`` does not tick."""
    ticked = {line.strip()[len("[X]") :].strip() for line in check_build.splitlines() if line.strip().startswith("[X]")}
    wanted = ["PyTorch", "Gloo", *(["NCCL"] if nccl else [])]
    return [name for name in wanted if name not in ticked]


def check_build(*, nccl: bool) -> None:
    """Raises VerifyError when a feature is missing."""
    said = horovodrun("--check-build", "--verbose")
    missing = missing_features(said, nccl=nccl)
    if missing:
        raise VerifyError(f"this Horovod was built without {', '.join(missing)}:\n{tail(said)}")


def allreduce(*, nccl: bool) -> str:
    """Sum a tensor over two ranks; returns where and by what it was reduced.

    Raises:
        VerifyError: the sum is wrong, late or absent; with the ranks' output.
    """
    here = ("--gloo", "--disable-cache", "--network-interfaces", "lo", "--gloo-timeout-seconds", f"{DEADLINE_S:.0f}")
    rank = (sys.executable, str(Path(__file__).resolve()), "--rank", *(["--nccl"] if nccl else []))
    said = horovodrun(*here, "-np", str(RANKS), "-H", f"localhost:{RANKS}", *rank)
    return next((line.partition(REDUCED)[2] for line in said.splitlines() if REDUCED in line), "")


def run_rank(*, nccl: bool) -> None:
    """One rank: reduce, compare, leave."""
    import horovod.torch as hvd  # noqa: PLC0415
    import torch  # noqa: PLC0415

    gpus = torch.cuda.device_count() if nccl else 0
    rank = int(os.environ["HOROVOD_RANK"])
    if 0 < gpus < RANKS:
        # NCCL refuses two ranks of one host on one GPU; with host names of their own they are two hosts to it.
        os.environ["NCCL_HOSTID"] = f"verify-horovod-{rank}"
    hvd.init()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    expected = float(sum(range(1, RANKS + 1)))
    reduced = hvd.allreduce(torch.full((1024,), float(rank + 1), device=device), op=hvd.Sum)
    value, right = reduced[0].item(), bool((reduced == expected).all())
    hvd.shutdown()
    if not right:
        raise VerifyError(f"allreduce over {RANKS} ranks gave {value}, expected {expected}")
    if rank == 0:
        print(REDUCED + place(gpus, nccl=nccl))


def place(gpus: int, *, nccl: bool) -> str:
    """Where the tensors were, in words."""
    if gpus:
        return f"on {min(gpus, RANKS)} GPU{'s' if gpus > 1 else ''} through NCCL"
    return "on the CPU through Gloo" + (", because no GPU is here: NCCL is built in and was not run" if nccl else "")


def main(arguments: list[str]) -> int:
    nccl = "--nccl" in arguments
    if arguments[:1] == ["--rank"]:
        run_rank(nccl=nccl)
        return 0
    try:
        check_build(nccl=nccl)
        where = allreduce(nccl=nccl)
    except VerifyError as error:
        print(f"horovod_build: {error}", file=sys.stderr)
        return 1
    built = "PyTorch, Gloo and NCCL" if nccl else "PyTorch and Gloo"
    print(f"{built} are built in; an allreduce over {RANKS} ranks is right, {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
