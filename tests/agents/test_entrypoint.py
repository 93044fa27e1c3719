"""The container's main: stage, make importable, run the task in the same process, leave with the right code."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from flyteidl.core import errors_pb2

from flytekitplugins_safedist.errors import ConfigError
from tests.harness.objectstore import ObjectStore
from tests.harness.pod import PROGRAM, RESOLVER, Pod
from tests.harness.procs import ROOT, TERM
from tests.harness.product import command_line, entrypoint, parse
from tests.harness.registered import registered
from tests.harness.tarballs import project

pytestmark = pytest.mark.processes

WORKFLOWS = """
import gc, json, os, sys
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
import lib

COLLECTS = gc.isenabled()

@task
def report() -> str:
    return json.dumps({
        "lib": lib.WHO, "file": __file__, "cwd": os.getcwd(), "path": sys.path, "argv": sys.argv,
        "PYTHONPATH": os.environ["PYTHONPATH"], "beside": open("data.txt").read(), "pid": os.getpid(),
        "collects": COLLECTS,
    })

@task
def fails() -> str:
    raise ValueError("the user's own")

@task
def recoverable() -> str:
    raise FlyteRecoverableException("try again")

@task
def leaves() -> str:
    raise SystemExit(17)
"""
WAITS_IN_A_STORE = """
import __main__, os, threading
from flytekit import task
from torch.distributed import TCPStore

class EndsTheStoreAtTheLastMoment:
    def __init__(self, pid):
        self.pid = pid

    def __del__(self, kill=os.kill, system=os.system):  # as the interpreter is taken apart
        kill(self.pid, 9)
        system("sleep 0.5")

@task
def waits() -> str:
    read, write = os.pipe()
    until_i_am_gone, alive = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(server.port).encode())
        os.read(until_i_am_gone, 1)
        os._exit(0)
    store = TCPStore("127.0.0.1", int(os.read(read, 9)), is_master=False)
    threading.Thread(target=store.wait, args=(["never"],), daemon=True).start()
    __main__.last = EndsTheStoreAtTheLastMoment(pid)
    return "done"
"""
FILES = {"workflows.py": WORKFLOWS, "lib.py": "WHO = 'archive'", "data.txt": "data"}


@pytest.fixture
def pod(warm, tmp_path):
    return Pod(tmp_path, FILES, warm)


def test_the_task_runs_with_the_archives_code_where_the_stock_command_would_put_it(pod):
    """In the path, too; and a directory that only the code has is importable where it is named."""
    (pod.cwd / "lib.py").write_text("WHO = 'image'")
    lib = {"lib.py": "from in_source import WHO", "source/in_source.py": "WHO = 'archive'"}
    pod.archive.write_bytes(project({**FILES, **lib}))
    named = [str(pod.cwd / "source"), str(pod.root / "image"), str(ROOT), *(path for path in sys.path if path)]
    pod.environment["PYTHONPATH"] = os.pathsep.join(named)
    done = pod.fresh(*pod.fast_arguments("report"))
    assert done.code == 0, done.err
    found = pod.output()
    assert found["lib"] == "archive"
    assert found["file"] == str(pod.cwd / "workflows.py")
    assert found["cwd"] == str(pod.cwd)
    assert found["beside"] == "data"
    assert found["PYTHONPATH"].split(os.pathsep)[-1] == str(pod.cwd)
    assert found["path"].index(str(pod.root / "image")) < found["path"].index(str(pod.cwd))
    assert found["argv"][0] == "pyflyte-execute"
    assert found["collects"], "Python's collector, which rests while flytekit is imported"
    assert re.search(r"\[safedist\] code [0-9a-f]{12} fetched: 4 files", done.err)


def test_another_destination_is_importable_and_the_working_directory_stays(pod):
    (pod.cwd / "data.txt").write_text("the image's")
    dest = pod.root / "elsewhere"
    assert pod.fast("report", str(dest)).code == 0
    found = pod.output()
    assert (found["cwd"], found["beside"]) == (str(pod.cwd), "the image's")
    assert found["file"] == str(dest / "workflows.py")


def test_code_baked_into_the_image_runs_with_the_same_command(pod):
    for name, text in FILES.items():
        (pod.cwd / name).write_text(text)
    done = pod.run("--", *pod.command("report"))
    assert done.code == 0, done.err
    assert pod.output()["lib"] == "archive"
    assert not (pod.root / "store").exists()


def test_a_restart_uses_what_is_there(pod):
    pod.fast("report")
    assert "fetched, nothing to change" in pod.fast("report").err


def test_a_module_of_the_archive_is_imported_by_each_rank_and_by_nobody_else(pod):
    ranks = """
