"""The ``safedist`` command: what it prints, and its exit status for scripts."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.moto_s3 import BUCKET, S3
from tests.harness.product import doctor, host_checks, main

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


def test_render_without_fast_registration_has_no_archive(capsys: pytest.CaptureFixture[str]) -> None:
    main(["render", str(TRAINING), "evaluate", "--no-fast", "--json", *IMAGE])

    args = json.loads(capsys.readouterr().out)["spec"]["containers"][0]["args"]
    assert args[:3] == ["safedist-execute", "--", "pyflyte-execute"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("render", "nowhere.py", "train"), "there is no such file [file=nowhere.py]"),
        (("render", str(Path(__file__).parents[3] / "README.md"), "train"), "this is not a module of Python"),
        (("render", str(TRAINING), "nothing"), "no such SafeHorovod or SafeTorch task"),
        (("render", str(TRAINING), "prepare"), "seen: evaluate, train"),
    ],
)
def test_what_cannot_be_done_exits_with_2(args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*args]) == 2
    assert text in capsys.readouterr().err


TASK = """
import functools, sys
from flytekit import task
from flytekitplugins_safedist import SafeTorch

@task(task_config=SafeTorch(nnodes=2))
def train() -> int: return 1
"""
PROXY = """
class Proxy:
    def __getattr__(self, name): raise RuntimeError("outside of an application")
    __class__ = property(lambda self: self.anything)
    plan = 3
proxy = Proxy()
"""
SHOWN = {
    "it prints": f"print('CUDA: no'){TASK}",
    "it reads its command line": f"{TASK}\nimport argparse\nargument = argparse.ArgumentParser().parse_args()",
    "it holds objects that are no tasks": f"{TASK}{PROXY}",
}
NOT_SHOWN = {
    "mistaken_import.py": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "mistaken_name.py": ("def f():\n    return nmae\n\nf()\n", "NameError: name 'nmae' is not defined"),
    "mistaken_syntax.py": ("x = (\n", "SyntaxError: "),
    "mistaken_end.py": (f"{TASK}\nsys.exit(5)", "SystemExit: 5"),
    "mistaken_wrapper.py": (
        f"{TASK.replace('def train', 'def inner')}\ntrain = functools.wraps(inner)(lambda: 1)",
        "outermost",
    ),
    "platform.py": (TASK, "rename the file"),
    "time.py": (TASK, "another module has that name"),
    "train.v2.py": (TASK, "not a module of Python"),
}
"""What a user's file has in it, and what is said of it."""


@pytest.mark.parametrize("case", SHOWN)
def test_the_document_stands_alone_whatever_a_module_does(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"shown_module_{len(SHOWN[case])}.py"
    file.write_text(SHOWN[case])

    assert main(["render", str(file), "train"]) == 0
    assert [one["kind"] for one in yaml.safe_load_all(capsys.readouterr().out)] == ["PyTorchJob"]
    assert main(["render", str(file), "train", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "PyTorchJob"


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_a_mistake_in_the_file_or_its_name_is_shown_as_python_shows_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = NOT_SHOWN[name]
    (tmp_path / name).write_text(text)

    assert main(["render", str(tmp_path / name), "train"]) == 2

    shown = capsys.readouterr().err
    assert said in shown
    assert "importlib" not in shown
    assert "safedist/tools" not in shown


def test_doctor_reports_each_finding_with_its_remedy_and_a_horovod_that_cannot_be_loaded_breaks_nothing_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], s3: S3
) -> None:
    gone, store = tmp_path / "gone", f"s3://{BUCKET}/prefix/"
    s3.put("prefix/there", b"")
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "horovod.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "output_of", functools.cache(doctor.output_of))  # each library is asked once

    places = ["--path", str(gone), "--path", str(tmp_path), "--store", store]
    for backend, horovod in (("torch", "warning"), ("horovod", "broken")):
        assert main(["doctor", "--json", "--backend", backend, *places]) == 1

        findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
        found = findings["horovod"]
        assert (found["status"], found["what"].rpartition(": ")[2]) == (horovod, "cannot open shared object file")
        assert findings[str(gone)]["status"] == "broken"
        assert findings[str(tmp_path)]["facts"]["replace"] is True
        assert findings["torch"]["facts"]["version"]
        assert findings[f"store {store}"]["status"] == "ok", findings[f"store {store}"]
        assert all(one["remedy"] for one in findings.values() if one["status"] == "broken")


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
            "it ends with SIGILL: the build does not fit this machine",
        ),
        ("""print('{"epoch": nan'); print('{"there": true}')""", {"there": True}),
        ("""print('{"epoch": nan')""", "no output"),
    ],
)
def test_what_a_process_of_its_own_prints_is_its_answer_or_why_there_is_none(program: str, answer: Any) -> None:
    assert doctor.output_of(program) == answer


def test_a_small_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for the size only: /dev/shm of the machine that runs this must stay as it is.
    usage = shutil._ntuple_diskusage(64 * 1024**2, 0, 64 * 1024**2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    ((_, status, what, remedy, _),) = host_checks.check_shared_memory()

    assert (status, what) == ("warning", "only 64 MiB, 64 MiB free: data loaders with workers will crash")
    assert "shared_memory" in remedy


@pytest.mark.parametrize(("as_one", "status"), [(True, "warning"), (False, "ok")])
def test_what_an_out_of_memory_kill_ends_is_said(as_one: bool, status: str) -> None:
    found = doctor.out_of_memory(doctor.memory.Cgroup(2 << 30, 0, 0, as_one=as_one))

    assert (found.check, found.status) == ("out of memory", status)
    assert found.what.startswith("a limit of 2.0 GiB; the kernel ends ")
    assert ("singleProcessOOMKill" in found.remedy) == as_one
    assert doctor.out_of_memory(None).status == "ok"


def test_help_says_in_words_what_the_commands_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "``" not in said
    assert "Parses, calls, prints" not in said
    assert "before it is registered" in said


def test_what_flytekit_does_not_serialize_is_told_in_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = "{{.image.trainer.fqn}}:{{.image.trainer.version}}"
    (tmp_path / "named_image.py").write_text(TASK.replace("nnodes=2)", f"nnodes=2), container_image={image!r}"))

    assert main(["render", str(tmp_path / "named_image.py"), "train"]) == 2
    assert "Image Config with name trainer not found" in capsys.readouterr().err
    assert main(["render", str(tmp_path / "named_image.py"), "train", "--image", "trainer=a/b:1"]) == 0


def test_an_image_without_a_tag_is_refused_with_the_form_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(TRAINING), "train", "--image", "x"]) == 2
    said = capsys.readouterr().err
    assert "--image" in said
    assert "REGISTRY/NAME:TAG" in said
    assert "Traceback" not in said
