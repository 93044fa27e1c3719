"""What torch's flight recorders say is read as what a rank waits in: gloo's, as real ranks gave it, and NCCL's, as it
was recorded on a GPU (``nccl_said.json``; tests/gpu asks one again)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.compat import torch as torch_inside
from flytekitplugins_safedist.coordinator import inquiry
from flytekitplugins_safedist.hangs import gpus, recorders, stacks
from flytekitplugins_safedist.hangs.evidence import groups_file, ranks_of, text_of
from flytekitplugins_safedist.hangs.processes import Process
from flytekitplugins_safedist.hangs.recorders import Names, RankRecord, merge, of_horovod
from flytekitplugins_safedist.hangs.snapshot import PAUSE_SECONDS, SAMPLES, Snapshot
from flytekitplugins_safedist.hangs.stacks import Frame

SAID = json.loads(Path(__file__).with_name("nccl_said.json").read_text())


def noted(said: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """What the rank itself has noted of its groups."""
    groups = {name: text_of(ranks) for name, ranks in (said["groups"] or {}).items()}
    return {"groups": groups, "recorders": {"nccl": "dump_nccl_trace_json"}, "problem": "", **facts}


def nccl(name: str, rank: int, names: Names | None = None) -> RankRecord:
    """Of a rank on a GPU."""
    said = SAID[name][str(rank)]
    return merge(rank, noted(said), {"nccl": said["nccl"]}, {} if names is None else names)


def entry(number: int, name: str, **facts: Any) -> dict[str, Any]:
    """As gloo's recorder has it, less what nobody reads."""
    return {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "input_dtypes": ["Float"],
        "input_sizes": [[3]],
        "is_p2p": False,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"gloo:{name}",
        "record_id": number - 1,
        "time_created_ns": number * 10**9,
        "timeout_ms": 600_000,
        "retired": True,
        **facts,
    }


def dump(*entries: dict[str, Any], **enqueued: int) -> dict[str, Any]:
    """A recorder's answer; *enqueued* operations by id of the group."""
    counts = enqueued or {"_0": len(entries)}
    status = {id_[1:]: {"last_enqueued_collective": str(count)} for id_, count in counts.items()}
    return {"entries": list(entries), "pg_status": status, "pg_config": {"": {"name": "", "ranks": "[]"}}}


def gloo(answer: dict[str, Any], names: Names | None = None, **groups: str) -> RankRecord:
    facts = {"groups": groups or {"0": "0-2"}, "recorders": {"gloo": "fr_trace_json"}, "problem": ""}
    return merge(1, facts, {"gloo": answer}, {} if names is None else names)


def test_a_record_says_what_a_rank_has_begun_and_what_has_not_ended() -> None:
    found = gloo(dump(entry(1, "broadcast"), entry(2, "all_reduce", retired=False), entry(3, "barrier", retired=False)))
    [wait] = found.waits
    assert (str(wait), wait.since, wait.timeout) == ("all_reduce of Float[3] (#2 of group 0)", 2.0, 600.0)
    assert (wait.rank, wait.members, wait.source) == (1, "0-2", "gloo")
    assert found.begun == {wait.key: 3}
    assert found.latest[0] == (wait.key, 1, "broadcast of Float[3]")
    assert found.is_whole


def test_of_a_group_whose_name_another_had_what_that_one_did_is_no_matter() -> None:
    """It counts from 1 again; and what the other had not ended is never noted as ended."""
    facts = {"groups": {"0": "0-2"}, "recorders": {"gloo": "fr_trace_json"}, "again": {"0": 5 * 10**9}}
    earlier = [entry(1, "broadcast"), entry(2, "all_reduce", retired=False), entry(3, "barrier")]
    assert merge(1, facts, {"gloo": dump(*earlier)}, {}) == RankRecord(
        begun={}, count=6, is_whole=True, backends=("gloo",)
    )
    later = entry(1, "all_reduce", pg_id=2, record_id=3, time_created_ns=9 * 10**9, retired=False)
    names: Names = {}
    found = merge(1, facts, {"gloo": dump(*earlier, later, _0=3, _2=1)}, names)
    [wait] = found.waits
    assert (wait.number, wait.since, found.begun) == (1, 9.0, {wait.key: 1})
    left = dump(entry(7, "all_reduce", pg_id=3, process_group=["9", ""], record_id=4000), _0=3, _2=4, _3=7)
    assert merge(1, facts, {"gloo": left}, names).begun == {"gloo 9 ": 7, "gloo 0 0-2": 4}


