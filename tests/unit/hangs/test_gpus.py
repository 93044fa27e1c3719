"""What a node's GPUs tell, by the real nvidia-ml-py over a stand-in for the driver; and what it means."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from flytekitplugins_safedist.hangs.gpus import GpuUse, GpuWatch, fault_of, indices_of, to_blame
from tests.harness.nvml import Gpus

UUIDS = [f"GPU-{index}0000000-aaaa-bbbb-cccc-000000000000" for index in range(4)]
FOUR = [GpuUse(index, uuid) for index, uuid in enumerate(UUIDS)]
IDLE = {"busy": 0, "used": 0, "total": 80 << 30, "degrees": 31, "reasons": 1}


@pytest.fixture
def gpus(nvml_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    ctypes.CDLL(str(nvml_driver))
    monkeypatch.setenv("TEST_NVML", str(tmp_path / "gpus"))
    monkeypatch.setattr("flytekitplugins_safedist.hangs.gpus.ANSWER_SECONDS", 60.0)
    return Gpus(tmp_path / "gpus", 2)


@contextmanager
def watched() -> Iterator[tuple[GpuWatch, list[str]]]:
    said: list[str] = []
    with GpuWatch(said.append) as watch:
        watch.look()
        yield watch, said


def test_how_gpus_are_used(gpus: Gpus) -> None:
    gpus.say(0, **{**IDLE, "busy": 97, "used": 12 << 30, "reasons": 0x41})
    gpus.say(1, **IDLE)
    with watched() as (watch, said):
        first, second = watch.usage()
        gpus.say(1, busy=100)
        watch.look()
        assert watch.usage()[1].busy == 100
    assert (first.index, first.uuid, first.busy, first.memory) == (0, UUIDS[0], 97, 12 << 30)
    assert f"{first}" == (
        f"GPU 0 ({UUIDS[0]}): 97% busy, 12.0 of 80.0 GiB in use, 31 °C, slowed for its temperature (hardware)"
    )
    assert (second.busy, second.slowed) == (0, "")
    assert said == []


def test_what_a_gpu_does_not_tell_is_left_out(gpus: Gpus) -> None:
    with watched() as (watch, _):
        assert watch.usage()[0] == GpuUse(0, UUIDS[0])
    assert f"{GpuUse(0, UUIDS[0])}" == f"GPU 0 ({UUIDS[0]}): it says nothing"


def test_an_xid_is_told_once_with_what_it_means(gpus: Gpus) -> None:
    with watched() as (watch, said):
        for xid in (31, 31, 48, 8):
            gpus.say(1, xid=xid)
        watch.look()
        found = watch.faults()
        watch.look()
        assert watch.faults() == found
    assert [(each.index, each.uuid, each.code, each.stays) for each in found] == [
        (1, UUIDS[1], "USER:GpuXidError", False),
        (1, UUIDS[1], "SYSTEM:GpuEccError", True),
        (1, UUIDS[1], "", False),
    ]
    assert said == [
        f"GPU 1 ({UUIDS[1]}) reported Xid 31: GPU memory page fault (an illegal address)",
        f"GPU 1 ({UUIDS[1]}) reported Xid 48: double-bit ECC error",
        f"GPU 1 ({UUIDS[1]}) reported Xid 8",
    ]


def test_a_lost_gpu_is_told_with_its_xid_or_without_and_the_others_are_looked_at(gpus: Gpus) -> None:
    gpus.say(1, **IDLE)
    with watched() as (watch, said):
        gpus.say(0, lost=1)
        watch.look()
        [fault] = watch.faults()
        gpus.say(0, xid=79)  # its event comes later: the same fault
        watch.look()
        assert watch.faults() == (fault,)
        assert [each.busy for each in watch.usage()] == [None, 0]
    assert (fault.index, fault.code, fault.stays) == (0, "SYSTEM:GpuFallenOffBus", True)
    assert said == [f"GPU 0 ({UUIDS[0]}) reported Xid 79: GPU has fallen off the bus"]


def test_an_event_of_a_gpu_that_is_lost_is_known_by_its_handle(gpus: Gpus) -> None:
    with watched() as (watch, _):
        gpus.say(1, lost=1, xid=119)
        watch.look()
        assert [each.what for each in watch.faults() if each.index == 1] == [
            "Xid 119: GSP RPC timeout",
            "Xid 79: GPU has fallen off the bus",
        ]


def test_a_driver_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=answers.wait))
    monkeypatch.setattr("flytekitplugins_safedist.hangs.gpus.ANSWER_SECONDS", 0.01)
    with watched() as (watch, _):
        monkeypatch.setattr("flytekitplugins_safedist.hangs.gpus.ANSWER_SECONDS", 3600.0)
        watch.look()
        assert watch.usage() == ()
        answers.set()
    for thread in threading.enumerate():
        if thread.name == "safedist-gpus":  # else it says in the log of the next test that it has ended
            thread.join()


def test_a_driver_that_is_not_loaded_is_no_trouble(gpus: Gpus, caplog: pytest.LogCaptureFixture) -> None:
    gpus.say(-1, driver=9)
    with caplog.at_level(logging.DEBUG, "flytekitplugins_safedist.hangs.gpus"), watched() as (watch, said):
        assert (watch.usage(), watch.faults(), said) == ((), (), [])
    [record] = caplog.records
    assert (record.levelno, "no GPUs are watched" in record.getMessage()) == (logging.DEBUG, True)


@pytest.mark.processes
def test_where_there_is_no_package_or_no_driver_nothing_happens() -> None:
    code = """
