"""The ``safedist`` command: what it prints, and its exit status for scripts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.product import doctor, host_checks, main
from tests.harness.registered import registered

PROJECT = Path(__file__).parent / "project"
TRAINING = PROJECT / "shop" / "training.py"
IMAGE = ("--image", "registry.example/shop:1")


@pytest.fixture(autouse=True)
def _leave_imports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_render_prints_a_summary_and_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(TRAINING), "train", *IMAGE]) == 0

    out = capsys.readouterr().out
    assert "# ranks     8 (4 per node, horovod)\n" in out
    assert "# restarts  1 of all ranks together in each attempt, 2 retries of the attempt by Flyte\n" in out
    (job,) = yaml.safe_load_all(out)
    assert (job["kind"], list(job)) == ("PyTorchJob", ["apiVersion", "kind", "metadata", "spec"])


def test_render_with_pods_prints_each_with_its_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(TRAINING), "train", "--pods", "--json", *IMAGE]) == 0

    job, *created = json.loads(capsys.readouterr().out)
    shown = [one for one in created if one["kind"] == "Pod"]
    names = [one["metadata"]["name"] for one in shown]
    assert [one["metadata"]["name"] for one in created if one["kind"] == "Service"] == names
    assert names == [f"{job['metadata']['name']}-{one}-0" for one in ("master", "worker")]
    ranks = [{e["name"]: e.get("value") for e in one["spec"]["containers"][0]["env"]}["PET_NODE_RANK"] for one in shown]
    assert ranks == ["0", "1"]


def test_render_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    main(["render", str(TRAINING), "train", "--pods", *IMAGE])
    first = capsys.readouterr().out

    main(["render", str(TRAINING), "train", "--pods", *IMAGE])

    assert capsys.readouterr().out == first


def test_render_without_fast_registration_has_no_archive(capsys: pytest.CaptureFixture[str]) -> None:
    main(["render", str(TRAINING), "evaluate", "--no-fast", "--json", *IMAGE])

    args = json.loads(capsys.readouterr().out)["spec"]["containers"][0]["args"]
    assert args[:3] == ["safedist-execute", "--", "pyflyte-execute"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("render", "nowhere.py", "train"), "there is no such file [file=nowhere.py]"),
        (("render", str(Path(__file__).parents[3] / "README.md"), "train"), "this is not a Python file"),
        (("render", str(TRAINING), "nothing"), "no such SafeHorovod or SafeTorch task"),
        (("render", str(TRAINING), "prepare"), "seen: evaluate, train"),
    ],
)
def test_what_cannot_be_done_exits_with_2(args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*args]) == 2
    assert text in capsys.readouterr().err


def test_a_file_that_cannot_be_imported_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken_module_of_test.py"
    file.write_text("import no_such_module_anywhere\n")

    assert main(["render", str(file), "train"]) == 2
    assert "No module named 'no_such_module_anywhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [("def f():\n    return nmae\n\nf()\n", "NameError: name 'nmae' is not defined"), ("x = (\n", "SyntaxError: ")],
    ids=["a wrong name", "no Python"],
)
def test_a_mistake_in_the_file_is_shown_as_python_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / f"mistaken_module_{len(text)}.py"
    file.write_text(text)

    assert main(["render", str(file), "train"]) == 2

    shown = capsys.readouterr().err
    assert said in shown
    assert f'File "{file}", line ' in shown
    assert "importlib" not in shown
    assert "flytekitplugins_safedist" not in shown


def test_doctor_reports_each_finding_with_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    store = tmp_path / "store"
    store.mkdir()

    status = main(["doctor", "--json", "--path", str(gone), "--path", str(tmp_path), "--store", str(store)])

    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    assert status == 1
    assert findings[str(gone)]["status"] == "broken"
    assert findings[str(tmp_path)]["facts"]["replace"] is True
    assert findings["torch"]["facts"]["version"]
    assert findings[f"store {store}"]["status"] == "ok"
    assert all(one["remedy"] for one in findings.values() if one["status"] == "broken")


def test_the_exit_status_is_for_what_is_broken_only() -> None:
    ok, warning, broken = (doctor.Finding("c", status, "w") for status in ("ok", "warning", "broken"))

    assert doctor.exit_status([ok, warning]) == 0
    assert doctor.exit_status([ok, broken]) == 1


def test_a_build_that_crashes_on_import_is_a_finding() -> None:
    found = host_checks.printed_by("import os, signal; os.kill(os.getpid(), signal.SIGILL)")

    assert found == "loading it ends with SIGILL: the build does not fit this machine"


@pytest.mark.parametrize("program", ["", "print('no json')"])
def test_a_build_that_says_nothing_is_a_finding(program: str) -> None:
    assert "prints nothing that can be read" in str(host_checks.printed_by(program))


def test_a_small_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for the size only: /dev/shm of the machine that runs this must stay as it is.
    usage = shutil._ntuple_diskusage(64 * 1024**2, 0, 64 * 1024**2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    ((_, status, what, remedy, _),) = host_checks.check_shared_memory()

    assert (status, what) == ("warning", "only 64 MiB, 64 MiB free: data loaders with workers will crash")
    assert "shared_memory" in remedy


def test_a_directory_that_cannot_be_written_is_broken() -> None:
    ((_, status, what, remedy, _),) = host_checks.check_directory(Path("/proc/self/fd"))

    assert status == "broken"
    assert "cannot be written by uid" in what
    assert "fsGroup" in remedy


def test_gpus_fewer_than_the_pinned_ranks_are_broken() -> None:
    found = {"gpus": 2, "cuda_build": "12.8", "nccl": True}

    (finding,) = host_checks._gpus(found, registered(nproc_per_node=4))

    assert finding.status == "broken"
    assert "4 ranks are registered for this pod, and 2 GPUs are visible" in finding.what


def test_help_says_in_words_what_the_commands_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "``" not in said
    assert "Parses, calls, prints" not in said
    assert "before it is registered" in said


def test_an_image_without_a_tag_is_refused_with_the_form_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(TRAINING), "train", "--image", "x"]) == 2
    said = capsys.readouterr().err
    assert "--image" in said
    assert "REGISTRY/NAME:TAG" in said
    assert "Traceback" not in said
