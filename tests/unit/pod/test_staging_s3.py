"""A real S3 client against a real S3 server on loopback (moto's), with flytekit's own configuration."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from flyteidl.core import literals_pb2

from tests.harness.moto_s3 import BUCKET
from tests.harness.tarballs import project

pytestmark = pytest.mark.processes


def test_a_task_runs_from_s3_to_s3(tmp_path, s3):
    workflow = "from flytekit import task\n@task\ndef t(n: int) -> int:\n    import late\n    return late.V + n\n"
    uri = s3.put("run/fast.tar.gz", project({"wf.py": workflow, "late.py": "V = 40"}))
    inputs = literals_pb2.LiteralMap()
    inputs.literals["n"].scalar.primitive.integer = 2
    arguments = [
        *("--additional-distribution", uri, "--dest-dir", ".", "--", "pyflyte-execute"),
        *("--inputs", s3.put("run/inputs.pb", inputs.SerializeToString()), "--output-prefix", f"s3://{BUCKET}/run/out"),
        *("--raw-output-data-prefix", f"s3://{BUCKET}/run/raw"),
        *("--resolver", "flytekit.core.python_auto_container.default_task_resolver"),
        *("--", "task-module", "wf", "task-name", "t"),
    ]
    environment = {
        **os.environ,
        **s3.environment,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    (tmp_path / "workdir").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "from flytekitplugins_safedist.pod.start import main; main()", *arguments],
        cwd=tmp_path / "workdir",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert s3.count("PUT", "run/out/outputs.pb") == 1
    assert s3.count("GET", "run/fast.tar.gz") == 1
