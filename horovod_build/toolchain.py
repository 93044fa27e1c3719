"""What a Horovod build needs and what decides its result: the toolchain, found and tried out, and the cache's key.

Values in, values out: nothing here writes, installs or changes the environment. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import cuda_toolkit
import patches

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# Module -> distribution. Horovod's setup.py would fetch these itself, unpinned, in the middle of the build.
BUILD_MODULES = {
    "pip": "pip",
    "setuptools": "setuptools",
    "wheel": "wheel",
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "yaml": "pyyaml",
}
# Settings that change what is built; they come from the user's environment and are part of the cache key.
PASSED_ON = ("CXX", "CXXFLAGS", "LDFLAGS", "HOROVOD_BUILD_ARCH_FLAGS")
GPU_PASSED_ON = (
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
)
BUILD_FLAGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # the bundled Gloo says cmake_minimum_required(2.8), which CMake 4 refuses
}
CPU_FLAGS = {"avx", "f16c", "fma"}  # Horovod's CMake turns these on when the building machine has them

TORCH_PROBE = """
import json, os, torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "abi": torch.compiled_with_cxx11_abi()}
print(json.dumps({**facts, "include": os.path.join(os.path.dirname(torch.__file__), "include")}))
"""
# Horovod's CMake takes the source directory for a regular expression (cmake/Utilities.cmake): below a path with a "+",
# such as torch's local version tag, the compiled library ends up in the wrong place, and nothing says so.
UNSAFE_IN_PATH = re.compile(r"[^A-Za-z0-9._/-]")
# torch/all.h refuses an older standard than torch needs with an #error: C++17 up to torch 2.13, C++20 from 2.14 on.
STANDARDS = (17, 20, 23)
TORCH_HEADER = "#include <torch/all.h>\n"
CXX17_PROBE = "#include <optional>\n#include <variant>\nint main() { return std::optional<int>{0}.value(); }\n"


class BuildError(Exception):
    """The wheel cannot be built, cached, installed or verified. The message says what to do."""


@dataclass(frozen=True)
class Missing:
    """One thing that the build needs and this machine lacks."""

    what: str
    seen: str
    remedy: str

    def __str__(self) -> str:
        return f"  - {self.what}: {self.seen}\n      {self.remedy}"


@dataclass(frozen=True)
class Toolchain:
    """What builds the wheel, found and tried out."""

    cxx: str
    cxx_version: str
    cmake: str
    generator: str
    torch: str
    torch_cuda: str | None
    torch_abi: bool
    standard: int
    """The C++ standard that torch's headers ask for."""
    cuda: cuda_toolkit.Cuda | None = None
    """For a build with NCCL."""


def tool_path(env: Mapping[str, str]) -> str:
    """PATH with this Python's own scripts first: cmake and ninja come from pip as often as from the system."""
    return os.pathsep.join([sysconfig.get_path("scripts"), env.get("PATH", os.defpath)])


def searching(env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which tools are tried out: the one the build will have."""
    return {**env, "PATH": tool_path(env)}


def first_line(command: list[str], env: Mapping[str, str]) -> str:
    """The first line that a tool prints for ``--version``; empty when it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=searching(env))
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.splitlines() or [""])[0].strip() if done.returncode == 0 else ""


def find_cxx(env: Mapping[str, str]) -> tuple[str, str] | Missing:
    """A C++ compiler that compiles C++17, and its version line."""
    remedy = "get it: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), or set CXX to one you have"
    # $CXX may be a command with arguments, such as "ccache g++"; CMake takes it the same way.
    commands = [shlex.split(env["CXX"])] if env.get("CXX") else [["c++"], ["g++"], ["clang++"]]
    found = next((command for command in commands if shutil.which(command[0], path=tool_path(env))), None)
    if found is None:
        return Missing("a C++ compiler", f"no {' or '.join(command[0] for command in commands)} on PATH", remedy)
    if reason := refusal([*found, "-std=c++17", "-fsyntax-only"], CXX17_PROBE, env):
        return Missing("a C++ compiler", f"{shlex.join(found)} cannot compile C++17: {reason}", remedy)
    return shlex.join(found), first_line([*found, "--version"], env)


