"""SIGTERM, from the first import to the exit: the process ends, not with success, and never as the user's error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness import needs
from tests.harness.moto_s3 import BUCKET, S3
from tests.harness.pod import PROGRAM, Pod
from tests.harness.procs import DEADLINE, TERM, Running, Warm, alive, until
from tests.harness.proxy import Holding
from tests.harness.registered import registered

TOLD = 137
"""What Flyte takes for the platform's doing, and tries again without any of the task's ``retries``."""
TORCH = registered(nproc_per_node=2)

MODULE = """
import json, os, signal, time
from flytekit import task

def told():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
    except BaseException:
        return "swallowed"

@task
def harmless() -> str:
    return "done"

@task
def swallows_and_returns() -> str:
    return str(told())

@task
def swallows_for_ever() -> str:
    while True:
        try:
            told()
            time.sleep(0.01)
        except BaseException:
            pass
"""
SWALLOWING_IMPORT = MODULE + "\ntold()\n"
SAFE = """
from flytekit import task
from flytekitplugins_safedist import SafeTorch

@task(task_config=SafeTorch(nproc_per_node=2))
def train() -> str:
    return "trained"
"""


class Stopped(Pod):
    """A pod with real torch, whose command is the console script's function."""

    def __init__(self, root: Path, code: str, warm: Warm | None = None) -> None:
        super().__init__(root, {"workflows.py": code}, warm)

    def begin(self, task: str, module: str = "", **more: str) -> subprocess.Popen[str]:
        self.environment |= more
        return self.start(*self.fast_arguments(task), module=module)


def test_at_sixty_points_of_all_imports_sigterm_ends_the_process_at_once_and_in_silence(tmp_path):
    pod = Stopped(tmp_path, MODULE)
    process = pod.begin("harmless", "tests.harness.stop_walker 15", **TORCH)
    out, err = process.communicate()
    assert process.returncode == 0, err
    ended = json.loads(out.splitlines()[-1])
    assert set(ended) == {str(TOLD)}, ended
    assert ended[str(TOLD)] >= 60
    said = set(err.splitlines())
    assert not [line for line in said if "Traceback" in line or "Error" in line], err
    assert pod.uploaded() == ["outputs.pb"]  # the walker's own


@pytest.mark.parametrize("task", ["swallows_and_returns", "swallows_for_ever"])
def test_a_task_that_catches_everything_is_ended_and_uploads_nothing(warm, tmp_path, task):
    pod = Stopped(tmp_path, MODULE, warm)
    done = pod.fast(task)
    assert done.code == TOLD, done.err
    assert pod.uploaded() == []


def test_a_module_that_catches_everything_at_import_is_ended_there(warm, tmp_path):
    pod = Stopped(tmp_path, SWALLOWING_IMPORT, warm)
    done = pod.fast("harmless")
    assert done.code == TOLD, done.err
    assert pod.uploaded() == []
    assert "Error" not in done.err


def test_a_handler_that_flytekit_left_behind_does_not_keep_the_process(warm, tmp_path):
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n" + MODULE
    pod = Stopped(tmp_path, code, warm)
    # Makes flytekit install packages at the start of the task, by a pip that does nothing here.
    pod.environment |= {"RUNTIME_PACKAGES": "", "_F_RUNTIME_PACKAGES": "--version"}
    done = pod.fast("harmless")
    assert done.code == TOLD, done.err
    assert pod.uploaded() == []


def test_at_any_time_of_a_jobs_start_sigterm_ends_it_and_is_never_the_users_error(tmp_path):
    """``SAFEDIST_SIGTERM_TIMES=60`` sweeps the first 6 s as finely as that; a few times are enough for every day."""
    count = int(os.environ.get("SAFEDIST_SIGTERM_TIMES", "3"))

    def told_at(number: int) -> str:
        pod = Stopped(tmp_path / str(number), SAFE)
        process = pod.begin("train", **TORCH, SAFEDIST_SCRATCH_ROOT=str(tmp_path / str(number) / "tmp"))
        try:
            process.wait(6.0 * number / count)
        except subprocess.TimeoutExpired:
            process.terminate()
        out, err = process.communicate(timeout=DEADLINE)
        uploaded = pod.uploaded()
        complaints = [text for text in ("Traceback", "MissingDependencyError", "StagingError") if text in out + err]
        if process.returncode == 0 and uploaded == ["outputs.pb"] and not complaints:
            return "fine"  # the verdict was there before the signal
        if process.returncode == 0 and uploaded == ["error.pb"] and pod.error().code == "SYSTEM:Stopped":
            return "fine"  # the verdict is that it was stopped
        if process.returncode != 0 and uploaded == [] and not complaints:
            return "fine"
        return f"after {6.0 * number / count:.2f} s: {process.returncode} {uploaded} {complaints}\n{err}"

    with ThreadPoolExecutor(2) as several:
        assert [text for text in several.map(told_at, range(count)) if text != "fine"] == []


