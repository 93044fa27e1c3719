"""From what ranks note to what the page says: sizes, ends of any kind, who is late, and what is not compared."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import re
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry

from flytekitplugins_safedist import Metrics
from flytekitplugins_safedist.record import exporters, layout, page, trace, writer
from flytekitplugins_safedist.record.clocks import Ahead, Offset
from flytekitplugins_safedist.record.findings import Findings, shown_seconds
from flytekitplugins_safedist.record.line import Pace
from flytekitplugins_safedist.record.profile import StepProfile
from flytekitplugins_safedist.record.profile import packed as packed_profile
from flytekitplugins_safedist.record.summary import (
    SLICES,
    GpuSummary,
    NodeSummary,
    RankSummary,
    RoundSummary,
    StageTimes,
    bucket,
    expanded,
    merged,
    packed,
    percentile,
)
from tests.harness import chrome_trace

HERE = Offset(0.0, 0.001)
ROOM = 1 << 20


def job(*ranks: RankSummary, world_size: int = 0, **more: Any) -> NodeSummary:
    """A node with one round of these ranks."""
    rounds = [RoundSummary(0, 0.0, 10.0, world_size or len(ranks), ranks=list(ranks))]
    return NodeSummary(0, "host", rounds=rounds, **more)


def shown(*nodes: NodeSummary, **end: Any) -> str:
    """The page, without its style."""
    return page.fragment(Findings(nodes), page.JobEnd("train", **end)).partition("</style>")[2]


def events_in(*nodes: NodeSummary) -> list[dict[str, Any]]:
    """Of the trace of these nodes, which is as it should be."""
    made = json.loads(gzip.decompress(trace.trace(Findings(nodes))))
    chrome_trace.check(made)
    return list(made["traceEvents"])


def sent(node: NodeSummary, limit: int = ROOM, offset: Offset = HERE) -> NodeSummary:
    """As node 0 has it of another node."""
    text = packed(node, limit)
    assert len(text) <= limit
    [got] = [each for each in merged(NodeSummary(-1, "node 0"), [(text, offset)]) if each.host == node.host]
    return got


# --- a rank's own ---------------------------------------------------------------------------------------------------
class Rank:
    """One rank, under a clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, began: float = 1000.0) -> None:
        self.now = began
        self.memory = memoryview(bytearray(layout.SIZE))
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.recorder = writer.Recorder(self.memory, at=began)
        monkeypatch.setattr(writer.RECORDER, "value", self.recorder)
        self.recorder.phase("import", began, 0.0)
        self.recorder.phase("inputs", began, 0.0)

    def stage(self, name: str, seconds: float) -> None:
        with writer.stage(name):
            self.now += seconds

    def read(self, how: str = "SIGKILL") -> RankSummary:
        return layout.read(self.memory, 3, since=999.0, until=self.now, how=how)


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


def test_what_a_rank_notes_is_what_its_agent_reads(rank):
    for step in range(20):
        for name, seconds in (("load", 0.25), ("forward", 0.5)):
            with writer.stage(name), writer.stage("part"):
                rank.now += seconds if (step, name) != (11, "load") else 30.0
    rank.recorder.saved(7, 1010.0, 0.5)
    rank.recorder.phase("function", 1000.0, rank.now - 1000.0)
    seen = rank.read("returned")
    assert list(seen.stages) == ["load", "load/part", "forward", "forward/part"]
    assert (seen.steps, seen.stages["load"].times) == (19, 20)
    assert seen.stages["forward"].seconds == pytest.approx(10.0)
    assert [round(seconds, 1) for _, seconds in seen.stalls] == [30.5]
    assert seen.saves == [(10.0, 0.5, 7)]
    assert seen.phases[0] == ("start", -1.0, 1.0), "from the begin of its round"
    assert seen.phases[-1] == ("function", 0.0, rank.now - 1000.0)
    assert 40 <= len(seen.pace) == len(seen.shares["load"]) <= SLICES
    assert seen.every * len(seen.pace) == pytest.approx(rank.now - 1000.0, rel=0.05)


