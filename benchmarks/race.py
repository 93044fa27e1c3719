"""The race of flyteorg/flyte#5800, counted: the stock HorovodJob's command against ours, on one machine.

One project is serialized twice by flytekit itself, as ``pyflyte package --fast`` does: as a stock HorovodJob with a
pod template (benchmarks/race_project), and as SafeHorovod. The placeholders are filled in as ``flytectl register
files`` and the backend do, and the pods' commands run here, with 8 ranks and the destination as working directory:

- ``stock``: ``horovodrun ... pyflyte-fast-execute ... -- pyflyte-execute ...``, as serialized, but with
  ``-np 8 -H localhost:8 --gloo`` in the place of the options that need an operator (discovery script, eth0, elastic);
- ``full``: ``safedist-execute ... -- pyflyte-execute ...`` exactly as serialized; the scratch volume is a directory;
- ``unpack``: 32 processes that stage the same archive into one fresh directory, let go at one moment. They live through
  all runs, so that what is repeated is the race and not the start of Python.

A run has failed when the exit code is not 0, when there is no ``outputs.pb`` or there is an ``error.pb``, or when the
output is wrong; an unpack also when anything was left behind, or when the directory is not byte for byte what GNU tar
makes.

    python benchmarks/race.py --stock-runs 3 --unpack-runs 200 --full-runs 20
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent / "race_project"
RANKS = 8
PROCESSES = 32
MODULES = 300
MODULE_BYTES = 10_000
DEADLINE_SECONDS = 600.0
OF_THE_OPERATOR = {
    "--network-interface",
    "--min-np",
    "--max-np",
    "--slots-per-host",
    "--host-discovery-script",
    "--elastic-timeout",
}
"""Options of the stock command, each with a value, that mean nothing without an operator's pods."""

TELLING = re.compile(r"(tar: .*|\b\w+(?:\.\w+)*(?:Error|Exception)\b.*|gzip: .*|\[safedist\] error: .*)")
VARYING = re.compile(r"0x[0-9a-f]+|/\S*/|\d+|\[.*?\]|'[^']*'")


