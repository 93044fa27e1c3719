"""Whether a node's agent stays as small as it began: over gigabytes of its ranks' output, and over many rounds.

The agent is a process of its own, as in a pod; what it holds is read from /proc ten times a second: memory of its own
(RssAnon: the kernel counts no file and nothing shared), open file descriptors, threads; the same of its rank server;
and what the ranks' logs take on disk.

    python benchmarks/flat.py --gigabytes 5 --rounds 100
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parent / "flat_project"


@dataclass(frozen=True)
class Sample:
    """What one process held at one moment: MiB, descriptors, threads."""

    memory: float
    descriptors: int
    threads: int


def sample(pid: int) -> Sample | None:
    """Read a process; None when it is gone."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return Sample(int(status["RssAnon"].split()[0]) / 1024, descriptors, int(status["Threads"]))
    except (OSError, KeyError):
        return None


def rank_server(agent: int) -> int | None:
    """The agent's rank server: its child that leads a session of its own."""
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    except OSError:
        return None
    for child in map(int, children):
        try:
            if "rank_server" in Path(f"/proc/{child}/cmdline").read_text():
                return child
        except OSError:
            continue
    return None


def watched(
    call: str, scratch: Path, environment: dict[str, str], each: Callable[[], object]
) -> dict[str, list[Sample]]:
    """Run a call in an agent, and sample it and its rank server until it ends."""
    started = [sys.executable, "-c", f"import flat_tasks; print(flat_tasks.{call})"]
    variables = {**os.environ, "PYTHONPATH": str(PROJECT), "SAFEDIST_SCRATCH_ROOT": str(scratch), **environment}
    found: dict[str, list[Sample]] = {"agent": [], "rank server": []}
    with (scratch / "err").open("wb") as err:
        agent = subprocess.Popen(started, env=variables, stdout=subprocess.DEVNULL, stderr=err)
        while agent.poll() is None:
            time.sleep(0.1)
            each()
            server = rank_server(agent.pid)
            for name, pid in (("agent", agent.pid), ("rank server", server)):
                now = None if pid is None else sample(pid)
                # From the first round on: before, it imports.
                if now is not None and b"start: torch" in (scratch / "err").read_bytes():
                    found[name].append(now)
    said = (scratch / "err").read_text()
    if agent.returncode != 0:
        raise SystemExit(f"the agent ended with {agent.returncode}:\n{said}")
    print(said.splitlines()[-1])
    return found


def told(found: dict[str, list[Sample]]) -> None:
    """The second tenth of the time against the ninth (it begins before that, and ends after it), and the most."""
    for name, samples in found.items():
        tenth = max(1, len(samples) // 10)
        print(f"  {name}, {len(samples)} samples")
        for what in ("memory", "descriptors", "threads"):
            values = [float(getattr(one, what)) for one in samples]
            early, late = max(values[tenth : 2 * tenth]), max(values[-2 * tenth : -tenth])
            unit = " MiB" if what == "memory" else ""
            print(
                f"    {what}{unit}: {early:g} in the second tenth of the time, {late:g} in the ninth, "
                f"at most {max(values):g}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="safedist-flat-") as directory:
        scratch, most = Path(directory), 0

        def measure_logs() -> None:
            nonlocal most
            logs = scratch.glob("safedist-*/logs/*")
            most = max(most, sum(log.stat().st_blocks * 512 for log in logs if log.exists()))

        if options.gigabytes > 0:
            print(f"{options.gigabytes:g} GB printed by two ranks:")
            told(watched(f"prints(gigabytes={options.gigabytes})", scratch, {}, measure_logs))
            print(f"  the ranks' logs on disk: at most {most / 2**20:.0f} MiB")
        if options.rounds > 0:
            print(f"{options.rounds} rounds:")
            environment = {"FLAT_ROUNDS": str(options.rounds)}
            told(watched("fails_in_every_round_but_the_last()", scratch, environment, lambda: None))


if __name__ == "__main__":
    main()
