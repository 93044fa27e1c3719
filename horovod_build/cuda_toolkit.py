"""What a build with NCCL stands on: a CUDA toolkit that is whole and fits torch, or the one that pip's wheels hold.

torch's own wheels bring CUDA's libraries and NCCL, but no compiler. For CUDA 13 the compiler is on the package index
too, as extras of the ``cuda-toolkit`` that torch itself requires in one version: nothing but pip is needed. CUDA 12's
wheels hold no ``nvcc`` that could be run (only ``ptxas``), so that a toolkit must be there. Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HOME_VARIABLES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
NCCL_VARIABLES = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")
DEFAULT_HOME = Path("/usr/local/cuda")
PIP_EXTRAS, PIP_SIZE = "nvcc,cccl,cudart", "about 115 MB"
FIRST_IN_WHEELS = 13
"""The first CUDA whose wheels hold the compiler."""


class CudaError(Exception):
    """No build with NCCL is possible here. The message says what was seen."""


@dataclass(frozen=True)
class Cuda:
    """What a build with NCCL uses.

    Attributes:
        home: the toolkit; None for the one that :func:`prepare` makes from wheels.
        version: what its nvcc says of itself, or the version of the wheels. Part of the cache's key.
        nccl: the directory of the NCCL that torch brings; None for the one that ``HOROVOD_NCCL_*`` name.
        nccl_version: its version. Part of the cache's key.
    """

    home: Path | None
    version: str
    nccl: Path | None
    nccl_version: str


def choose(env: Mapping[str, str], path: str, torch_cuda: str) -> Cuda:
    """The toolkit that the user names, or one that is found and whole, or the wheels. Raises CudaError."""
    nccl, nccl_version = find_nccl(env, torch_cuda)
    named = next(((name, Path(env[name])) for name in HOME_VARIABLES if env.get(name)), None)
    if named is not None:
        if reason := unfit(named[1], torch_cuda):
            raise CudaError(f"{named[0]}={named[1]} {reason}")
        return Cuda(named[1], nvcc_version(named[1]), nccl, nccl_version)
    reasons = []
    for home in found_homes(path):
        if not (reason := unfit(home, torch_cuda)):
            return Cuda(home, nvcc_version(home), nccl, nccl_version)
        reasons.append(f"{home} {reason}")
    if wheels := wheel_version(torch_cuda):
        return Cuda(None, wheels, nccl, nccl_version)
    seen = "; ".join(reasons) or f"no nvcc on PATH or in {DEFAULT_HOME}/bin"
    if int(torch_cuda.split(".", maxsplit=1)[0]) < FIRST_IN_WHEELS:
        raise CudaError(f"{seen}, and the wheels of CUDA {torch_cuda} hold no nvcc (those of CUDA 13 and later do)")
    raise CudaError(f"{seen}, and this torch requires no cuda-toolkit in one version, whose compiler pip could bring")


def found_homes(path: str) -> list[Path]:
    """The toolkits of this machine, which nobody named: that of the nvcc on PATH, and the usual directory."""
    homes = []
    if nvcc := shutil.which("nvcc", path=path):
        # It may be a script that runs another: nvcc itself says where it lies, as CMake asks it too.
        said = subprocess.run([nvcc, "-v", "nothing"], capture_output=True, text=True, check=False)
        here = re.search(r"^#\$ _HERE_=(.+)$", said.stdout + said.stderr, re.MULTILINE)
        homes.append(Path(here[1] if here else os.path.realpath(nvcc).rpartition("/")[0]).parent)
    return [*homes, *([DEFAULT_HOME] if (DEFAULT_HOME / "bin" / "nvcc").exists() else [])]


def unfit(home: Path, torch_cuda: str) -> str:
    """Why nothing can be built with this toolkit; empty when it can."""
    libraries = [home / "lib64", home / "lib", *home.glob("targets/*/lib")]
    lacking = [] if (home / "bin" / "nvcc").is_file() else ["bin/nvcc"]
    if not any(
        folder.joinpath("cuda_runtime.h").is_file() for folder in (home / "include", *home.glob("targets/*/include"))
    ):
        lacking.append("include/cuda_runtime.h")
    lacking += [
        name for name in ("libcudart_static.a", "libcudadevrt.a") if not any((at / name).is_file() for at in libraries)
    ]
    if lacking:
        return f"is no whole CUDA toolkit: no {', no '.join(lacking)}"
    version = nvcc_version(home)
    release = re.search(r"release (\d+)|cuda_(\d+)", version)
    if release is None:
        return f"has an nvcc that does not say its version ({version!r})"
    if (major := release[1] or release[2]) != torch_cuda.split(".", maxsplit=1)[0]:
        return f"is CUDA {major}, and torch is built with CUDA {torch_cuda}"
    return ""


def nvcc_version(home: Path) -> str:
    """The line in which nvcc says its release and build."""
    try:
        said = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        return str(error)
    return next((line.strip() for line in said.splitlines() if "release" in line), said.strip())


def wheel_version(torch_cuda: str) -> str | None:
    """The version of ``cuda-toolkit`` that the installed torch requires; None where its wheels hold no compiler."""
    if int(torch_cuda.split(".", maxsplit=1)[0]) < FIRST_IN_WHEELS:
        return None
    try:
        required = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    pinned = (re.match(r"cuda-toolkit(?:\[.*?\])?\s*\(?==\s*([0-9.]+)", line) for line in required)
    return next((found[1] for found in pinned if found), None)


def find_nccl(env: Mapping[str, str], torch_cuda: str) -> tuple[Path | None, str]:
    """torch's own NCCL, unless the user names another; and its version. Raises CudaError."""
    if any(env.get(name) for name in NCCL_VARIABLES):
        return None, "named by HOROVOD_NCCL_*"  # which are in the key themselves
    name = f"nvidia-nccl-cu{torch_cuda.split('.', maxsplit=1)[0]}"
    try:
        wheel = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise CudaError(
            f"torch brings no NCCL here ({name} is not installed); set HOROVOD_NCCL_HOME to one, with include/nccl.h"
        ) from None
    return Path(str(wheel.locate_file("nvidia/nccl"))), wheel.version


