"""What a run leaves to look at: a page that says who was late, why it failed, and what it did when."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.harness import chrome_trace
from tests.harness.job import Job
from tests.harness.moto_s3 import BUCKET
from tests.harness.nvml import Gpus
from tests.harness.pod import Pod
from tests.harness.procs import DEADLINE, KILL, TERM, Ended, gate, until
from tests.harness.proxy import Holding
from tests.harness.registered import registered

SECRET = "s3cr3t-of-the-database"


def text_in(html: str) -> str:
    """Of a page that has each element closed, and fetches nothing."""
    tree = ElementTree.fromstring(html)
    assert not [each.attrib for each in tree.iter() if {"src", "href"} & set(each.attrib)]
    return "".join(tree.itertext())


def ours_in(deck: str) -> str:
    """Our part of Flyte's deck, as text."""
    [ours] = re.findall(r'<div class="sd">.*?</div></div>', deck, re.DOTALL)
    return text_in(ours.removesuffix("</div>"))


def page(ended: Ended, verdict: str = "outputs.pb") -> str:
    """What Flyte's deck says of ours at the end."""
    assert ended.uploaded == ["deck.html", verdict], ended.err
    html = (ended.files / "outputs" / "deck.html").read_text()
    assert re.findall(r"(?:src|href)=|@import|url\(", html) == [], "nothing is fetched"
    assert html.index(">Run</li>") < html.index(">Timeline</li>"), "the first tab"
    return ours_in(html)


def left(ended: Ended) -> tuple[str, dict[str, Any]]:
    """The page's text and the trace of a local run, whose log says where they are."""
    [address] = re.findall(r"the record of this run: (\S+)/run\.html", ended.err)
    [body] = re.findall(r"<body.*</body>", (Path(address) / "run.html").read_text(), re.DOTALL)
    trace = json.loads(gzip.decompress((Path(address) / "trace.json.gz").read_bytes()))
    chrome_trace.check(trace)
    return text_in(body), trace


