"""What the released source of Horovod 0.28.1 needs to be built and run today: every change, and where it comes from.

The project is hardly maintained since that release (June 2023), so the changes live here, as a list of exact
replacements in the verified sdist. A text that is not there exactly once is refused. What the list says is part of the
cache's key (:func:`digest`), so that no wheel of an older list is taken for one of this. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path


class PatchError(Exception):
    """The source is not the one that the patches were made for. The message names the file and the text."""


@dataclass(frozen=True)
class Edit:
    """One replacement of a text that the file holds exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Patch:
    """One change with one reason."""

    name: str
    origin: str
    """The pull request that does the same upstream, or "ours"."""
    why: str
    edits: tuple[Edit, ...]


TOP, TORCH, PYTORCH = "CMakeLists.txt", "horovod/torch/CMakeLists.txt", "cmake/Modules/FindPytorch.cmake"
MPI_OPS = "horovod/torch/mpi_ops_v2.cc"
WAITING = """\
void WaitAndClear(int handle) {
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
"""
WAITING_ASLEEP = """\
void WaitAndClear(int handle) {
  {
    py::gil_scoped_release release_python_gil;
    const auto began = std::chrono::steady_clock::now();
    while (!handle_manager.PollHandle(handle)) {
      const auto waited = std::chrono::steady_clock::now() - began;
      if (waited < std::chrono::microseconds(200)) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(
            waited / 32, std::chrono::milliseconds(1)));
      }
    }
  }
"""
CPU_ONLY = '"$ENV{HOROVOD_GPU_OPERATIONS}" STREQUAL ""'


def patches(standard: int) -> tuple[Patch, ...]:
    """All changes, for a torch whose headers ask for C++ ``standard`` (17, 20, ...)."""
    wanted = f"set(CMAKE_CXX_STANDARD {standard})"
    return (
        Patch(
            name="the C++ standard of torch's headers",
            origin="horovod/horovod#3998 (merged after the release) for C++17; ours for C++20",
            why="the source asks for C++14; torch's headers refuse less than C++17 since 2.1, than C++20 since 2.14",
            edits=tuple(Edit(file, "set(CMAKE_CXX_STANDARD 14)", wanted) for file in (TOP, TORCH)),
        ),
        Patch(
            name="no CUDA and no ROCm unless GPU operations are asked for",
            origin="ours",
            why="the source looks for nvcc, CUDA_HOME and ROCm by itself: the machine decided what was built, and a "
            "piece of a toolkit failed a build for the CPU",
            edits=(
                Edit(
                    TOP,
                    "if(DEFINED ENV{HOROVOD_CUDA_HOME})",
                    f"if(DEFINED ENV{{HOROVOD_CUDA_HOME}} AND NOT {CPU_ONLY})",
                ),
                Edit(TOP, "\ncheck_language(CUDA)\n", f"\nif(NOT {CPU_ONLY})\n    check_language(CUDA)\nendif()\n"),
                Edit(
                    TOP,
                    "\nif(NOT CMAKE_CUDA_COMPILER)\n",
                    f"\nif(NOT CMAKE_CUDA_COMPILER AND NOT {CPU_ONLY})\n",
                ),
                Edit(
                    PYTORCH,
                    "\nif (Pytorch_CUDA OR Pytorch_ROCM)\n",
                    f"\nif ({CPU_ONLY})\n    set(Pytorch_CUDA FALSE)\n    set(Pytorch_ROCM FALSE)\nendif()\n"
                    "if (Pytorch_CUDA OR Pytorch_ROCM)\n",
                ),
            ),
        ),
        Patch(
            name="C++17 for the CUDA kernels",
            origin="horovod/horovod#4313 (open) raises it to 14",
            why="the source asks for C++11, in which nvcc cannot read the standard library of GCC 14",
            edits=(Edit("horovod/common/ops/cuda/CMakeLists.txt", "CMAKE_CUDA_STANDARD 11", "CMAKE_CUDA_STANDARD 17"),),
        ),
        Patch(
            name="GCC 14 and later",
            origin="pytorch/gloo#452, google/flatbuffers#7227 (merged; the bundled copies are older); ours for Horovod",
            why="newer standard headers bring fewer others with them ('logic_error' is not a member of 'std'), and an "
            "assignment to a const member is refused also in a template that nobody uses",
            edits=(
                Edit("horovod/common/common.h", "#include <memory>\n", "#include <memory>\n#include <stdexcept>\n"),
                Edit("horovod/common/group_table.h", "#include <queue>\n", "#include <queue>\n#include <string>\n"),
                Edit(
                    "third_party/gloo/gloo/types.h",
                    "#include <iostream>\n",
                    "#include <cstdint>\n#include <iostream>\n",
                ),
                Edit(
                    "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
                    "  const size_type count_;",
                    "  size_type count_;",
                ),
            ),
        ),
        Patch(
            name="no distutils",
            origin="ours",
            why="Python 3.12 has none: without setuptools the build misses Python's headers and horovodrun cannot be "
            "imported",
            edits=(
                Edit(
                    TORCH,
                    "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
                    "import sysconfig; print(sysconfig.get_path('include'))",
                ),
                Edit(
                    "horovod/runner/js_run.py",
                    "from distutils.spawn import find_executable",
                    "from shutil import which as find_executable",
                ),
            ),
        ),
        Patch(
            name="no debug information",
            origin="ours",
            why="it is half of the compiler's time (59 s against 30 s for one file), and nobody reads it: the image "
            "took it out again; the optimisation (-O3) stays",
            edits=(Edit("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),),
        ),
        Patch(
            name="a rank that waits for others leaves them the processor",
            origin="ours",
            why="the wait for a collective yielded in a loop and took Python's lock each time: with more ranks than "
            "cores half of the processor time was the kernel's (benchmarks/waiting.py). It now lets go of the lock "
            "once, spins for 200 us, and then sleeps a 32nd of what it has waited, 1 ms at most",
            edits=(
                Edit(MPI_OPS, "#include <chrono>\n", "#include <algorithm>\n#include <chrono>\n"),
                Edit(MPI_OPS, WAITING, WAITING_ASLEEP),
            ),
        ),
    )


def digest(standard: int) -> str:
    """What the patches do to the source, as one short text: it changes with every edit, not with a reason's wording."""
    edits = [(edit.file, edit.old, edit.new) for patch in patches(standard) for edit in patch.edits]
    return hashlib.sha256(json.dumps(edits).encode()).hexdigest()


def apply(source: Path, standard: int) -> None:
    """Change the unpacked source. Raises PatchError when a file does not hold a text exactly once."""
    for patch in patches(standard):
        for edit in patch.edits:
            path = source / edit.file
            try:
                text = path.read_text()
            except OSError as error:
                raise PatchError(f"the source is not laid out as horovod 0.28.1: {error}") from error
            if (count := text.count(edit.old)) != 1:
                raise PatchError(
                    f"{path} holds {edit.old.strip()!r} {count} times, expected once (patch: {patch.name}): "
                    "not horovod 0.28.1?"
                )
            path.write_text(text.replace(edit.old, edit.new))
