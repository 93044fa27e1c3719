"""The versions that setup.cfg promises, each tried on a subset: import, both examples, a restart, Horovod, staging.

``nox -s matrix`` tries all of them, one environment after the other (each is removed again: about 5 GB with torch's
CUDA libraries), and ends with a table. ``nox -s corners`` tries the oldest together and the newest together, on the
oldest and the newest Python that this machine has; CI runs it. The others are what `make` calls.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nox

PYTHONS = ("3.10", "3.11", "3.12")
ROOT = Path(__file__).parent
NEWEST, NEWEST_OF_3_10 = re.findall(r"^torch==([\d.]+)", (ROOT / "requirements/torch.txt").read_text(), re.MULTILINE)
TORCHES = ("2.5.0", "2.8.0", "2.13.0", NEWEST)
NEWEST_FOR = {"3.10": NEWEST_OF_3_10}
"""A Python for which the newest torch is not made (no wheel for it), and the newest that is."""
FLYTEKITS = ("1.16.0", "1.16.31")
"""The oldest that is promised, and the newest that constraints.txt pins."""

RESULTS = ROOT / ".nox" / "results.jsonl"
TORCHS_OWN = re.compile("(torch|sympy|triton)==|cuda-|nvidia-(?!ml-py)")
"""What `make TORCH=...` chooses, and torch then names exactly: not pinned."""
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
SMOKE_TESTS = (
    "tests/unit/test_import.py",
    "tests/contracts/golden/test_golden.py",
    "tests/contracts/cli/test_real_clis.py",
    "tests/unit/plugin/test_overrides.py",
    "tests/agents/test_replica_outlives_group.py",
    "tests/agents/test_failures.py::test_failing_ranks_restart_together_with_fresh_scratch_and_a_new_round",
    "tests/agents/test_failures.py::test_horovod_meets_again_after_a_restart",
    "tests/agents/test_startmethods.py::test_preload_and_spawn_give_the_same_results",
    "tests/agents/test_staging_race.py::test_two_archives_into_one_destination_leave_each_file_whole",
    "tests/unit/checkpoint/test_checkpoints.py",
    "tests/checkpoint/test_property.py::test_fsdp1_takes_its_parts_from_whole_tensors_and_is_resumed_where_a_block_was_never_trained",
    "tests/checkpoint/test_race_ranks.py::test_by_ranks[2-what_ranks_hold_alike_is_written_by_all_and_running_means_are_rank_0s]",
)
"""What a version of torch, flytekit or Python can break: a name that pytest does not find fails the session."""
WANTED = ("flytekit", "flytekitplugins-kfmpi", "flytekitplugins-kfpytorch")
TOOLS = ("hypothesis", "jsonschema", "moto[s3]", "flask", "flask-cors", "psutil", "s3fs")
OF_ALL = "not container and not gpu and not wheel"
"""What `make test` takes."""
PYTEST = ("pytest", "pytest-timeout", "pytest-xdist")

nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["corners"]


def interpreters() -> dict[str, Path]:
    """The promised Pythons of this machine that run and have C headers, for Horovod: version -> program.

    Tried by running them: a shim of pyenv's is on PATH for versions that it then refuses to run; those lie beside it.
    """
    ask = (
        "import os, sys, sysconfig; "
        "os.path.exists(sysconfig.get_path('include') + '/Python.h') and print(sys.executable)"
    )
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = {}
    for version in PYTHONS:
        candidates = [
            shutil.which(f"python{version}"),
            *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)),
            f"/usr/bin/python{version}",
        ]
        for candidate in filter(None, candidates):
            try:
                done = subprocess.run([candidate, "-c", ask], capture_output=True, text=True, check=False)
            except OSError:
                continue
            if done.returncode == 0 and done.stdout.strip():
                found[version] = Path(done.stdout.strip())
                break
    return found


FOUND = interpreters()
# uv and nox look for "python3.10" on PATH, where a shim that does not run would be the first.
os.environ["PATH"] = os.pathsep.join([*(str(program.parent) for program in FOUND.values()), os.environ["PATH"]])


def own(tool: str) -> str:
    """A tool of the environment that nox itself runs in: `make` has installed it."""
    return str(Path(sys.executable).with_name(tool))


@nox.session(python=False, default=False)
def lint(session: nox.Session) -> None:
    """Rules, formatting, imports between levels, what nothing uses, words, tables that are made, news fragments."""
    session.run(own("ruff"), "check", ".", external=True)
    session.run(own("ruff"), "format", "--check", ".", external=True)
    if sys.version_info >= (3, 11):  # import-linter's own floor
        session.run(own("lint-imports"), "--no-cache", "--config", "pyproject.toml", external=True)
    session.run(own("vulture"), external=True)
    session.run(sys.executable, "scripts/words.py", external=True)
    for tables in ("scripts/fields.py", "scripts/failures.py"):
        session.run(sys.executable, tables, "--check", external=True)
    session.run(own("towncrier"), "build", "--draft", "--version", "next", external=True, silent=True)


@nox.session(python=False, default=False)
def types(session: nox.Session) -> None:
    """mypy, strict."""
    session.run(own("mypy"), external=True)


def side_by_side() -> tuple[str, ...]:
    """pytest, on several workers: tests wait for processes and containers more than they compute.

    "worksteal": neighbours start on one worker, so that what a module shares is made once or twice, and none idles.
    """
    cores = len(os.sched_getaffinity(0))
    workers = os.environ.get("WORKERS") or str(16 if cores > 8 else 2 * cores)
    return "-m", "pytest", "--numprocesses", workers, "--dist", "worksteal"


@nox.session(python=False, default=False)
def tests(session: nox.Session) -> None:
    """All that need no container; or what is named after `--`."""
    session.run(sys.executable, *side_by_side(), "-m", OF_ALL, *session.posargs, external=True)


@nox.session(python=False, default=False)
def wheel(session: nox.Session) -> None:
    """What installers make of the wheel: the index decides, so these say little of a change."""
    session.run(sys.executable, "-m", "pytest", "-m", "wheel", *session.posargs, "tests/contracts/cli", external=True)


@nox.session(python=False, default=False)
def gpu(session: nox.Session) -> None:
    """The tests that need a GPU: without one they fail."""
    of_gpus = ("-m", "gpu", "--numprocesses", "4", "--dist", "loadgroup", "tests/gpu")
    session.run(
        sys.executable, "-m", "pytest", *of_gpus, *session.posargs, env={"SAFEDIST_TEST_GPU": "1"}, external=True
    )


@nox.session(python=False, default=False)
def containers(session: nox.Session) -> None:
    """The tests over several containers."""
    session.run(sys.executable, *side_by_side(), "-m", "container", *session.posargs, external=True)


@nox.session(python=False, default=False)
def coverage(session: nox.Session) -> None:
    """The same as `tests`, and which lines and branches they run, and for which test: in agents and ranks as well."""
    measured = ROOT / "build" / "coverage"
    shutil.rmtree(measured, ignore_errors=True)
    measured.mkdir(parents=True)
    session.env.update(PYTHONPATH=str(ROOT / "scripts" / "contexts"))
    run = ("-m", "coverage", "run", *side_by_side(), "-p", "sitecustomize")
    # A process that is told to stop as it starts to be measured ends otherwise: by the tracer, not by ours.
    left_out = "tests/agents/test_stopping.py::test_at_sixty_points"
    kept = ("-m", OF_ALL, f"--deselect={left_out}")
    session.run(sys.executable, *run, *kept, *session.posargs, external=True)
    # A process that is killed while it writes leaves a file that is none.
    session.run(sys.executable, "-m", "coverage", "combine", "--quiet", external=True)
    session.run(sys.executable, "-m", "coverage", "report", external=True)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The site, where a link, a name or a command that leads nowhere is an error, and the schema of the workflows."""
    if sys.version_info < (3, 11):
        session.skip("mkdocs-material needs Python 3.11")
    session.install("-r", "requirements/docs.txt", "--constraint", "requirements/constraints.txt")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})
    # `make test` has these as well, a quarter of an hour later: a page that was written last is looked at here.
    commands = ("tests/contracts/cli/test_documented.py", "-k", "without_one or elsewhere")
    session.run(sys.executable, "-m", "pytest", "--quiet", *commands, external=True)
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))
    session.run("check-jsonschema", "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml")