def test_nobody_waits_in_a_group_that_is_closed() -> None:
    """What was given up there is never noted as ended; how far the rank had come counts for the others."""
    facts = {"groups": {"0": "0-2"}, "recorders": {"gloo": "fr_trace_json"}, "closed": ["3"]}
    left = entry(1, "barrier", pg_id=1, process_group=["3", "undefined"], retired=False)
    found = merge(1, facts, {"gloo": dump(left, entry(2, "all_reduce", retired=False))}, {})
    assert [wait.group for wait in found.waits] == ["0"]
    assert found.begun == {"gloo 3 ": 1, "gloo 0 0-2": 2}


def test_messages_between_two_ranks_do_not_hide_a_collective_that_has_not_ended() -> None:
    """Gloo counts them as operations of the group that have ended; its collectives it numbers without them."""
    found = gloo(dump(entry(5, "barrier"), entry(6, "all_reduce", retired=False), _0=7))
    assert [wait.number for wait in found.waits] == [6]


@pytest.mark.parametrize("name", ["all_reduce, the other sleeps", "all_reduce after a batch, the other sleeps"])
def test_what_a_rank_waits_in_on_a_gpu_is_known_and_who_has_not_come(name: str) -> None:
    first, other = (nccl(name, rank, {("nccl", "2"): "3", ("nccl", "3"): "4"}) for rank in (0, 1))
    [wait] = first.waits
    assert str(wait).startswith("all_reduce of Float[7] (#")
    assert (wait.source, wait.members, wait.timeout) == ("nccl", "0,1", 120.0)
    age = SAID[name]["0"]["now_ns"] / 1e9 - wait.since
    assert 1.5 < age < 3, "seconds, since it was enqueued"
    assert other.waits == ()
    assert other.begun[wait.key] == wait.number - 1


def test_what_is_sent_in_a_batch_is_one_wait_of_those_who_exchange_it() -> None:
    first, other = (nccl("batch_isend_irecv, the other sleeps", rank, {("nccl", "3"): "4"}) for rank in (0, 1))
    [wait] = first.waits
    assert str(wait) == "send 0->1, recv 0<-1 (group 0, between ranks 0,1)"
    assert wait.number == 0
    assert wait.members == "0,1"
    assert other.waits == ()


def test_ranks_that_call_different_operations_of_nccl_are_told_apart() -> None:
    calls = [record.latest[-1] for record in (nccl("other operations", 0), nccl("other operations", 1))]
    assert calls == [("nccl 0 0,1", 3, "all_reduce of Float[3]"), ("nccl 0 0,1", 3, "broadcast of Float[9]")]


def test_where_nobody_notes_the_ends_of_operations_nothing_is_concluded() -> None:
    found = nccl("TORCH_NCCL_BLOCKING_WAIT, the other sleeps", 0)
    assert (found.waits, found.is_whole) == ((), False)


def test_where_the_user_has_nccl_end_nothing_its_timeout_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_inside.gives_up("nccl")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert (torch_inside.gives_up("nccl"), torch_inside.gives_up("gloo")) == (False, True)
    said = SAID["all_reduce, the other sleeps"]["0"]
    found = merge(0, noted(said, endless=["nccl"]), {"nccl": said["nccl"]}, {("nccl", "2"): "3", ("nccl", "3"): "4"})
    assert (found.waits[0].timeout, found.timeout) == (math.inf, math.inf)


def test_of_a_communicator_that_is_not_made_yet_nothing_is_recorded() -> None:
    found = nccl("a communicator that is not made", 0)
    assert (found.waits, found.begun, found.is_whole) == ((), {}, True)


def test_groups_of_two_backends_are_two_and_have_each_its_count() -> None:
    said = SAID["gloo and NCCL in one group"]["0"]
    found = merge(0, noted(said), {"nccl": said["nccl"], "gloo": said["gloo"]}, {})
    assert found.begun == {"nccl 0 0": 2, "nccl 2 0": 1, "gloo 0 0": 2, "gloo 1 0": 1, "gloo 2 0": 1}
    assert [wait.key for wait in found.waits] == ["nccl 0 0"]


def test_an_older_torch_that_answers_for_gloo_whatever_it_is_asked_is_not_believed() -> None:
    said = SAID["gloo and NCCL in one group"]["0"]
    assert merge(0, noted(said), {"nccl2": said["gloo"]}, {}).begun == {}


