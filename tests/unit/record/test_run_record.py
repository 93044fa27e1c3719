"""From what ranks write to what the page says: sizes, who is late, and files that are cut short."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flytekitplugins_safedist.record import findings, node, page, trace, writer
from flytekitplugins_safedist.record.clocks import Ahead, Offset
from flytekitplugins_safedist.record.events import (
    GpuPart,
    Interval,
    NodePart,
    PhaseDone,
    RankPart,
    RankStarted,
    RoundPart,
    SaveDone,
    StageTimes,
    bucket,
    events_of,
    percentile,
)
from flytekitplugins_safedist.record.node import NodeRecorder, RankEnd
from flytekitplugins_safedist.record.profile import packed, unpacked
from tests.harness import chrome_trace


def plain(text: str) -> str:
    return text


def events_in(parts: list[NodePart]) -> list[dict[str, Any]]:
    """Of the trace of these nodes, which is as it should be."""
    made = json.loads(gzip.decompress(trace.trace(parts)))
    chrome_trace.check(made)
    return list(made["traceEvents"])


def interval(since: float, seconds: float, steps: int = 10, **stages: tuple[int, float, float, float]) -> Interval:
    number = bucket(seconds / steps)
    return Interval(since, seconds, stages, steps, -1, {number: steps}, (since, seconds / steps), {}, 1.0, 1 << 30, 0)


def test_a_line_that_is_cut_short_or_damaged_is_none() -> None:
    lines = RankStarted(1, 3, 0, 1.5).line() + PhaseDone("import", 1.5, 2.0).line()
    assert list(events_of(lines + '{"event": "Nothing"}\n[]\n' + SaveDone(3, 1, 2).line()[:-9])) == [
        RankStarted(1, 3, 0, 1.5),
        PhaseDone("import", 1.5, 2.0),
    ]


def test_a_percentile_is_at_most_five_hundredths_off() -> None:
    durations = {bucket(0.1): 90, bucket(0.25): 10}
    assert percentile(durations, 0.5) == pytest.approx(0.1, rel=0.05)
    assert percentile(durations, 0.95) == pytest.approx(0.25, rel=0.05)
    assert percentile({}, 0.5) == 0


def part(rank: int, **stages: tuple[int, float, float]) -> RankPart:
    """Stages as times, seconds of each, and when they ended on average."""
    made = {name: StageTimes(times, times * seconds, seconds, end) for name, (times, seconds, end) in stages.items()}
    return RankPart(rank, 0.0, 10.0, "returned", stages=made)


def test_of_two_ranks_the_one_is_named_that_is_late_and_not_the_one_that_waits() -> None:
    early = part(0, sync=(100, 0.052, 5.0), load=(100, 0.010, 5.010))
    late = part(1, sync=(100, 0.002, 5.0), load=(100, 0.060, 5.060))
    assert [(held.rank, held.stage) for held in findings.held_back([early, late])] == [(1, "load")]
    [held] = findings.held_back([early, late])
    assert (held.seconds, held.usual, held.total) == pytest.approx((0.050, 0.010, 5.0))


def test_nobody_is_named_where_ranks_differ_by_little_or_are_alone() -> None:
    ranks = [part(rank, load=(100, 0.1 + rank * 0.001, 5.0 + rank * 0.001)) for rank in range(2)]
    assert findings.held_back(ranks) == []
    assert findings.held_back([part(0, load=(100, 3.0, 5.0))]) == []


def test_a_rank_that_was_ended_a_step_further_is_not_late_for_that_and_few_steps_name_nobody() -> None:
    # Rank 0 ended "load" 101 times, rank 1 a hundred times, and waits in "sync" for rank 0.
    further = part(0, load=(101, 0.060, 5.060 + 0.035), sync=(100, 0.010, 5.070))
    other = part(1, load=(100, 0.010, 5.010), sync=(100, 0.060, 5.070))
    assert [(held.rank, held.stage) for held in findings.held_back([further, other])] == [(0, "load")]
    even = [part(0, load=(101, 0.060, 5.095)), part(1, load=(100, 0.060, 5.060))]
    assert findings.held_back(even) == []
    uneven = [part(0, load=(8, 0.060, 5.060)), part(1, load=(7, 0.010, 5.010))]
    assert findings.held_back(uneven) == []
    assert findings.held_back([part(0, load=(2, 0.015, 5.015)), part(1, load=(2, 0.010, 5.010))]) == []
    once = [part(0, load=(1, 0.060, 5.060)), part(1, load=(1, 0.010, 5.010))]
    assert [(held.rank, held.stage) for held in findings.held_back(once)] == [(0, "load")], "that is no noise"


def test_of_stages_within_stages_the_innermost_is_named_that_costs_the_time() -> None:
    def rank(number: int, decode: float) -> RankPart:
        made = part(number, step=(100, 0.1, 5.1))
        inner = {"step/data": (0.01 + decode, 5.0 + decode), "step/data/decode": (decode, 4.99 + decode)}
        made.stages |= {name: StageTimes(100, 100 * each, each, end) for name, (each, end) in inner.items()}
        return made

    held = findings.held_back([rank(0, 0.001), rank(1, 0.051), rank(2, 0.001)])
    assert [(each.rank, each.stage) for each in held] == [(1, "step/data/decode")], "all take as long for a step"


def ten_hours(tmp_path: Path, ranks: range, number: int, clock: list[float]) -> NodeRecorder:
    """A node of eight ranks and four rounds, whose files are as long as ten hours make them."""
    chance = random.Random(number)
    made = NodeRecorder(f"host-{number}", plain)
    for round_no in range(4):
        clock[0] = 1000.0 + 9001 * round_no
        made.begins(round_no, number)
        since, ends = made.part.rounds[-1].since, []
        for rank in ranks:
            file = tmp_path / f"{round_no}-{rank}"
            lines = [
                RankStarted(1, rank, round_no, since + 1),
                PhaseDone("import", since + 1, 5),
                PhaseDone("inputs", since + 6, 1),
            ]
            at = since + 7
            while at < since + 9000:
                long = chance.uniform(4, 30)
                stages = {f"stage-{n}": (10, long / 9, long / 90, 10 * (at - since)) for n in range(8)}
                lines.append(interval(at, long, chance.randint(0, 9) or 1, **stages))
                lines += [SaveDone(int(at), at, 1.0)] if chance.random() < 0.05 else []
                at += long + (chance.random() < 0.02) * 60
            file.write_text("".join(line.line() for line in lines))
            ends.append(RankEnd(rank, file, "ended with the others", since + 9000))
        made.over(ends)
        made.why(f"rank {ranks[0]} failed")
    return made


def test_sixty_four_ranks_over_ten_hours_are_a_page_of_300_kb_and_small_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    nodes = [ten_hours(tmp_path, range(at * 8, at * 8 + 8), at, clock) for at in range(8)]
    assert max(len(node.text_of(each.part, 1 << 20)) for each in nodes) < 200_000
    assert all(len(node.text_of(each.part, 20_000)) <= 20_000 for each in nodes)
    assert len(node.text_of(nodes[0].part, 20_000)) > 500, "and still says what it can"
    parts = node.merged(nodes[0].part, [(node.text_of(each.part, 1 << 20), Offset(0.0, 0.001)) for each in nodes[1:]])
    found = findings.found_in(parts)
    assert [rank.rank for rank in found.ranks] == list(range(64))
    told = page.JobEnd("train", code="USER:ValueError", cause="x" * 200_000)
    html = page.fragment(found, told)
    assert 30_000 < len(html.encode()) <= page.LIMIT == 300_000
    assert "<td>63</td>" in html, "all of them"
    events = events_in(parts)
    assert {event["pid"] for event in events} == set(range(8))
    assert all(event["ts"] >= -1 for event in events if event["ph"] != "M")


def test_a_part_that_is_damaged_or_of_another_version_is_left_out() -> None:
    own = NodeRecorder("a", plain).part
    other = NodeRecorder("b", plain)
    other.part.version = 99
    assert node.merged(own, [("{", Offset(0.0, None)), (node.text_of(other.part, 1000), Offset(0.0, None))]) == [own]


def test_what_code_of_the_task_calls_a_phase_is_text_in_the_page() -> None:
    """Phases come from a file that this code can write to."""
    rank = part(0)
    rank.phases = [('"><script>', 0.0, 5.0)]
    parts = [NodePart(0, "host", 0.0, rounds=[RoundPart(0, 0.0, 10.0, ranks=[rank])])]
    html = page.fragment(findings.found_in(parts), page.JobEnd("train"))
    assert html.count("p-&quot;") == 2
    assert "<script" not in html


def test_what_a_rank_writes_is_what_its_node_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    file = tmp_path / "events"
    recorder = writer.Recorder(file, rank=0, round_no=0, at=100.0)
    monkeypatch.setattr(writer.RECORDER, "value", recorder)
    for step in range(20):
        for name, seconds in (("load", 0.25), ("forward", 0.5)):
            with writer.stage(name), writer.stage("part"):
                clock[0] += seconds if (step, name) != (11, "load") else 30.0
    recorder.saved(7, 110.0, 0.5)
    recorder.close(failed=False)
    nodes = NodeRecorder("host", plain)
    nodes.begins(0, 0)
    nodes.over([RankEnd(0, file, "returned", clock[0])])
    [rank] = nodes.part.rounds[0].ranks
    assert list(rank.stages) == ["load/part", "load", "forward/part", "forward"]
    assert (rank.stages["load"].times, rank.stages["load"].longest) == (20, 30.0)
    assert rank.stages["forward"].seconds == pytest.approx(10.0)
    assert rank.steps == 19
    assert [round(seconds, 1) for _, seconds in rank.stalls] == [30.5]
    assert rank.saves == [(7, 110.0, 0.5)]
    assert not file.exists()


def test_outside_a_rank_a_stage_is_nothing() -> None:
    with writer.stage("load"):
        pass


def test_names_without_end_are_one(tmp_path: Path) -> None:
    recorder = writer.Recorder(tmp_path / "events", rank=0, round_no=0, at=0.0)
    for number in range(1000):
        recorder.leave(recorder.enter(f"step {number}"), 0.0, 0.001)
    recorder.close(failed=False)
    text = (tmp_path / "events").read_text()
    assert "(others)" in text
    assert "step 999" not in text
    assert len(text) < 10_000


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
    other = NodeRecorder("b", plain)
    other.phase("staging", 5.0, 1.0)
    other.begins(0, 1)
    [_, moved] = node.merged(NodeRecorder("a", plain).part, [(node.text_of(other.part, 9000), Offset(100.0, 0.5))])
    assert moved.phases[0] == ("staging", 105.0, 1.0)
    assert moved.rounds[0].since == pytest.approx(other.part.rounds[0].since + 100.0)
    assert (moved.offset, moved.error) == (100.0, 0.5)


def test_steps_that_are_told_are_counted_and_not_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    recorder = writer.Recorder(tmp_path / "events", rank=0, round_no=0, at=100.0)
    for step in range(5):
        for _ in range(3):
            clock[0] += 0.1
            recorder.leave(recorder.enter("micro"), clock[0], clock[0])
        recorder.progress(np.int64(100 + step), {"loss": np.float32(1.0 / (step + 1)), "none": None})
    recorder.close(failed=False)
    nodes = NodeRecorder("host", plain)
    nodes.begins(0, 0)
    nodes.over([RankEnd(0, tmp_path / "events", "returned", clock[0])])
    [rank] = nodes.part.rounds[0].ranks
    assert (rank.steps, rank.step) == (4, 104)
    shown = page.fragment(findings.found_in([nodes.part]), page.JobEnd("train"))
    assert "5 steps, " in shown, "the first one has no known beginning, and was a step"
    assert "<tr><td>0</td><td>5</td>" in shown
    assert rank.values == pytest.approx({"loss": 0.2}), "and what is no number is left out"
    assert percentile(rank.durations, 0.5) == pytest.approx(0.3, rel=0.05)


def test_what_does_not_fit_a_message_loses_what_is_finest_and_oldest_first(tmp_path: Path) -> None:
    made = NodeRecorder("host", plain)
    for round_no in range(5):
        made.begins(round_no, 0)
        file = tmp_path / str(round_no)
        since = made.part.rounds[-1].since
        line = interval(since, 1.0, load=(10, 0.5, 0.1, 5.0)).line()
        file.write_text(RankStarted(1, 0, round_no, since).line() + line)
        made.over([RankEnd(0, file, "returned", since + 1.0)])
    all_ = json.loads(node.text_of(made.part, 1 << 20))
    assert [len(every["ranks"]) for every in all_["rounds"]] == [1] * 5
    assert all(every["ranks"][0]["shares"] for every in all_["rounds"])
    coarser = json.loads(node.text_of(made.part, len(node.text_of(made.part, 1 << 20)) - 1))
    assert [len(every["ranks"]) for every in coarser["rounds"]] == [1] * 5
    assert not any(every["ranks"][0]["shares"] for every in coarser["rounds"])
    latest = json.loads(node.text_of(made.part, len(json.dumps(coarser)) - 1))
    assert [(every["round"], len(every["ranks"])) for every in latest["rounds"]] == [(1, 0), (2, 0), (3, 0), (4, 1)]
    assert [len(every["ranks"]) for every in json.loads(node.text_of(made.part, 10))["rounds"]] == [0] * 4


def test_how_gpus_were_used_keeps_its_size_and_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = NodeRecorder("host", plain)
    for number in range(5000):
        memory = 7 << 30 if number == 3210 else 1 << 30
        made.sees(GpuPart(3, "GPU-3", 80 << 30, 5.0 * number, 5.0, [100 if number < 2500 else 0], [memory], ""))
    [gpu] = made.part.gpus
    assert 100 <= len(gpu.busy) == len(gpu.memory) <= 2 * node.SLICES
    assert gpu.since == 0
    assert gpu.every * len(gpu.busy) == pytest.approx(25_000, rel=0.02), "all of the time"
    assert sum(gpu.busy) / len(gpu.busy) == pytest.approx(50, abs=2)
    assert max(gpu.memory) == 7 << 30
    [short] = json.loads(node.text_of(made.part, 500))["gpus"]
    assert (len(short["busy"]), max(short["memory"])) == (1, 7 << 30)
    made.sees(GpuPart(4, "GPU-4", 80 << 30, 0.0, 5.0, [10], [1 << 30], "its temperature"))
    html = page.fragment(findings.found_in([made.part]), page.JobEnd("train"))
    assert "<td>3</td><td>GPU-3</td><td>50%</td><td>7.0 of 80.0 GiB</td>" in html
    assert "<td>its temperature</td>" in html
    events = events_in([made.part])
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"GPU 3 busy (%)", "GPU 3 memory"}


def slice_(name: str, at: float, took: float, **more: object) -> dict[str, object]:
    """As torch 2.13 writes one."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": at, "dur": took, **more}