def test_the_page_names_the_rank_and_the_stage_that_the_others_waited_for_and_nobody_else(warm, tmp_path):
    """By 300 ms: on a busy machine 50 ms may be another rank's, too."""
    ended = warm.run("job_recorded:one_is_late", tmp_path / "job")
    assert ended.value == 12, ended.err
    text, trace = left(ended)
    assert re.search(r"Held the others back: .*rank 2 in stage 'load', by", text), text
    held = text.split("Held the others back:")[1].split(".")[0]
    assert re.findall(r"rank \d+", held) == ["rank 2"]
    assert "rank 2 in stage 'load'" in ended.err, "in the log, too"
    assert "worked alone" not in ended.err, "they made a process group, and took it down again"
    names = {(event["tid"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {(rank, phase) for rank in range(3) for phase in ("import", "function")} <= names


def test_the_steps_that_torch_profiler_was_asked_for_are_in_the_trace_beside_their_rank(warm, tmp_path):
    ended = warm.run("job_recorded:one_is_profiled", tmp_path / "job", environment={"DATABASE_PASSWORD": SECRET})
    assert ended.value == 5, ended.err
    events = left(ended)[1]["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seen = [event for event in events if event.get("cat") == "torch"]
    assert {tracks[event["tid"]].partition(":")[0] for event in seen} == {"rank 1"}
    names = {event["name"] for event in seen}
    assert {"aten::mm", "at [$DATABASE_PASSWORD]"} <= names
    assert {name for name in names if name.startswith("step")} == {"step 2", "step 3"}
    [whole] = [event for event in events if event["name"] == "function" and event["tid"] == 1]
    for event in seen:
        assert whole["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= whole["ts"] + whole["dur"]


def test_a_rank_that_cannot_be_profiled_says_so_and_goes_on(warm, tmp_path):
    ended = warm.run("job_recorded:profiles_itself", tmp_path / "job")
    assert ended.value == 5, ended.err
    assert ended.out.count("no profile of this rank: a profiler of the task's own is running") == 1
    assert "steps seen by its own: 5" in ended.out


def test_ranks_that_train_alone_are_told_and_the_values_of_the_last_step_are_an_output(warm, tmp_path):
    ended = warm.run("job_recorded:each_alone", tmp_path / "job")
    assert ended.value == {"loss": 0.25, "rank": 0.0}, ended.err
    assert ended.err.count("each of the 2 ranks worked alone") == 1
    assert "each of the 2 ranks worked alone" in left(ended)[0]


def test_what_a_rank_raised_is_there_without_its_secrets(warm, tmp_path):
    ended = warm.run(
        "job_recorded:one_raises", tmp_path / "job", kind="execute", environment={"DATABASE_PASSWORD": SECRET}
    )
    text = page(ended, "error.pb")
    assert "failed: USER:ValueError" in text
    assert "cannot connect with [$DATABASE_PASSWORD] <b>" in text
    assert "in one_raises" in text, "the traceback"
    assert "connecting to [$DATABASE_PASSWORD] at postgres://[credentials]@db/x" in text, "the log's last lines"
    whole = (ended.files / "outputs" / "deck.html").read_text()
    assert SECRET not in whole
    assert "hunter2secret" not in whole


def test_the_page_of_node_0_has_the_ranks_of_all_nodes_and_how_well_their_clocks_are_known(warm, tmp_path):
    first, second = Job(warm, tmp_path, "job_recorded:two_nodes").run()
    assert second.uploaded == []
    text = page(first, "error.pb")
    assert "4 rank(s) on 2 node(s)" in text
    assert "Held the others back: rank 3 in stage 'load', by" in text
    assert len(re.findall(r"\d (?:m?s) ± \d", text)) == 2, "each node's clock, and its error"
    assert "raised ValueError: no learning rate" in text


def test_a_range_that_shrank_says_which_node_was_lost_and_what_ran_before(warm, tmp_path):
    with gate(tmp_path / "gate") as ranks:
        job = Job(warm, tmp_path, "job_recorded:a_range", "", ranks.environment)
        job.nodes = "1:2"
        host = job.start(0)
        until(job.listening, "the first pod listens")
        other = job.start(1)
        ranks.heard(4)
        other.signal(KILL)
        ranks.heard(2)
        ranks.let_go(2)
        ended = host.wait()
        other.wait()
    text = page(ended)
    assert "2 round(s)" in text
    assert re.search(r"loss: the node on \S+:? .*connection was lost", text), text


def test_a_pod_shows_how_long_its_code_took_to_be_staged(warm, tmp_path):
    code = """
from flytekit import task
from flytekitplugins_safedist import SafeTorch

@task(task_config=SafeTorch(nproc_per_node=1), enable_deck=True)
def nothing() -> None:
    pass
"""
    pod = Pod(tmp_path / "pod", {"workflows.py": code}, warm)
    pod.environment |= registered(decks=["Timeline"])
    ended = pod.fast("nothing")
    assert pod.uploaded() == ["deck.html", "outputs.pb"], ended.err
    assert re.search(r"<td>staging</td><td>[\d.]+ m?s</td>", (pod.outputs / "deck.html").read_text())


QUICK = {"TEST_PAGE_SECONDS": "0.05"}


def test_while_the_job_runs_the_page_shows_the_ranks_and_gpus_of_all_nodes(warm, tmp_path, ranks_gate, nvml_driver):
    Gpus(tmp_path / "gpus", 2).say(1, busy=97, used=3 << 30, total=80 << 30)
    gpus = {"TEST_NVML": str(tmp_path / "gpus"), "TEST_NVML_LIBRARY": str(nvml_driver)}
    job = Job(warm, tmp_path, "job_recorded:two_nodes_wait", "", {**ranks_gate.environment, **QUICK, **gpus})
    other = job.start(1)
    first = job.start(0)
    ranks_gate.heard(4)
    deck = first.files / "outputs" / "deck.html"

    def shows(text: str, times: int) -> bool:
        return deck.exists() and ours_in(deck.read_text()).count(text) == times

    until(lambda: shows("4 rank(s) on 2 node(s); 1 round(s); 3 steps", 1), "all ranks' steps")
    until(lambda: shows("97%3.0 of 80.0 GiB", 2), "a GPU of each node")
    text = ours_in(deck.read_text())
    assert "two_nodes_wait" in text
    assert re.search(r"running; [\d.]+ (ms|s|min)", text), text
    assert "loss 0.25" in text
    assert "it goes on" in text
    assert text.count("running") == 5, "the job, and each rank"
    until(lambda: "drawn by rank 0" in deck.read_text(), "what rank 0 has published")
    assert deck.read_text().count("drawn by rank") == 1, "one writer"
    ranks_gate.let_go(4)
    ended, _ = first.wait(), other.wait()
    text = page(ended)
    assert "succeeded; " in text
    assert "running" not in text


def test_a_store_that_is_slow_holds_up_no_job_and_the_page_of_its_end_is_the_last(warm, tmp_path, ranks_gate, s3):
    store = Holding(int(s3.endpoint.rpartition(":")[2]), "deck.html")
    more = {**s3.environment, "FLYTE_AWS_ENDPOINT": f"http://127.0.0.1:{store.port}", **ranks_gate.environment, **QUICK}
    prefix = f"s3://{BUCKET}/{tmp_path.name}"
    arguments = ["--output-prefix", f"{prefix}/out", "--raw-output-data-prefix", f"{prefix}/raw"]
    call = "job_recorded:one_node_waits"
    job = warm.start(call, tmp_path / "job", kind="execute", environment=more, arguments=arguments)
    ranks_gate.heard(2)
    assert store.begun.wait(DEADLINE), "the first page is on its way"
    ranks_gate.let_go(2)
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert store.uploads == 2, "one at a time; the second is the end's"
    store.release.set()
    assert b"succeeded; " in s3.get(f"{tmp_path.name}/out/deck.html")
    store.close()


def test_a_rank_server_that_dies_and_a_pod_that_is_told_to_stop_leave_a_page(warm, tmp_path, ranks_gate):
    for code in ("RanksNotStarted", "Stopped"):
        more = ranks_gate.environment
        job = warm.start("job_recorded:one_node_waits", tmp_path / code, kind="execute", environment=more)
        server = int(ranks_gate.heard(2)[0].split()[-1])
        if code == "Stopped":
            job.signal(TERM)
        else:
            os.kill(server, KILL)
        text = page(job.wait(), "error.pb")
        assert f"failed: SYSTEM:{code}" in text
        assert "3 steps" in text, "what the ranks had noted"
