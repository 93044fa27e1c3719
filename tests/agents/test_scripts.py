"""An existing script with its own command line, on ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flytekitplugins_safedist.run import run_script
from tests.fs.ranks import torchrun
from tests.harness.procs import Ended, Warm

SCRIPT = str(Path(__file__).parents[1] / "jobs" / "script_of_a_user.py")


def on_two_ranks(warm: Warm, tmp_path: Path, *arguments: str) -> Ended:
    """``python -m flytekitplugins_safedist.run``."""
    options = ["--nproc-per-node", "2", *arguments]
    return warm.start(
        "flytekitplugins_safedist.run:__main__", tmp_path / "job", kind="module", arguments=options
    ).wait()


@pytest.mark.parametrize("ends", ["well", "with 256", "at once with 0"])
def test_a_script_runs_on_each_rank_with_its_own_arguments(warm, tmp_path, ends):
    ended = on_two_ranks(warm, tmp_path, SCRIPT, "--lr", "3", "--ends", ends)
    assert (ended.code, ended.left, ended.scratch) == (0, [], []), ended.err
    assert {f"[rank {rank}] {rank} of 2 doubles to [6] ['3', '3']" for rank in range(2)} <= set(ended.out.splitlines())
    assert {f"[rank {rank}] a word of {rank}'s on errors" for rank in range(2)} <= set(ended.err.splitlines())
    assert "on errors" not in ended.out
    assert "RankFailedError" not in ended.err


def test_a_failure_is_the_scripts_with_the_scripts_lines_alone(warm, tmp_path):
    ended = on_two_ranks(warm, tmp_path, SCRIPT, "--lr", "3", "--ends", "badly")
    assert (ended.code, ended.left, ended.scratch) == (1, [], [])
    assert "rank 1 (local_rank 1) on node 0" in ended.err
    assert "raised ValueError: bad data" in ended.err
    assert "script_of_a_user.py" in ended.err
    assert "runpy" not in ended.err


def test_a_failure_that_refuses_another_traceback_is_the_scripts_all_the_same(warm, tmp_path):
    frozen = "@dataclass(frozen=True)\nclass Frozen(Exception):\n    why: str\n"
    (tmp_path / "train.py").write_text(f"from dataclasses import dataclass\n{frozen}raise Frozen('the reason')\n")
    ended = on_two_ranks(warm, tmp_path, str(tmp_path / "train.py"))
    assert ended.code == 1
    assert "Frozen: the reason" in ended.err
    assert "FrozenInstanceError" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "seen"),
    [
        (["--lr", "3", "--ends", "with 3"], 3, "script_of_a_user.py ended with status 3, at script_of_a_user.py:"),
        (["--lr", "3", "--ends", "at once with 3"], 3, "ended with exit code 3"),
        ([], 2, "script_of_a_user.py ended with status 2, at script_of_a_user.py:"),
    ],
    ids=["exit", "os._exit", "usage"],
)
def test_another_status_than_0_is_a_failure_and_the_commands_own(warm, tmp_path, arguments, code, seen):
    ended = on_two_ranks(warm, tmp_path, SCRIPT, *arguments)
    assert ended.code == code
    assert seen in ended.err
    assert "Traceback" not in ended.out + ended.err


def test_a_scripts_name_and_arguments_may_be_no_utf_8(warm, tmp_path):
    odd = os.fsdecode(b"\xff")
    script = tmp_path / f"train{odd}.py"
    script.write_text("import os, sys\nprint(*map(os.fsencode, sys.argv[1:]))\n")
    ended = on_two_ranks(warm, tmp_path, str(script), odd, "é")
    assert ended.code == 0, ended.err
    assert {rf"[rank {rank}] b'\xff' b'\xc3\xa9'" for rank in range(2)} <= set(ended.out.splitlines())


def test_what_lies_beside_a_script_is_found_also_where_the_script_is_named_by_a_link(warm, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("import beside\n")
    (tmp_path / "project" / "beside.py").touch()
    (tmp_path / "train.py").symlink_to("project/train.py")
    ended = on_two_ranks(warm, tmp_path, str(tmp_path / "train.py"))
    assert ended.code == 0, ended.err


def test_files_beside_a_script_are_the_scripts_alone_where_python_has_modules_of_their_names(warm, tmp_path):
    """``python -m`` looks in the working directory first, for what the command itself imports, too."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(
        "import io, secrets, yaml\nprint(secrets.TOKEN, yaml.__file__)\nio.BytesIO"
    )
    for name in ("secrets", "statistics", "yaml", "click", "io"):
        (tmp_path / "project" / f"{name}.py").write_text("TOKEN = 'of the project'\n")
    command = f"{sys.executable} -m flytekitplugins_safedist.run train.py"
    ended = warm.command(["sh", "-c", f"cd {tmp_path / 'project'}; exec {command}"], tmp_path / "job").wait()
    assert ended.code == 0, ended.err
    assert f"[rank 0] of the project {tmp_path / 'project' / 'yaml.py'}" in ended.out


