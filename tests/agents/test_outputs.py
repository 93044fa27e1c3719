"""Outputs that Flyte would refuse are found before they are uploaded as such, and nothing of them is lost."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from flyteidl.core import literals_pb2
from flytekit.core.type_engine import LiteralsResolver
from flytekit.models.literals import LiteralMap

from tests.harness.procs import ROOT, uploaded_error, uploaded_output
from tests.jobs.job_large import losses


@pytest.mark.end("outputs are larger than Flyte takes (2 MiB)", "USER:OutputTooLargeError")
def test_outputs_over_flytes_limit_are_refused_with_name_size_and_way_out_and_all_values_are_kept(
    warm, tmp_path, as_promised
):
    ended = warm.run("job_large:large", tmp_path / "job", kind="execute")
    as_promised(ended)
    text = uploaded_error(ended).message
    assert re.search(r"because of 'losses' \([23],\d{3},\d{3} bytes\);", text), text
    assert "'epochs'" not in text
    assert text.count("Flyte would refuse the outputs") == ended.err.count("Flyte would refuse the outputs") == 1, text
    assert "at most 2,097,152 bytes for all outputs together" in text
    assert "return large values as FlyteFile" in text
    assert "round 1" not in ended.err, "it would repeat: the ranks are not started again"

    [kept] = set(re.findall(r"kept at (\S+outputs\.pb)", text))
    assert Path(kept).is_relative_to(tmp_path / "job" / "raw"), "beside the files that the task made"
    message = literals_pb2.LiteralMap.FromString(Path(kept).read_bytes())
    values = LiteralsResolver(LiteralMap.from_flyte_idl(message).literals)
    assert values.get("losses", as_type=list[str]) == losses()
    assert values.get("epochs", as_type=int) == 7


NOT_THERE = "raised PayloadError: rank 0 returns a path that is not there"


@pytest.mark.parametrize(
    ("task", "path", "whose"),
    [
        ("file", "{other}/model.bin", ": it is in the scratch of rank 1, round 0 [path=/"),
        ("text", "{other}/tmp/model.bin", ": it is in the scratch of rank 1, round 0 [path=/"),
        ("directories", "{other}/model", ": it is in the scratch of rank 1, round 0 [path=/"),
        ("file", "{own}/model.bin", ": it is in the scratch of rank 0, round 0 [path=/"),
        ("text", "/nowhere/model.bin", " [path=/nowhere/model.bin]"),
    ],
)
def test_a_path_that_rank_0_returns_and_does_not_have_is_told_with_whose_scratch_it_is_in(
    warm, tmp_path, task, path, whose
):
    ended = warm.run(f"job_elsewhere:{task}", tmp_path / "job", kind="execute", environment={"TEST_PATH": path})
    assert (ended.code, ended.uploaded) == (0, ["error.pb"]), ended.err
    error = uploaded_error(ended)
    assert error.code == "USER:PayloadError"
    assert NOT_THERE + whose in error.message
    assert "round 1" not in ended.err, "it would repeat: the ranks are not started again"


def test_what_the_cluster_offloads_passes(warm, tmp_path):
    ended = warm.run("job_large:large", tmp_path / "job", kind="execute", environment={"_F_L_MIN_SIZE_MB": "1"})
    assert ended.uploaded == ["losses_offloaded_metadata.pb", "outputs.pb"], ended.err


def test_a_limit_that_this_cluster_has_is_taken(warm, tmp_path):
    environment = {"SAFEDIST_MAX_OUTPUT_BYTES": "50000000"}
    ended = warm.run("job_large:large", tmp_path / "job", kind="execute", environment=environment)
    assert ended.uploaded == ["outputs.pb"], ended.err


def test_a_local_run_has_no_limit(warm, tmp_path):
    ended = warm.run("job_large:large", tmp_path / "job")
    assert ended.value[1] == losses()


def test_a_warning_that_is_an_error_to_the_user_is_none_to_finished_work(warm, tmp_path):
    ended = warm.run("job_warnings:strict", tmp_path / "job", kind="execute")
    assert (ended.code, ended.uploaded) == (0, ["deck.html", "outputs.pb"]), ended.err
    assert uploaded_output(ended) == "done"


@pytest.mark.parametrize(("call", "inputs", "value"), [("strict", {}, "done"), ("mapped", {"xs": [1]}, [1])])
def test_it_is_none_in_a_local_run_either(warm, tmp_path, call, inputs, value):
    assert warm.run(f"job_warnings:{call}", tmp_path / "job", inputs=inputs).value == value


def test_nor_is_it_where_the_pods_variable_says_so(warm, tmp_path):
    inputs, outputs = tmp_path / "inputs.pb", tmp_path / "job" / "outputs"
    inputs.write_bytes(b"")
    command = [str(Path(sys.executable).parent / "safedist-execute"), "--", "pyflyte-execute", "--inputs", str(inputs)]
    command += ["--output-prefix", str(outputs), "--raw-output-data-prefix", str(tmp_path / "raw"), "--resolver"]
    command += ["flytekit.core.python_auto_container.default_task_resolver", "--", "task-module", "job_warnings"]
    environment = {"PYTHONWARNINGS": "error", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'jobs'}"}
    ended = warm.command([*command, "task-name", "strict"], tmp_path / "job", environment).wait()
    assert (ended.code, ended.uploaded) == (0, ["deck.html", "outputs.pb"]), ended.err
