"""What a task downloads of its inputs comes to each node once, for all of its ranks, from a real S3 API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from tests.harness import needs
from tests.harness.job import Job, ended
from tests.harness.procs import uploaded_error, uploaded_output
from tests.harness.registered import OPTIONS
from tests.jobs.job_inputs import Settings, reads

NODES, PER_NODE = 2, 2
OF_FOLDER = {"a.txt": "a", "deep/b.txt": "b", "run-[lr=0.1]/c.txt": "c"}
FILES = ("file.bin", "several-0", "several-1", "named", "weights", "settings-0")


def job(warm: Any, tmp_path: Any, s3: Any, how: str) -> tuple[Job, list[str]]:
    """The job, with its inputs in the store, and the pods' further arguments."""
    prefix = tmp_path.name
    for name, text in OF_FOLDER.items():
        s3.put(f"{prefix}/folder/{name}", text.encode())
    files = {name: FlyteFile(s3.put(f"{prefix}/{name}", name.encode())) for name in FILES}
    values = {
        "folder": FlyteDirectory(f"s3://code/{prefix}/folder"),
        "file": files["file.bin"],
        "several": [files["several-0"], files["several-1"]],
        "named": {"one": files["named"]},
        "settings": Settings(weights=files["weights"], several=[files["settings-0"]]),
    }
    sent = TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), values, reads.python_interface.inputs)
    (tmp_path / "inputs.pb").write_bytes(sent.to_flyte_idl().SerializeToString())
    made = Job(warm, tmp_path, "job_inputs:reads", how, s3.environment)
    return made, ["--inputs", str(tmp_path / "inputs.pb")]


def gets(s3: Any, prefix: str) -> dict[str, int]:
    """How often each object was fetched."""
    names = (*(f"folder/{name}" for name in OF_FOLDER if "[" not in name), *FILES)
    return {name: s3.count("GET", f"{prefix}/{name}") for name in names}


@pytest.mark.parametrize(("how", "shared"), [("killed", True), ("", False)], ids=["once, restarts or not", "opted out"])
def test_each_input_is_fetched_once_per_node_and_each_rank_has_names_of_its_own(warm, tmp_path, s3, how, shared):
    made, arguments = job(warm, tmp_path, s3, how)
    made.registered = {"decks": ["Timeline"], "scratch": {**OPTIONS["scratch"], "share_inputs": shared}}
    waiting = made.start(1, arguments=arguments)
    first, second = ended(made.start(0, arguments=arguments), waiting)
    assert first.uploaded == ["deck.html", "outputs.pb"], first.err + second.err
    rounds = (0, 1) if how == "killed" else (0,)
    for rank, found in enumerate(json.loads(uploaded_output(first))):
        assert found["folder"] == OF_FOLDER
        assert found["files"] == list(FILES)
        assert found["name"] == "file.bin", "as flytekit names it"
        assert found["own"] == ["deep", f"rank-{rank}", "run-[lr=0.1]"], "each rank's own names, and no other's"
        of_node = sorted({rank // PER_NODE * PER_NODE + local for local in range(PER_NODE)})
        assert found["node"] == [f"round-{round_}-rank-{each}" for round_ in rounds for each in of_node]
        assert found["mode"] == "0o700"
    assert set(gets(s3, tmp_path.name).values()) == {NODES if shared else NODES * PER_NODE}
    told = first.out.count("fetched in") + second.out.count("fetched in")
    assert told == (NODES * (1 + len(FILES)) if shared else 0), first.out
    amount = f"<td>{len(OF_FOLDER) + len(FILES)} files, {sum(map(len, ('abc', *FILES)))} B</td>"
    assert (first.files / "outputs" / "deck.html").read_text().count(amount) == (NODES if shared else 0)


def test_a_rank_that_writes_to_its_input_in_place_does_not_change_that_of_others_in_silence(warm, tmp_path, s3):
    needs.root("write to a file that is read-only")
    made, arguments = job(warm, tmp_path, s3, "writes in place")
    waiting = made.start(1, arguments=arguments)
    first, _ = ended(made.start(0, arguments=arguments), waiting)
    assert first.uploaded == ["error.pb"]
    message = uploaded_error(first).message
    assert "a rank has changed a file of an input in place" in message
    assert "file=deep/b.txt" in message
    assert "Scratch(share_inputs=False)" in message
