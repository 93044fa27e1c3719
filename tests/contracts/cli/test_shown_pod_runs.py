"""What is shown is what runs: the command and variables of a shown pod, started as a process, upload the task's output.

Registration is the real CLI against the stand-in of :mod:`flyteadmin`; the archive that it uploaded is put where the
command looks for it. The pod is a process of this machine: its image, mounts and network are not part of this test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from clis import IMAGE, PACKAGE, pyflyte
from flyteadmin import Received
from flyteidl.core.literals_pb2 import LiteralMap

from tests.harness.flyte import executed
from tests.harness.product import job_manifest


def test_the_command_of_the_shown_pod_uploads_the_output(
    project: Path,
    admin: tuple[str, Received],
    tmp_path: Path,
) -> None:
    endpoint, received = admin
    where = ("--version", "v1", "--project", "flytesnacks", "--domain", "development", "--image", IMAGE)
    pyflyte("register", *where, "shop", cwd=project, endpoint=endpoint)
    template = received.tasks["shop.training.evaluate"].spec.template
    inputs, store, scratch, home = (tmp_path / one for one in ("inputs.pb", "store", "scratch", "home"))
    for directory in (store, scratch, home):
        directory.mkdir()
    said = LiteralMap()
    said.literals["score"].scalar.primitive.float_value = 0.75
    inputs.write_bytes(said.SerializeToString())
    (archive,) = {location for location in received.uploads if location in str(template.k8s_pod)}
    (store / "code.tar.gz").write_bytes(received.uploads[archive])
    files = {
        "{{.input}}": str(inputs),
        "{{.outputPrefix}}": str(store),
        "{{.rawOutputDataPrefix}}": str(store / "raw"),
        "{{.checkpointOutputPrefix}}": "",
        "{{.prevCheckpointPrefix}}": "",
        archive: str(store / "code.tar.gz"),
        "/root": str(home),
    }

    pod = executed(job_manifest(template), files)
    container = pod["spec"]["containers"][0]
    program = "from flytekitplugins_safedist.pod.start import main; main()"  # the console script, by its module
    # what the kubelet would fill in (the pod's limits) is not known here, as without a limit
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    done = subprocess.run(
        [sys.executable, "-c", program, *container["args"][1:]],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(PACKAGE),
            **variables,
            "SAFEDIST_SCRATCH_ROOT": str(scratch),
        },
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )

    assert container["args"][0] == "safedist-execute"
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = LiteralMap.FromString((store / "outputs.pb").read_bytes())
    assert outputs.literals["o0"].scalar.primitive.float_value == 0.75
    assert (home / "shop" / "training.py").is_file()
    assert list(scratch.iterdir()) == []