def uploading(warm: Warm, files: Path, s3: S3, **more: str) -> tuple[Holding, Running]:
    """A pod in the middle of uploading its outputs, told to stop."""
    store = Holding(int(s3.endpoint.rpartition(":")[2]), "outputs.pb")
    environment = {**s3.environment, "FLYTE_AWS_ENDPOINT": f"http://127.0.0.1:{store.port}", **more}
    place = ["--output-prefix", f"s3://{BUCKET}/{files.parent.name}"]
    running = warm.start("job_private:nothing", files, kind="execute", environment=environment, arguments=place)
    assert store.begun.wait(DEADLINE), running.shown
    running.signal(TERM)
    return store, running


def test_an_upload_that_runs_when_the_pod_is_told_to_stop_is_finished(warm, tmp_path, s3):
    store, running = uploading(warm, tmp_path / "job", s3)
    until(lambda: "the upload is finished first" in running.shown, "it is told to stop")
    store.release.set()
    ended = running.wait()
    assert (ended.code, ended.left) == (0, []), ended.err
    assert s3.get(f"{tmp_path.name}/outputs.pb")
    store.close()


def test_an_upload_that_outlasts_the_grace_period_ends_undecided(warm, tmp_path, s3):
    # A second less than the margin: the time is over when SIGTERM comes, and nothing here has to be waited for.
    store, running = uploading(warm, tmp_path / "job", s3, SAFEDIST_GRACE_SECONDS="1")
    ended = running.wait()
    assert (ended.code, ended.left) == (TOLD, []), ended.err
    assert s3.count("PUT", f"{tmp_path.name}/") == 0
    assert (ended.files / "termination-log").read_text() == (
        "told to stop by SIGTERM, and the grace period is over before the upload of this attempt's verdict\n"
    )
    store.release.set()
    store.close()


def test_ranks_whose_agent_is_gone_end_in_the_middle_of_an_import_that_catches_everything(warm, tmp_path, ranks_gate):
    running = warm.start("job_stubborn_import:never_started", tmp_path / "job", environment=ranks_gate.environment)
    assert ranks_gate.heard(1) == [f"importing in {running.pid}"]
    ranks_gate.let_go(1)
    ranks = [int(line.split()[-1]) for line in ranks_gate.heard(2)]
    running.signal(signal.SIGKILL)
    ended = running.wait()
    until(lambda: not any(alive(pid) for pid in ranks), "the ranks end")
    assert ended.left == []
    assert ended.scratch == []


AS_A_CONTAINER = """
import os, shlex, sys
agent = shlex.join([sys.executable, "-c", {program!r}, *sys.argv[1:]])
os.execvp("unshare", ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", agent + "; exit $?"])
"""


def test_a_parent_that_keeps_sigterm_to_itself_is_told_before_a_save_is_lost_to_it(tmp_path):
    """Which parents do: tests/unit/pod/test_parents.py."""
    needs.root("make a container's process 1")
    pod = Pod(tmp_path, {"workflows.py": "from flytekit import task\n\n@task\ndef train() -> int:\n    return 1\n"})
    pod.environment["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"
    program = PROGRAM.format(message=str(pod.message))

    ended = pod.fresh(*pod.fast_arguments("train"), program=AS_A_CONTAINER.format(program=program))

    assert ended.code == 0, ended.err
    (told,) = [line for line in ended.err.splitlines() if "a pod that is told to stop saves nothing" in line]
    assert told.partition("nothing: ")[2].partition(", which")[0] == "bash (process 1)"
