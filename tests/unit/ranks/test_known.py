"""Libraries at the top of a user's module: imported once, forked from, and right in every rank.

They are in a directory of their own, which nothing but the process here has on its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import needs
from tests.harness.procs import DEADLINE, ROOT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(4 * DEADLINE)]

LIBRARIES = Path(sys.prefix, "libraries")

USES = {
    "accelerate": "accelerate.utils.is_rich_available()",
    "cv2": "cv2.resize(numpy.zeros((8, 8, 3), numpy.uint8), (4, 4)).shape",
    "datasets": "datasets.Dataset.from_dict({'a': [1, 2]})['a'][:]",
    "lightning": "lightning.fabric.utilities.rank_zero.rank_zero_only.rank",
    "numba.core.config": "numba.core.config.CACHE_DIR",
    "pandas": "str(pandas.DataFrame({'a': ['x', 'y']}).describe())",
    "pyarrow.compute": "pyarrow.compute.sum(pyarrow.array(range(10**6))).as_py()",
    "pytorch_lightning": "pytorch_lightning.utilities.rank_zero.rank_zero_only.rank",
    "scipy.linalg": "float(scipy.linalg.det(numpy.eye(200)))",
    "sklearn.linear_model": "sklearn.linear_model.LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0]).n_features_in_",
    "torch._dynamo.package": "torch._dynamo.package.DynamoCache.path_prefix",
    "torchmetrics": "torchmetrics.utilities.prints.rank_zero_only.rank",
    "transformers.trainer": "transformers.trainer.Trainer.__name__",
    "wandb": "wandb.init(mode='disabled').disabled",
}
"""What a module imports, and what a rank does with it."""

FACTS: dict[str, list[Any]] = {
    "lightning": [2, 3],
    "pytorch_lightning": [2, 3],
    "torchmetrics": [0, 1],
    "numba.core.config": ["/numba-2", "/numba-3"],
}
"""What is each rank's own."""

# As a pod does it: torch and flytekit in one process; in its child, under the task's variables, the user's module; and
# from there two ranks of the second node of two. One child for each library, none of which knows of the others.
PROGRAM = """
import json, os, sys, tempfile
from flytekitplugins_safedist.ranks import known, preload

def say(what):
    os.write(1, json.dumps(what).encode() + b"\\n")
    os._exit(0)

os.environ.update(known.VARIABLES)
base = preload.preload(["torch", "flytekit"], [])
assert base.unsafe is None, base.unsafe
for number, (library, use) in enumerate(json.load(open(sys.argv[1])).items()):
    users = f"users_{number}"
    if os.fork() == 0:
        with open(f"{sys.argv[2]}/{users}.py", "w") as file:
            file.write(f"import numpy\\nimport {library}\\ndef use():\\n    return {use}\\n")
        done = preload.preload([], [users])
        if done.unsafe is not None:
            say([library, None, done.unsafe])
        for rank in (2, 3):
            if os.fork() == 0:
                cache = tempfile.mkdtemp(dir=sys.argv[2], suffix=f"-{rank}")
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank - 2), "OMP_NUM_THREADS": "1"}
                os.environ.update(place, TORCHINDUCTOR_CACHE_DIR=cache, NUMBA_CACHE_DIR=f"/numba-{rank}")
                preload.refresh(done, os.environ)
                say([library, rank, sys.modules[users].use()])
            assert os.wait()[1] == 0
        os._exit(0)
    assert os.wait()[1] == 0, library
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the ranks said, by library; why they were not forked, where they were not."""
    if not LIBRARIES.is_dir():
        needs.missing(f"there is no {LIBRARIES}", bring="make test")
    directory = tmp_path_factory.mktemp("known")
    stand_in = directory / "numba" / "core"
    stand_in.mkdir(parents=True)
    # Numba's wheels are three times all others here: it stands for itself in what safedist asks of it (numba 0.68).
    read = "import os\ndef reload_config():\n    globals()['CACHE_DIR'] = os.environ.get('NUMBA_CACHE_DIR', '')\n"
    (stand_in / "config.py").write_text(f"{read}reload_config()\n")
    (directory / "uses.json").write_text(json.dumps(USES))
    kept = {name: value for name, value in os.environ.items() if "RANK" not in name}
    path = os.pathsep.join([str(directory), str(ROOT), str(LIBRARIES)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory / "uses.json"), str(directory)],
        env={**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf")},
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = {}
    for line in done.stdout.splitlines():
        if line.startswith('["'):
            library, rank, said = json.loads(line)
            found.setdefault(library, []).append(said if rank is not None else f"not forked: {said}")
    return found


@pytest.mark.parametrize("library", USES)
def test_a_library_at_the_top_of_a_module_leaves_ranks_forked_and_each_itself(ranks, library):
    said = ranks[library]
    assert not [each for each in said if str(each).startswith("not forked")]
    assert len(said) == 2
    assert said == FACTS.get(library, said)


def test_compiled_code_is_kept_where_the_rank_keeps_its_own(ranks):
    ends = [Path(said).parent.name[-2:] for said in ranks["torch._dynamo.package"]]
    assert ends == ["-2", "-3"]


def test_every_entry_of_the_table_is_tried():
    from flytekitplugins_safedist.ranks import known

    tried = {"torch._dynamo.package", *FACTS}
    modules = known.FACTS
    assert {name.partition(".")[0] for name in modules} - {name.partition(".")[0] for name in tried} == {
        "lightning_fabric"  # pytorch_lightning's
    }