import json, os, time
from flytekit import task
from flytekitplugins_safedist import SafeTorch
with open("imports", "a") as file:
    file.write(f"{os.getpid()} ")
time.sleep(0.2)

@task(task_config=SafeTorch(nproc_per_node=2))
def train() -> str:
    return json.dumps({"server": os.getppid(), "agent": agent()})

def agent():
    return int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
"""
    pod.archive.write_bytes(project({"ranks.py": ranks}))
    pod.environment |= registered(nproc_per_node=2)
    arguments = ["--additional-distribution", str(pod.archive), "--dest-dir", "."]
    running = pod.running(*arguments, "--", *pod.command("train", "ranks"))
    ended = running.wait()
    assert (ended.code, ended.left) == (0, []), ended.err
    assert pod.output()["agent"] == running.pid
    importers = {int(pid) for pid in (pod.cwd / "imports").read_text().split()}
    assert len(importers) == 2
    assert not importers & {running.pid, pod.output()["server"]}
    took = float(re.findall(r"import (\S+) s", ended.err)[-1])
    assert took >= 0.2, "it is in the time that the job is said to have taken"


def test_a_resolver_of_the_archive_is_the_ranks_to_import_and_finds_their_task(pod):
    mine = """
import json, os
from flytekit import task
from flytekit.core.base_task import TaskResolverMixin
from flytekitplugins_safedist import SafeTorch

with open("imports", "a") as file:
    file.write(f"{os.getpid()} ")

class ByNumber(TaskResolverMixin):
    name = location = "mine.by_number"
    loader_args = get_all_tasks = None

    def load_task(self, loader_args):
        return [None, train][int(loader_args[0])]

by_number = ByNumber()

@task(task_config=SafeTorch(nproc_per_node=2))
def train() -> str:
    return json.dumps({"server": os.getppid()})
