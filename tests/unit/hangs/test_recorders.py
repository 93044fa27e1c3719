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
from flytekitplugins_safedist.hangs.recorders import Names, RankRecord, merge, of_horovod
from flytekitplugins_safedist.hangs.snapshot import PAUSE_SECONDS, SAMPLES
from flytekitplugins_safedist.hangs.stacks import Frame

SAID = json.loads(Path(__file__).with_name("nccl_said.json").read_text())


def noted(said: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """What the rank itself has noted of its groups."""
    groups = {name: text_of(ranks) for name, ranks in (said["groups"] or {}).items()}
    return {"groups": groups, "recorders": {"nccl": "dump_nccl_trace_json"}, **facts}


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


def gloo(answer: dict[str, Any]) -> RankRecord:
    return merge(1, {"groups": {"0": "0-2"}, "recorders": {"gloo": "fr_trace_json"}}, {"gloo": answer}, {})


def said(found: RankRecord) -> str:
    """As text: its waits, how many it has begun by key, whether that is all."""
    begun = [f"{key}: {number}" for key, number in found.begun.items()]
    return "; ".join([*map(str, found.waits.values()), *begun, *(["whole"] if found.is_whole else [])])


def test_a_record_says_what_a_rank_has_begun_and_what_has_not_ended() -> None:
    found = gloo(dump(entry(1, "broadcast"), entry(2, "all_reduce", retired=False), entry(3, "barrier", retired=False)))
    assert said(found) == "all_reduce of Float[3] (#2 of group 0); gloo 0 0-2: 3; whole"
    [wait] = found.waits.values()
    assert (wait.rank, wait.members, wait.source, wait.since, wait.timeout) == (1, "0-2", "gloo", 2.0, 600.0)
    assert found.latest[0] == (wait.key, 1, "broadcast of Float[3]")


FULL = dump(
    *[entry(at, "all_reduce", pg_id=2, process_group=["3", ""], record_id=at) for at in (9, 10)], _0=5, _1=40, _2=10
)
"""A ring from which all entries of groups 0 and 1 have gone."""
EARLIER = [entry(1, "broadcast"), entry(2, "all_reduce", retired=False), entry(3, "barrier")]
LATER = entry(1, "all_reduce", pg_id=2, record_id=3, time_created_ns=9 * 10**9, retired=False)
SET_BACK = entry(2, "barrier", pg_id=2, record_id=4, retired=False)  # the clock was, meanwhile
OF_9 = entry(7, "all_reduce", pg_id=3, process_group=["9", ""], record_id=4000)
OF_CLOSED = entry(1, "barrier", pg_id=1, process_group=["3", "undefined"], retired=False)
REDUCES = entry(2, "all_reduce", retired=False)
AGAIN, GROUPS = {"again": {"0": 5 * 10**9}}, {"groups": {"0": "0-2", "2": "0,1", "3": "1,2"}}


@pytest.mark.parametrize(
    ("answer", "facts", "names", "says"),
    [
        # Of a group whose name another had before it is no matter what that one did, nor what it had not ended.
        (dump(*EARLIER), AGAIN, {}, "whole"),
        (dump(*EARLIER, LATER, _0=3, _2=1), AGAIN, {}, "all_reduce of Float[3] (#1 of group 0); gloo 0 0-2: 1; whole"),
        (
            dump(*EARLIER, {**LATER, "retired": True}, SET_BACK, _0=3, _2=2),
            AGAIN,
            {},
            "barrier of Float[3] (#2 of group 0); gloo 0 0-2: 2; whole",
        ),
        (dump(OF_9, _0=3, _2=4, _3=7), AGAIN, {"0": "\0", "2": "0"}, "gloo 9 : 7; gloo 0 0-2: 4; whole"),
        # What was given up in a group that is closed is never noted as ended; one of its name may be made again.
        (
            dump(OF_CLOSED, REDUCES),
            {"closed": ["3"]},
            {},
            "all_reduce of Float[3] (#2 of group 0); gloo 0 0-2: 2; whole",
        ),
        # Messages are counted as operations of the group that have ended; its collectives are numbered without them.
        (
            dump(entry(5, "barrier"), entry(6, "all_reduce", retired=False), _0=7),
            {},
            {},
            "all_reduce of Float[3] (#6 of group 0); gloo 0 0-2: 6; whole",
        ),
        # A group whose entries have left the ring is known by its name, or not at all.
        (FULL, GROUPS, {"0": "0", "1": "2"}, "gloo 3 1,2: 10; gloo 0 0-2: 5; gloo 2 0,1: 40; whole"),
        (FULL, GROUPS, {"0": "0"}, "gloo 3 1,2: 10; gloo 0 0-2: 5"),
        (FULL, {**GROUPS, "closed": ["9"]}, {"0": "0", "1": "9"}, "gloo 3 1,2: 10; gloo 0 0-2: 5; whole"),
    ],
)
def test_what_counts_of_groups_that_are_not_there_any_more(
    answer: dict[str, Any], facts: dict[str, Any], names: dict[str, str], says: str
) -> None:
    kept: Names = {("gloo", id_): name for id_, name in names.items()}
    found = merge(1, {"groups": {"0": "0-2"}, "recorders": {"gloo": "fr_trace_json"}, **facts}, {"gloo": answer}, kept)
    assert said(found) == says
    ids = {str(each["pg_id"]): each["process_group"][0] for each in answer["entries"]}
    assert {id_: kept["gloo", id_] for id_ in ids if kept["gloo", id_] != "\0"}.items() <= ids.items(), (
        "for later looks"
    )


SLEEPS = ", the other sleeps"
BETWEEN = "send 0->1, recv 0<-1 (group 0, between ranks 0,1); nccl 0 0,1: 7; nccl 0, between ranks 0,1 0,1: 0"


@pytest.mark.parametrize(
    ("name", "names", "says"),
    [
        (f"batch_isend_irecv{SLEEPS}", {("nccl", "3"): "4"}, BETWEEN),
        (f"TORCH_NCCL_BLOCKING_WAIT{SLEEPS}", {}, "nccl 0 0,1: 3"),  # nobody notes the ends of operations
        ("a communicator that is not made", {}, "whole"),
        ("a full ring", {}, "nccl 0 0: 2606"),
    ],
)
def test_what_a_gpu_has_recorded(name: str, names: Names, says: str) -> None:
    assert said(nccl(name, 0, names)) == says


@pytest.mark.parametrize("name", [f"all_reduce{SLEEPS}", f"all_reduce after a batch{SLEEPS}"])
def test_what_a_rank_waits_in_on_a_gpu_is_known_and_who_has_not_come(name: str) -> None:
    first, other = (nccl(name, rank, {("nccl", "2"): "3", ("nccl", "3"): "4"}) for rank in (0, 1))
    [wait] = first.waits.values()
    assert str(wait).startswith("all_reduce of Float[7] (#")
    assert (wait.source, wait.members, wait.timeout) == ("nccl", "0,1", 120.0)
    assert 1.5 < SAID[name]["0"]["now_ns"] / 1e9 - wait.since < 3, "seconds, since it was enqueued"
    assert (other.waits, other.begun[wait.key]) == ({}, wait.number - 1)
    calls = [nccl("other operations", rank).latest[-1] for rank in (0, 1)]
    assert calls == [("nccl 0 0,1", 3, "all_reduce of Float[3]"), ("nccl 0 0,1", 3, "broadcast of Float[9]")]


def test_where_the_user_has_nccl_end_nothing_its_timeout_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_inside.gives_up("nccl")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert (torch_inside.gives_up("nccl"), torch_inside.gives_up("gloo")) == (False, True)
    said_ = SAID[f"all_reduce{SLEEPS}"]["0"]
    found = merge(0, noted(said_, endless=["nccl"]), {"nccl": said_["nccl"]}, {})
    assert [*(wait.timeout for wait in found.waits.values()), found.timeout] == [math.inf, math.inf]


def test_groups_of_two_backends_are_two_and_have_each_its_count() -> None:
    of_two = SAID["gloo and NCCL in one group"]["0"]
    found = merge(0, noted(of_two), {"nccl": of_two["nccl"], "gloo": of_two["gloo"]}, {})
    assert found.begun == {"nccl 0 0": 2, "nccl 2 0": 1, "gloo 0 0": 2, "gloo 1 0": 1, "gloo 2 0": 1}
    assert list(found.waits) == ["nccl 0 0"]
    # An older torch answers for gloo, whatever it is asked: it is not believed.
    assert merge(0, noted(of_two), {"nccl2": of_two["gloo"]}, {}).begun == {}


def test_torchs_own_parser_reads_what_these_tests_are_made_of() -> None:
    """Its types are what an installed torch promises; it changes them with the version in the dump."""
    types = pytest.importorskip("torch.distributed.flight_recorder.components.types")
    ranks = [said for name, by_rank in SAID.items() if name != "source" for said in by_rank.values()]
    for each in [each for said in ranks for each in said["nccl"].get("entries", ())]:
        group = each["process_group"][0]
        operation = types.Op({**each, "frames": []}, {group: {0, 1}}, group)
        assert operation.type in each["profiling_name"]


def test_a_backend_that_torch_does_not_record_is_said_and_so_is_what_cannot_be_read() -> None:
    facts = {"recorders": {"gloo": "", "nccl": "dump_nccl_trace_json", "torch no longer has it": ""}}
    assert merge(1, facts, {"nccl": dump(_0=0)}, {}).unwatched == ("gloo", "torch no longer has it")
    assert not merge(1, facts, {}, {}).is_whole
    assert merge(1, {"recorders": {}, "closed": ["0"]}, {}, {}).is_whole, "it is in no group any more"


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
    [wait] = of_horovod(0, 2, (4, 3, "w"), stack).waits.values()
    assert (str(wait), wait.timeout) == ("allreduce of w (#4 of group Horovod)", math.inf)
    assert of_horovod(0, 2, (4, 4, ""), stack).waits == {}
    [wait] = of_horovod(0, 2, (4, 3, ""), (Frame("/app/horovod/train.py", 7, "evaluate"),)).waits.values()
    assert str(wait) == "a collective (#4 of group Horovod)", "a project in a directory of that name is the user's"
