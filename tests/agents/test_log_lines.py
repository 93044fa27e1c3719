"""What the logs of a job's nodes say when all is well: a success must not look like a failure.

Real commands from end to end, over a real S3 client and server (moto's): what libraries write when their process ends
shows only there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.harness.moto_s3 import BUCKET, S3
from tests.harness.pod import pyflyte_execute
from tests.harness.procs import Ended, Warm
from tests.harness.product import ReservedPort
from tests.harness.registered import registered
from tests.harness.tarballs import project

JOBS = Path(__file__).parents[1] / "jobs"
COMMAND = [sys.executable, "-c", "from flytekitplugins_safedist.pod.start import main; main()"]


def run(warm: Warm, s3: S3, directory: Path) -> list[Ended]:
    """Both nodes of a job, each from its command line to its exit: code, inputs and outputs in the store."""
    reserved = ReservedPort()
    port = str(reserved.port)
    prefix = f"s3://{BUCKET}/{directory.name}"
    code = s3.put(f"{directory.name}/fast.tar.gz", project({"job_logs.py": (JOBS / "job_logs.py").read_text()}))
    arguments = [
        *("--additional-distribution", code, "--dest-dir", ".", "--"),
        *pyflyte_execute(
            "job_logs:train", s3.put(f"{directory.name}/inputs.pb", b""), f"{prefix}/out", f"{prefix}/raw"
        ),
    ]
    started = []
    for node in (1, 0):
        environment = {
            **s3.environment,
            "FLYTE_INTERNAL_EXECUTION_ID": directory.name,
            **registered(nodes="2"),
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


def test_after_success_no_node_logs_a_warning_and_its_last_line_is_the_summary(warm, tmp_path, s3):
    """And each has asked the store once for the code, and one of them has put the outputs there, once."""
    nodes = run(warm, s3, tmp_path)
    assert [node.code for node in nodes] == [0, 0], nodes
    assert [levels(node) for node in nodes] == [[], []]
    for number, node in enumerate(nodes):
        last = node.err.splitlines()[-1]
        assert last.startswith("[safedist] end: succeeded after 1 round(s)"), node.err
        assert last.endswith(f"node {number}")
    assert s3.count("GET", f"{tmp_path.name}/fast.tar.gz") == 2
    assert s3.count("PUT", f"{tmp_path.name}/out/outputs.pb") == 1
