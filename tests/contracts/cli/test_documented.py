"""Each command line of the README and the docs is run: here, in a directory with a user's files; or where the table
below says, by another test or by CI itself. What a machine of CI cannot do is named with its reason."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.procs import DEADLINE, ROOT, Ended, Warm

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "horovod_build" / "README.md"]
PROGRAMS = {"make", "nox", "pip", "python", "pyflyte", "safedist", "kubectl", "flytectl", "torchrun"}

HERE = {
    "pyflyte run workflow.py main": (0, ["end: succeeded"]),
    "python -m flytekitplugins_safedist.run --nproc-per-node 4 --max-restarts 1 train.py --lr 3": (
        0,
        ["[rank 3] trained with 3.0"],
    ),
    "python -m tests.simulation 200000": (0, ["'success': "]),
}
"""What is run as it is written but for the names of :func:`here`, in a directory of a user's, and with the most options
of those that pages have it with; the exit status, and what the command must say."""

ELSEWHERE = {
    "make demo": (".ci/run", "make demo examples"),
    "make docs": (".ci/run", "make docs"),
    "python scripts/failures.py": ("noxfile.py", "scripts/failures.py"),
    "make lint": (".ci/run", "make lint"),
    "make corners": (".ci/run", "make corners"),
    "make test": (".ci/run", "make test "),
    "make test-container": (".ci/run", "make test-container"),
    "make wheel": (".ci/run", "make wheel"),
    "python scripts/build_image.py": (".ci/run", "scripts/build_image.py --extra"),
    "python horovod_build/build.py": ("Makefile", "python horovod_build/build.py"),
    "pyflyte run examples/digits_ddp.py digits": ("Makefile", "pyflyte run examples/digits_ddp.py digits"),
    "pip install .": ("Makefile", "--editable"),
    "pip wheel --no-deps --wheel-dir dist .": ("tests/contracts/cli/conftest.py", '"wheel", "--no-deps"'),
    "pyflyte run --remote --image IMAGE workflow.py main": (
        "tests/contracts/cli/test_real_clis.py",
        '"run", "--remote"',
    ),
    "safedist render workflow.py train": (
        "tests/contracts/cli/test_documented.py",
        "def test_what_the_pages_send_to_a_file_is_yaml_and_nothing_else",
    ),
    "pyflyte run examples/failures/bad_data.py train": (
        "tests/agents/test_failing_examples.py",
        '"job_failing_examples:bad_data"',
    ),
    "pyflyte run examples/failures/hang.py train": (
        "tests/agents/test_failing_examples.py",
        '"job_failing_examples:hang"',
    ),
    "pyflyte run examples/failures/lost_rank.py train --where /tmp/run-1": (
        "tests/agents/test_failing_examples.py",
        '"job_failing_examples:lost_rank"',
    ),
    "pyflyte run train.py main --steps 400 --where /tmp/run-1": (
        "tests/contracts/cli/test_documented.py",
        "def test_the_quick_start_goes_on_from_its_last_save",
    ),
    "python examples/fs_races.py": ("Makefile", "python examples/fs_races.py"),
    "safedist doctor --path /mnt/shared --store s3://bucket/prefix/": (
        "tests/contracts/cli/test_safedist.py",
        '["doctor", "--json"',
    ),
    "safedist why EXECUTION": ("tests/contracts/cli/test_why.py", '"why", name'),
    "safedist stacks": ("tests/agents/test_stacks.py", '"stacks"'),
}
"""What is run elsewhere: where, and the words there that do it."""

NOT_HERE = {
    "kubectl apply --dry-run=server -f job.yaml": "a cluster; of what it is given, see below",
    "kubectl exec": "a cluster",
    "pyflyte register --resource-requests …": "a cluster; what it registers is tested without one",
    "flytectl register files": "a cluster; tests/harness/flytectl.py does what it was seen to do",
    "make gpu": "a GPU",
    "python -c": "no command: pages speak of what it has no source for",
    "python -m": "no command: pages say that scripts and modules are run as it runs them",
    "make help": "prints the lines of the Makefile",
    "nox -s matrix": "hours",
    "python horovod_build/build.py --gpu nccl": "gigabytes of CUDA; docs/versions.md says where it was built",
    "python horovod_build/build.py --verify-only": "verifying is what make demo's build ends with",
    "make check": "lint, types and a part of the tests: each is run by .ci/run",
    "make demo-torch": "the example alone, which `make examples` runs",
    "make bench": "measures, for half an hour",
    "make coverage": "the tests once more, twice as slowly",
    "make matrix": "hours; its oldest and newest are make corners, which .ci/run runs",
    "make mutants": "hours",
    "make simulation": "a night",
    "kubectl cordon": "a cluster",
    "kubectl drain": "a cluster",
    "kubectl delete pod NAME --force": "a cluster",
    "python -m tests.simulation.mutants": "a quarter of an hour",
    'make mutants MUTANTS="agent rank --sample 40 --seed 7"': "hours",
    "pip install '.[gpu,prometheus,otlp]'": "make's pip installs the same",
    "pip install '.[torch,kubeflow]'": "a CUDA build of torch is gigabytes; make's pip installs the same",
    "pip install --ignore-requires-python --no-deps": "a Python that flytekit refuses",
    "python horovod_build/build.py --no-install --wheel-dir dist": "compiles for minutes what make demo has compiled",
}
"""Why not."""

WORKFLOW = """
from flytekit import Resources, task, workflow
from flytekitplugins_safedist import SafeTorch, current_rank

