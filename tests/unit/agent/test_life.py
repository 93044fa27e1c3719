"""The sign that a container leaves for the next one in its pod: whose it is, and what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flytekitplugins_safedist.agent import life
from flytekitplugins_safedist.agent.life import Life
from flytekitplugins_safedist.coordinator.books import Memory

UID = "5c9f2d0e-8a67-4b52-9f1e-0d3b6a7c8e21"
KUBELETS = f"1522 1510 254:1 /var/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/vda1 rw"
OTHERS = (
    f"1523 1510 254:1 /var/lib/kubelet/pods/{UID}/containers/main/1f /dev/termination-log rw - ext4 /dev/vda1 rw\n"
    "1524 1510 254:1 /var/lib/docker/containers/ab/hosts /etc/hosts rw,relatime - ext4 /dev/vda1 rw"
)


def shown(root: Path, mounts: str) -> Path:
    """A root directory with what the kernel shows of mounts."""
    file = root / "proc" / "self" / "mountinfo"
    file.parent.mkdir(parents=True)
    file.write_text(mounts + "\n")
    return root


NAMES = {
    "volume": "SAFEDIST_SCRATCH_ROOT",
    "job": "SAFEDIST_JOB",
    "execution": "FLYTE_INTERNAL_EXECUTION_ID",
    "attempt": "FLYTE_ATTEMPT_NUMBER",
}


def of_pod(volume: Path) -> dict[str, str]:
    return dict(zip(NAMES.values(), (str(volume), "{}", "f1", "0"), strict=True))


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "volume"
    path.mkdir()
    return path


@pytest.mark.parametrize("missing", ["pod", *NAMES])
def test_no_sign_is_left_where_it_is_no_pod_of_a_job_with_a_volume(tmp_path, volume, missing):
    root = shown(tmp_path, OTHERS if missing == "pod" else KUBELETS)
    environment = of_pod(volume)
    environment.pop(NAMES.get(missing, ""), None)
    life.begin(environment, root)
    life.end(1)
    assert list(volume.iterdir()) == []


@pytest.mark.parametrize("damage", ["{", "[]", json.dumps({"attempt": "f-0", "starts": "x"})])
def test_a_sign_that_cannot_be_read_is_none(tmp_path, volume, damage):
    root = shown(tmp_path, KUBELETS)
    (volume / f".safedist-{UID}").write_text(damage)
    life.begin(of_pod(volume), root)
    assert life.BEFORE.value is None
    life.end(0)
    assert list(volume.iterdir()) == []


def test_starts_are_counted_and_an_orderly_end_is_told_with_its_status(tmp_path, volume, caplog):
    root = shown(tmp_path, KUBELETS)
    environment = of_pod(volume)
    for _ in range(3):
        life.begin(environment, root)
        life.end(137)
    before, life.BEFORE.value = life.BEFORE.value, None
    assert before is not None
    assert (before.starts, before.code) == (1, 137)
    assert "started before (2 time(s)), and ended at " in caplog.text
    assert "UTC with exit status 137" in caplog.text


@pytest.mark.parametrize("other", ["pod", "attempt"])
def test_a_sign_of_another_pod_or_attempt_tells_nothing(tmp_path, volume, other):
    roots = [shown(tmp_path / uid, KUBELETS.replace(UID, uid)) for uid in (UID, UID.replace("5", "6"))]
    life.begin(of_pod(volume), roots[0])
    life.end(137)
    again = {**of_pod(volume), NAMES["attempt"]: "1" if other == "attempt" else "0"}
    life.begin(again, roots[other == "pod"])
    life.end(0)
    assert life.BEFORE.value is None


def test_memory_that_was_not_full_is_told_and_blamed_for_nothing():
    text = str(Life("f-0", 0, 0.0, Memory(400 << 20, 800 << 20)))
    assert text == (
        "this container was started before (1 time(s)), and ended at 00:00:00 UTC without a verdict; its memory then: "
        "400.0 MiB of 800.0 MiB in use"
    )


def test_a_volume_that_does_not_answer_keeps_no_process(tmp_path, volume, monkeypatch):
    monkeypatch.setattr(life, "END_SECONDS", 0.01)
    life.begin(of_pod(volume), shown(tmp_path, KUBELETS))
    [sign] = volume.iterdir()
    draft = sign.with_suffix(".new")
    os.mkfifo(draft)  # whoever writes there waits
    life.end(1)
    assert json.loads(sign.read_text())["code"] is None
    with draft.open("rb"):
        pass