@nox.session(python=False, default=False)
def constraints(session: nox.Session) -> None:
    """Make constraints.txt anew; what is pinned stays where it still fits, unless `-- --upgrade` is given."""
    target = ROOT / "requirements" / "constraints.txt"
    head = [line for line in target.read_text().splitlines() if line.startswith("#")]
    wanted = [f"requirements/{name}.txt" for name in ("build", "demo", "dev", "docs", "libraries")]
    options = ("--quiet", "--universal", "--python-version", PYTHONS[0], "--no-annotate", "--no-header")
    made = ("--output-file", str(target), *session.posargs)
    session.run(own("uv"), "pip", "compile", *options, *wanted, "setup.cfg", *made, external=True)
    pins = [line for line in target.read_text().splitlines() if not TORCHS_OWN.match(line)]
    target.write_text("\n".join([*head, *pins]) + "\n")


@nox.session(python=PYTHONS, venv_params=["--seed"])
@nox.parametrize("torch", TORCHES)
def matrix(session: nox.Session, torch: str) -> None:
    """One Python and one torch, with each flytekit."""
    smoke(session, torch, FLYTEKITS)
    if session.name == f"matrix-{PYTHONS[-1]}(torch={TORCHES[-1]!r})":
        session.notify("table")


@nox.session(python=PYTHONS, venv_params=["--seed"], default=False)
def oldest(session: nox.Session) -> None:
    """The oldest torch and flytekit."""
    smoke(session, TORCHES[0], FLYTEKITS[:1])


