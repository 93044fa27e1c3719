"""The coordinator's decisions, one by one: what nodes say, and what they are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flytekitplugins_safedist.job.deciding import Coordinator
from flytekitplugins_safedist.job.ending import Finish, verdict_of
from flytekitplugins_safedist.job.facts import Cause, End, History, Spent
from flytekitplugins_safedist.job.messages import (
    Again,
    AllSaved,
    Answer,
    Asks,
    Beat,
    CannotBegin,
    Ended,
    Floor,
    Gather,
    Go,
    Greet,
    Hello,
    Leave,
    Leaves,
    Listens,
    Message,
    Preempted,
    Refused,
    Returned,
    Saved,
    Stop,
    Tell,
    TheEnd,
    Told,
    Uploaded,
    Waits,
    Welcome,
)
from flytekitplugins_safedist.job.rules import Disconnected, Rules, Said, Tick

RULES = Rules("job", min_nodes=2, max_nodes=2, fixed=True, max_restarts=1, max_replacements=4, heartbeat=10, timeout=60)
RANGE = replace(RULES, min_nodes=2, max_nodes=3, fixed=False, last_call=5)
REAL = Cause(echo=0, consequence=False, time_ns=5, rank=1, name="ValueError")
ECHO = Cause(echo=4, consequence=True, time_ns=1, rank=0, name="RuntimeError")


class Job:
    """A coordinator, its clock, and what each process was told."""

    def __init__(self, rules: Rules = RULES, host: str = "0a") -> None:
        self.now = 0.0
        self.coordinator = Coordinator(rules, host, 0.0)
        self.rules = rules

    def on(self, event: Any, after: float = 0.1) -> list[tuple[str, Message]]:
        self.now += after
        return self.coordinator.on(event, self.now)

    def says(self, process: str, message: Message) -> list[tuple[str, Message]]:
        return self.on(Said(process, message))

    def comes(self, process: str, **facts: Any) -> list[tuple[str, Message]]:
        node = int(process[0]) if self.rules.fixed else None
        started = {"started_ns": ord(process[1]), "host": f"host{process[0]}", **facts}
        return self.says(process, Hello("job", process, node, **started))

    def waits(self, seconds: float, *alive: str) -> list[tuple[str, Message]]:
        """Time passes; these processes beat."""
        told = []
        for _ in range(int(seconds / 0.5)):
            told += self.on(Tick(), 0.5)
            for process in alive:
                told += self.on(Said(process, Beat()), 0.0)
        return told

    def begins(self) -> Job:
        self.comes("0a")
        assert len(of(Go, self.comes("1a"))) == 2
        return self


def of(kind: type[Message], told: list[tuple[str, Message]]) -> dict[str, Any]:
    return {process: message for process, message in told if isinstance(message, kind)}


def test_a_round_begins_when_every_node_is_there_each_with_its_place() -> None:
    job = Job()
    assert of(Welcome, job.comes("0a")).keys() == {"0a"}
    told = of(Go, job.comes("1a"))
    assert {process: (go.round, go.node_rank, go.nnodes, go.hosts) for process, go in told.items()} == {
        "0a": (0, 0, 2, ("host0", "host1")),
        "1a": (0, 1, 2, ("host0", "host1")),
    }


def test_a_failure_stops_the_others_and_costs_one_restart() -> None:
    job = Job().begins()
    assert of(Stop, job.says("1a", Ended(0, REAL))).keys() == {"0a"}
    told = job.says("0a", Ended(0, ECHO))
    assert of(Again, told)["1a"].why == "rank 1 failed (ValueError); all ranks start again: restart 1 of 1"
    assert {go.round for go in of(Go, told).values()} == {1}


@pytest.mark.parametrize(
    ("cause", "restarts", "reason"),
    [
        (replace(REAL, repeats=True), 1, "ValueError would repeat: a restart cannot help"),
        (REAL, 0, "max_restarts=0"),
    ],
)
def test_where_no_restart_helps_or_is_left_the_root_cause_is_asked_for_and_ends_the_job(
    cause, restarts, reason
) -> None:
    job = Job(replace(RULES, max_restarts=restarts)).begins()
    job.says("1a", Ended(0, cause))
    assert of(Tell, job.says("0a", Ended(0, ECHO))).keys() == {"1a"}
    ends = of(TheEnd, job.says("1a", Told(0, "record", "disk")))
    assert {process: end.uploads for process, end in ends.items()} == {"0a": True, "1a": False}
    assert ends["0a"].end == End("failed", outcome="record", reason=reason, disk="disk")
    assert of(Leave, job.says("0a", Uploaded(ok=True))) == {"1a": Leave(ok=True)}


def test_a_root_cause_whose_node_is_lost_before_it_tells_is_never_replaced_by_an_echo() -> None:
    job = Job(replace(RULES, max_restarts=0)).begins()
    job.says("1a", Ended(0, REAL))
    job.says("0a", Ended(0, ECHO))
    job.on(Disconnected("1a"))
    [end] = of(TheEnd, job.waits(20, "0a")).values()
    assert end.end.kind == "lost"
    assert "rank 1 on node 1 failed (ValueError), and that node was lost before it could say more" in end.end.text


def test_a_connection_that_is_back_within_the_grace_ends_nothing() -> None:
    job = Job().begins()
    job.on(Disconnected("1a"))
    assert of(Stop, job.waits(2, "0a")) == {}
    assert of(Go, job.comes("1a", round=0, state="running")) == {}
    assert of(Stop, job.waits(8, "0a", "1a")) == {}


def test_a_connection_that_is_not_back_is_a_lost_node_and_costs_one_replacement() -> None:
    job = Job().begins()
    job.on(Disconnected("1a"))
    assert of(Stop, job.waits(4, "0a")).keys() == {"0a"}
    job.says("0a", Ended(0, ECHO))
    assert of(Go, job.comes("1b")).keys() == {"0a", "1b"}
    assert [(spent.who, spent.node) for spent in job.coordinator.history.losses] == [("1a/0", "1")]
    assert job.coordinator.history.restarts == ()


def test_a_silent_node_is_lost_after_the_heartbeat_and_told_to_come_anew_when_it_wakes() -> None:
    job = Job().begins()
    assert of(Stop, job.waits(9, "0a")) == {}
    assert of(Stop, job.waits(2, "0a")).keys() == {"0a"}
    assert of(Greet, job.says("1a", Beat())).keys() == {"1a"}
    assert of(Stop, job.comes("1a", round=0, state="running")).keys() == {"1a"}


def test_after_a_pause_of_its_own_the_coordinator_blames_nobody() -> None:
    job = Job().begins()
    assert of(Stop, job.on(Tick(), after=1000)) == {}


def test_a_new_process_takes_the_place_of_one_that_runs_at_once_and_the_old_one_is_turned_away() -> None:
    job = Job().begins()
    told = job.comes("1b")
    assert of(Refused, told)["1a"].why == "fenced"
    assert of(Stop, told).keys() == {"0a"}
    assert of(Go, job.says("0a", Ended(0))).keys() == {"0a", "1b"}


def test_a_process_that_started_earlier_by_its_clock_is_turned_away_unless_the_other_cannot_be_heard() -> None:
    job = Job()
    job.comes("0a")
    job.comes("1b", started_ns=7)
    job = Job(replace(RULES, min_nodes=3, max_nodes=3))
    job.comes("1b")
    assert of(Refused, job.comes("1a"))["1a"].why == "fenced"
    job.on(Disconnected("1b"))
    assert of(Welcome, job.comes("1a")).keys() == {"1a"}
    assert of(Refused, job.comes("1a")) == {}


def test_a_node_that_leaves_between_rounds_is_not_counted_in_the_next() -> None:
    job = Job(replace(RULES, min_nodes=3, max_nodes=3))
    for process in ("0a", "1a"):
        job.comes(process)
    job.says("1a", Leaves("told to stop by SIGTERM"))
    assert of(Go, job.comes("2a")) == {}
    assert of(Refused, job.comes("1a"))["1a"].text == "it has said that it leaves"
    assert of(Go, job.comes("1b")).keys() == {"0a", "1b", "2a"}


def test_a_node_that_is_lost_when_its_ranks_have_returned_restarts_nobody() -> None:
    job = Job().begins()
    job.says("1a", Returned(0))
    job.on(Disconnected("1a"))
    told = job.waits(4, "0a")
    assert of(Stop, told) == {}
    assert of(Waits, told)["0a"].why == "node 1 lost after its ranks had succeeded: the round goes on"
    assert of(Waits, job.comes("1b")).keys() == {"1b"}
    assert {process: end.end.kind for process, end in of(TheEnd, job.says("0a", Returned(0))).items()} == {
        "0a": "done",
        "1b": "done",
    }


def test_losses_beyond_max_replacements_end_the_job() -> None:
    job = Job(replace(RULES, max_replacements=1, short_life=0.0)).begins()
    job.comes("1b")
    job.says("0a", Ended(0))
    end = of(TheEnd, job.comes("1c"))["0a"].end
    assert (end.kind, end.text) == (
        "replacements",
        "node 1: a new process has taken its place; and 1 replacements are used up",
    )


@pytest.mark.end("the same worker is lost three times, and lives less than ten minutes each time it is back")
def test_a_node_that_dies_soon_after_it_is_back_is_replaced_twice_and_the_job_says_why_it_ends() -> None:
    job = Job(replace(RULES, about="Its container's memory is limited to 2.0 GiB.")).begins()
    for round_no, process in enumerate(("1b", "1c")):
        job.comes(process)
        job.says("0a", Ended(round_no))
    end = of(TheEnd, job.comes("1d"))["0a"].end
    assert end.text.startswith("node 1 was lost 3 times, and lived less than 600 s each time it was back")
    assert end.text.endswith("memory is limited to 2.0 GiB.")
    verdict = verdict_of(Finish(end, uploads=True), None)
    assert verdict is not None
    assert verdict.code == "SYSTEM:NodeLost"


def test_a_new_coordinator_goes_on_from_what_a_survivor_brings_and_counts_the_lost_one_once() -> None:
    brought = History(version=7, round=4, nodes=3, restarts=(Spent(2, "1", "failed"),))
    job = Job(replace(RULES, min_nodes=3, max_nodes=3), host="0b")
    job.comes("0b")
    told = job.comes("1a", history=brought, lost=("0a",), round=4, state="running")
    assert of(Stop, told)["1a"].round == 4
    job.comes("2a", history=brought, lost=("0a",), round=4, state="ended")
    told = of(Go, job.says("1a", Ended(4)))
    assert {go.round for go in told.values()} == {5}
    assert [spent.who for spent in job.coordinator.history.losses] == ["0a"]
    assert len(job.coordinator.history.restarts) == 1


def test_an_end_in_failure_that_a_survivor_brings_is_uploaded_by_the_new_node_0() -> None:
    end = End("failed", outcome="record", reason="max_restarts=0")
    job = Job(host="0b")
    job.comes("0b")
    told = of(
        TheEnd, job.comes("1a", history=History(version=3, round=0, end=end), lost=("0a",), round=0, state="ended")
    )
    assert (told["0b"].end, told["0b"].uploads, told["1a"].uploads) == (end, True, False)


def test_node_0_that_leaves_says_so_with_its_loss_counted() -> None:
    job = Job().begins()
    stop = of(Stop, job.says("0a", Leaves("told to stop by SIGTERM")))["1a"]
    assert [spent.who for spent in stop.history.losses] == ["0a"]
    assert stop.left == {"node 0": "told to stop by SIGTERM"}
    assert job.waits(5) == []


def test_a_node_that_cannot_begin_ends_a_job_that_has_not_begun_and_no_other() -> None:
    job = Job()
    job.comes("0a")
    job.comes("1a", state="cannot")
    assert of(TheEnd, job.says("1a", CannotBegin("record", "no rank was started")))["0a"].end.outcome == "record"
    job = Job().begins()
    job.comes("1b", state="cannot")
    assert of(Refused, job.says("1b", CannotBegin("record", "no rank was started")))["1b"].why == "begun"


def test_nodes_that_never_come_are_named_meanwhile_and_at_the_end() -> None:
    job = Job()
    job.comes("0a")
    told = job.waits(62, "0a")
    assert "waiting for node(s) 1 for 30 s" in of(Waits, told[: len(told) // 2 + 2])["0a"].why
    end = of(TheEnd, told)["0a"].end
    assert (end.kind, end.text, end.missing) == ("timeout", "node 1 of 2 did not arrive within 60 s", ("1",))


def test_a_range_begins_with_its_minimum_after_a_last_call_led_by_the_host() -> None:
    job = Job(RANGE)
    job.comes("1a")
    job.comes("0a")
    assert of(Go, job.waits(4, "0a", "1a")) == {}
    told = of(Go, job.waits(2, "0a", "1a"))
    assert {process: go.node_rank for process, go in told.items()} == {"0a": 0, "1a": 1}


def test_a_range_takes_in_who_comes_later_without_a_restart_and_goes_on_without_who_is_lost() -> None:
    job = Job(RANGE)
    job.comes("0a")
    job.comes("1a")
    job.waits(6, "0a", "1a")
    assert of(Stop, job.comes("2a")).keys() == {"0a", "1a"}
    job.says("0a", Ended(0, ECHO))
    assert {go.nnodes for go in of(Go, job.says("1a", Ended(0))).values()} == {3}
    job.says("2a", Leaves("told to stop by SIGTERM"))
    job.says("0a", Ended(1, ECHO))
    assert {go.nnodes for go in of(Go, job.says("1a", Ended(1, ECHO))).values()} == {2}
    assert job.coordinator.history.restarts == ()


def test_a_range_refuses_processes_beyond_its_maximum_and_its_replacements() -> None:
    job = Job(replace(RANGE, max_replacements=1))
    for number in range(4):
        job.comes(f"{number}a")
    assert of(Refused, job.comes("4a"))["4a"].why == "too many"


def test_all_ranks_save_at_the_highest_floor_and_a_node_that_is_told_to_stop_may_go_then() -> None:
    job = Job().begins()
    job.says("0a", Listens(0))
    assert of(Gather, job.says("1a", Preempted(0))).keys() == {"0a", "1a"}
    job.says("0a", Floor(0, 1, 7))
    answer = of(Answer, job.says("1a", Floor(0, 1, 9)))["0a"]
    assert (answer.step, answer.urgent) == (9, True)
    assert of(AllSaved, job.says("0a", Saved(0, 1))) == {}
    assert of(AllSaved, job.says("1a", Saved(0, 1)))["1a"].urgent


def test_where_nobody_would_save_a_node_that_is_told_to_stop_may_go_at_once() -> None:
    assert of(AllSaved, Job().begins().says("1a", Preempted(0)))["1a"].urgent


def test_a_save_that_was_asked_for_is_followed_by_an_urgent_one_where_a_node_is_told_to_stop_meanwhile() -> None:
    job = Job().begins()
    job.says("0a", Listens(0))
    job.says("0a", Asks(0))
    job.says("0a", Floor(0, 1, 3))
    assert not of(Answer, job.says("1a", Floor(0, 1, None)))["0a"].urgent
    job.says("1a", Preempted(0))
    job.says("0a", Saved(0, 1))
    told = job.says("1a", Saved(0, 1))
    assert not of(AllSaved, told)["1a"].urgent
    assert of(Gather, told)["0a"].call == 2
