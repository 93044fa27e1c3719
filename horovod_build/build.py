#!/usr/bin/env python3
"""Build the Horovod wheel that safedist needs, once per machine, and install it into the Python that runs this script.

Horovod's last release (0.28.1, June 2023) does not compile against any torch that safedist runs on. This script takes
the released sdist (by its hash), applies what it needs (patches.py), builds against the *installed* torch,
proves the wheel with a real allreduce, and only then puts it into the cache, under a key made of everything that
decides what the compiler produces. What the machine has beside that (an nvcc, CUDA_HOME) decides nothing.

Standard library only: it runs in a bare virtual environment, in the Dockerfile's builder stage, and in CI alike.
Exit status: 0 done; 1 something failed, and the message says what and what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import cuda_toolkit
import patches
from toolchain import (
    SDIST_SHA256,
    UNSAFE_IN_PATH,
    VERSION,
    BuildError,
    Toolchain,
    build_facts,
    build_flags,
    cache_key,
    default_cache,
    find_toolchain,
    tool_path,
)

FACTS_FILE = "facts.json"
BYTES_PER_JOB = 2 << 30
CPU_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
LOG_TAIL_LINES = 20
ERROR_LINES = 10
# A parent make's MAKEFLAGS carry its job server and variables; MAKELEVEL would make the inner make print them. The rest
# are what Horovod's CMake files, CMake's search for CUDA, and torch's own build helpers read.
KEPT_OUT = re.compile(r"MAKEFLAGS$|MFLAGS$|MAKELEVEL$|HOROVOD_|CUDA|CCL_|ROCM_|HIP_|HIPCXX$")
ERROR_LINE = re.compile(r"\b(fatal )?error: |CMake Error|\w+Error: ")


def say(text: str) -> None:
    print(f"horovod_build: {text}", flush=True)


# --- source -----------------------------------------------------------------------------------------------------------


def fetch_sdist(into: Path) -> Path:
    """Download the released sdist with pip, which checks its hash and knows the machine's package index."""
    requirement = into / "requirement.txt"
    requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes", "--dest", str(into)]
    # No cache: pip would otherwise hand out a wheel that it built itself from the unpatched source.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", *options, "-r", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sdist = into / f"horovod-{VERSION}.tar.gz"
    if done.returncode != 0 or not sdist.is_file():
        raise BuildError(
            f"the source of Horovod {VERSION} could not be downloaded with pip (exit status {done.returncode}); "
            f"check pip's index settings, or hand in the file with --sdist:\n{tail(done.stdout + done.stderr)}"
        )
    return sdist


def check_sdist(sdist: Path) -> None:
    """Refuse an sdist that is not the released one: the patch and the cache key are about that one only."""
    try:
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    except OSError as error:
        raise BuildError(f"the sdist cannot be read: {error}") from error
    if digest != SDIST_SHA256:
        raise BuildError(f"{sdist} is not the released horovod {VERSION}: sha256 {digest}, expected {SDIST_SHA256}")


def unpack(sdist: Path, into: Path) -> Path:
    """Unpack; returns the source directory."""
    with tarfile.open(sdist) as archive:
        # Python 3.10.12, 3.11.4 and later know the filter; the archive's hash has been checked either way.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(into, **safe)  # type: ignore[arg-type]
    return into / f"horovod-{VERSION}"


def patch(source: Path, standard: int) -> None:
    """Apply the patches. Raises BuildError when the source is not the one that they were made for."""
    try:
        patches.apply(source, standard)
    except patches.PatchError as error:
        raise BuildError(str(error)) from error


# --- build ------------------------------------------------------------------------------------------------------------


def job_count(root: Path = Path("/")) -> int:
    """Compiler processes at once: one per core that this process may use, each with 2 GiB of memory that it may use.

    Args:
        root: where ``proc`` and ``sys`` lie; another one in tests.
    """
    memory = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    cores: list[float] = [len(os.sched_getaffinity(0))]
    for group in control_groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and 1, as below
            memory += numbers(group / name)
        for quota in (numbers(group / "cpu.max"), [n for name in CPU_V1 for n in numbers(group / name)]):
            cores += [quota[0] / quota[1]] if len(quota) == 2 else []
    return max(1, int(min(*cores, min(memory) / BYTES_PER_JOB)))


