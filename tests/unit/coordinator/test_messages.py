"""What nodes and the coordinator say to each other, on the wire and in the docs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.coordinator.books import Books, Cause, Leader, Loss, Memory, Outcome, Round, Verdict
from flytekitplugins_safedist.coordinator.messages import Course, Floor, HangNotice, Offer, Save, Status, Want
from flytekitplugins_safedist.coordinator.sign import Sign

KEY = Round(Leader(2, "a" * 16), 3)
CAUSE = Cause(KEY, 5, "ValueError", "text ünd \ud800", 1, echo=1, is_timeout=True, machine="m", where="node 1 (m)")
BOOKS = Books(KEY, 4, 1, (Outcome(KEY, CAUSE, Loss("node 1", "gone", 3.5, Memory(1, 2)), "free", "m", (1, 2)),))
STATUS = Status(
    "job",
    "b",
    None,
    1.5,
    host="h",
    machine="m",
    leader=KEY.leader,
    round=KEY,
    node_rank=1,
    phase="returned",
    cannot=CAUSE,
    leaving="told to stop",
    is_cut=True,
    ranks_returned=(2, 3),
    listens=True,
    is_preempted=True,
    asks=2,
    floor=Floor(2, 7),
    saved=1,
    stall=3.0,
    looked=1,
    report="{}",
    starts=1,
    ended=Memory(96, 100),
    memory=Memory(95, 100),
    leader_memory=Memory(1, 100),
    offer=Offer(KEY, {"MASTER_PORT": "1"}),
    is_uploaded=True,
    books=BOOKS,
    ranks=8,
)
COURSE = Course(
    KEY.leader,
    KEY,
    runs=True,
    is_checks=True,
    size=4,
    offer={"MASTER_PORT": "1"},
    save=Save(1, is_urgent=True, step=None, is_forced=True),
    ran_before=True,
    look=2,
    hang=HangNotice(2, "key", 1, "text"),
    verdict=Verdict("failed", "why", KEY, CAUSE, "code", (1,), ("2",)),
    is_decided=True,
    news='a "quoted" line\n',
    memory=Memory(1, 2),
    books=BOOKS,
)


def test_all_that_a_status_says_arrives():
    assert Status.parse(STATUS.dump()) == STATUS
    assert Status.parse(Status("job", "b", 1, 1.0).dump()) == Status("job", "b", 1, 1.0)


def test_all_that_a_want_says_arrives():
    want = Want(COURSE, 3, 'leave "now"')
    assert Want.parse(want.dump()) == want
    assert Want.parse(Want(Course(KEY.leader), -1).dump()) == Want(Course(KEY.leader), -1)


def test_what_is_as_at_first_is_not_sent():
    assert len(Status("job", "b", 1, 1.0).dump()) < 80
    assert len(Want(Course(KEY.leader), 1).dump()) < 120


def test_what_all_nodes_are_to_know_is_written_once():
    course = replace(COURSE, news="x")
    assert course.content is course.content
    assert Want(course, 1).dump().endswith(course.content + b"}")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"job": 3}', b"\xff", b"[" * 100_000, b"{}"])
def test_what_is_no_message_is_an_error_of_one_kind(content):
    for kind in (Status, Want, Sign):
        with pytest.raises(ValueError, match="not "):
            kind.parse(content)


@given(st.binary(max_size=60), st.integers(0, 400))
def test_whatever_is_broken_on_the_way_is_that_error_or_a_message(noise, at):
    data = STATUS.dump()
    for content in (data[:at] + noise + data[at:], data[:at] + noise):
        try:
            Status.parse(content)
        except ValueError:
            continue


def test_a_node_of_a_later_version_is_told_which_one_answers():
    data = {**json.loads(Status("job", "b", 1, 1.0).dump()), "protocol": 99, "novelty": [1]}
    status = Status.parse(json.dumps(data).encode())
    assert status.refusal("job").startswith("it speaks version 99 of the protocol, and node 0 2")
    assert replace(status, protocol=2).refusal("job") == ""
    assert status.refusal("other") == "it is of job 'job', and this is job 'other'"
    own = json.loads(Status("job", "b", 1, 1.0).dump())
    assert own.pop("protocol") == 2, "said always: what is left out is the reader's own"
    assert Status.parse(json.dumps(own).encode()).refusal("job").startswith("it speaks version 0 of the protocol")


def test_the_docs_have_all_fields():
    page = (Path(__file__).parents[3] / "docs" / "rendezvous.md").read_text()
    for kind in (Status, Course, Want, Books, Outcome):
        table = page.partition(f"### {kind.__name__}")[2].partition("###")[0]
        rows = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| `")}
        names = {name for row in rows for name in row.replace("`", "").split(", ")}
        assert names == {each.name for each in fields(kind)}, kind.__name__