@task(
    task_config=SafeTorch(nnodes=2, nproc_per_node=2, max_restarts=1),
    requests=Resources(cpu="8", mem="16Gi"), limits=Resources(cpu="8", mem="16Gi"),
    container_image="registry.example/train:1",
)
def train(epochs: int) -> float:
    return float(epochs * current_rank().world_size)

@workflow
def main(epochs: int = 20) -> float:
    return train(epochs=epochs)
"""
EXAMPLE, TRAIN = (
    re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[0]
    for page in ("README.md", "docs/index.md")
)
"""What the README and the quick start begin with, as they stand."""

SCRIPT = """
if __name__ == "__main__":
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1.0)
    print("trained with", parser.parse_args().lr)
"""


KUBECTL = """#!/usr/bin/env python3
import sys, yaml
for each in yaml.safe_load_all(open(sys.argv[sys.argv.index("-f") + 1])):
    print(each["apiVersion"], each["kind"], "dry run")
"""
"""A stand-in for the command that needs a cluster: it parses what it is given."""


def lines(page: Path) -> list[str]:
    """The lines of a page's blocks without a language, and its code spans; without comments."""
    text = page.read_text()
    blocks = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    found = [
        line.split("#")[0] for language, block in blocks.findall(text) if not language for line in block.split("\n")
    ]
    return [*found, *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", blocks.sub("", text))]


def commands(page: Path) -> list[str]:
    """The calls of a program in these."""
    called = [part.strip() for line in lines(page) for part in re.split(r"&&|[|>]", line)]
    return [line for line in called if line.partition(" ")[0] in PROGRAMS and " " in line]


def asked(command: str) -> tuple[str, set[str]]:
    """Program and what it is to do; and its further words, less values of options."""
    words = shlex.split(command)
    what = " ".join(words[:3] if words[1] == "-m" else words[:2])
    return what, {word.partition("=")[0] for word in words if word.startswith("-")}


def is_in(command: str, table: dict[str, object]) -> bool:
    """Whether the table has it, or the same with more options: a page may name a part in a sentence."""
    what, options = asked(command)
    return command in table or any(what == asked(one)[0] and options <= asked(one)[1] for one in table)


@functools.cache
def documented() -> dict[str, set[str]]:
    """Each command, and the pages that have it. Benchmarks have a test of their own."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for command in commands(page):
            found.setdefault(command, set()).add(page.name)
    return found


def test_no_command_of_a_page_is_without_one_who_runs_it() -> None:
    tables: dict[str, object] = {**HERE, **ELSEWHERE, **NOT_HERE}
    without = {command: pages for command, pages in documented().items() if not is_in(command, tables)}
    assert {command: pages for command, pages in without.items() if "benchmarks/" not in command} == {}
    assert [command for command in tables if command not in documented()] == [], "these are on no page any more"


def test_what_is_run_elsewhere_is_there() -> None:
    found = {command: words in (ROOT / place).read_text() for command, (place, words) in ELSEWHERE.items()}
    assert [command for command, is_there in found.items() if not is_there] == []


@pytest.mark.parametrize("script", sorted({shlex.split(one)[1] for one in documented() if "benchmarks/" in one}))
def test_a_benchmark_takes_the_options_of_the_pages(warm: Warm, tmp_path: Path, script: str) -> None:
    """It begins, with all that it imports. What it measures takes minutes, and is nobody's business in a test."""
    words = {word for command in documented() if script in command for word in shlex.split(command)}
    how: dict[str, Any] = {"kind": "main", "arguments": ["--help"], "libraries": False, "path": [ROOT / "benchmarks"]}
    done = warm.run(f"{ROOT / script}:__main__", tmp_path / "job", **how)
    assert done.code == 0, done.err
    assert [word for word in words if word.startswith("--") and word not in done.out] == []


@pytest.mark.processes
@pytest.mark.parametrize("command", HERE)
def test_a_command_of_the_pages_does_what_they_say(command: str, tmp_path: Path, warm: Warm) -> None:
    code, says = HERE[command]
    words = here(command, tmp_path)
    if command.startswith(("pyflyte", "python -m flyte")):
        ended = forked(warm, words, tmp_path)
        status, said = ended.code, ended.out + ended.err
    else:
        done = run(words, tmp_path)
        status, said = done.returncode, done.stdout + done.stderr
    assert status == code, said
    assert [text for text in says if text not in said] == []


@pytest.mark.processes
def test_the_quick_start_goes_on_from_its_last_save(warm: Warm, tmp_path: Path) -> None:
    first, second = (command for command in commands(ROOT / "docs" / "index.md") if "--where" in command)
    begun = run(here(first, tmp_path), tmp_path)
    assert begun.stdout.endswith("\n0\n"), begun.stderr
    assert "nothing to resume from; saves go to" in begun.stdout
    done = forked(warm, here(second, tmp_path), tmp_path)
    assert done.out.endswith("\n200\n"), done.err
    assert "resumed from" in done.out


@pytest.mark.processes
def test_what_the_pages_send_to_a_file_is_yaml_and_nothing_else(tmp_path: Path) -> None:
    """Whatever the user's module prints as it is imported, and with the warning that most tasks have, as a comment."""
    here("safedist", tmp_path)
    sent = {line.strip().replace("train.py", "workflow.py") for page in PAGES for line in lines(page)}
    (line,) = (each for each in sent if "> job.yaml" in each)
    for name in ("workflow.py", "train.py"):
        said = 'import os, sys\nprint("- [loading", file=sys.__stdout__)\nos.system("echo - [from a child")\n'
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(said + text.replace('container_image="registry.example/train:1",', ""))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(KUBECTL)
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    done = run(["bash", "-c", f"unset PYTHONUNBUFFERED; PATH={tmp_path}/bin:$PATH; {line}"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "kubeflow.org/v1 PyTorchJob dry run\n"), done.stderr
    assert "- [loading" in done.stderr
    assert "- [from a child" in done.stderr
    assert "# WARNING the image" in (tmp_path / "job.yaml").read_text()


def here(command: str, place: Path) -> list[str]:
    """The command's words, with places of the test's own, in a directory with the files that the pages name."""
    workflow, train = (EXAMPLE, TRAIN) if command.startswith("pyflyte") else (WORKFLOW, WORKFLOW + SCRIPT)
    for name, text in {"workflow.py": workflow, "train.py": train}.items():
        (place / name).write_text(text)
    swapped = {"/tmp/run-1": f"{place}/run-1", "200000": "20", " examples/": f" {ROOT}/examples/"}
    for name, mine in swapped.items():
        command = command.replace(name, mine)
    return shlex.split(command)


def forked(warm: Warm, words: list[str], place: Path) -> Ended:
    """The same in a process that has imported what it needs."""
    program, *arguments = words
    call, kind = f"{Path(sys.executable).parent / program}:__main__", "main"
    if program == "python":
        call, kind, arguments = f"{arguments[1]}:__main__", "module", arguments[2:]
    return warm.run(call, place / "forked", kind=kind, arguments=arguments, cwd=place)


def run(words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    """As a user types it, with the environment's own programs first."""
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        words, cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE
    )
