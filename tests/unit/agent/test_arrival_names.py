"""How the nodes of one attempt find each other and nobody else, and what is said of a pod that does not come: real
arrivals are in tests/agents/test_arrival.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flytekitplugins_safedist.agent import arrival
from flytekitplugins_safedist.agent.arrival import Attempt, mention, run_id
from flytekitplugins_safedist.agent.leader_store import NoStore
from flytekitplugins_safedist.agent.membership import Membership
from flytekitplugins_safedist.config.registered import Registered
from flytekitplugins_safedist.coordinator.messages import Want
from flytekitplugins_safedist.coordinator.ports import ReservedPort
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.errors import LaunchTimeoutError
from flytekitplugins_safedist.rank.task_context import IN_POD
from flytekitplugins_safedist.topology import Endpoint, Topology
from tests.harness.registered import registered
from tests.unit.rank.test_order import SNAPSHOT


def test_each_attempt_of_each_execution_has_a_name_of_its_own():
    other = replace(SNAPSHOT, execution_id=(*SNAPSHOT.execution_id[:2], "another"))
    names = {
        run_id(flyte, environment)
        for flyte in (SNAPSHOT, other)
        for environment in ({}, {"FLYTE_ATTEMPT_NUMBER": "1"}, {"FLYTE_ATTEMPT_NUMBER": "11"})
    }
    assert len(names) == 6
    assert run_id(SNAPSHOT, {}) == run_id(SNAPSHOT, {"FLYTE_ATTEMPT_NUMBER": "0"})


def test_two_tasks_of_one_execution_are_two_jobs_and_all_nodes_of_one_have_its_name():
    prefixes = ("s3://b/f1/n0/data/0", "s3://b/f1/n1/data/0", "s3://b/f1/n1/data/0/")
    one, other, same = (run_id(replace(SNAPSHOT, mode=IN_POD, output_metadata_prefix=each), {}) for each in prefixes)
    assert one != other == same


def test_an_attempt_that_is_not_a_number_is_not_taken_for_the_first():
    with pytest.raises(ValueError, match="second"):
        run_id(SNAPSHOT, {"FLYTE_ATTEMPT_NUMBER": "second"})


def test_a_job_goes_by_what_its_user_has_set():
    times = {"rendezvous": 101.0, "heartbeat": 20.0, "stop": 4.0, "preemption": 7.0, "upload": 50.0}
    checks = {"action": "fail", "slow": 0.5, "timeout": 120.0}
    numbers = {"max_restarts": 3, "max_replacements": 4}
    settings = Registered.from_env(registered(nodes="2:4", preflight=checks, timeouts=times, **numbers))
    assert settings is not None
    rules = Attempt(Topology(None, 2, 4, 1, Endpoint("here", 1), "a test"), settings, SNAPSHOT, "run").rules()
    assert rules == Rules("run", 2, 4, is_fixed=False, checks=True, last_call=10.0, renew=20.0, **numbers, **times)


def test_what_keeps_a_pod_from_coming_is_said_to_who_waits_for_it(monkeypatch):
    port, settings = ReservedPort(), Registered.from_env(registered(nodes="2"))
    assert settings is not None
    places = [Topology(node, 2, 2, 1, Endpoint("127.0.0.1", port.port), "a test") for node in range(2)]
    first, second = (Attempt(place, settings, SNAPSHOT, "run") for place in places)
    error = LaunchTimeoutError("libraries were not imported in time")
    with monkeypatch.context() as patched:
        patched.setattr(arrival, "_MENTION_SECONDS", 0.1)
        mention(error, second)  # nobody is there
        mention(error, first)
    job = Membership(first.rules(), places[0], NoStore())
    job.link.begin(job.first)
    while not isinstance(job.inbox.get(timeout=30), Want):
        continue
    mention(error, second)
    said = "; node 1 came, and could not begin (LaunchTimeoutError: libraries were not imported in time)"
    assert job._server._coordinator._trouble() == said
    job.close(decided=False)
