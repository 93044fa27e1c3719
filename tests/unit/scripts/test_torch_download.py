"""What `make` says before pip fetches gigabytes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import torch_download


@pytest.mark.parametrize(
    "wheel",
    ['cuda-toolkit[cublas,cudart]==13.2.2; platform_system == "Linux"', "nvidia-nccl-cu12 (==2.20.5)"],
)
def test_a_cuda_build_is_announced_with_its_size_and_the_way_around_it(wheel: str) -> None:
    text = torch_download.warning({"version": "2.15.0", "requires_dist": ["filelock", wheel]})
    assert text is not None
    assert "torch 2.15.0 from this index is a CUDA build" in text
    assert "2.6 GB to download and 5.5 GB installed" in text
    assert "PIP_OPTIONS=" in text


@pytest.mark.parametrize("metadata", [{}, {"version": "2.13.0+cpu", "requires_dist": ["filelock", "sympy>=1.13"]}])
def test_nothing_is_said_of_a_cpu_build(metadata: dict[str, object]) -> None:
    assert torch_download.warning(metadata) is None


def test_pips_own_plan_is_read(tmp_path: Path) -> None:
    """A wheel of the test's own, which says that it is torch: pip plans to install it, and installs nothing."""
    import zipfile

    lines = ("Metadata-Version: 2.1", "Name: torch", "Version: 99.0", "Requires-Dist: nvidia-nccl-cu13==2.28")
    with zipfile.ZipFile(tmp_path / "torch-99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch-99.0.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr("torch-99.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("torch-99.0.dist-info/RECORD", "")
    options = ["--no-index", "--find-links", str(tmp_path), "--ignore-installed"]
    metadata = torch_download.planned("torch==99.0", options)
    assert metadata is not None
    assert torch_download.warning(metadata) is not None


def test_what_pip_cannot_plan_is_left_to_the_installation_to_say() -> None:
    assert torch_download.main(["no-such-requirement!", "--no-index"]) == 0
