"""Outputs wait for the store, whoever writes them, and those that Flyte may refuse are told."""

from __future__ import annotations

import re
import socket

import pytest
from flyteidl.core import literals_pb2
from flytekit.core.type_engine import LiteralsResolver
from flytekit.models.literals import LiteralMap

from tests.harness.pod import SAFEDIST_EXECUTE, pyflyte_execute
from tests.harness.procs import ROOT, until, uploaded_error, uploaded_output
from tests.harness.proxy import Proxy
from tests.harness.registered import registered
from tests.jobs.job_large import losses


def test_outputs_over_flytes_usual_limit_are_uploaded_and_told(warm, tmp_path):
    ended = warm.run("job_large:large", tmp_path / "job", kind="execute")
    assert (ended.code, ended.uploaded) == (0, ["outputs.pb"]), ended.err
    assert re.search(
        r"warning: outputs\.pb has [23],\d{3},\d{3} bytes \(losses [23],\d{3},\d{3}, epochs \d+\)", ended.err
    )
    message = literals_pb2.LiteralMap.FromString((ended.files / "outputs/outputs.pb").read_bytes())
    values = LiteralsResolver(LiteralMap.from_flyte_idl(message).literals)
    assert values.get("losses", as_type=list[str]) == losses()
    assert values.get("epochs", as_type=int) == 7


class Away:
    """An S3 store that is there, away and there again, behind a port that stays."""

    def __init__(self, s3, gate) -> None:
        s3.put("something", b"")  # the bucket is there
        self._target, self._gate = int(s3.endpoint.rpartition(":")[2]), gate
        self._proxy = Proxy(self._target)
        self.environment = {"TEST_STORE": f"http://127.0.0.1:{self._proxy.port}", **gate.environment}

    def meanwhile(self, running, what: str) -> None:
        """Go away when the rank says so, and come back when it has tried in vain."""
        assert self._gate.heard(1) == [what]
        self._proxy.close()
        self._gate.let_go(1)
        until(lambda: "trying again in" in (running.files / "out").read_text(), "the rank tries again")
        self._proxy = Proxy(self._target, self._proxy.port)


@pytest.fixture
def away(s3, ranks_gate):
    return Away(s3, ranks_gate)


def test_what_a_type_stores_by_a_client_of_its_own_waits_for_the_store(warm, tmp_path, away, s3):
    running = warm.start("job_stored:writes", tmp_path / "job", kind="execute", environment=away.environment)
    away.meanwhile(running, "returns")
    ended = running.wait()
    assert (ended.code, ended.uploaded) == (0, ["outputs.pb"]), ended.err
    assert s3.get("frame") == b"1, 2, 3"
    assert "uploading the task's outputs failed: EndpointConnectionError" in ended.out


@pytest.mark.parametrize("task", ["lines", "files"])
def test_what_can_be_drawn_only_once_is_uploaded_whole_after_an_outage(warm, tmp_path, away, s3, task):
    environment = {**s3.environment, **away.environment, "FLYTE_AWS_ENDPOINT": away.environment["TEST_STORE"]}
    raw = ["--raw-output-data-prefix", f"s3://code/{tmp_path.name}"]
    running = warm.start(f"job_stored:{task}", tmp_path / "job", kind="execute", arguments=raw, environment=environment)
    away.meanwhile(running, "returns")
    ended = running.wait()
    assert (ended.code, ended.uploaded) == (0, ["outputs.pb"]), ended.err
    message = literals_pb2.LiteralMap.FromString((ended.files / "outputs/outputs.pb").read_bytes())
    literal = message.literals["o0"]
    blobs = [each.scalar.blob.uri for each in literal.collection.literals] or [literal.scalar.blob.uri]
    stored = [s3.get(uri.removeprefix("s3://code/")).decode() for uri in blobs]
    assert stored == {"lines": ['{"step": 0}\n{"step": 1}\n{"step": 2}\n'], "files": ["0", "1", "2"]}[task]


def test_inputs_wait_for_the_store_too(warm, tmp_path, away):
    running = warm.start("job_stored:reads_back", tmp_path / "job", environment=away.environment)
    away.meanwhile(running, "reads")
    ended = running.wait()
    assert ended.value == "1, 2, 3", ended.err
    assert "fetching the task's inputs failed: ConnectionRefusedError" in ended.out


@pytest.mark.end("storage", "SYSTEM:Storage")
def test_a_store_that_stays_away_from_outputs_is_the_platforms(warm, tmp_path, ranks_gate, as_promised):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    environment = {"TEST_STORE": nobody, **ranks_gate.environment}
    ranks_gate.let_go(1)
    ended = warm.run("job_stored:writes_soon", tmp_path / "job", kind="execute", environment=environment)
    as_promised(ended)


NOT_THERE = "raised PayloadError: rank 0 returns a path that is not there"


@pytest.mark.parametrize(
    ("task", "path", "whose"),
    [
        ("text", "{other}/tmp/model.bin", ": it is in the scratch of rank 1, round 0 [path=/"),
        ("directories", "{other}/model", ": it is in the scratch of rank 1, round 0 [path=/"),
        ("file", "{own}/model.bin", ": it is in the scratch of rank 0, round 0 [path=/"),
        ("text", "/nowhere/model.bin", " [path=/nowhere/model.bin]"),
        ("file", "nowhere.bin", " [path=/"),
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


def test_what_the_cluster_offloads_counts_no_more(warm, tmp_path):
    ended = warm.run("job_large:large", tmp_path / "job", kind="execute", environment={"_F_L_MIN_SIZE_MB": "1"})
    assert ended.uploaded == ["losses_offloaded_metadata.pb", "outputs.pb"], ended.err
    assert "outputs.pb has" not in ended.err


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
    environment = {"PYTHONWARNINGS": "error", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'jobs'}"}
    environment |= registered(nproc_per_node=2, decks=["Timeline"])
    command = [SAFEDIST_EXECUTE, "--", *pyflyte_execute("job_warnings:strict", inputs, outputs, tmp_path / "raw")]
    ended = warm.command(command, tmp_path / "job", environment).wait()
    assert (ended.code, ended.uploaded) == (0, ["deck.html", "outputs.pb"]), ended.err
