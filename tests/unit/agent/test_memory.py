"""Memory of the container: read as the kernel shows it, in both versions of control groups, and told.

The directories are as a pod, a namespace or a bare machine show them; ``tests/containers/test_image.py`` reads a real
one.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from flytekitplugins_safedist.agent.memory import (
    Cgroup,
    cgroup,
    high_water,
    killed,
    resident,
    told,
)

MIB = 1024**2
NO_LIMIT_V1 = "9223372036854771712"


class Machine:
    """A root directory with what the kernel would show under it."""

    def __init__(self, root: Path, *, groups: str, machine_mib: int = 16_000) -> None:
        self.root = root
        self.write("proc/self/cgroup", groups)
        self.write("proc/meminfo", f"MemTotal:       {machine_mib * 1024} kB\nMemFree:         1024 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n" if text else "")

    def v1(self, below: str, *, limit: str, usage: int, cached: int, kills: int | None = 0) -> None:
        place = f"sys/fs/cgroup/memory{below}"
        self.write(f"{place}/memory.limit_in_bytes", limit)
        self.write(f"{place}/memory.usage_in_bytes", str(usage))
        # The plain names are of this group alone, without those below it: not what the limit counts.
        self.write(f"{place}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cached}\ntotal_active_file {MIB}")
        count = "" if kills is None else f"\noom_kill {kills}"
        self.write(f"{place}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0{count}")

    def at(self, below: str) -> str:
        """The directory of a control group."""
        return str(self.root / f"sys/fs/cgroup{below}")

    def v2(self, below: str, *, limit: str, usage: int, cached: int, kills: int = 0) -> None:
        place = f"sys/fs/cgroup{below}"
        self.write(f"{place}/memory.max", limit)
        self.write(f"{place}/memory.current", str(usage))
        self.write(f"{place}/memory.stat", f"anon 5\ninactive_file {cached}\nactive_file {MIB}")
        self.write(f"{place}/memory.events", f"low 0\nhigh 0\nmax 7\noom 3\noom_kill {kills}\noom_group_kill 0")


def test_a_pod_under_version_1_whose_mount_begins_at_its_own_group(tmp_path: Path) -> None:
    pod = "/kubepods/burstable/pod1/c1"
    groups = f"9:name=systemd:{pod}\n4:cpuset,memory:{pod}\n0::/"
    machine = Machine(tmp_path, groups=groups)
    machine.v1("", limit=str(1024 * MIB), usage=900 * MIB, cached=399 * MIB, kills=2)
    machine.write("sys/fs/cgroup/memory/memory.max_usage_in_bytes", str(1000 * MIB))
    assert cgroup(tmp_path) == Cgroup(1024 * MIB, 500 * MIB, 2, machine.at("/memory"), 1000 * MIB)


@pytest.mark.parametrize("as_one", [True, False])
def test_a_pod_under_version_2_in_a_namespace_of_its_own(tmp_path: Path, as_one: bool) -> None:
    machine = Machine(tmp_path, groups="0::/")
    machine.v2("", limit=str(1024 * MIB), usage=900 * MIB, cached=399 * MIB, kills=2)
    machine.write("sys/fs/cgroup/memory.peak", str(1000 * MIB))
    machine.write("sys/fs/cgroup/memory.oom.group", f"{as_one:d}")  # one kill ends the whole container
    assert cgroup(tmp_path) == Cgroup(1024 * MIB, 500 * MIB, 2, machine.at(""), 1000 * MIB, as_one=as_one)


def test_version_1_counts_where_the_machine_mounts_both(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="4:memory:/job\n1:cpu:/\n0::/")
    machine.v1("/job", limit=str(64 * MIB), usage=10 * MIB, cached=0)
    assert cgroup(tmp_path) == Cgroup(limit=64 * MIB, in_use=9 * MIB, kills=0, place=machine.at("/memory/job"))


def test_the_smallest_limit_above_a_group_holds(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="0::/pods/pod1/c1")
    machine.v2("/pods/pod1/c1", limit="max", usage=9 * MIB, cached=0)
    machine.write("sys/fs/cgroup/pods/pod1/memory.max", str(512 * MIB))
    machine.write("sys/fs/cgroup/pods/memory.max", str(700 * MIB))
    machine.write("sys/fs/cgroup/pods/pod1/memory.peak", str(500 * MIB))
    machine.write("sys/fs/cgroup/pods/pod1/c1/memory.peak", str(90 * MIB))
    found = cgroup(tmp_path)
    assert found is not None
    # The high-water mark, too, is that of the group which is limited: what others in it hold counts.
    assert (found.limit, found.place, found.peak) == (512 * MIB, machine.at("/pods/pod1"), 500 * MIB)


@pytest.mark.parametrize("limit", ["max", str(32_000 * MIB)])
def test_a_limit_that_the_machine_does_not_have_is_none(tmp_path: Path, limit: str) -> None:
    machine = Machine(tmp_path, groups="0::/")
    machine.v2("", limit=limit, usage=9 * MIB, cached=0)
    assert cgroup(tmp_path) == Cgroup(limit=None, in_use=8 * MIB, kills=0, place=machine.at(""))


def test_version_1_says_no_limit_with_a_large_number_and_may_count_no_kills(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="4:memory:/")
    machine.v1("", limit=NO_LIMIT_V1, usage=9 * MIB, cached=0, kills=None)
    assert cgroup(tmp_path) == Cgroup(limit=None, in_use=8 * MIB, kills=None, place=machine.at("/memory"))


@pytest.mark.parametrize("groups", ["", "0::/../other", "4:memory:/gone"])
def test_nothing_is_known_where_nothing_accounts_for_memory(tmp_path: Path, groups: str) -> None:
    """As in the root group of a bare machine."""
    Machine(tmp_path, groups=groups)
    assert cgroup(tmp_path) is None
    assert cgroup(tmp_path / "no proc here") is None


def test_a_process_that_holds_memory_is_measured_while_it_lives() -> None:
    code = "import sys; held = b'x' * (64 << 20); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 64 * MIB < resident(child.pid) <= high_water(child.pid)
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
        assert (resident(child.pid), high_water(child.pid)) == (0, 0)


# --- as people read it ----------------------------------------------------------------------------------------------
def test_a_killed_rank_is_told_with_the_high_water_of_each_and_what_the_kernel_counted() -> None:
    before, now = Cgroup(1024 * MIB, 400 * MIB, 3), Cgroup(1024 * MIB, 600 * MIB, 4)
    assert killed(now, before) == 1
    assert told(now, before, {5: 742 * MIB, 4: 0}) == (
        "Memory high-water of each rank of this node: rank 4 unknown, rank 5 742.0 MiB. The container has a limit of "
        "1.0 GiB, 600.0 MiB were in use right after. Since the ranks started, the kernel's out-of-memory killer has "
        'ended 1 process(es) here. To give it at least half as much again: requests=Resources(mem="2Gi", ...), '
        'limits=Resources(mem="2Gi", ...).'
    )


def kill_at(limit: int | None, peak: int | None) -> str:
    """What is told of one kill in a container with this limit and high-water mark."""
    group = Cgroup(limit, 600 * MIB, 3, "/sys/fs/cgroup", peak)
    return told(dataclasses.replace(group, kills=4), group, {0: MIB})


def test_a_kill_at_the_limit_is_told_with_how_near_it_was_and_of_which_group() -> None:
    said = kill_at(1024 * MIB, 1023 * MIB)
    assert (
        "The container has a limit of 1.0 GiB (control group /sys/fs/cgroup), its high-water mark, cached files "
        "included, is 1023.0 MiB, 600.0 MiB were in use right after." in said
    )
    assert said.endswith('requests=Resources(mem="2Gi", ...), limits=Resources(mem="2Gi", ...).')
    assert "half as much again" in said


@pytest.mark.parametrize(
    ("limit", "peak", "advised"),
    [
        (8192 * MIB, 3072 * MIB, "no memory left, 5.0 GiB below its limit. Ask for"),
        (None, 3072 * MIB, "no memory left. Ask for"),
    ],
)
def test_a_kill_far_below_the_limit_is_the_machines_shortage(limit: int | None, peak: int, advised: str) -> None:
    """More of a limit would not help there: the pod had been placed where less was free than it came to use."""
    said = kill_at(limit, peak)
    assert advised in said
    assert 'requests=Resources(mem="5Gi", ...), limits=Resources(mem="5Gi", ...).' in said
    assert "half as much" not in said


def test_without_limit_and_high_water_mark_no_number_is_made_up() -> None:
    assert kill_at(None, None).endswith("requests=Resources(mem=..., ...), limits=Resources(mem=..., ...).")


def test_what_nobody_counted_is_not_told() -> None:
    now = Cgroup(None, 600 * MIB, None)
    assert told(now, now, {0: MIB}) == (
        "Memory high-water of each rank of this node: rank 0 1.0 MiB. The container has no limit, 600.0 MiB were in "
        "use right after."
    )
    assert told(None, None, {0: MIB}) == "Memory high-water of each rank of this node: rank 0 1.0 MiB."