# --- the project -----------------------------------------------------------------------------------------------------
def write_project(root: Path) -> Path:
    """The code to register: the tasks, and 300 modules of 10 kB that say whether they are whole."""
    package = root / "race_code"
    package.mkdir(parents=True)
    for file in PROJECT.glob("*.py"):
        shutil.copy(file, root)
    names = [f"module_{number}" for number in range(MODULES)]
    for number, name in enumerate(names):
        body = "".join(f"# line {line} of module {number}\n" for line in range(MODULE_BYTES // 25))
        (package / f"{name}.py").write_text(f"{body}VALUE = {number}\n")
    (package / "__init__.py").write_text(
        "from importlib import import_module\n\n\ndef total():\n"
        f"    return sum(import_module(f'race_code.module_{{n}}').VALUE for n in range({MODULES}))\n"
    )
    return root


def pack(project: Path, target: Path) -> Path:
    """The code archive, as fast registration makes it: files only, one time for all, as a float."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.mtime = 315532800.0  # as flytekit does; it puts a pax header before each file
        return None if "__pycache__" in info.name else info

    with tarfile.open(target, "w:gz") as archive:
        for file in sorted(project.rglob("*.py")):
            archive.add(file, arcname=str(file.relative_to(project)), filter=plain)
    return target


def serialize(project: Path) -> dict[str, dict[str, Any]]:
    """Arguments and variables of the primary container, by task, from flytekit and the tasks' real plugins."""
    from flytekit.configuration import FastSerializationSettings, Image, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable
    from google.protobuf.json_format import MessageToDict

    sys.path.insert(0, str(project))
    import race_tasks

    settings = SerializationSettings(
        image_config=ImageConfig(default_image=Image(name="default", fqn="registry.example/train", tag="1")),
        project="benchmarks",
        domain="development",
        version="1",
        fast_serialization_settings=FastSerializationSettings(enabled=True),
    )
    found = {}
    for task in (race_tasks.stock, race_tasks.ours):
        template = get_serializable(OrderedDict(), settings, task).template.to_flyte_idl()
        container = MessageToDict(template.k8s_pod.pod_spec)["containers"][0]
        environment = {one["name"]: one["value"] for one in container["env"]}
        found[task.name.rpartition(".")[2]] = {"args": container["args"], "environment": environment}
    return found


def filled(args: list[str], work: Path, code: Path) -> list[str]:
    """What flytectl and the backend put in the place of the placeholders."""
    values = {
        "{{ .remote_package_path }}": str(code),
        "{{ .dest_dir }}": str(work / "root"),
        "{{.input}}": str(work / "inputs.pb"),
        "{{.outputPrefix}}": str(work / "outputs"),
        "{{.rawOutputDataPrefix}}": str(work / "raw"),
        "{{.checkpointOutputPrefix}}": str(work / "checkpoints"),
        "{{.prevCheckpointPrefix}}": '""',
    }
    return [values.get(argument, argument) for argument in args]


def on_this_machine(args: list[str]) -> list[str]:
    """The stock command without the options that need an operator."""
    at = args.index("pyflyte-fast-execute")
    front, kept = iter(args[:at]), []
    for argument in front:
        if argument in OF_THE_OPERATOR:
            next(front)
        else:
            kept.append(argument)
    return [*kept, "-H", f"localhost:{RANKS}", "--gloo", *args[at:]]


# --- whole runs ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """Of one run: what was wrong with it ("" when nothing), what it said about that, seconds."""

    wrong: str
    messages: tuple[str, ...]
    seconds: float


def run_task(container: dict[str, Any], code: Path) -> Outcome:
    """Run a pod's command in a directory of its own."""
    from flyteidl.core import literals_pb2

    with tempfile.TemporaryDirectory(prefix="race-") as name:
        work = Path(name)
        for directory in ("root", "scratch", "tmp"):
            (work / directory).mkdir()
        (work / "inputs.pb").write_bytes(literals_pb2.LiteralMap().SerializeToString())
        args = filled(container["args"], work, code)
        command = on_this_machine(args) if args[0] == "horovodrun" else args
        environment = {**os.environ, **container["environment"], "TMPDIR": str(work / "tmp")}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if "SAFEDIST_SCRATCH_ROOT" in environment:
            environment["SAFEDIST_SCRATCH_ROOT"] = str(work / "scratch")  # the volume's mount point
        started = time.perf_counter()
        with (work / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=work / "root", env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code_of_exit: int | None = process.wait(DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                code_of_exit = None
            finally:
                end_session(process)
        seconds = time.perf_counter() - started
        wrong = verdict(code_of_exit, work / "outputs")
        return Outcome(wrong, messages(work / "log") if wrong else (), seconds)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Ranks that outlived their launcher must not race with the next run."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def verdict(exit_code: int | None, outputs: Path) -> str:
    """What is wrong with a run; "" when nothing is."""
    from flyteidl.core import literals_pb2

    if exit_code is None:
        return f"still running after {DEADLINE_SECONDS:g} s"
    if exit_code:
        return f"exit code {exit_code}"
    if (outputs / "error.pb").exists():
        return "exit code 0, error.pb"
    if not (outputs / "outputs.pb").exists():
        return "exit code 0, no outputs.pb"
    literals = literals_pb2.LiteralMap.FromString((outputs / "outputs.pb").read_bytes())
    value = literals.literals["o0"].scalar.primitive.integer
    expected = RANKS * sum(range(MODULES))
    return "" if value == expected else f"output {value} and not {expected}"


def messages(log: Path) -> tuple[str, ...]:
    """The telling lines, most frequent first, alike ones counted together."""
    counted: Counter[str] = Counter()
    example: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines():
        if found := TELLING.search(line):
            alike = VARYING.sub("*", found[1])
            counted[alike] += 1
            example.setdefault(alike, found[1][:150])
    return tuple(f"{count} x  {example[alike]}" for alike, count in counted.most_common(8))


def report(title: str, outcomes: list[Outcome]) -> None:
    """Failures out of runs, and what they said."""
    failed = [one for one in outcomes if one.wrong]
    print(f"{title}: {len(failed)} failures in {len(outcomes)} runs", flush=True)
    for wrong, count in Counter(one.wrong for one in failed).most_common():
        print(f"    {count} x  {wrong}", flush=True)
    for number, one in enumerate(failed[:5], 1):
        print(f"    said in failed run {number}:", flush=True)
        for message in one.messages:
            print(f"        {message}", flush=True)


# --- unpacking alone -------------------------------------------------------------------------------------------------
def worker() -> None:
    """Stage what each line of stdin asks for; answer in one line."""
    from flytekitplugins_safedist.pod.staging import Options, stage

    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            code = stage(order["uri"], Path(order["dest"]), Options())
            answer: dict[str, Any] = {"new": code.new}
        except Exception as error:  # whatever it is, it is a failure to count
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


@contextmanager
def workers(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ready to stage."""
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # progress, when the machine is slow
            text=True,
        )
        for _ in range(count)
    ]
    try:
        for process in started:
            if heard(process) != "ready":
                raise SystemExit("a worker did not start")
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def heard(process: subprocess.Popen[str]) -> str:
    """The next line a worker says."""
    return process.stdout.readline().strip() if process.stdout is not None else ""


def run_unpack(processes: list[subprocess.Popen[str]], code: Path, expected: Path) -> Outcome:
    """All at one moment into one fresh directory."""
    with tempfile.TemporaryDirectory(prefix="race-") as name:
        work = Path(name)
        order = json.dumps({"uri": str(code), "dest": str(work / "root")})
        started = time.perf_counter()
        for process in processes:
            if process.stdin is not None:
                process.stdin.write(order + "\n")
                process.stdin.flush()
        answers = [json.loads(heard(process) or '{"error": "the process died"}') for process in processes]
        seconds = time.perf_counter() - started
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            return Outcome(f"{len(errors)} processes failed", tuple(errors[:3]), seconds)
        return Outcome("" if same(work / "root", expected) else "the directory is not what tar makes", (), seconds)


def same(one: Path, other: Path) -> bool:
    """Byte for byte, with nothing more and nothing less."""
    names = sorted(path.relative_to(other) for path in other.rglob("*"))
    files = [str(name) for name in names if (other / name).is_file()]
    if sorted(path.relative_to(one) for path in one.rglob("*")) != names:
        return False
    _, different, unreadable = filecmp.cmpfiles(one, other, files, shallow=False)
    return not different and not unreadable


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock-runs", type=int, default=3)
    parser.add_argument("--unpack-runs", type=int, default=200)
    parser.add_argument("--full-runs", type=int, default=20)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwind, so that no rank is left behind
    with tempfile.TemporaryDirectory(prefix="race-project-") as name:
        root = Path(name)
        project = write_project(root / "project")
        code = pack(project, root / "fast.tar.gz")
        tasks = serialize(project)
        (root / "expected").mkdir()
        subprocess.run(["tar", "-xzf", str(code), "-C", str(root / "expected")], check=True)
        print(f"{MODULES} modules, {code.stat().st_size / 1e3:.0f} kB packed; {os.cpu_count()} cores", flush=True)
        print("stock: " + " ".join(on_this_machine(tasks["stock"]["args"])[:12]) + " ...")
        report(f"stock, {RANKS} ranks", [run_task(tasks["stock"], code) for _ in range(options.stock_runs)])
        with workers(PROCESSES) as processes:
            unpacks = [run_unpack(processes, code, root / "expected") for _ in range(options.unpack_runs)]
        report(f"safedist, the unpack by {PROCESSES} processes", unpacks)
        full = [run_task(tasks["ours"], code) for _ in range(options.full_runs)]
        report(f"safedist, full, {RANKS} ranks", full)
    if any(one.wrong for one in [*unpacks, *full]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
