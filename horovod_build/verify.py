#!/usr/bin/env python3
"""Prove that the installed Horovod works: what it was built with, and one real allreduce on two ranks.

With ``--nccl`` the tensors are on GPUs, where there are any; where there are none, they stay on the CPU, and the last
line says so.

The ranks are started as safedist starts them: with ``HOROVOD_*`` variables and Horovod's own key-value server, without
horovodrun, ssh or MPI. Everything stays on the loopback interface. Used by ``build.py`` before a wheel enters
the cache and after it was installed, and by the image's own test.

Exit status: 0 it works; 1 it does not, and the last line says why.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

RANKS = 2
DEADLINE_S = 180.0
"""For one step. A cold import of torch from a slow disk takes tens of seconds; a hang is what this bounds."""
TAIL_LINES = 30
REDUCED = "reduced: "
"""What rank 0 prints before the place and the way of the reduction."""


class VerifyError(Exception):
    """Horovod is not installed, lacks a feature that safedist needs, or does not reduce."""


def missing_features(check_build: str, *, nccl: bool) -> list[str]:
    """The features that safedist needs and ``horovodrun --check-build`` does not tick."""
    ticked = {line.strip()[len("[X]") :].strip() for line in check_build.splitlines() if line.strip().startswith("[X]")}
    wanted = ["PyTorch", "Gloo", *(["NCCL"] if nccl else [])]
    return [name for name in wanted if name not in ticked]


def check_build(*, nccl: bool) -> None:
    """Run ``horovodrun --check-build``. Raises VerifyError when it fails or a feature is missing."""
    code = "from horovod.runner.launch import run_commandline; run_commandline()"  # what the console script runs
    script = Path(sys.executable).with_name("horovodrun")
    command = [str(script)] if script.is_file() and not os.environ.get("PYTHONPATH") else [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            [*command, "--check-build", "--verbose"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise VerifyError(f"horovodrun --check-build did not end within {DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        raise VerifyError(
            f"horovodrun --check-build failed (exit status {done.returncode}):\n{done.stdout}{done.stderr}"
        )
    missing = missing_features(done.stdout, nccl=nccl)
    if missing:
        raise VerifyError(f"this Horovod was built without {', '.join(missing)}:\n{done.stdout}")


def rank_variables(rank: int, port: int) -> dict[str, str]:
    """What a Horovod rank needs, and nothing else (horovod/runner/gloo_run.py sets the same for its ranks)."""
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{DEADLINE_S:.0f}",  # its 30 s are short on a loaded machine
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(RANKS),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(RANKS),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }


def start_server() -> tuple[int, Callable[[], None]]:
    """Start Horovod's key-value server. Returns its port and the function that stops it."""
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts  # noqa: PLC0415
        from horovod.runner.http.http_server import RendezvousServer  # noqa: PLC0415
    except ImportError as error:
        raise VerifyError(f"horovod cannot be imported by {sys.executable}: {error}") from error
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{RANKS}"), RANKS))
    return int(port), server.stop


def allreduce(*, nccl: bool) -> str:
    """Sum a tensor over two ranks; returns where and by what it was reduced.

    Raises:
        VerifyError: the sum is wrong, late or absent; with the ranks' output.
    """
    port, stop = start_server()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(stop)
        ranks: list[subprocess.Popen[bytes]] = []
        logs: list[IO[bytes]] = []
        for rank in range(RANKS):
            logs.append(cleanup.enter_context(tempfile.TemporaryFile()))
            ranks.append(start_rank(rank, port, logs[-1], nccl=nccl))
            cleanup.callback(end, ranks[-1])
        wait_for(ranks, logs)
        logs[0].seek(0)
        said = logs[0].read().decode(errors="replace").splitlines()
        return next((line[len(REDUCED) :] for line in said if line.startswith(REDUCED)), "")


def start_rank(rank: int, port: int, log: IO[bytes], *, nccl: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--rank", str(rank), *(["--nccl"] if nccl else [])]
    env = {**os.environ, **rank_variables(rank, port)}
    return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def end(process: subprocess.Popen[bytes]) -> None:
    """A rank whose peer failed hangs in the allreduce: nothing but SIGKILL ends it for certain."""
    process.kill()
    process.wait()


def wait_for(ranks: list[subprocess.Popen[bytes]], logs: list[IO[bytes]]) -> None:
    """Wait for every rank. Raises VerifyError for the first one that fails or is late."""
    for rank, process in enumerate(ranks):
        try:
            status = process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise VerifyError(
                f"rank {rank} of the allreduce did not end within {DEADLINE_S:.0f} s:\n{tails(logs)}"
            ) from error
        if status != 0:
            raise VerifyError(f"rank {rank} of the allreduce failed (exit status {status}):\n{tails(logs)}")


def tails(logs: list[IO[bytes]]) -> str:
    """The last lines of every rank."""
    lines: list[str] = []
    for rank, log in enumerate(logs):
        log.seek(0)
        text = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        lines += [f"[rank {rank}] {line}" for line in text]
    return "\n".join(lines)


def run_rank(rank: int, *, nccl: bool) -> None:
    """One rank: reduce, compare, leave."""
    import horovod.torch as hvd  # noqa: PLC0415
    import torch  # noqa: PLC0415

    gpus = torch.cuda.device_count() if nccl else 0
    if 0 < gpus < RANKS:
        # NCCL refuses two ranks of one host on one GPU; with host names of their own they are two hosts to it.
        os.environ["NCCL_HOSTID"] = f"verify-horovod-{rank}"
    hvd.init()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    expected = float(sum(range(1, RANKS + 1)))
    reduced = hvd.allreduce(torch.full((1024,), float(hvd.rank() + 1), device=device), op=hvd.Sum)
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
        run_rank(int(arguments[1]), nccl=nccl)
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