def test_after_a_script_modules_are_again_what_they_were(tmp_path, monkeypatch):
    (tmp_path / "yaml.py").write_text("TOKEN = 'of the project'\n")
    (tmp_path / "train.py").write_text(
        "import sys, yaml\nsys.seen = yaml.TOKEN\nassert 'yaml.loader' not in sys.modules\n"
    )
    monkeypatch.setattr(sys, "seen", None, raising=False)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "yaml"}
    run_script(tmp_path / "train.py")
    assert sys.seen == "of the project"
    assert before == {"yaml": yaml} | {name: sys.modules[name] for name in before}


def test_a_module_is_run_by_its_name(warm, tmp_path):
    (tmp_path / "job" / "package").mkdir(parents=True)
    (tmp_path / "job" / "package" / "train.py").write_text(
        "import os, sys\nprint('rank', os.environ['RANK'], 'is', __name__, 'of', __package__, sys.argv[1:])\n"
    )
    ended = on_two_ranks(warm, tmp_path, "-m", "package.train", "--lr", "3")
    assert ended.code == 0, ended.err
    said = {f"[rank {rank}] rank {rank} is __main__ of package ['--lr', '3']" for rank in range(2)}
    assert said <= set(ended.out.splitlines())


@pytest.mark.parametrize("status", [0, 7])
def test_any_program_is_run_with_no_python(warm, tmp_path, status):
    os.mkfifo(tmp_path / "0 has said")  # rank 1's failure ends rank 0, whatever that has not said by then
    meet = '[ $RANK = 0 ] && echo > "$1" || read _ < "$1"'
    program = f"echo rank $RANK of $WORLD_SIZE; {meet}; exit $((RANK * {status}))"
    ended = on_two_ranks(warm, tmp_path, "--no_python", "sh", "-c", program, "sh", str(tmp_path / "0 has said"))
    assert ended.code == status, ended.err
    assert {f"[rank {rank}] rank {rank} of 2" for rank in range(2)} <= set(ended.out.splitlines())
    assert "worked alone" not in ended.err, "whether programs meet is not seen"


def test_a_compile_cache_that_the_shell_names_is_the_ranks_and_another_is_each_ranks_own(warm, tmp_path):
    """The libraries' caches outlive a run where a user has said where they are, as under torchrun."""
    (tmp_path / "train.py").write_text(
        "import os; print(os.environ['TORCH_EXTENSIONS_DIR'], os.environ['NUMBA_CACHE_DIR'])"
    )
    options = ["--nproc-per-node", "2", str(tmp_path / "train.py")]
    shell = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), "NUMBA_CACHE_DIR": ""}
    module = "flytekitplugins_safedist.run:__main__"
    ended = warm.start(module, tmp_path / "job", kind="module", arguments=options, environment=shell).wait()
    assert ended.code == 0, ended.err
    built, own = zip(*(line.split()[2:] for line in ended.out.splitlines() if line.startswith("[rank ")), strict=True)
    assert set(built) == {str(tmp_path / "built")}
    assert len(set(own)) == 2


NAMES = "import os; print(*sorted(os.environ))"


def test_a_script_has_all_variables_that_torchrun_sets(warm, tmp_path):
    (tmp_path / "names.py").write_text(NAMES)
    program = str(tmp_path / "names.py")
    torchruns = torchrun(warm, tmp_path / "its", Path(program), "--nproc-per-node=2").wait()
    ours = on_two_ranks(warm, tmp_path, program)
    assert (torchruns.code, ours.code) == (0, 0), torchruns.err + ours.err
    its = set(torchruns.out.splitlines()[-1].split())
    assert "TORCHELASTIC_MAX_RESTARTS" in its
    mine = next(line for line in ours.out.splitlines() if line.startswith("[rank 0]"))
    launchers = {"LC_CTYPE", "_", "TORCHELASTIC_SIGNALS_TO_HANDLE"}  # what its own process has of them
    assert its - launchers <= set(mine.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: script\n"),
        (["no_such_script.py"], "there is no such file: "),
        (["--standalone", "--nnodes=1", SCRIPT], "--standalone --nnodes=1 (leave out torchrun's and horovodrun's own"),
        (["--nproc-per-node", "0", SCRIPT], "nproc_per_node=0 is not a number of ranks"),
    ],
)
def test_wrong_usage_starts_nothing(warm, tmp_path, arguments, said):
    ended = on_two_ranks(warm, tmp_path, *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert "[safedist] start" not in ended.err


def test_a_working_directory_that_was_deleted_is_told_before_anything_is_imported(tmp_path):
    begin = 'rmdir "$PWD"; exec "$0" -m flytekitplugins_safedist.run "$1"'
    (gone := tmp_path / "gone").mkdir()
    command = ["sh", "-c", begin, sys.executable, SCRIPT]
    ended = subprocess.run(command, cwd=gone, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "error: the working directory of this process" in ended.stderr
    assert "Fix: change to a directory that is there: cd in the shell" in ended.stderr


def test_in_a_task_a_script_that_is_not_there_is_named(warm, tmp_path):
    ended = warm.run("job_script:by_path", tmp_path / "job", inputs={"path": "nowhere/train.py"})
    assert "there is no such script here" in str(ended.error)
    assert "nowhere/train.py" in str(ended.error)