"""
    pod.archive.write_bytes(project({"mine.py": mine}))
    pod.environment |= registered(nproc_per_node=2)
    *command, _, resolver, _, _, _, _, _ = pod.fast_arguments("train")
    assert resolver.endswith("default_task_resolver")
    ended = pod.run(*command, "--resolver", "mine.by_number", "--", "1")
    assert ended.code == 0, ended.err
    importers = {int(pid) for pid in (pod.cwd / "imports").read_text().split()}
    assert len(importers) == 2
    assert pod.output()["server"] not in importers


def test_a_users_exception_is_uploaded_and_the_exit_code_is_zero_also_where_its_text_is_no_utf_8(pod):
    names = "from flytekit import task\n@task\ndef names() -> str:\n    raise ValueError('no file \\udcff.csv')\n"
    pod.archive.write_bytes(project({"workflows.py": names}))
    assert pod.fast("names").code == 0
    error = pod.error()
    assert "ValueError: no file \\udcff.csv" in error.message
    assert error.kind == errors_pb2.ContainerError.NON_RECOVERABLE


def test_an_error_that_is_uploaded_is_the_verdict_also_where_flytekit_is_told_to_fail_on_errors(pod):
    pod.environment["FLYTE_FAIL_ON_ERROR"] = "true"
    done = pod.fast("fails")
    assert done.code == 0, done.err
    assert pod.error().code == "USER:RuntimeError"
    assert "warning: FLYTE_FAIL_ON_ERROR is not followed" in done.err


def test_inputs_that_cannot_be_fetched_are_the_platforms_failure(pod):
    (pod.root / "inputs.pb").unlink()
    done = pod.fast("report")
    assert done.code == 0, done.err
    error = pod.error()
    assert (error.code, error.kind) == ("SYSTEM:Storage", errors_pb2.ContainerError.RECOVERABLE)
    assert f"the task's inputs cannot be fetched from {pod.root / 'inputs.pb'}" in error.message


def test_a_recoverable_exception_stays_recoverable(pod):
    assert pod.fast("recoverable").code == 0
    assert pod.error().kind == errors_pb2.ContainerError.RECOVERABLE


def test_what_leaves_with_a_code_uploads_nothing(pod):
    assert pod.fast("leaves").code == 17
    assert not pod.outputs.exists()


def test_missing_code_is_the_verdict_for_no_start_would_find_it(pod):
    pod.archive.unlink()
    done = pod.fast("report")
    assert done.code == 0, done.err
    error = pod.error()
    assert (error.code, error.kind) == ("USER:CodeNotFoundError", errors_pb2.ContainerError.NON_RECOVERABLE)
    assert "register the task again" in error.message
    assert done.err.count("[safedist] error: ") == 1
    assert "register the task again" in done.err
    assert "Traceback" not in done.err


NODES = {
    **registered(nodes="2"),
    **{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456", "WORLD_SIZE": "2"},
}


PLACES = {
    "node 0": {**NODES, "PET_NODE_RANK": "0", "RANK": "0"},
    "node 1": {**NODES, "PET_NODE_RANK": "1", "RANK": "1"},
    "of a range": {
        **{**NODES, **registered(nodes="1:2")},
        **{"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "127.0.0.1:23456"},
    },
}


@pytest.mark.parametrize("place", ["node 1", "of a range"])
def test_a_pod_that_another_version_of_the_package_registered_says_so_as_the_verdict(pod, place):
    """Any of them: nobody knows which node it is, and all would say the same."""
    pod.environment |= {**PLACES[place], **registered(nodes="2", version=1)}
    done = pod.fast("report")
    assert done.code == 0, done.err
    assert pod.error().code == "USER:TopologyError"
    assert "this pod was registered by another version of flytekitplugins-safedist than its image has" in done.err
    assert "register the task with the version that is in its image" in pod.error().message


@pytest.mark.parametrize(
    ("place", "verdict"), [("node 0", "outputs.pb"), ("node 1", "error.pb"), ("of a range", "outputs.pb")]
)
def test_a_pod_that_starts_after_the_verdict_leaves_with_0_also_where_the_code_is_gone(pod, place, verdict):
    pod.outputs.mkdir()
    (pod.outputs / verdict).write_bytes(b"what it came to")
    pod.environment |= PLACES[place]
    pod.archive.unlink()
    done = pod.fast("report")
    assert done.code == 0, done.err
    assert "this attempt has ended, and its result is uploaded" in done.err
    assert done.err.count("CodeNotFoundError") == 1
    assert [(one.name, one.read_bytes()) for one in pod.outputs.iterdir()] == [(verdict, b"what it came to")]


@pytest.mark.parametrize(("place", "code"), [("node 0", 137), ("node 1", 1)])
def test_where_the_verdicts_store_is_away_too_node_0_starts_again_and_another_looks_for_it(pod, place, code):
    """Node 1 may be the only one that the store is away from: node 0 is to be told."""
    pod.environment |= {**PLACES[place], **registered(nodes="2", timeouts={"rendezvous": 1, "upload": 1})}
    pod.archive.unlink()
    command = pod.command("report")
    command[command.index("--output-prefix") + 1] = "nosuchprotocol://outputs"
    done = pod.run("--additional-distribution", str(pod.archive), "--", *command)
    assert "cannot tell whether this attempt has ended already" in done.err
    assert "CodeNotFoundError" in done.err
    assert done.code == code


def test_what_would_repeat_and_cannot_be_uploaded_ends_undecided(pod):
    pod.archive.unlink()
    pod.outputs.write_text("a file is in the way")
    done = pod.fast("report")
    assert done.code == 137
    assert "the verdict cannot be uploaded" in done.err


def test_a_hostile_archive_is_one_message_naming_the_member(pod):
    pod.archive.write_bytes(project({"ok.py": "1", "../evil.py": "2"}))
    done = pod.fast("report")
    assert done.code == 0, done.err
    assert pod.error().code == "USER:ArchiveError"
    assert "ArchiveError" in done.err
    assert "'../evil.py'" in done.err
    assert "Traceback" not in done.err
    assert not (pod.root / "evil.py").exists()


def test_a_file_of_the_image_that_is_in_the_codes_way_is_the_tasks_own_mistake(pod):
    (pod.cwd / "package").write_text("a file of the image")
    pod.archive.write_bytes(project({"package/module.py": "1"}))
    done = pod.fast("report")
    assert done.code == 0, done.err
    assert pod.error().code == "USER:PathBlockedError"
    assert "A file stands where a directory is needed" in pod.error().message


@pytest.mark.parametrize("outputs", ["that it speaks to", "of the same kind"])
def test_a_store_that_the_image_has_no_package_for_is_the_images_mistake(pod, outputs):
    pod.prefix = str(pod.outputs) if outputs == "that it speaks to" else "nosuchstore://bucket/outputs"
    done = pod.run("--additional-distribution", "nosuchstore://bucket/fast.tar.gz", "--", *pod.command("report"))
    assert "This image cannot reach the store" in (done.files / "termination-log").read_text()
    if outputs == "of the same kind":
        assert done.code == 1, done.err
    else:
        assert done.code == 0, done.err
        error = pod.error()
        assert (error.code, error.kind) == ("USER:MissingDependencyError", errors_pb2.ContainerError.NON_RECOVERABLE)


def test_a_verdict_that_no_store_takes_ends_as_the_platforms_and_kubernetes_is_told_why(pod):
    pod.outputs.write_text("a file is in the way")
    done = pod.fast("fails")
    assert done.code == 137
    assert str(pod.outputs) in (done.files / "termination-log").read_text()


REFUSES_A_SIGNED_URL = (
    """
