"""Which CUDA a build of Horovod with NCCL takes, and what it says where there is none.

Toolkits are directories of the test's own, with an nvcc that prints what a real one prints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "horovod_build"))

import cuda_toolkit as cuda

NAMED_NCCL = {"HOROVOD_NCCL_HOME": "/nccl"}
Toolkit = Callable[..., Path]


@pytest.fixture
def toolkit(tmp_path: Path) -> Toolkit:
    """Make a toolkit of a release; ``without`` leaves files out."""

    def make(release: str = "13.0", without: tuple[str, ...] = ()) -> Path:
        home = tmp_path / f"cuda-{release}"
        said = f'test "$1" = --version && echo "Cuda compilation tools, release {release}, V{release}.88"'
        here = f"echo '#$ _HERE_={home}/bin' >&2"
        files = {"bin/nvcc": f"#!/bin/sh\n{said} || {here}\n", "include/cuda_runtime.h": ""}
        files |= {"lib64/libcudart_static.a": "", "lib64/libcudadevrt.a": ""}
        for name, content in files.items():
            if name not in without:
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                (home / name).write_text(content)
                (home / name).chmod(0o755)
        return home

    return make


@pytest.fixture
def no_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the usual directory."""
    monkeypatch.setattr(cuda, "DEFAULT_HOME", tmp_path / "usual")


@pytest.fixture
def required_by_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the installed torch requires, as far as the test says."""
    required: list[str] = []
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    return required


def test_a_toolkit_that_is_named_is_taken(toolkit: Toolkit) -> None:
    home = toolkit()
    chosen = cuda.choose({"CUDA_HOME": str(home), **NAMED_NCCL}, "", "13.2")
    assert (chosen.home, chosen.version) == (home, "Cuda compilation tools, release 13.0, V13.0.88")


@pytest.mark.parametrize(
    ("without", "seen"),
    [
        (("bin/nvcc",), "no bin/nvcc"),
        (("include/cuda_runtime.h",), "no include/cuda_runtime.h"),
        (("lib64/libcudart_static.a", "lib64/libcudadevrt.a"), "no libcudart_static.a, no libcudadevrt.a"),
    ],
)
def test_a_named_toolkit_that_cannot_build_is_refused_with_what_it_lacks(
    toolkit: Toolkit, without: tuple[str, ...], seen: str
) -> None:
    home = toolkit(without=without)
    with pytest.raises(cuda.CudaError, match=f"HOROVOD_CUDA_HOME={home} is no whole CUDA toolkit: {seen}"):
        cuda.choose({"HOROVOD_CUDA_HOME": str(home), **NAMED_NCCL}, "", "13.2")


def test_a_toolkit_of_another_cuda_than_torchs_is_refused(toolkit: Toolkit) -> None:
    with pytest.raises(cuda.CudaError, match=r"is CUDA 12, and torch is built with CUDA 13\.2"):
        cuda.choose({"CUDA_HOME": str(toolkit("12.4")), **NAMED_NCCL}, "", "13.2")


def test_the_toolkit_of_the_nvcc_on_path_is_taken_also_through_a_script(
    toolkit: Toolkit, tmp_path: Path, no_default: None
) -> None:
    home = toolkit()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "nvcc").write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    (tmp_path / "tools" / "nvcc").chmod(0o755)
    assert cuda.choose(NAMED_NCCL, str(tmp_path / "tools"), "13.2").home == home


def test_where_the_found_toolkit_is_not_whole_the_wheels_that_torch_requires_are_taken(
    toolkit: Toolkit, no_default: None, required_by_torch: list[str]
) -> None:
    required_by_torch[:] = ["filelock", 'cuda-toolkit[cublas,cudart]==13.2.2; platform_system == "Linux"']
    home = toolkit(without=("lib64/libcudart_static.a",))
    chosen = cuda.choose(NAMED_NCCL, f"{home}/bin:{os.environ['PATH']}", "13.2")
    assert (chosen.home, chosen.version) == (None, "13.2.2")


def test_the_wheels_of_cuda_12_hold_no_compiler_and_the_error_says_so(no_default: None) -> None:
    with pytest.raises(cuda.CudaError, match=r"no nvcc on PATH or in .*, and the wheels of CUDA 12\.1 hold no nvcc"):
        cuda.choose(NAMED_NCCL, "", "12.1")


def test_a_torch_of_cuda_13_that_names_no_toolkit_needs_one(no_default: None, required_by_torch: list[str]) -> None:
    required_by_torch[:] = ["filelock"]
    with pytest.raises(cuda.CudaError, match=r"this torch requires no cuda-toolkit in one version"):
        cuda.choose(NAMED_NCCL, "", "13.0")


def test_a_torch_without_nccl_needs_one_that_is_named(toolkit: Toolkit) -> None:
    with pytest.raises(cuda.CudaError, match=r"nvidia-nccl-cu99 is not installed.*set HOROVOD_NCCL_HOME"):
        cuda.choose({"CUDA_HOME": str(toolkit())}, "", "99.0")


def test_the_build_sees_the_toolkit_first_and_torchs_nccl_under_a_linkers_name(
    toolkit: Toolkit, tmp_path: Path
) -> None:
    wheel = tmp_path / "nvidia" / "nccl"
    (wheel / "lib").mkdir(parents=True)
    (wheel / "include").mkdir()
    (wheel / "lib" / "libnccl.so.2").write_text("the library")
    (wheel / "include" / "nccl.h").write_text("the header")
    home = toolkit()
    env = cuda.prepare(cuda.Cuda(home, "13.0", wheel, "2.28"), tmp_path / "build", {"PATH": "/bin", "CC": "cc"})
    assert env["PATH"] == f"{home}/bin:/bin"
    assert {env["CUDA_HOME"], env["HOROVOD_CUDA_HOME"], env["CUDAToolkit_ROOT"]} == {str(home)}
    assert env["CUDACXX"] == f"{home}/bin/nvcc"
    assert (Path(env["HOROVOD_NCCL_HOME"]) / "lib" / "libnccl.so").read_text() == "the library"
    assert (Path(env["HOROVOD_NCCL_HOME"]) / "include" / "nccl.h").read_text() == "the header"
    assert env["HOROVOD_NCCL_LINK"] == "SHARED"
    assert env["CC"] == "cc"