def control_groups(root: Path) -> Iterator[Path]:
    """Those of this process and those above them, as far as they are seen here: a container sees its own as the top."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for each in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents):
                yield root / "sys/fs/cgroup" / controllers / each


def numbers(file: Path) -> list[int]:
    """What a file of a control group says; nothing where it limits nothing ("max", -1) or is not there."""
    try:
        said = [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
    return said if min(said, default=0) > 0 else []


def build_environment(tools: Toolchain, flags: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """The environment of the build: the user's, with the toolchain pinned and kept out what would change the result.

    Horovod's and CMake's own settings are those in ``flags``, which the cache's key holds, and no others.
    """
    inherited = {name: value for name, value in env.items() if not KEPT_OUT.match(name)}
    return {
        **inherited,
        **flags,
        "CXX": tools.cxx,
        "HOROVOD_CMAKE": tools.cmake,
        "CMAKE_GENERATOR": tools.generator,
        "CMAKE_BUILD_PARALLEL_LEVEL": str(job_count()),
        "MAKEFLAGS": f"-j{job_count()}",  # unset, Horovod's setup.py says -j8, whatever the machine
        "PATH": tool_path(env),
    }


def with_cuda(tools: Toolchain, aside: Path, env: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a build with NCCL; fetches CUDA's compiler where no toolkit is there. Raises BuildError."""
    if tools.cuda is None:
        return env
    if tools.cuda.home is None:
        say(
            f"no CUDA toolkit here that fits torch: fetching the compiler of CUDA {tools.cuda.version} with pip "
            f"({cuda_toolkit.PIP_SIZE}, for this build only; HOROVOD_CUDA_HOME names a toolkit instead)"
        )
    else:
        say(f"CUDA toolkit: {tools.cuda.home} ({tools.cuda.version})")
    try:
        return cuda_toolkit.prepare(tools.cuda, aside, env)
    except cuda_toolkit.CudaError as error:
        raise BuildError(str(error)) from error


def compile_wheel(source: Path, into: Path, env: Mapping[str, str], log: Path) -> Path:
    """Run the build; returns the wheel. Raises BuildError with the log's end, and keeps the log."""
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--verbose", "--wheel-dir", str(into)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    started = time.monotonic()
    with log.open("wb") as stream:
        status = subprocess.run(command, env=dict(env), stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
    wheels = sorted(into.glob("horovod-*.whl"))
    if status != 0 or len(wheels) != 1:
        raise BuildError(f"the build failed (pip's exit status {status}); {excerpt(log)}")
    say(f"built {wheels[0].name} in {time.monotonic() - started:.0f} s")
    return wheels[0]


def excerpt(log: Path) -> str:
    """What a person would look for in the log: the first errors, then its end, which pip fills with its own command."""
    text = log.read_text(errors="replace")
    return "\n".join([f"the first errors in {log}:", *error_lines(text.splitlines()), "...and its end:", tail(text)])


def error_lines(lines: list[str]) -> list[str]:
    """The first errors; of CMake's, which say on their first line only where, also the message up to a blank line."""
    found: list[str] = []
    for number, line in enumerate(lines):
        if len(found) >= ERROR_LINES:
            break
        if ERROR_LINE.search(line):
            found.append(line)
            if "CMake Error at" in line:
                found += itertools.takewhile(str.strip, lines[number + 1 : number + 1 + ERROR_LINES])
    return found


def tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LOG_TAIL_LINES:])


def verify(*, nccl: bool, site: Path | None = None) -> None:
    """Run verify.py in a process of its own, on the installed Horovod or on the one unpacked in ``site``."""
    script = Path(__file__).with_name("verify.py")
    command = [sys.executable, str(script), *(["--nccl"] if nccl else [])]
    paths = [str(path) for path in (site, os.environ.get("PYTHONPATH")) if path]
    env = {**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if site else {})}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"Horovod does not work on this machine:\n{(done.stdout + done.stderr).strip()}")
    say(done.stdout.strip().splitlines()[-1])


