"""A dict that is a task's input has one order of keys in all ranks of a job: a loop over it may hold a collective.

Flyte sends such dicts as protobuf maps, which each process iterates in an order of its own; so all processes here are
interpreters of their own, as pods are.
"""

from __future__ import annotations

import json
from pathlib import Path

from flyteidl.core import literals_pb2

from tests.harness.job import Job, ended
from tests.harness.pod import SAFEDIST_EXECUTE, pyflyte_execute
from tests.harness.procs import ROOT, Running, uploaded_output
from tests.harness.registered import registered

KEYS = ["stem", "body", "head", "layer.10", "layer.9", "Zeta", "alpha", "ü"]
"""Eight keys have 40,320 orders: that four processes agree on one by chance is no worry."""


def table() -> literals_pb2.Literal:
    found = literals_pb2.Literal()
    for number, key in enumerate(KEYS):
        found.map.literals[key].scalar.primitive.integer = number
    return found


def inputs(directory: Path) -> None:
    """All that a dict may travel as: maps, maps in lists in maps, structs (as the console sends them), and a map that
    lies in the store because it is large."""
    sent = literals_pb2.LiteralMap()
    sent.literals["typed"].CopyFrom(table())
    for key in KEYS:
        sent.literals["nested"].map.literals[key].collection.literals.extend([table(), table()])
    plain = dict.fromkeys(KEYS, 1)
    sent.literals["untyped"].scalar.generic.update({**plain, "inner": [plain, {"deep": plain}]})
    sent.literals["shapes"].scalar.generic.update({"layers": plain})
    (directory / "large.pb").write_bytes(table().SerializeToString())
    sent.literals["large"].offloaded_metadata.uri = str(directory / "large.pb")
    (directory / "inputs.pb").write_bytes(sent.SerializeToString())


def pod(job: Job, number: int) -> Running:
    """``safedist-execute`` in an interpreter of its own."""
    files = job.directory / f"node-{number}"
    outputs = job.directory / "uploads" / files.name
    files.mkdir()
    (files / "outputs").symlink_to(outputs)
    task = pyflyte_execute(f"{job.module}:{job.task}", job.directory / "inputs.pb", outputs, files / "raw")
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'jobs'}"}
    told = registered(nodes="2", nproc_per_node=2)
    return job.warm.command(
        [SAFEDIST_EXECUTE, "--", *task], files, {**job.variables(number), **told, **job.environment, **path}
    )


def test_a_dict_has_one_order_of_keys_in_all_ranks_of_two_nodes(warm, tmp_path):
    inputs(tmp_path)
    job = Job(warm, tmp_path, "job_keys:keys")
    waiting = pod(job, 1)
    first, _ = ended(pod(job, 0), waiting)
    assert first.uploaded == ["outputs.pb"], first.err
    orders = json.loads(uploaded_output(first))
    assert orders == [orders[0]] * 4
    assert orders[0][0] == [[key, None] for key in sorted(KEYS)], "by name: the caller's own order is not sent"
