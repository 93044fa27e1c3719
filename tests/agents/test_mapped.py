"""One element of a map task, as its pod runs it."""

from __future__ import annotations

import functools
from base64 import b64decode
from pathlib import Path

import cloudpickle
from flyteidl.core import artifact_id_pb2, literals_pb2
from flytekit import map_task
from flytekit.configuration import Image, ImageConfig, SerializationSettings

from tests.harness.procs import ROOT
from tests.harness.registered import registered
from tests.jobs.job_mapped import parted

SETTINGS = SerializationSettings(image_config=ImageConfig(default_image=Image("default", "registry/image", "v1")))


def inputs(directory: Path) -> Path:
    """Two elements, each a pickle in the store, and what both have."""
    sent = literals_pb2.LiteralMap()
    sent.literals["factor"].scalar.primitive.integer = 10
    for number, pickled in enumerate(({1, 2}, {3, 4})):
        (directory / f"{number}.pickle").write_bytes(cloudpickle.dumps(pickled))
        blob = sent.literals["pickled"].collection.literals.add().scalar.blob
        blob.metadata.type.format, blob.uri = "PythonPickle", str(directory / f"{number}.pickle")
    path = directory / "inputs.pb"
    path.write_bytes(sent.SerializeToString())
    return path


def test_an_element_keeps_the_partitions_of_its_artifact_and_uploads_no_input_again(warm, tmp_path):
    files = tmp_path / "pod"
    places = {
        "{{.input}}": str(inputs(tmp_path)),
        "{{.outputPrefix}}": str(files / "outputs"),
        "{{.rawOutputDataPrefix}}": str(files / "raw"),
        "{{.checkpointOutputPrefix}}": str(files / "checkpoint"),
        "{{.prevCheckpointPrefix}}": "",
    }
    mapped = map_task(functools.partial(parted, factor=10))
    command = [places.get(each, each) for each in mapped.get_command(SETTINGS)]
    element = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "ELEMENT", "ELEMENT": "1"}
    options = {"arguments": ["--", *command], "environment": {**registered(nproc_per_node=2), **element}}
    ended = warm.run("", files, kind="entrypoint", path=[ROOT / "tests" / "jobs", ROOT], **options)
    assert (ended.code, ended.uploaded) == (0, ["outputs.pb"]), ended.err
    output = literals_pb2.LiteralMap.FromString((files / "outputs" / "outputs.pb").read_bytes()).literals["o0"]
    assert output.scalar.primitive.integer == 70
    artifact = artifact_id_pb2.ArtifactID.FromString(b64decode(output.metadata["_uap"]))
    assert artifact.partitions.value["region"].static_value == "eu"
    assert not (files / "raw").exists(), "nothing that was uploaded is uploaded again"
