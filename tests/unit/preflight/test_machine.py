"""Checks of a directory, on file systems that really behave like that (a FUSE mount of the test's own)."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.preflight.machine import check_directory, check_network, check_torch
from tests.harness import needs
from tests.harness.fusefs import FuseMount, require
from tests.harness.registered import registered


def examined(tmp_path: Path, **rules: Any) -> dict[str, tuple[str, str, str, dict[str, Any]]]:
    """The findings on a mount with *rules*, by status. A mount of any name is found."""
    require()
    backing, mountpoint = tmp_path / "backing", tmp_path / "caf\u00e9, with space and back\\slash"
    with FuseMount(backing, mountpoint, **rules):
        found = {one[1]: one for one in check_directory(mountpoint)}
    assert list(backing.iterdir()) == []
    return {status: (status, what, remedy, facts) for status, (_, _, what, remedy, facts) in found.items()}


@pytest.fixture
def much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flytekitplugins_safedist.preflight.machine._LITTLE_SPACE", 0)


@pytest.mark.usefixtures("much_room")
def test_a_good_directory_says_what_it_is(tmp_path: Path) -> None:
    _, what, remedy, facts = examined(tmp_path, locks="shared")["ok"]

    assert what.startswith("fuse")
    assert facts["type"].startswith("fuse")
    assert "renames and locks work" in what
    assert (facts["replace"], facts["flock"], remedy) == (True, True, "")


@pytest.mark.usefixtures("much_room")
def test_locks_that_are_dropped_are_a_warning(tmp_path: Path) -> None:
    _, what, remedy, facts = examined(tmp_path, locks="dropped")["warning"]

    assert "does not keep locks between processes" in what
    assert "correct all the same" in remedy
    assert facts["flock"] is False


def test_a_full_directory_is_broken(tmp_path: Path) -> None:
    found = examined(tmp_path, faults=[{"op": "mkdir", "errno": "ENOSPC", "first": 9}])

    assert "No space left on device" in found["broken"][1]


def test_a_mount_whose_name_is_no_text_hurts_no_other(tmp_path: Path) -> None:
    mountpoint = tmp_path / os.fsdecode(b"latin-\xe9")
    mountpoint.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mountpoint], capture_output=True, check=False)
    if mounted.returncode:
        needs.missing(
            f"a tmpfs cannot be mounted: {mounted.stderr!r}", bring="sudo make test (in a container: --privileged)"
        )
    try:
        (found,) = check_directory(mountpoint)
        assert found[4]["type"] == "tmpfs"
        assert next(iter(check_directory(tmp_path)))[1] != "broken"
    finally:
        subprocess.run(["umount", "-l", mountpoint], check=True)


def test_a_hostname_that_dns_could_not_have_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n" * 64)
    found = next(iter(check_network()))
    assert found[1] == "warning"
    assert "does not resolve" in found[2]


def test_no_directory_is_broken(tmp_path: Path) -> None:
    ((name, status, what, remedy, _),) = check_directory(tmp_path / "none")

    assert (name, status) == (str(tmp_path / "none"), "broken")
    assert what == f"cannot be written by uid {os.getuid()}: No such file or directory"
    assert "fsGroup" in remedy


@pytest.mark.parametrize(
    ("address", "status", "says", "does"),
    [
        ("127.0.1.1", "warning", "which other nodes cannot reach", "let /etc/hosts name the pod's address"),
        ("10.1.2.3", "ok", "is 10.1.2.3", ""),
    ],
)
def test_the_address_that_others_use_is_named_and_one_that_only_this_machine_can_use_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, address: str, status: str, says: str, does: str
) -> None:
    # The resolver is a stand-in: which names resolve to what is not this test's to arrange on the machine.
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "getfqdn", lambda _: "pod.example")
    ((_, seen, what, remedy, facts),) = check_network()
    assert (seen, facts["addresses"]) == (status, [address])
    assert says in what
    assert does in remedy


FACTS = {"version": "2.13.0", "cuda_build": None, "hip_build": None, "gpus": 0, "nccl": False, "gloo": True}


@pytest.mark.parametrize(
    ("env", "statuses"),
    [
        ({}, ["broken"]),  # by hand
        (registered(gpus=1), ["broken"]),
        (registered(), ["warning"]),
        ({"SAFEDIST_ROUND": "0"}, ["warning"]),  # a local run
    ],
)
def test_a_driver_of_the_machine_is_broken_only_where_gpus_are_asked_for(
    env: dict[str, str], statuses: list[str]
) -> None:
    assert [each.status for each in check_torch(FACTS, env, ["nvidia0"]) if each.check == "gpu"] == statuses


@pytest.mark.parametrize(
    ("cuda", "why"), [(None, "this torch is built for the CPU"), ("12.8", "CUDA cannot be initialised")]
)
def test_why_torch_sees_no_gpu_is_told_by_its_build(cuda: str | None, why: str) -> None:
    told = [each.what for each in check_torch({**FACTS, "cuda_build": cuda}, {}, ["nvidia0"]) if each.check == "gpu"]
    assert told == [f"there is an NVIDIA driver, but torch sees no GPU: {why}"]


FOUR = "GPU-a,GPU-b,GPU-c,GPU-d"


@pytest.mark.parametrize(
    ("gpus", "variables", "visible", "what"),
    [
        (8, {"NVIDIA_VISIBLE_DEVICES": FOUR}, 4, None),  # a platform's limit, or an override
        (8, {"NVIDIA_VISIBLE_DEVICES": FOUR}, 3, "this pod has 4 GPUs, and torch sees 3"),
        (8, {"NVIDIA_VISIBLE_DEVICES": FOUR, "CUDA_VISIBLE_DEVICES": "0"}, 1, None),
        (2, {"NVIDIA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1, None),  # a process sees one slice
        (8, {"NVIDIA_VISIBLE_DEVICES": "void"}, 2, None),  # two device files
        (8, {}, 1, "this pod has 2 GPUs, and torch sees 1"),
        (None, {"NVIDIA_VISIBLE_DEVICES": FOUR}, 0, None),
    ],
)
def test_torch_must_see_the_gpus_that_the_pod_has_in_the_end(
    gpus: int | None, variables: dict[str, str], visible: int, what: str | None
) -> None:
    facts = {**FACTS, "cuda_build": "12.8", "gpus": visible, "nccl": True}
    env = registered(gpus=gpus, nproc_per_node=gpus or 1, nproc_is_open=True) | variables
    devices = ["nvidia0", "nvidia1", "nvidiactl"] if gpus else []
    broken = [each.what for each in check_torch(facts, env, devices) if each.status == "broken"]
    assert broken == ([] if what is None else [what])
