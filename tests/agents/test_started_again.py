"""A container that is started again in the same pod says how it ended before: its scratch volume outlives it.

Which pod this is, the kernel says: the kubelet's hosts file of a pod is mounted here in a name space of the process's.
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents.test_out_of_memory import LIMIT, group
from tests.harness import needs
from tests.harness.mounts import mount
from tests.harness.pod import Pod
from tests.harness.procs import until
from tests.harness.registered import registered

__all__ = ["group"]

pytestmark = pytest.mark.processes

WORKFLOWS = """
import os
import time
from pathlib import Path

from flytekit import task
from flytekitplugins_safedist import SafeTorch


def in_use(group):
    usage = next(file for name in ("memory.current", "memory.usage_in_bytes") if (file := group / name).exists())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    prefix = "total_" if "total_active_file" in stat else ""
    return int(usage.read_text()) - sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))


@task(task_config=SafeTorch(nproc_per_node=1))
def fills_its_memory_at_first() -> str:
    mark, held = Path(os.environ["TEST_MARK"]), []
    if mark.exists():
        return "done"
    while in_use(Path(os.environ["TEST_GROUP"])) < 0.97 * int(os.environ["TEST_LIMIT"]):
        held.append(bytearray(4 << 20))
    mark.touch()
    time.sleep(3600)
"""


def in_pod(root: Path, uid: str, group: Path) -> Callable[[], None]:
    """What a process does before it becomes the container's: it has the pod's hosts file, and the group's limit."""
    hosts = root / "pods" / uid / "etc-hosts"
    hosts.parent.mkdir(parents=True, exist_ok=True)
    hosts.write_bytes(Path("/etc/hosts").read_bytes())

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        mount("--bind", hosts, "/etc/hosts")

    return enter


def ended_for_its_memory(group: Path, pod: Pod, enter: Callable[[], None]) -> None:
    """The first start: its memory is full, and the kernel ends all of it."""
    sign = pod.root / "volume"
    process = pod.start(*pod.fast_arguments("fills_its_memory_at_first"), preexec_fn=enter)
    until(lambda: Path(pod.environment["TEST_MARK"]).exists() or process.poll() is not None, "its memory is full")
    full = 0.95 * LIMIT

    def is_noted() -> bool:
        found = [json.loads(each.read_text()) for each in sign.glob(".safedist-*") if each.suffix != ".new"]
        return any((each["memory"] or {}).get("used", 0) >= full for each in found) or process.poll() is not None

    until(is_noted, "the sign says that")
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err


def test_a_container_that_was_ended_for_its_memory_says_so_when_it_is_started_again(tmp_path, group):
    needs.root("mount files")
    pod, uid = Pod(tmp_path / "pod", {"workflows.py": WORKFLOWS}), str(uuid.uuid4())
    (pod.root / "volume").mkdir()
    pod.environment = {
        **registered(nproc_per_node=1),
        **{
            "SAFEDIST_SCRATCH_ROOT": str(pod.root / "volume"),
            "FLYTE_INTERNAL_EXECUTION_ID": "f1",
            "FLYTE_ATTEMPT_NUMBER": "0",
        },
        **{"TEST_MARK": str(tmp_path / "mark"), "TEST_GROUP": str(group), "TEST_LIMIT": str(LIMIT)},
    }
    ended_for_its_memory(group, pod, in_pod(tmp_path, uid, group))
    again = pod.start(*pod.fast_arguments("fills_its_memory_at_first"), preexec_fn=in_pod(tmp_path, uid, group))
    _, err = again.communicate()
    assert (again.returncode, pod.uploaded()) == (0, ["outputs.pb"]), err
    said = "this container was started before (1 time(s)), and ended at "
    (line,) = [each for each in err.splitlines() if said in each]
    assert "UTC without a verdict; its memory then: 8" in line
    assert "of 900.0 MiB in use, so most likely the kernel ended it. Fix: raise mem= in requests and limits" in line
    assert pod.message.read_text().startswith(said), "where Kubernetes shows it, if it is ended again"
    assert list((pod.root / "volume").glob(".safedist-*")) == [], "what has ended for good leaves none"
