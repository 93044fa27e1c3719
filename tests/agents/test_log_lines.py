"""Both nodes of a job from their command lines to their exits, over a real S3 client and server (moto's).

What libraries write when their process ends shows only there. And so does in which order a dict comes that is a task's
input, where a loop over it may hold a collective: Flyte sends such dicts as protobuf maps, which each interpreter
iterates in an order of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flyteidl.core import literals_pb2

from tests.harness.moto_s3 import BUCKET, S3
from tests.harness.pod import pyflyte_execute
from tests.harness.procs import Ended, Warm
from tests.harness.product import ReservedPort
from tests.harness.registered import registered
from tests.harness.tarballs import project

JOBS = Path(__file__).parents[1] / "jobs"
COMMAND = [sys.executable, "-c", "from flytekitplugins_safedist.pod.start import main; main()"]


KEYS = ["stem", "body", "head", "layer.10", "layer.9", "Zeta", "alpha", "ü"]
"""Eight keys have 40,320 orders: that two interpreters agree on one by chance is no worry."""


def table() -> literals_pb2.Literal:
    found = literals_pb2.Literal()
    for number, key in enumerate(KEYS):
        found.map.literals[key].scalar.primitive.integer = number
    return found


def inputs(s3: S3, name: str) -> bytes:
    """All that a dict may travel as: maps, maps in lists in maps, structs (as the console sends them), and a map that
    lies in the store because it is large."""
    sent = literals_pb2.LiteralMap()
    sent.literals["typed"].CopyFrom(table())
    for key in KEYS:
        sent.literals["nested"].map.literals[key].collection.literals.extend([table(), table()])
    plain = dict.fromkeys(KEYS, 1)
    sent.literals["untyped"].scalar.generic.update({**plain, "inner": [plain, {"deep": plain}]})
    sent.literals["shapes"].scalar.generic.update({"layers": plain})
    sent.literals["large"].offloaded_metadata.uri = s3.put(f"{name}/large.pb", table().SerializeToString())
    return sent.SerializeToString()


def run(warm: Warm, s3: S3, directory: Path) -> list[Ended]:
    """Both nodes of a job, each from its command line to its exit: code, inputs and outputs in the store."""
    reserved = ReservedPort()
    port = str(reserved.port)
    prefix = f"s3://{BUCKET}/{directory.name}"
    code = s3.put(f"{directory.name}/fast.tar.gz", project({"job_logs.py": (JOBS / "job_logs.py").read_text()}))
    arguments = [
        *("--additional-distribution", code, "--dest-dir", ".", "--"),
        *pyflyte_execute(
            *("job_logs:train", s3.put(f"{directory.name}/inputs.pb", inputs(s3, directory.name))),
            *(f"{prefix}/out", f"{prefix}/raw"),
        ),
    ]
    started = []
    for node in (1, 0):
        environment = {
            **s3.environment,
            "FLYTE_INTERNAL_EXECUTION_ID": directory.name,
            **registered(nodes="2", nproc_per_node=2),
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(node)},
            **{"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NNODES": "2", "PET_NODE_RANK": str(node)},
        }
        started.append(warm.command([*COMMAND, *arguments], directory / f"node-{node}", environment))
    ended = [one.wait() for one in reversed(started)]
    reserved.close()
    return ended


def levels(ended: Ended) -> list[str]:
    """The lines of libraries' loggers at WARNING or above: flytekit's JSON, and what Python's own logging prints."""
    found = []
    for line in (ended.out + ended.err).splitlines():
        try:
            level = json.loads(line)["levelname"]
        except (ValueError, TypeError, KeyError):
            level = line
        if any(word in level for word in ("WARN", "ERROR", "CRITICAL", "Unclosed", "Traceback")):
            found.append(line)
    return found


def test_after_success_no_node_logs_a_warning_and_all_ranks_had_one_order_of_keys(warm, tmp_path, s3):
    """And a node's last line is the summary; and each has asked the store once for the code, and one of them has put
    the outputs there, once."""
    nodes = run(warm, s3, tmp_path)
    assert [node.code for node in nodes] == [0, 0], nodes
    assert [levels(node) for node in nodes] == [[], []]
    for number, node in enumerate(nodes):
        last = node.err.splitlines()[-1]
        assert last.startswith("[safedist] end: succeeded after 1 round(s)"), node.err
        assert last.endswith(f"node {number}")
    assert s3.count("GET", f"{tmp_path.name}/fast.tar.gz") == 2
    assert s3.count("PUT", f"{tmp_path.name}/out/outputs.pb") == 1
    outputs = literals_pb2.LiteralMap.FromString(s3.get(f"{tmp_path.name}/out/outputs.pb"))
    orders = json.loads(outputs.literals["o1"].scalar.primitive.string_value)
    assert orders == [orders[0]] * 4
    assert orders[0][0] == [[key, None] for key in sorted(KEYS)], "by name: the caller's own order is not sent"