import sys
from flytekitplugins_safedist.hangs.gpus import GpuWatch
sys.modules["pynvml"] = None
for _ in range(2):
    watch = GpuWatch(print)
    watch.look()
    print(watch.faults(), watch.usage())
    sys.modules.pop("pynvml", None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("() ()\n" * 2, "")


def test_the_numbers_are_told_apart_as_flyte_2_does() -> None:
    """flyte#7879, package gpufault: the codes of a user, and those after which a GPU is not to be trusted."""
    codes = {xid: fault_of(xid, FOUR[0], 0).code for xid in range(200)}
    assert {xid for xid, code in codes.items() if code.startswith("USER:")} == {13, 31, 43, 45}
    assert all(codes[xid].startswith("SYSTEM:") for xid in (48, 62, 63, 64, 74, 79, 94, 95, 109, 119, 120, 140))
    kinds = ("FallenOffBus", "EccError", "NvlinkError", "XidError")
    assert {*codes.values(), ""} == {"", "USER:GpuXidError", *(f"SYSTEM:Gpu{kind}" for kind in kinds)}
    assert not fault_of(94, FOUR[0], 0).stays, "a contained error ends the program alone"


def test_whose_a_gpu_is() -> None:
    asked = {
        (1, 4, ""): {1},
        (1, 2, "2,3"): {3},
        (0, 2, f"{UUIDS[3]}, GPU-1"): {3},
        (5, 8, ""): {1},
        (0, 1, ""): {0, 1, 2, 3},
        (0, 1, "2"): {2},
        (1, 2, "MIG-7, MIG-8"): {0, 1, 2, 3},
    }
    assert {each: indices_of(*each[:2], FOUR, each[2]) for each in asked} == asked
    assert indices_of(1, 2, [], "") == set(), "without GPUs nobody has one"


def test_the_hardwares_comes_before_the_programs_and_none_is_of_the_end_itself() -> None:
    expected = [((31, 13), 31), ((45, 48, 79), 48), ((8,), None), ((45,), 45), ((45.1,), None), ((43.1,), 43)]
    for xids, which in expected:  # a tenth: after the failure
        faults = [fault_of(int(xid), FOUR[0], 5 + (xid > int(xid))) for xid in xids]
        found = to_blame(faults, failed_ns=5)
        assert (xids, found and found.xid) == (xids, which)