MARKS = [slice_("safedist: the clock", at, 1.0) for at in (1e9, 1e9 + 9)]


def test_a_profile_is_on_the_clock_of_its_last_mark_and_on_tracks_beside_its_rank() -> None:
    thread = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 4, "args": {"name": "stream 4 "}}
    kernel = slice_("gemm", 1e9 + 2_000_009, 500.25, pid=0, tid=4)
    spans = slice_("PyTorch Profiler (0)", 1e9, 1e7, cat="Trace", tid="PyTorch Profiler")
    flow = {"ph": "s", "name": "fwdbwd", "pid": 7, "tid": 7, "ts": 1e9}
    text = packed([thread, *MARKS, slice_("mm", 1e9 + 1_000_009, 20), kernel, spans, flow], 100.0, plain)
    far = RankPart(1, 0.0, 0.0, "returned", profile=text)
    part = NodePart(1, "b", 0.0, rounds=[RoundPart(0, 90.0, 110.0, ranks=[far])])
    parts = node.merged(
        NodePart(0, "a", 0.0, phases=[("prepare", 45.0, 1.0)]), [(json.dumps(part.to_dict()), Offset(-50, 0))]
    )
    assert json.dumps(part.to_dict()) == node.text_of(part, 1 << 20)
    events = events_in(parts)
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seen = {event["name"]: event for event in events if event.get("cat") == "torch"}
    assert {name: tracks[event["tid"]] for name, event in seen.items()} == {
        "mm": "rank 1: 7",
        "gemm": "rank 1: stream 4",
    }
    since = findings.found_in(parts).since
    assert [seen[name]["ts"] / 1e6 + since for name in ("mm", "gemm")] == pytest.approx([51.0, 52.0], abs=1e-5)
    assert seen["gemm"]["dur"] == 500.25