def refusal(command: list[str], text: str, env: Mapping[str, str]) -> str:
    """Why the compiler does not take ``text``, in the words of its first error; empty when it does."""
    with tempfile.TemporaryDirectory(prefix="safedist-cxx-") as directory:
        source = Path(directory, "probe.cc")
        source.write_text(text)
        whole = [*command, "-o", os.devnull, str(source)]
        done = subprocess.run(whole, capture_output=True, text=True, check=False, env=searching(env))
    lines = done.stderr.strip().splitlines() or ["it printed nothing"]
    return "" if done.returncode == 0 else next((line for line in lines if "error" in line), lines[0])


def find_standard(env: Mapping[str, str], cxx: str, include: str) -> int | Missing:
    """The oldest C++ standard with which the compiler gets through torch's headers: they know, not torch's version."""
    folders = [f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    for standard in STANDARDS:
        # Preprocessed only, up to the first #error, which takes a second: parsing them takes twenty.
        command = [*shlex.split(cxx), f"-std=c++{standard}", "-E", "-Wfatal-errors", *folders]
        if not (reason := refusal(command, TORCH_HEADER, env)):
            return standard
    remedy = "get a newer one (torch 2.14 and later need GCC 11 or Clang 14), or set CXX to one you have"
    seen = f"{cxx} does not get through them with C++{STANDARDS[-1]}: {reason}"
    return Missing("a C++ compiler for torch's headers", seen, remedy)


def find_cmake(env: Mapping[str, str]) -> str | Missing:
    """A CMake new enough for Horovod (3.13)."""
    remedy = f"get it: {sys.executable} -m pip install cmake, or your system's cmake package"
    found = shutil.which(env.get("HOROVOD_CMAKE") or "cmake", path=tool_path(env))
    if found is None:
        return Missing("CMake >= 3.13", "no cmake on PATH", remedy)
    version = re.search(r"(\d+)\.(\d+)", line := first_line([found, "--version"], env))
    if version is None or (int(version[1]), int(version[2])) < (3, 13):
        return Missing("CMake >= 3.13", f"{found} says {line!r}", remedy)
    return found


def find_generator(env: Mapping[str, str]) -> str | Missing:
    """CMake's name for the tool that runs the compiler."""
    for tool, generator in (("make", "Unix Makefiles"), ("ninja", "Ninja")):
        if shutil.which(tool, path=tool_path(env)):
            return generator
    remedy = f"get one: apt-get install make, or {sys.executable} -m pip install ninja"
    return Missing("make or ninja", "neither is on PATH", remedy)


def find_torch() -> dict[str, object] | Missing:
    """Version, CUDA version and C++ ABI of the installed torch, asked in a process of its own."""
    remedy = f"get it: {sys.executable} -m pip install 'torch>=2.5,<3'"
    done = subprocess.run([sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Missing("torch", f"{sys.executable} cannot import it: {reason}", remedy)
    facts: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def find_modules() -> list[Missing]:
    """The build modules that this Python lacks."""
    code = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    done = subprocess.run([sys.executable, "-c", code, *BUILD_MODULES], capture_output=True, text=True, check=True)
    lacking = [BUILD_MODULES[module] for module in done.stdout.split()]
    pip = [Missing("pip", "not installed", f"get it: {sys.executable} -m ensurepip")] if "pip" in lacking else []
    rest = [name for name in lacking if name != "pip"]
    if not rest:
        return pip
    remedy = f"get them: {sys.executable} -m pip install {' '.join(rest)}"
    return [*pip, Missing("Python packages for the build", f"{', '.join(rest)} not installed", remedy)]


def find_headers() -> Missing | None:
    """Python's own C headers; Debian and Fedora ship them in a package of their own."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.is_file():
        return None
    return Missing(
        "Python's C headers", f"no {header}", "get them: apt-get install python3-dev, or dnf install python3-devel"
    )


def find_cuda(env: Mapping[str, str], torch: Mapping[str, object]) -> cuda_toolkit.Cuda | Missing:
    """What a build with NCCL needs on top."""
    if not torch["cuda"]:
        seen = f"torch {torch['version']} is a CPU build"
        return Missing("torch with CUDA", seen, "install a CUDA build of torch, or leave out --gpu nccl")
    try:
        return cuda_toolkit.choose(env, tool_path(env), str(torch["cuda"]))
    except cuda_toolkit.CudaError as error:
        remedy = f"install the CUDA toolkit of torch's CUDA version ({torch['cuda']}) and set HOROVOD_CUDA_HOME to it"
        return Missing("CUDA's compiler and NCCL", str(error), remedy)


def find_toolchain(env: Mapping[str, str], *, nccl: bool) -> Toolchain:
    """Everything the build needs. Raises BuildError that lists all that is missing, not only the first."""
    cxx, cmake, generator, torch = find_cxx(env), find_cmake(env), find_generator(env), find_torch()
    standard: int | Missing | None = None  # cannot be known without both
    if not (isinstance(cxx, Missing) or isinstance(torch, Missing)):
        standard = find_standard(env, cxx[0], str(torch["include"]))
    cuda = find_cuda(env, torch) if nccl and not isinstance(torch, Missing) else None
    seen = (cxx, cmake, generator, torch, standard, find_headers(), cuda)
    missing = [found for found in seen if isinstance(found, Missing)]
    missing += find_modules()
    if missing or isinstance(cxx, Missing) or isinstance(torch, Missing) or not isinstance(standard, int):
        things = "1 thing is" if len(missing) == 1 else f"{len(missing)} things are"
        listed = "\n".join(str(item) for item in missing)
        raise BuildError(f"{things} missing on this machine to build Horovod {VERSION}:\n{listed}")
    return Toolchain(
        cxx=cxx[0],
        cxx_version=cxx[1],
        cmake=str(cmake),
        generator=str(generator),
        torch=str(torch["version"]),
        torch_cuda=str(torch["cuda"]) if torch["cuda"] else None,
        torch_abi=bool(torch["abi"]),
        standard=standard,
        cuda=cuda if isinstance(cuda, cuda_toolkit.Cuda) else None,
    )


def build_flags(env: Mapping[str, str], *, nccl: bool) -> dict[str, str]:
    """The settings handed to Horovod's build. A build for the CPU takes none of those about CUDA."""
    names = (*PASSED_ON, *(GPU_PASSED_ON if nccl else ()))
    passed = {name: env[name] for name in names if env.get(name)}
    return {**passed, **BUILD_FLAGS, **({"HOROVOD_GPU_OPERATIONS": "NCCL"} if nccl else {})}


def cpu_flags() -> list[str]:
    """The instruction sets that Horovod's CMake would turn on here; none known outside Linux on x86."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return sorted(CPU_FLAGS & set(line.split()))


def build_facts(tools: Toolchain, flags: Mapping[str, str]) -> dict[str, object]:
    """Everything that decides what the compiler produces: the content that the cache is keyed by."""
    return {
        "horovod": VERSION,
        "sdist_sha256": SDIST_SHA256,
        "patches": patches.digest(tools.standard),
        "cxx_standard": tools.standard,
        "torch": tools.torch,
        "torch_cuda": tools.torch_cuda,
        "torch_cxx11_abi": tools.torch_abi,
        "python": sysconfig.get_config_var("SOABI"),
        "platform": sysconfig.get_platform(),
        "libc": libc_version(),
        "cpu": cpu_flags(),
        "cxx": tools.cxx_version,
        **({"nvcc": tools.cuda.version, "nccl": tools.cuda.nccl_version} if tools.cuda else {}),
        "flags": dict(sorted(flags.items())),
    }


def libc_version() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""  # not glibc


def cache_key(facts: Mapping[str, object]) -> str:
    """A name that a person can read and that differs whenever a fact does."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    name = f"horovod-{facts['horovod']}-torch-{facts['torch']}-{facts['python']}-{digest[:16]}"
    return UNSAFE_IN_PATH.sub("_", name)


def default_cache(env: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/flytekitplugins-safedist``, by default below ``~/.cache``. Raises BuildError where there is no
    home directory either."""
    base = env.get("XDG_CACHE_HOME") or ""
    try:
        # The XDG base directory specification: a relative value is invalid and to be ignored.
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError(f"there is no home directory ({error}): name a directory with --cache-dir") from error
    return root / "flytekitplugins-safedist"
