"""A container that is started again in the same pod says how it ended before: its scratch volume outlives it.

Which pod this is, the kernel says: the kubelet's hosts file of a pod is mounted here in a name space of the process's.
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from pathlib import Path
from typing import Any

from tests.agents.test_out_of_memory import LIMIT, group, limited
from tests.harness import needs
from tests.harness.procs import KILL, Running, Warm, until

__all__ = ["group"]


class Container:
    """A container of a pod, whose memory is limited: it has the pod's hosts file, and a volume for scratch."""

    def __init__(self, warm: Warm, root: Path, group: Path) -> None:
        self.volume, self.mark, hosts = root / "volume", root / "mark", root / "pods" / str(uuid.uuid4()) / "etc-hosts"
        self.volume.mkdir()
        hosts.parent.mkdir(parents=True)
        hosts.write_bytes(Path("/etc/hosts").read_bytes())
        environment = {
            **limited(group),
            **{"SAFEDIST_SCRATCH_ROOT": str(self.volume), "FLYTE_INTERNAL_EXECUTION_ID": "f1"},
            **{"FLYTE_ATTEMPT_NUMBER": "0"},
            **{"TEST_MARK": str(self.mark), "TEST_MOUNTS": json.dumps([("--bind", str(hosts), "/etc/hosts")])},
        }
        self._warm, self._root = warm, root
        self._options: dict[str, Any] = {"kind": "execute", "environment": environment}

    def start(self, name: str) -> Running:
        place = ["--output-prefix", str(self._root / "uploads")]
        files, call = self._root / name, "job_memory:fills_its_memory_at_first"
        return self._warm.start(call, files, arguments=place, **self._options)


def ended_for_its_memory(group: Path, container: Container) -> None:
    """The first start: its memory is full, and the kernel ends all of it."""
    running = container.start("first")
    until(container.mark.exists, "its memory is full")
    full = 0.95 * LIMIT

    def is_noted() -> bool:
        found = [json.loads(each.read_text()) for each in container.volume.glob(".safedist-*") if each.suffix != ".new"]
        return any((each["memory"] or {}).get("used", 0) >= full for each in found)

    until(is_noted, "the sign says that")
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    ended = running.wait()
    assert ended.code == -KILL, ended.err


def test_a_container_that_was_ended_for_its_memory_says_so_when_it_is_started_again(warm, tmp_path, group):
    needs.root("mount files")
    container = Container(warm, tmp_path, group)
    ended_for_its_memory(group, container)
    again = container.start("again").wait()
    uploaded = [path.name for path in (tmp_path / "uploads").glob("[!.]*")]
    assert (again.code, again.left, uploaded) == (0, [], ["outputs.pb"]), again.err
    said = "this container was started before (1 time(s)), and ended at "
    (line,) = [each for each in again.err.splitlines() if said in each]
    assert "UTC without a verdict; its memory then: 8" in line
    assert "of 900.0 MiB in use, so most likely the kernel ended it. Fix: raise mem= in requests and limits" in line
    told = (again.files / "termination-log").read_text()
    assert told.startswith(said), "where Kubernetes shows it, if it is ended again"
    assert list(container.volume.glob(".safedist-*")) == [], "what has ended for good leaves none"