def test_of_a_profile_that_is_too_large_the_longest_slices_are_kept_and_it_goes_first() -> None:
    chance = random.Random(1)
    many = [slice_(f"op {number} {chance.random()}", 1e9 + 9 + 2 * number, chance.random()) for number in range(50_000)]
    text = packed([*MARKS, *many, slice_("whole", 1e9 + 9, 1e5)], 100.0, plain)
    assert 1 << 15 < len(text) <= 128 << 10
    _, _, slices = unpacked(text)
    assert slices[0][0] == "whole"
    assert min(took for _, _, _, took in slices) > 500, "ns"
    rank = RankPart(0, 0.0, 1.0, "returned", pace="9" * 96, profile=text)
    part = NodePart(0, "a", 0.0, rounds=[RoundPart(0, 0.0, 1.0, ranks=[rank])])
    [kept] = json.loads(node.text_of(part, 64 << 10))["rounds"][0]["ranks"]
    assert (kept["profile"], kept["pace"]) == ("", "9" * 96)


def test_slices_that_overlap_by_rounding_are_cut_where_it_costs_least() -> None:
    phases = [("prepare", 0.0, 0.3), ("rendezvous", 0.2999, 0.5)]
    rank = RankPart(0, 1.0, 2.0, "returned", phases=[("function", 1.0, 1.0)], stalls=[(1.2, 0.8001)])
    part = NodePart(0, "a", 0.0, phases=phases, rounds=[RoundPart(0, 1.0, 2.0, ranks=[rank])])
    took = {event["name"]: event["dur"] for event in events_in([part]) if event["ph"] == "X"}
    assert took == {"prepare": 299_900, "rendezvous": 500_000, "round 0": 1e6, "function": 1e6, "stall": 800_000}