def prepare(cuda: Cuda, into: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Put together what the build needs below ``into``; returns ``environment`` with it. Raises CudaError."""
    home = cuda.home or install_wheels(cuda.version, into / "cuda")
    added = {name: str(home) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDAToolkit_ROOT")}
    added["CUDACXX"] = str(home / "bin" / "nvcc")
    added["PATH"] = os.pathsep.join([str(home / "bin"), environment.get("PATH", os.defpath)])
    if cuda.nccl is not None:
        added["HOROVOD_NCCL_HOME"] = str(link_nccl(cuda.nccl, into / "nccl"))
        added["HOROVOD_NCCL_LINK"] = "SHARED"  # the one that torch has loaded when Horovod is imported
    return {**environment, **added}


def install_wheels(version: str, into: Path) -> Path:
    """Install CUDA's compiler with pip, in a directory of the build's own: its home."""
    wanted = f"cuda-toolkit[{PIP_EXTRAS}]=={version}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(into), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CudaError(f"pip could not install {wanted}:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    home = into / "nvidia" / f"cu{version.split('.', maxsplit=1)[0]}"
    if not (home / "bin" / "nvcc").is_file():
        raise CudaError(f"the wheels of {wanted} hold no {home.relative_to(into)}/bin/nvcc")
    (home / "lib64").symlink_to("lib")  # where nvcc looks
    link_names(home / "lib", home / "lib")
    return home


def link_nccl(nccl: Path, into: Path) -> Path:
    """A directory with NCCL's headers, and its library under the name that linkers look for."""
    (into / "lib").mkdir(parents=True)
    (into / "include").symlink_to(nccl / "include")
    link_names(nccl / "lib", into / "lib")
    return into


def link_names(libraries: Path, into: Path) -> None:
    """Wheels hold libX.so.N only: link them as libX.so."""
    for library in libraries.glob("lib*.so.*"):
        plain = into / f"{library.name.partition('.so')[0]}.so"
        if not plain.exists():
            plain.symlink_to(library)