@pytest.mark.parametrize("hours", [0.3, 48])
def test_whoever_ends_a_rank_how_its_last_step_is_there_and_no_stall_that_was_none(rank, hours):
    steps, step_seconds = 2000, hours * 3600 / 2000
    for step in range(steps):
        rank.stage("train", step_seconds)
        rank.recorder.progress(step, {"loss": 1.0 / (step + 1)})
    for how in ("SIGKILL", "ended with the others", "running", "returned"):
        seen = rank.read(how)
        assert (seen.steps, seen.step, seen.stages["train"].times) == (steps - 1, steps - 1, steps)
        assert seen.values == {"loss": pytest.approx(1.0 / steps)}
        assert seen.stalls == []
    rank.now += 20 * step_seconds
    assert [round(at) for at, _ in rank.read("running").stalls] == [round(hours * 3600)], "the step that goes on"
    assert rank.read("returned").stalls == []
    rank.recorder.phase("function", 1000.0, rank.now - 1000.0)
    rank.now += 20 * step_seconds
    assert rank.read("running").stalls == [], "it writes its outputs, and makes no steps"


def test_of_saves_all_are_counted_and_the_latest_are_there(rank):
    for step in range(700):
        rank.recorder.saved(step, 1000.0 + 60 * step, 1.0)
    seen = rank.read("returned")
    assert (seen.saved, len(seen.saves), seen.saves[-1][2]) == (700, 24, 699)


def test_steps_that_are_told_are_counted_and_not_the_stages(rank):
    for step in range(5):
        for _ in range(3):
            rank.now += 0.1
            rank.stage("micro", 0.0)
        values = {"loss": np.float32(1.0 / (step + 1)), "none": None, "on meta": torch.ones(1, device="meta")}
        rank.recorder.progress(np.int64(100 + step), values)
    seen = rank.read("returned")
    assert (seen.steps, seen.step, sum(seen.durations.values())) == (4, 104, 4)
    assert seen.values == pytest.approx({"loss": 0.2}), "and what is no number is left out"
    assert percentile(seen.durations, 0.5) == pytest.approx(0.3, rel=0.05)
    html = shown(job(seen))
    assert "5 steps, " in html, "the first one has no known beginning, and was a step"
    assert "<tr><td>3</td><td>5</td>" in html


def test_names_without_end_are_one_and_of_any_letters(rank):
    for number in range(1000):
        rank.stage(f"⏱ step {number} {'x' * 100}", 0.001)
    with writer.stage("a"), writer.stage("b"), writer.stage("c"), writer.stage("d"), writer.stage("e"):
        pass
    stages = rank.read().stages
    assert len(stages) == layout.STAGES + 1
    assert stages["(others)"].times == 1000 - layout.STAGES + 5
    assert next(iter(stages)).startswith("⏱ step 0 xxx")


def test_no_name_of_a_stage_or_of_a_value_shows_a_secret(rank, monkeypatch):
    monkeypatch.setenv("DATABASE_PASSWORD", "s3cr3t-of-it")
    rank.stage("load s3cr3t-of-it", 1.0)
    rank.recorder.progress(0, {"loss of s3cr3t-of-it": 0.5})
    html = shown(job(rank.read()))
    assert "loss of [$DATABASE_PASSWORD] 0.5" in html
    assert "load [$DATABASE_PASSWORD]" in html


def test_a_process_that_is_forked_from_a_rank_notes_nothing(rank):
    with writer.stage("load"):
        child = os.fork()
        if not child:
            try:
                rank.recorder.progress(9, {})
                rank.stage("load", 1.0)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    assert rank.read().stages["load"].times == 1