@nox.session(python=PYTHONS, venv_params=["--seed"], default=False)
def newest(session: nox.Session) -> None:
    """The newest torch and flytekit."""
    smoke(session, TORCHES[-1], FLYTEKITS[-1:])


@nox.session(python=False)
def corners(session: nox.Session) -> None:
    """The oldest with the oldest Python here, the newest with the newest."""
    if not FOUND:
        session.error(f"no Python of {', '.join(PYTHONS)} with C headers (Python.h) is on this machine")
    first, last = min(FOUND, key=PYTHONS.index), max(FOUND, key=PYTHONS.index)
    RESULTS.unlink(missing_ok=True)
    session.log(
        f"corners: Python {first} with torch {TORCHES[0]} and flytekit {FLYTEKITS[0]}; "
        f"Python {last} with torch {TORCHES[-1]} and flytekit {FLYTEKITS[-1]}"
    )
    session.notify(f"oldest-{first}")
    session.notify(f"newest-{last}")
    session.notify("table")


@nox.session(python=False, default=False)
def table(session: nox.Session) -> None:
    """What the sessions before this one left, as Markdown."""
    rows = list({_key(row): row for row in map(json.loads, RESULTS.read_text().splitlines())}.values())
    print("| Python | torch | flytekit | result | install | Horovod | smoke |\n|---|---|---|---|---|---|---|")
    for row in rows:
        seconds = ["" if row[name] is None else f"{row[name]:.0f} s" for name in ("install", "horovod", "smoke")]
        print(f"| {' | '.join([*_key(row), row['result'], *seconds])} |")
    bad = [row for row in rows if row["result"] != "passed"]
    if bad:
        session.error(f"{len(bad)} of {len(rows)} did not pass")


def _key(row: dict[str, str]) -> tuple[str, str, str]:
    return row["python"], row["torch"], row["flytekit"]


def smoke(session: nox.Session, torch: str, flytekits: tuple[str, ...]) -> None:
    """Make the environment, run the subset with each flytekit, note the result, remove the environment."""
    # Without bytecode each of the many processes here would compile torch's sources anew; uv installs none.
    session.env.update(PYTHONDONTWRITEBYTECODE="", SAFEDIST_CI="1", OMP_NUM_THREADS="1")
    if torch == TORCHES[-1]:
        torch = NEWEST_FOR.get(str(session.python), torch)
    row: dict[str, object] = {"python": session.python, "torch": torch, "flytekit": ", ".join(flytekits)}
    row.update(install=None, horovod=None, smoke=None, result="failed: environment")
    try:
        began = time.monotonic()
        install(session, torch, flytekits[0])
        row.update(install=time.monotonic() - began, result="failed: Horovod's build")
        session.log(f"installed in {row['install']:.0f} s")
        began = time.monotonic()
        session.run("python", "horovod_build/build.py")
        row.update(horovod=time.monotonic() - began)
        began = time.monotonic()
        for flytekit in flytekits:
            row.update(result=f"failed with flytekit {flytekit}")
            if flytekit != flytekits[0]:
                install_flytekit(session, flytekit)
            use(session)
        row.update(result="passed", smoke=time.monotonic() - began)
    finally:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as results:
            results.write(json.dumps(row) + "\n")
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


def install(session: nox.Session, torch: str, flytekit: str) -> None:
    session.install("-r", "requirements/build.txt", *constrained())
    session.install(f"torch=={torch}", *PYTEST, *TOOLS, "-r", "requirements/demo.txt", *constrained())
    session.install("--no-build-isolation", "--editable", ".", *constrained())
    install_flytekit(session, flytekit)


def install_flytekit(session: nox.Session, version: str) -> None:
    session.install(*(f"{name}=={version}" for name in WANTED), *constrained())


def constrained() -> tuple[str, str]:
    """pip's option for constraints.txt without flytekit's own versions."""
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines(keepends=True)
    file = ROOT / ".nox" / "constraints.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(line for line in lines if not line.startswith(("flytekit", "flyteidl"))))
    return "--constraint", str(file)


def use(session: nox.Session) -> None:
    """The subset: two real command lines and the tests. A test that skips fails: nothing is silently untried."""
    for example in ("digits_horovod.py", "digits_ddp.py"):
        session.run("pyflyte", "run", f"examples/{example}", "digits", "--epochs", "3")
    with tempfile.TemporaryDirectory() as directory:
        report = f"{directory}/report.xml"
        session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *SMOKE_TESTS)
        session.run("python", "scripts/sum_tests.py", report)


@nox.session(python=max(FOUND, default=False), default=False)
def mutants(session: nox.Session) -> None:
    """Whether the tests notice what they are for: scripts/mutants.py, beside what makes the changes."""
    session.install("cosmic-ray==8.7.0", "coverage")
    session.run("python", "scripts/mutants.py", *session.posargs)