from flytekit.core.data_persistence import FileAccessProvider
def put(*_, **__):
    raise PermissionError("PUT https://bucket.example/outputs.pb?X-Amz-Signature=SECRET refused")
FileAccessProvider._put = FileAccessProvider.put_data = FileAccessProvider.put = FileAccessProvider.async_put_data = put
"""
    + PROGRAM
)


def test_a_signed_url_that_a_store_refuses_is_told_without_its_signature(pod):
    process = pod.start(*pod.fast_arguments("report"), program=REFUSES_A_SIGNED_URL)
    _, err = process.communicate()
    assert process.returncode == 137, err
    for told in (pod.message.read_text(), err):
        assert "PUT https://bucket.example/outputs.pb?... refused" in told
        assert "SECRET" not in told
    assert "infrastructure failure" in err.splitlines()[-1]


def test_a_rank_server_that_cannot_be_started_ends_as_the_platforms_and_kubernetes_is_told_why(pod):
    pod.environment |= registered()
    nowhere = 'import sys\nsys.executable = "/nowhere/python"\n'
    process = pod.start(*pod.fast_arguments("report"), program=nowhere + PROGRAM)
    _, err = process.communicate()
    assert process.returncode == 137, err
    assert "the rank server cannot be started" in pod.message.read_text()
    assert "No such file or directory: '/nowhere/python'" in pod.message.read_text()


def test_wrong_arguments_of_the_task_command_end_as_with_click(pod):
    done = pod.run("--", "pyflyte-execute", "--nonsense")
    assert done.code == 2
    assert "No such option" in done.err


def test_other_commands_take_the_processs_place_with_the_code_importable(pod):
    program = "import os, lib; print(lib.WHO, os.getpid())"
    process = pod.start("--additional-distribution", str(pod.archive), "--", sys.executable, "-c", program)
    out, err = process.communicate()
    assert out == f"archive {process.pid}\n", err


def test_a_thread_that_comes_back_from_a_store_while_the_process_ends_does_not_abort_it(pod):
    pod.archive.write_bytes(project({**FILES, "workflows.py": WAITS_IN_A_STORE}))
    done = pod.fresh(*pod.fast_arguments("waits"))
    assert done.code == 0, done.err
    assert "terminate called" not in done.err
    assert os.listdir(pod.outputs) == ["outputs.pb"]


def test_a_command_that_does_not_exist_is_named(pod):
    done = pod.run("--", "no-such-program")
    assert done.code == 2
    assert "no-such-program" in done.err


def test_sigterm_while_staging_leaves_nothing_half_made(pod):
    with ObjectStore(pod.archive.read_bytes()) as store:
        store.fault = lambda method, _: "drip" if method == "GET" else None
        running = pod.running("--additional-distribution", store.url, "--dest-dir", ".", "--", *pod.command("report"))
        store.hanging.wait()  # it is in the middle of fetching now
        running.signal(TERM)
        done = running.wait()
    assert (done.code, done.left, done.scratch) == (137, [], [])
    told = (done.files / "termination-log").read_text()
    assert "told to stop by SIGTERM before this attempt had a verdict" in told
    assert os.listdir(pod.cwd) == []


def test_unfilled_placeholders_say_what_was_forgotten(pod):
    arguments = ["--additional-distribution", "{{ .remote_package_path }}", "--dest-dir", "{{ .dest_dir }}"]
    done = pod.run(*arguments, "--", *pod.command("report"))
    assert done.code == 0, done.err
    assert pod.error().code == "USER:CodeNotFoundError"
    assert "flytectl register files" in pod.error().message


def test_dynamic_workflows_get_the_distribution_before_the_resolver():
    fast = ["--additional-distribution", "s3://b/k", "--dest-dir", "/d"]
    before, behind = ["pyflyte-execute", "--inputs", "i"], [*RESOLVER, "task-module", "m", "--resolver", "mine"]
    invocation = parse([*fast, "--", *before, *behind])
    further = ["--dynamic-addl-distro", "s3://b/k", "--dynamic-dest-dir", "/d"]
    assert command_line(invocation) == [*before, *further, *behind]


def test_without_fast_registration_the_command_is_left_alone():
    invocation = parse(["--", "pyflyte-execute", "--resolver", "r"])
    assert command_line(invocation) == ["pyflyte-execute", "--resolver", "r"]


@pytest.mark.parametrize("command", [["python", "-c", "1"], ["pyflyte-execute", "--", "x"], ["/bin/sh", "--inputs"]])
def test_without_the_separator_any_command_is_taken_as_with_the_stock_command(command):
    invocation = parse(["--dest-dir", "/d", "--additional-distribution=u", *command])
    assert invocation.command == tuple(command)
    assert (invocation.distribution, str(invocation.dest)) == ("u", "/d")


@pytest.mark.parametrize("arguments", [[], ["--"], ["--", ""], ["--dest-dir", "/d"]])
def test_an_empty_command_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert "no command is given" in capsys.readouterr().err


def test_an_option_is_not_guessed_from_its_beginning(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--dest=/d", "--", "sh"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --dest=/d" in capsys.readouterr().err


def test_a_working_directory_that_was_removed_is_named(pod):
    program = "import os; os.rmdir(os.getcwd()); from flytekitplugins_safedist.pod.start import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--", "pyflyte-execute"],
        cwd=pod.cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 137
    assert "cannot be told from its name" in done.stderr
    assert "Traceback" not in done.stderr


def test_messages_go_to_standard_output_where_standard_error_is_closed(pod):
    pod.archive.unlink()
    process = pod.start(
        *("--additional-distribution", str(pod.archive), "--dest-dir", ".", "--", *pod.command("report")),
        preexec_fn=lambda: os.close(2),
    )
    out, _ = process.communicate()
    assert process.returncode == 0, "what every start would meet again is the attempt's verdict"
    assert "register the task again" in out


def test_a_log_that_nobody_takes_any_more_is_no_failure_of_a_pod_whose_verdict_is_uploaded(pod):
    process = pod.start(*pod.fast_arguments("fails"))
    assert process.stderr is not None
    process.stderr.close()
    process.communicate()
    assert process.returncode == 0
    assert "the user's own" in pod.error().message


def test_code_is_found_in_a_directory_that_was_looked_at_within_the_resolution_of_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("come_a_moment_later")
    looked_at = tmp_path.stat()
    (tmp_path / "come_a_moment_later.py").touch()
    os.utime(tmp_path, ns=(looked_at.st_atime_ns, looked_at.st_mtime_ns))
    entrypoint.make_importable(tmp_path, tmp_path)
    importlib.import_module("come_a_moment_later")


def test_limits_come_from_the_pods_variables():
    options = entrypoint.options_from(
        {
            "SAFEDIST_CODE_MAX_BYTES": "5",
            "SAFEDIST_CODE_MAX_FILES": "6",
            "SAFEDIST_CODE_MAX_RATIO": "7.5",
            "SAFEDIST_CODE_TIMEOUT": "8",
        }
    )
    assert options.deadline == 8
    assert (options.max_bytes, options.max_files, options.max_ratio) == (5, 6, 7.5)
    job = SimpleNamespace(timeouts=SimpleNamespace(code=9.0))
    assert [entrypoint.options_from(each, job).deadline for each in ({}, {"SAFEDIST_CODE_TIMEOUT": "8"})] == [9, 8]


def test_every_wrong_limit_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        entrypoint.options_from({"SAFEDIST_CODE_MAX_BYTES": "much", "SAFEDIST_CODE_MAX_FILES": "-1"})
    assert len(caught.value.problems) == 2


def test_nothing_is_imported_before_the_rank_server_is_started():
    """It has the most to import, so it is first."""
    program = """
import subprocess, sys
from flytekitplugins_safedist.pod import start
class Popen:
    def __init__(self, *_, **__):
        ours = sorted(name for name in sys.modules if name.startswith("flytekitplugins_safedist."))
        heavy = {"flytekit", "fsspec", "s3fs", "torch", "horovod", "grpc", "botocore", "asyncio"} & set(sys.modules)
        print(len(ours), sorted(heavy))
        raise SystemExit(0)
subprocess.Popen = Popen
start.main()
"""
    environment = {**os.environ, **registered(), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    count, heavy = done.stdout.split(maxsplit=1)
    assert int(count) < 12
    assert heavy == "[]\n"