def test_numbers_of_a_rank_that_are_none_harm_nobody() -> None:
    """Its code has written over all of them, or over some, here and there."""
    chance = random.Random(7)
    fills = [b"\xff", b"\x00", b"\x7f", b"\x02\0\0\0\0\0\xf8\x7f"]
    memories = [bytearray(fill * (layout.SIZE // len(fill))) for fill in fills]
    numbers = [b"\0" * 8, b"\xff" * 8, *(struct.pack("d", each) for each in (math.nan, math.inf, -1.0, 5e-324))]
    for _ in range(1000):
        memory = bytearray(layout.SIZE)
        of_rank = layout.RankMemory.from_buffer(memory)
        of_rank.clear(1000.0)
        of_rank.steps, of_rank.saved, of_rank.peak, of_rank.every = 3, 2, 1 << 30, chance.choice([1.0, 0.0, math.nan])
        for at in chance.choices(range(0, layout.SIZE - 8, 8), k=chance.choice([1, 30, 1000])):
            memory[at : at + 8] = chance.choice(numbers)
        memories.append(memory)
    for memory in map(memoryview, memories):
        seen = layout.read(memory, 3, since=999.0, until=2000.0, how=chance.choice(["returned", "running"]))
        assert layout.stall_seconds(memory, 2000.0) is not None
        assert "train" in shown(job(seen, part(4)))
        packed(job(seen), ROOM)


def test_a_loss_that_is_no_number_any_more_hides_nothing_of_its_rank(rank):
    rank.stage("load", 1.0)
    rank.recorder.meet()
    rank.recorder.progress(0, {"loss": math.nan, "accuracy": 0.5, "norm": -math.inf})
    [seen] = sent(job(rank.read("returned"))).rounds[0].ranks
    assert (list(seen.stages), seen.met, seen.step) == (["load"], True, 0)
    assert "loss nan; accuracy 0.5; norm -inf" in shown(job(seen))


def test_a_stage_that_another_thread_ends_than_began_it_is_a_stage(rank):
    """A generator that a thread runs ahead of the training, and whoever drops it closes."""

    def batches():
        while True:
            with writer.stage("load"):
                yield

    ahead = batches()
    with writer.stage("train"), ThreadPoolExecutor(1) as pool:
        pool.submit(next, ahead).result()
        ahead.close()
        with writer.stage("step"):
            pass
    assert list(rank.read().stages) == ["train", "load", "train/step"]


def test_outside_a_rank_a_stage_is_nothing() -> None:
    with writer.stage("load"):
        pass


# --- ranks that worked alone, and who held the others back ------------------------------------------------------------
def part(rank: int, how: str = "returned", **stages: tuple[int, float, float]) -> RankSummary:
    """Stages as times, seconds of each, and when they ended on average."""
    made = {name: StageTimes(times, times * seconds, end) for name, (times, seconds, end) in stages.items()}
    return RankSummary(rank, 0.0, 10.0, how, stages=made)


def test_ranks_that_worked_alone_are_told_where_all_of_them_came_to_their_end_so() -> None:
    met = part(1)
    met.met = True
    for ranks, world_size, is_told in [
        ([part(0), part(1)], 2, True),
        ([part(0), met], 2, False),
        ([part(0), part(1, "ended with the others")], 2, False),
        ([part(0)], 1, False),
        ([part(0), part(1)], 3, False),
    ]:
        html = shown(job(*ranks, world_size=world_size))
        assert ("each of the 2 ranks worked alone. Fix: " in html) == is_told


HELD = """
the one that is late and not the one that waits: 1 load
    sync 100 0.052 5.000, load 100 0.010 5.010
    sync 100 0.002 5.000, load 100 0.060 5.060
nobody where they differ by little: nobody
    load 100 0.100 5.000
    load 100 0.101 5.001
nobody where one is alone: nobody
    load 100 3.000 5.000
one that was ended a step further and is late besides: 0 load
    load 101 0.060 5.095, sync 100 0.010 5.070
    load 100 0.010 5.010, sync 100 0.060 5.070
nobody who was ended a step further: nobody
    load 101 0.060 5.095
    load 100 0.060 5.060
nobody for noise in few steps: nobody
    load 2 0.015 5.015
    load 2 0.010 5.010
one for a single step that is no noise: 0 load
    load 1 0.060 5.060
    load 1 0.010 5.010
of stages within stages the innermost that costs the time: 1 step/data/decode
    step 100 0.1 5.1, step/data 100 0.011 5.001, step/data/decode 100 0.001 4.991
    step 100 0.1 5.1, step/data 100 0.061 5.051, step/data/decode 100 0.051 5.041
    step 100 0.1 5.1, step/data 100 0.011 5.001, step/data/decode 100 0.001 4.991
one within a stage that has not ended: 1 epoch/load
    epoch/load 100 0.010 5.010
    epoch/load 100 0.060 5.060
one within a stage that another one has left: 1 epoch/load
    epoch/load 100 0.010 5.010, epoch 1 6.000 6.000
    epoch/load 100 0.060 5.060
"""
"""Who is named; of each rank the stages, as :func:`part` takes them."""


@pytest.mark.parametrize(
    "case", re.findall(r"^\S.*(?:\n .*)*", HELD, re.MULTILINE), ids=lambda case: case.partition(":")[0]
)
def test_named_is_who_held_the_others_back(case: str) -> None:
    head, *rows = case.splitlines()
    ranks = []
    for number, row in enumerate(rows):
        stages = [stage.split() for stage in row.split(",")]
        ranks.append(part(number, **{name: (int(times), float(each), float(end)) for name, times, each, end in stages}))
    found = Findings([job(*ranks)])
    assert [f"{each.rank} {each.stage}" for each in found.held] == [head.partition(": ")[2]] * ("nobody" not in head)
    assert found.uneven == []


def test_what_a_rank_costs_is_told_by_step_and_its_ends_count_from_its_own_begin() -> None:
    early = part(0, sync=(100, 0.052, 5.0), load=(100, 0.010, 5.010))
    late = part(1, sync=(100, 0.002, 4.0), load=(100, 0.060, 4.060))
    late.began = 1.0
    assert "rank 1 in stage &#x27;load&#x27;, by 50 ms a step (81% of it; the others take 10 ms)" in shown(
        job(early, late)
    )
    within = [part(rank, **{"epoch/load": (100, seconds, 5 + seconds)}) for rank, seconds in enumerate((0.01, 0.06))]
    for each in within:
        each.steps, each.step = 99, 99
    assert "rank 1 in stage &#x27;epoch/load&#x27;, by 50 ms a step (143% of it" in shown(job(*within))


def test_what_is_not_compared_is_called_so() -> None:
    html = shown(job(part(0, load=(8, 0.061, 5.060)), part(1, load=(7, 0.011, 5.010))))
    assert "Not compared: &#x27;load&#x27;, which some ranks ended more often than others." in html
    assert "No rank" not in html
    also = part(0, load=(8, 0.06, 5.06), loss=(8, 0.01, 5.1)), part(1, load=(7, 0.011, 5.01), loss=(8, 0.01, 5.1))
    assert "No rank stands out in the other stages: " in shown(job(*also))
    html = shown(job(part(0, load=(8, 0.01, 5.0)), part(1, load=(8, 0.01, 5.0)), world_size=4800))
    assert "No rank of 2 of 4800 ranks stands out: " in html
    assert "2 of 4800 rank(s) on 1 node(s)" in html


# --- of a whole job -------------------------------------------------------------------------------------------------
def filled(rank: int, began: float, *, late: bool = False) -> RankSummary:
    """As ten hours make it, with 48 stages."""
    chance = random.Random(rank)

    def digits() -> str:
        return "".join(chance.choices("0123456789", k=SLICES))

    made = RankSummary(
        rank, began, began + 999, "ended with the others", steps=9998, step=9998, every=999 / 96, saved=999
    )
    made.phases = [("start", 0.0, 1.0), ("import", 1.0, chance.random()), ("function", 3.0, 996.0)]
    for number in range(layout.STAGES):
        seconds, end = (0.6, 0.5) if late and number == 3 else (0.1, 0.5 * late)
        made.stages[f"a stage of the model {number}"] = StageTimes(9999, 9999 * seconds, 500 + number + end)
    made.durations = {number: chance.randrange(99) + 1 for number in range(-40, 0)}
    made.rate, made.pace, made.shares = chance.random(), digits(), {name: digits() for name in list(made.stages)[:8]}
    made.stalls = [(chance.random() * 900, 5.0) for _ in range(12)]
    made.saves = [(10.0 * number, chance.random(), number) for number in range(24)]
    return made


def large(node: int, ranks: int, late: int) -> NodeSummary:
    rounds = [RoundSummary(at, 1000.0 * at, 1000.0 * at + 999, 64, f"rank {at} failed") for at in range(4)]
    for every in rounds:
        every.ranks = [filled(rank, every.since, late=rank == late) for rank in range(node * ranks, (node + 1) * ranks)]
    return NodeSummary(node, f"host-{node}", [("staging", 0.0, 1.0)], rounds)


def test_sixty_four_ranks_over_ten_hours_are_a_page_of_300_kb_and_a_trace() -> None:
    nodes = [large(0, 8, 19), *(sent(large(node, 8, 19), 256 << 10) for node in range(1, 8))]
    html = shown(*nodes, code="USER:ValueError", cause="x" * 200_000)
    assert 30_000 < len(html.encode()) <= page.LIMIT == 300_000
    assert "<td>63</td>" in html, "all of them"
    assert "Held the others back: rank 19 in stage &#x27;a stage of the model 3&#x27;" in html
    for every in (every for node in nodes for every in node.rounds):
        del every.ranks[1:]  # two hundred thousand events of all of them tell no more
    events = events_in(*nodes)
    assert {event["pid"] for event in events} == set(range(8))
    assert all(event["ts"] >= -1 for event in events if event["ph"] != "M")


def test_thousands_of_restarts_are_a_page_of_300_kb() -> None:
    html = shown(job(), budgets=[f"restart: {number} of 5000, rank 1: {'<' * 200}" for number in range(5000)])
    assert len(html) <= page.LIMIT
    assert "<li>4936 before these</li><li>restart: 4936 of 5000, " in html
    assert "restart: 4999 of 5000, " in html


def test_of_600_nodes_each_sends_the_stages_of_all_its_ranks() -> None:
    found = Findings([large(0, 8, 4007), *(sent(large(node, 8, 4007), (16 << 20) // 600) for node in (1, 500))])
    assert [(each.rank, each.stage) for each in found.held] == [(4007, "a stage of the model 3")]
    assert len(found.ranks) == 24
    assert all(len(rank.stages) == layout.STAGES for rank in sent(large(1, 8, 0), 16 << 10).rounds[-1].ranks)


def test_what_does_not_fit_a_message_loses_what_is_finest_and_oldest_first() -> None:
    node = large(0, 2, 0)
    node.rounds[-1].ranks[0].profile = "p" * 1000
    node.gpus.append(GpuSummary(0, "GPU-0", 1, 7.0))
    left, limit = [], ROOM
    for _ in range(5):
        got = sent(node, limit)
        last, rounds = got.rounds[-1].ranks[0], sum(bool(every.ranks) for every in got.rounds)
        left.append((bool(last.profile), bool(got.gpus), bool(last.pace), rounds, len(last.stages)))
        limit = len(packed(node, limit)) - 1
    assert left == [
        (True, True, True, 4, 48),
        (False, True, True, 4, 48),
        (False, False, False, 4, 48),
        (False, False, False, 1, 48),
        (False, False, False, 1, 0),
    ]


def test_a_summary_that_is_damaged_or_of_another_version_is_left_out() -> None:
    own, other = NodeSummary(0, "a"), NodeSummary(1, "b", version=99)
    assert merged(own, [("{", HERE), (packed(other, 1000), HERE)]) == [own]


def test_the_round_that_the_job_failed_in_ended_because_of_its_root_cause() -> None:
    node = job(part(0, load=(9, 0.1, 5.0)), part(1, load=(9, 0.1, 5.0)))
    node.rounds.insert(0, RoundSummary(-1, 0.0, 1.0, 2, "rank 1 failed"))
    node.rounds[1].why = "rank 0: raised ConnectionError"
    html = shown(node, code="USER:ValueError", cause="rank 1 raised ValueError: no rate\nTraceback")
    assert "<td>rank 1 failed</td>" in html
    assert "<td>rank 1 raised ValueError: no rate</td>" in html
    assert "ConnectionError" not in html


def test_a_name_is_text_in_the_page_and_memory_and_time_have_a_scale() -> None:
    first, second = part(0, **{'"><script>': (9, 0.1, 5.0)}), part(1)
    first.peak, second.peak, first.durations = 1 << 30, 1 << 28, {bucket(0.1): 80, bucket(0.2): 19, bucket(5.0): 1}
    first.phases = [('"><script>', 0.0, 5.0)]
    html = shown(job(first, second))
    assert "<script" not in html
    assert "most memory (0 to 1024 MiB)" in html
    assert re.search(r'--b:100.0%">1024 MiB<.*--b:25.0%">256 MiB<', html)
    assert '"bar " style="--a:50.0%;--b:100.0%">96 ms to 0.19 s<' in html, "at most 5% off"


def test_saves_lie_on_top_of_the_pace_also_where_a_round_ended_before_there_was_one(rank):
    """A job that is killed soon after its first save: what has no pace yet came first, and hid the saves below it."""
    rank.recorder.saved(0, 1000.0, 0.5)
    node = job(rank.read())
    for step in range(100):
        rank.now += 0.5
        rank.recorder.progress(step, {})
    rank.recorder.saved(99, rank.now, 0.5)
    node.rounds.append(RoundSummary(1, 1000.0, rank.now, 1, ranks=[rank.read()]))
    kinds = re.findall(r'<path class="(\w+)" stroke-width="[\d.]+" d="M\d{2}', shown(node))
    assert kinds[-2:] == ["high", "save"]


# --- clocks, GPUs, paces --------------------------------------------------------------------------------------------
def test_two_clocks_are_told_apart_as_well_as_messages_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # Node 0's clock is 1000 s ahead; messages take 10 to 50 ms there, and 20 to 90 ms back.
    node_0, other = Ahead(), Ahead()
    for there, back in ((0.05, 0.02), (0.01, 0.09), (0.03, 0.04)):
        monkeypatch.setattr("time.monotonic", lambda late=there: 1000.0 + 7.0 + late)
        node_0.note(7.0)
        monkeypatch.setattr("time.monotonic", lambda late=back: 9.0 + late)
        other.note(1009.0)
    offset = Offset.between(node_0.least, other.least)
    assert offset.error == pytest.approx(0.015)
    assert abs(offset.seconds - 1000.0) <= 0.015
    assert Offset.between(node_0.least, None).error is None


def test_times_of_other_nodes_are_moved_to_node_0s() -> None:
    other = job(part(3), phases=[("staging", 5.0, 1.0)], gpus=[GpuSummary(0, "GPU-0", 1, 7.0)])
    moved = sent(other, offset=Offset(100.0, 0.5))
    assert moved.phases[0] == ("staging", 105.0, 1.0)
    times = moved.rounds[0].since, moved.rounds[0].ranks[0].until, moved.gpus[0].since
    assert times == (100.0, 110.0, 107.0)
    assert (moved.offset, moved.error) == (100.0, 0.5)


def test_how_gpus_were_used_keeps_its_size_its_peaks_and_its_time() -> None:
    gpu = GpuSummary(3, "GPU-3", 80 << 30, since=0.0)
    at = 0.0
    for number in range(5000):
        gpu.note(100 if at < 12_500 else 0, 7 << 30 if number == 3210 else 1 << 30, at)
        at += 5.05 if number % 100 else 60.0  # looks come late, and the agent may be busy
    assert 48 <= len(gpu.busy) == len(gpu.memory) <= SLICES
    assert gpu.every * len(gpu.busy) == pytest.approx(at, rel=0.03), "all of the time"
    assert sum(gpu.busy) / len(gpu.busy) == pytest.approx(100 * 12_500 / at, abs=2)
    other = GpuSummary(4, "GPU-4", 80 << 30, since=0.0, slowed="its temperature")
    other.note(10, 1 << 30, 0.0)
    html = shown(node := job(part(0), gpus=[gpu, other]))
    assert re.search(r"<td>3</td><td>GPU-3</td><td>4\d%</td><td>7.0 of 80.0 GiB</td>", html)
    assert "<td>its temperature</td>" in html
    assert {"GPU 3 busy (%)", "GPU 3 memory"} <= {event["name"] for event in events_in(node) if event["ph"] == "C"}


def test_a_pace_is_of_the_last_minute_and_counts_over_rounds() -> None:
    pace = Pace()
    pace.see(0, 0.0, 100.0)
    assert (pace.rate, pace.steps) == (0, 0)
    for second in range(200):
        pace.see(1 + second * (2 if second < 100 else 5), 3.0, 101.0 + second)
    assert pace.rate == pytest.approx(5)
    assert (pace.steps, pace.stalled) == (996, 3.0)
    pace = Pace(pace.steps, pace.stalled)
    assert pace.rate == 0
    for ended, stalled, now in ((4, 0.0, 400.0), (5, 2.0, 401.0), (5, 1.0, 402.0)):
        pace.see(ended, stalled, now)
    assert (pace.steps, pace.stalled) == (1001, 5.0), "a counter never falls"


def test_a_step_that_takes_ten_times_as_long_as_most_is_a_stall_from_its_begin(rank):
    rank.now += 1000.0
    assert layout.stall_seconds(rank.memory, rank.now) == 0, "how long a step takes is not known yet"
    for step in range(20):
        rank.recorder.progress(step, {})
        rank.now += 0.5
    rank.now += 4.4
    assert layout.stall_seconds(rank.memory, rank.now) == 0, "no step of half a second has lasted for five"
    rank.now += 1.0
    assert layout.stall_seconds(rank.memory, rank.now) == pytest.approx(5.9)
    rank.recorder.progress(20, {})
    assert layout.stall_seconds(rank.memory, rank.now) == pytest.approx(5.9, rel=0.05)


# --- metrics --------------------------------------------------------------------------------------------------------
def test_the_page_of_metrics_lists_all_of_them_under_both_names() -> None:
    docs = Path(__file__).parents[3] / "docs" / "metrics.md"
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|", docs.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [each.name for each in exporters.TABLE]
    registry = CollectorRegistry()
    with ExitStack() as stack:
        values = {each: {"": 1.0} for each in exporters.TABLE}
        reader = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
        stack.callback(exporters.measure([reader], lambda: values, {}))
        told = [sample.name for family in registry.collect() for sample in family.samples]
    assert [name for _, name in rows] == [name for name in told if name != "target_info"]
    for each in exporters.TABLE:
        assert re.fullmatch(r"safedist(\.[a-z]+)+", each.name)
        assert re.fullmatch(r"s|By|1|\{[a-z]+\}", each.unit), "UCUM: base units, or what is counted, in braces"


def warnings_of(metrics: Metrics) -> list[str]:
    warned: list[str] = []
    with ExitStack() as stack:
        exporters.begin(metrics, dict, {}, stack, warned.append)
    return warned


def test_what_is_off_begins_nothing_and_what_cannot_begin_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_of(Metrics()) == []
    with socket.socket() as free, monkeypatch.context() as patch:
        free.bind(("127.0.0.1", 0))
        patch.setenv("OTEL_METRICS_EXEMPLAR_FILTER", "nonsense")
        port = free.getsockname()[1]
        free.close()
        assert warnings_of(Metrics(prometheus=port)) == ["no metrics: ValueError: Unknown exemplar filter 'nonsense'."]
    for module in ("opentelemetry.exporter.prometheus", "opentelemetry.exporter.otlp.proto.http.metric_exporter"):
        monkeypatch.setitem(sys.modules, module, None)
    warned = warnings_of(Metrics(prometheus=1, otlp=True))
    assert [text.partition(":")[0] for text in warned] == ["no metrics for prometheus", "no metrics for otlp"]
    assert all(text.endswith("the image needs it (docs/metrics.md)") for text in warned)


# --- the trace, and what torch saw ------------------------------------------------------------------------------------
def slice_(name: str, at: float, took: float, **more: object) -> dict[str, object]:
    """As torch 2.13 writes one."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": at, "dur": took, **more}


MARKS = [slice_("safedist: the clock", at, 1.0) for at in (1e9, 1e9 + 9)]


def test_a_profile_is_on_the_clock_of_its_last_mark_and_on_tracks_beside_its_rank() -> None:
    thread = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 4, "args": {"name": "stream 4 "}}
    kernel = slice_("gemm", 1e9 + 2_000_009, 500.25, pid=0, tid=4)
    spans = slice_("PyTorch Profiler (0)", 1e9, 1e7, cat="Trace", tid="PyTorch Profiler")
    flow = {"ph": "s", "name": "fwdbwd", "pid": 7, "tid": 7, "ts": 1e9}
    profile = packed_profile([thread, *MARKS, slice_("mm", 1e9 + 1_000_009, 20), kernel, spans, flow], 100.0, str)
    far = NodeSummary(1, "b", rounds=[RoundSummary(0, 90.0, 110.0, 2)])
    far.rounds[0].ranks = [RankSummary(1, 0.0, 0.0, "returned", profile=profile)]
    nodes = NodeSummary(0, "a", phases=[("prepare", 45.0, 1.0)]), sent(far, offset=Offset(-50, 0))
    events = events_in(*nodes)
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seen = {event["name"]: event for event in events if event.get("cat") == "torch"}
    named = {name: tracks[event["tid"]] for name, event in seen.items()}
    assert named == {"mm": "rank 1: 7", "gemm": "rank 1: stream 4"}
    since = Findings(nodes).since
    assert [seen[name]["ts"] / 1e6 + since for name in ("mm", "gemm")] == pytest.approx([51.0, 52.0], abs=1e-5)
    assert seen["gemm"]["dur"] == 500.25


def test_a_profile_is_left_beside_what_another_thread_writes_of_its_rank(tmp_path: Path) -> None:
    """The one that notes groups, which has its draft there while torch still writes the profile."""
    others, file = tmp_path / "round-0-rank-0.draft", tmp_path / "round-0-rank-0.profile"
    others.write_text("groups")
    profile = StepProfile(1, 1, file)
    for step in range(2):
        profile.ended(step)
    assert expanded(file.read_text())
    assert others.read_text() == "groups"
    assert len(list(tmp_path.iterdir())) == 2


def test_of_a_profile_that_is_too_large_the_longest_slices_are_kept() -> None:
    chance = random.Random(1)
    many = [slice_(f"op {number} {chance.random()}", 1e9 + 9 + 2 * number, chance.random()) for number in range(50_000)]
    text = packed_profile([*MARKS, *many, slice_("whole", 1e9 + 9, 1e5)], 100.0, str)
    assert 1 << 15 < len(text) <= 128 << 10
    _, _, slices = expanded(text)
    assert slices[0][0] == "whole"
    assert min(took for _, _, _, took in slices) > 500, "ns"


def test_slices_that_overlap_by_rounding_are_cut_where_it_costs_least() -> None:
    phases = [("prepare", 0.0, 0.3), ("rendezvous", 0.2999, 0.5)]
    rank = RankSummary(0, 1.0, 2.0, "returned", phases=[("function", 0.0, 1.0)], stalls=[(0.2, 0.8001)])
    node = NodeSummary(0, "a", phases=phases, rounds=[RoundSummary(0, 1.0, 2.0, 1, ranks=[rank])])
    took = {event["name"]: event["dur"] for event in events_in(node) if event["ph"] == "X"}
    assert took == {"prepare": 299_900, "rendezvous": 500_000, "round 0": 1e6, "function": 1e6, "stall": 800_000}


def test_the_trace_has_a_pace_where_it_changes_and_not_in_each_slice_of_time() -> None:
    first = part(0)
    first.pace, first.rate, first.every = "0099", 9.0, 1.0
    counted = [(event["ts"], event["args"]["value"]) for event in events_in(job(first)) if event["ph"] == "C"]
    assert counted == [(0, 0.0), (2_000_000, 9.0)]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0099, "9.9 ms"),
        (0.00995, "10 ms"),
        (0.0995, "0.10 s"),
        (9.995, "10.0 s"),
        (59.95, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (36120, "10 h 02 min"),
    ],
)
def test_seconds_are_shown_as_people_read_them(seconds, shown):
    assert shown_seconds(seconds) == shown