def pip_install(wheel: Path, *options: str) -> None:
    """Install the wheel. Its own dependencies are the build modules, which are there already."""
    base = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", "--no-index"]
    done = subprocess.run([*base, *options, str(wheel)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"pip could not install {wheel}:\n{tail(done.stdout + done.stderr)}")


# --- cache ------------------------------------------------------------------------------------------------------------


def cached_wheel(entry: Path) -> Path | None:
    """The wheel of a cache entry, if it is whole: its bytes are those that were verified when it was published."""
    try:
        facts = json.loads((entry / FACTS_FILE).read_text())
        wheel = entry / str(facts["wheel"])
        if hashlib.sha256(wheel.read_bytes()).hexdigest() == facts["wheel_sha256"]:
            return wheel
        reason = "its bytes changed since it was published"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    say(f"the cached wheel in {entry} is damaged ({reason}): it is built anew")
    return None


def publish(wheel: Path, facts: Mapping[str, object], entry: Path) -> Path:
    """Put wheel and facts into the cache with one rename: nobody sees an entry without its wheel, or half a wheel."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".publishing-", dir=entry.parent) as aside:
        ready = Path(aside) / "entry"
        ready.mkdir()
        shutil.copy2(wheel, ready)
        record = {**facts, "wheel": wheel.name, "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
        (ready / FACTS_FILE).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        for path in ready.iterdir():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())  # a power cut must not leave a renamed entry with empty files
        try:
            ready.rename(entry)
        except OSError:
            # Another build published first. Same key, same content: take theirs, drop ours.
            theirs = cached_wheel(entry)
            if theirs is not None:
                return theirs
            if not entry.exists():
                raise
            entry.rename(Path(aside) / "damaged")  # never taken apart in its place, where another may come meanwhile
            ready.rename(entry)
    return entry / wheel.name


def make_wheel(aside: Path, tools: Toolchain, flags: Mapping[str, str], sdist: Path | None, log: Path) -> Path:
    """Fetch, patch, build and prove a wheel below ``aside``."""
    if unsafe := UNSAFE_IN_PATH.search(str(aside)):
        raise BuildError(
            f"Horovod cannot be built below a path with {unsafe[0]!r} in it ({aside}): its CMake files take the path "
            "for a regular expression and misplace the library; choose another directory with TMPDIR"
        )
    archive = sdist or fetch_sdist(aside)
    check_sdist(archive)
    source = unpack(archive, aside / "source")
    patch(source, tools.standard)
    what = f"Horovod {VERSION} for torch {tools.torch} in C++{tools.standard}"
    say(f"building {what} with {job_count()} jobs (some minutes); log: {log}")
    wheel = compile_wheel(source, aside, with_cuda(tools, aside, build_environment(tools, flags, os.environ)), log)
    pip_install(wheel, "--target", str(aside / "site"))
    verify(nccl="HOROVOD_GPU_OPERATIONS" in flags, site=aside / "site")
    return wheel


def obtain_wheel(cache: Path, tools: Toolchain, flags: Mapping[str, str], sdist: Path | None) -> Path:
    """The wheel for this toolchain: from the cache, or built and published there."""
    facts = build_facts(tools, flags)
    key = cache_key(facts)
    if wheel := cached_wheel(cache / key):
        say(f"cached: {wheel}")
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as aside:
        wheel = make_wheel(Path(aside), tools, flags, sdist, cache / f"{key}.log")
        return publish(wheel, facts, cache / key)


# --- command line -----------------------------------------------------------------------------------------------------


def hand_out(wheel: Path, directory: Path) -> None:
    """Copy the wheel into ``directory``, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=directory) as aside:
        Path(shutil.copy2(wheel, aside)).replace(directory / wheel.name)
    say(f"wheel: {directory / wheel.name}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cache-dir", type=Path, help="default: flytekitplugins-safedist in the user's cache")
    parser.add_argument("--wheel-dir", type=Path, help="also copy the wheel into this directory")
    parser.add_argument("--sdist", type=Path, help=f"the released horovod-{VERSION}.tar.gz, instead of a download")
    parser.add_argument(
        "--gpu", choices=("none", "nccl"), default="none", help="what reduces GPU tensors; default: none"
    )
    parser.add_argument("--no-install", action="store_true", help="build (or find) the wheel only")
    parser.add_argument("--verify-only", action="store_true", help="check the Horovod that is installed, build nothing")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Do what the command line asks. Raises BuildError."""
    nccl = options.gpu == "nccl"
    if not options.verify_only:
        tools = find_toolchain(os.environ, nccl=nccl)
        flags = build_flags(os.environ, nccl=nccl)
        cache = options.cache_dir or default_cache(os.environ)
        wheel = obtain_wheel(cache.absolute(), tools, flags, options.sdist)
        if options.wheel_dir:
            hand_out(wheel, options.wheel_dir)
        if options.no_install:
            return
        pip_install(wheel)
    verify(nccl=nccl)


def main(arguments: list[str]) -> int:
    try:
        run(parse(arguments))
    except BuildError as error:
        print(f"horovod_build: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"horovod_build: {error} (a full disk or a missing permission? see --cache-dir)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