def test_a_group_whose_entries_have_left_the_ring_is_known_by_its_name_or_not_at_all() -> None:
    ring = [entry(number, "all_reduce", pg_id=2, process_group=["3", ""], record_id=number) for number in (9, 10)]
    answer, members = dump(*ring, _0=5, _1=40, _2=10), {"0": "0-2", "2": "0,1", "3": "1,2"}
    names: Names = {("gloo", "0"): "0", ("gloo", "1"): "2"}
    found = gloo(answer, names, **members)
    assert found.begun == {"gloo 3 1,2": 10, "gloo 0 0-2": 5, "gloo 2 0,1": 40}
    assert found.is_whole
    assert names["gloo", "2"] == "3", "for later looks"
    found = gloo(answer, {("gloo", "0"): "0"}, **members)
    assert found.begun == {"gloo 3 1,2": 10, "gloo 0 0-2": 5}
    assert not found.is_whole, "one has been used, and nobody knows which"
    assert nccl("a full ring", 0).begun == {"nccl 0 0": 2606}


def test_torchs_own_parser_reads_what_these_tests_are_made_of() -> None:
    """Its types are what an installed torch promises; it changes them with the version in the dump."""
    types = pytest.importorskip("torch.distributed.flight_recorder.components.types")
    ranks = [said for name, by_rank in SAID.items() if name != "source" for said in by_rank.values()]
    for each in [each for said in ranks for each in said["nccl"].get("entries", ())]:
        group = each["process_group"][0]
        operation = types.Op({**each, "frames": []}, {group: {0, 1}}, group)
        assert operation.type in each["profiling_name"]


def test_a_backend_that_torch_does_not_record_is_said_and_so_is_what_cannot_be_read() -> None:
    facts = {"groups": {"0": "0-2"}, "recorders": {"gloo": "", "nccl": "dump_nccl_trace_json"}, "problem": ""}
    assert merge(1, facts, {"nccl": dump(_0=0)}, {}).unwatched == ("gloo",)
    assert merge(1, {**facts, "problem": "torch no longer has it"}, {}, {}).unwatched == ("torch no longer has it",)


def test_a_look_is_over_in_time_whatever_a_rank_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One whose threads all stand in its GPU's driver, say: it is what the others wait for."""
    now = [100.0]

    def says_nothing(_path: Path, _what: str, seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(recorders, "ask", says_nothing)
    groups_file(tmp_path / "rank").write_text(json.dumps({"recorders": {"gloo": "a", "nccl": "b"}}))
    assert recorders.read({0: tmp_path / "rank"}, {}) == {}
    stands = SAMPLES * stacks.WRITE_SECONDS + (SAMPLES - 1) * PAUSE_SECONDS
    assert now[0] - 100.0 + stands + gpus.ANSWER_SECONDS < inquiry.ANSWER_SECONDS / 1.5


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0, 1, 2, 3], "0-3"), (range(1, 58, 8), "1-57:8"), ([4, 0], "0,4"), ([0, 1, 5], "0,1,5"), ([7], "7"), ([], "")],
)
def test_members_of_a_group_are_a_short_text_and_the_same_again(ranks: Any, text: str) -> None:
    assert text_of(ranks) == text
    assert ranks_of(text) == sorted(ranks)


def test_a_wait_for_horovod_is_called_by_the_operation_that_the_user_has_called() -> None:
    stack = (
        Frame("/lib/horovod/torch/mpi_ops.py", 1285, "synchronize"),
        Frame("/lib/torch/autograd/function.py", 625, "apply"),
        Frame("/lib/horovod/torch/mpi_ops.py", 254, "allreduce"),
        Frame("/app/train.py", 11, "train"),
    )
    [wait] = of_horovod(0, 2, (4, 3, "w"), stack).waits
    assert (str(wait), wait.timeout) == ("allreduce of w (#4 of group Horovod)", math.inf)
    assert of_horovod(0, 2, (4, 4, ""), stack).waits == ()


def test_a_project_in_a_directory_called_horovod_is_the_users() -> None:
    users = Snapshot(0, Process(1, "S"), threads=((Frame("/app/horovod/train.py", 7, "evaluate"),),))
    assert (users.waits_in, users.where) == ("", "at train.py:7 in evaluate")
    assert str(of_horovod(0, 2, (4, 3, ""), users.stack).waits[0]).startswith("a collective ")
