"""The Horovod build: what it says when something is missing, and what its cache promises.

The compile itself takes minutes and is not repeated here, nor is what the build does first and last: it tries torch's
headers, and reduces over two ranks. ``make`` runs it before all tests where it has changed, and the Dockerfile does.
Where a test needs a wheel without compiling one, it makes a file of its own and says so.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.fs.ranks import size

pytestmark = pytest.mark.processes

FOLDER = Path(__file__).parents[3] / "horovod_build"


def load(name: str) -> ModuleType:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


build = load("build")
patches = load("patches")
toolchain = load("toolchain")
verify = load("verify")


def executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real Python without torch, setuptools or even pip."""
    directory = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    return str(directory / "bin" / "python")


class TestWhatIsMissing:
    def test_all_that_is_missing_is_listed_at_once_each_with_its_remedy_and_nothing_is_written(
        self, bare_python: str, tmp_path: Path
    ) -> None:
        env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
        command = [bare_python, str(FOLDER / "build.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "6 things are missing on this machine to build Horovod 0.28.1" in done.stderr
        assert "a C++ compiler: no c++ or g++ or clang++ on PATH\n      get it: apt-get install g++" in done.stderr
        assert "CMake >= 3.13: no cmake on PATH\n      get it:" in done.stderr
        assert "make or ninja: neither is on PATH\n      get one: apt-get install make" in done.stderr
        assert "torch: " in done.stderr
        assert "No module named 'torch'" in done.stderr
        assert "pip: not installed\n      get it:" in done.stderr
        assert "setuptools, wheel, cffi, cloudpickle, packaging, psutil, pyyaml not installed" in done.stderr
        assert "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_compiler_that_cannot_compile_is_quoted(self, tmp_path: Path) -> None:
        executable(tmp_path / "old-c++", "echo 'error: unrecognized option -std=c++17' >&2; exit 1")
        found = toolchain.find_cxx({"CXX": str(tmp_path / "old-c++"), "PATH": os.environ["PATH"]})
        assert isinstance(found, toolchain.Missing)
        assert "old-c++ cannot compile C++17: error: unrecognized option -std=c++17" in str(found)

    def test_a_compiler_with_a_launcher_in_front_is_taken_whole(self, tmp_path: Path) -> None:
        executable(tmp_path / "launcher", 'test "$2" = --version && echo "fake c++ 13"; exit 0')
        env = {"CXX": f"{tmp_path}/launcher c++", "PATH": os.environ["PATH"]}
        assert toolchain.find_cxx(env) == (f"{tmp_path}/launcher c++", "fake c++ 13")

    @pytest.mark.parametrize("says", ["cmake version 3.12.4", "not a version"])
    def test_a_cmake_that_is_too_old_is_quoted(self, tmp_path: Path, says: str) -> None:
        executable(tmp_path / "cmake", f"echo '{says}'")
        found = toolchain.find_cmake({"HOROVOD_CMAKE": str(tmp_path / "cmake"), "PATH": ""})
        assert isinstance(found, toolchain.Missing)
        assert says in str(found)

    def test_nccl_needs_a_cuda_torch(self) -> None:
        found = toolchain.find_cuda({}, {"version": "2.13.0+cpu", "cuda": None})
        assert "torch 2.13.0+cpu is a CPU build\n      install a CUDA build of torch" in str(found)

    def test_nccl_needs_a_toolkit_that_can_build(self, tmp_path: Path) -> None:
        """One that is named and not there, as CUDA 12's wheels are no way out."""
        env = {"PATH": str(tmp_path), "HOROVOD_CUDA_HOME": str(tmp_path / "cuda"), "HOROVOD_NCCL_HOME": "/nccl"}
        found = toolchain.find_cuda(env, {"version": "2.4.0+cu121", "cuda": "12.1"})
        assert f"HOROVOD_CUDA_HOME={tmp_path}/cuda is no whole CUDA toolkit: no bin/nvcc" in str(found)
        assert "install the CUDA toolkit of torch's CUDA version (12.1)" in str(found)


class TestStandard:
    """Asked of the compiler with headers as torch's are: an #error for a standard that is too old."""

    def torch_header(self, directory: Path, *lines: str) -> str:
        header = directory / "torch" / "csrc" / "api" / "include" / "torch" / "all.h"
        header.parent.mkdir(parents=True)
        header.write_text("\n".join(lines) + "\n")
        return str(directory)

    @pytest.mark.parametrize(("value", "expected"), [("201703L", 17), ("202002L", 20)])
    def test_it_is_the_oldest_that_torchs_headers_take(self, tmp_path: Path, value: str, expected: int) -> None:
        include = self.torch_header(tmp_path, f"#if __cplusplus < {value}", "#error newer, please", "#endif")
        assert toolchain.find_standard(os.environ, "c++", include) == expected

    def test_headers_that_no_standard_gets_through_are_quoted(self, tmp_path: Path) -> None:
        include = self.torch_header(tmp_path, "#error C++98 or older is required")
        found = toolchain.find_standard(os.environ, "c++", include)
        assert isinstance(found, toolchain.Missing)
        assert "C++98 or older is required" in str(found)
        assert "get a newer one" in str(found)


class TestPatch:
    def source(self, directory: Path, standard: int = 17) -> Path:
        """A source that holds every text that the patches replace, once, and nothing else."""
        for patch in patches.patches(standard):
            for edit in patch.edits:
                path = directory / edit.file
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as stream:
                    stream.write(edit.old)
        return directory

    @pytest.mark.parametrize("standard", [17, 20])
    def test_every_text_is_replaced_and_both_files_ask_for_torchs_standard(self, tmp_path: Path, standard: int) -> None:
        build.patch(self.source(tmp_path), standard)
        for patch in patches.patches(standard):
            for edit in patch.edits:
                assert edit.new in (tmp_path / edit.file).read_text()
        for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
            text = (tmp_path / name).read_text()
            assert f"set(CMAKE_CXX_STANDARD {standard})" in text
            assert "set(CMAKE_CXX_STANDARD 14)" not in text

    def test_each_patch_says_where_it_comes_from_and_why(self) -> None:
        for patch in patches.patches(17):
            assert patch.why
            assert patch.origin.startswith("ours") or "#" in patch.origin

    def test_the_documentation_lists_them_all(self) -> None:
        text = (FOLDER / "README.md").read_text()
        listed = [
            line.split("|")[1].strip() for line in text.partition("## The patches")[2].splitlines() if "|" in line
        ]
        assert listed[2 : 2 + len(patches.patches(17))] == [patch.name for patch in patches.patches(17)]

    @pytest.mark.parametrize("text", ["set(CMAKE_CXX_STANDARD 17)\n", "set(CMAKE_CXX_STANDARD 14)\n" * 2, ""])
    def test_a_file_that_does_not_hold_a_text_exactly_once_is_refused(self, tmp_path: Path, text: str) -> None:
        source = self.source(tmp_path)
        (source / "horovod/torch/CMakeLists.txt").write_text(text)
        with pytest.raises(build.BuildError, match=r"horovod/torch/CMakeLists.txt holds .* times, expected once"):
            build.patch(source, 17)

    def test_a_source_without_the_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(build.BuildError, match=r"not laid out as horovod 0\.28\.1: .*CMakeLists\.txt"):
            build.patch(tmp_path, 17)

    def test_an_sdist_that_is_not_the_released_one_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "horovod-0.28.1.tar.gz").write_bytes(b"something else")
        with pytest.raises(build.BuildError, match=r"is not the released horovod 0\.28\.1: sha256 [0-9a-f]{64}"):
            build.check_sdist(tmp_path / "horovod-0.28.1.tar.gz")


class TestBuildEnvironment:
    tools = toolchain.Toolchain("/usr/bin/c++", "c++ 12", "/usr/bin/cmake", "Ninja", "2.13.0", None, True, 17)

    def test_a_calling_make_does_not_leak_in(self) -> None:
        env = {"PATH": "/bin", "MAKEFLAGS": " -j --jobserver-auth=3,4 -- TORCH=x", "MFLAGS": "-j", "MAKELEVEL": "1"}
        got = build.build_environment(self.tools, {}, env)
        assert got["MAKEFLAGS"] == f"-j{build.job_count()}"
        assert {"MFLAGS", "MAKELEVEL"}.isdisjoint(got)

    @pytest.mark.parametrize(
        ("files", "jobs"),
        [
            ({"0::/pod\n": "", "pod/memory.max": "4294967296\n", "pod/cpu.max": "max 100000\n"}, 2),
            ({"0::/\n": "", "memory.max": "max\n", "cpu.max": "150000 100000\n"}, 1),
            ({"0::/a/b\n": "", "a/memory.max": "2147483648\n", "a/b/memory.max": "max\n"}, 1),
            (
                {
                    "4:memory:/docker/x\n1:cpu:/docker/x\n": "",
                    "memory/memory.limit_in_bytes": "4294967296\n",
                    "cpu/cpu.cfs_quota_us": "300000\n",
                    "cpu/cpu.cfs_period_us": "100000\n",
                },
                2,
            ),
            ({"1:cpu:/\n": "", "cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
            ({}, 64),
        ],
    )
    def test_as_many_jobs_as_the_containers_memory_and_processor_time_are_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], jobs: int
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
        monkeypatch.setattr(os, "sysconf", lambda _: 1 << 21)  # a machine of terabytes
        for name, text in files.items():
            file = tmp_path / ("sys/fs/cgroup" if text else "proc/self") / (name if text else "cgroup")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text or name)
        assert build.job_count(tmp_path) == jobs

    def test_the_tools_that_were_tried_out_are_the_ones_used(self) -> None:
        got = build.build_environment(self.tools, {"HOROVOD_WITH_GLOO": "1"}, {"PATH": "/bin", "CXX": "other"})
        assert (got["CXX"], got["HOROVOD_CMAKE"], got["CMAKE_GENERATOR"]) == ("/usr/bin/c++", "/usr/bin/cmake", "Ninja")
        assert got["HOROVOD_WITH_GLOO"] == "1"

    def test_a_build_for_the_cpu_is_the_same_on_every_machine(self) -> None:
        """Neither its settings, nor its environment, nor its place in the cache know what the machine has of CUDA."""
        machine = {"PATH": "/bin", "CUDA_HOME": "/nowhere", "CUDACXX": "/nowhere/nvcc", "HOROVOD_CUDA_HOME": "/nowhere"}
        machine |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/nccl", "CUDAToolkit_ROOT": "/nowhere"}
        flags, plain = toolchain.build_flags(machine, nccl=False), toolchain.build_flags({"PATH": "/bin"}, nccl=False)
        assert flags == plain
        got = build.build_environment(self.tools, flags, machine)
        assert got == build.build_environment(self.tools, plain, {"PATH": "/bin"})

    def test_nccl_is_asked_for_only_on_request(self) -> None:
        assert "HOROVOD_GPU_OPERATIONS" not in toolchain.build_flags({}, nccl=False)
        assert toolchain.build_flags({}, nccl=True)["HOROVOD_GPU_OPERATIONS"] == "NCCL"

    def test_a_failed_build_shows_the_first_errors_of_its_log_and_keeps_it(self, tmp_path: Path) -> None:
        (tmp_path / "setup.py").write_text("raise SystemExit('a.cc:1: fatal error: torch/torch.h')")
        with pytest.raises(
            build.BuildError, match=r"the build failed .*first errors in .*log:\n.*fatal error: torch/torch\.h"
        ):
            build.compile_wheel(tmp_path, tmp_path / "out", os.environ, tmp_path / "log")
        assert "fatal error" in (tmp_path / "log").read_text()

    def test_of_cmakes_errors_the_message_is_shown_and_not_only_the_place(self) -> None:
        log = [
            "-- Configuring",
            "  CMake Error at horovod/torch/CMakeLists.txt:22 (message):",
            "    Horovod build with GPU support was requested but this PyTorch installation",
            "    does not support CUDA.",
            "  ",
            "  -- Configuring incomplete, errors occurred!",
        ]
        assert build.error_lines(log) == log[1:4]


class TestCacheKey:
    tools = TestBuildEnvironment.tools

    def key(self, flags: dict[str, str] | None = None, **changed: object) -> str:
        facts = toolchain.build_facts(self.tools, flags or {})
        assert set(changed) <= set(facts)
        return toolchain.cache_key({**facts, **changed})

    def test_each_fact_changes_the_key(self) -> None:
        facts = {
            *("horovod", "sdist_sha256", "patches", "cxx_standard", "torch", "torch_cuda", "torch_cxx11_abi"),
            *("python", "platform", "libc", "cpu", "cxx"),
        }
        assert {fact for fact in facts if self.key(**{fact: "something else"}) == self.key()} == set()

    def test_flags_the_standard_of_torchs_headers_and_the_cuda_of_a_build_with_nccl_change_the_key(self) -> None:
        keys = [self.key(), self.key({"CXXFLAGS": "-O1"})]
        keys += [self.key(toolchain.build_flags({}, nccl=nccl)) for nccl in (False, True)]
        others = [{"standard": 20}]
        for version, nccl in (("13.0", "2.28"), ("13.2", "2.28"), ("13.2", "2.29")):
            others.append({"cuda": toolchain.cuda_toolkit.Cuda(None, version, None, nccl)})
        for changed in others:
            tools = dataclasses.replace(self.tools, **changed)
            keys.append(toolchain.cache_key(toolchain.build_facts(tools, {})))
        assert len(set(keys)) == len(keys)

    def test_another_patch_changes_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = self.key()
        monkeypatch.setattr(patches, "patches", lambda standard: ())
        assert self.key() != before

    def test_the_local_tag_of_torch_is_in_the_name_but_no_character_that_horovods_cmake_trips_over(self) -> None:
        assert "torch-2.13.0_cpu-" in self.key(torch="2.13.0+cpu")

    def test_the_cache_lies_where_the_xdg_specification_says(self, tmp_path: Path, monkeypatch: object) -> None:
        below = "flytekitplugins-safedist"
        assert toolchain.default_cache({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / below
        assert toolchain.default_cache({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / below
        assert toolchain.default_cache({}) == Path.home() / ".cache" / below

    def test_without_a_home_directory_one_is_asked_for_and_a_named_one_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As for a user that no file knows, where HOME is not set."""

        def home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", home)
        assert build.parse(["--cache-dir", "/cache"]).cache_dir == Path("/cache")
        with pytest.raises(build.BuildError, match=r"no home directory .*--cache-dir"):
            toolchain.default_cache({})


def publish_one(cache: str, content: bytes, barrier: object, done: object) -> None:
    """One of two builds of the same key that are ready at the same moment."""
    wheel = Path(cache).with_name(f"{Path(cache).name}-{os.getpid()}") / "horovod-0.28.1-test.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(content)
    barrier.wait()  # type: ignore[attr-defined]
    path = build.publish(wheel, {"horovod": "0.28.1"}, Path(cache) / "key")
    done.put((str(path), path.read_bytes()))  # type: ignore[attr-defined]


class TestCache:
    def entry(self, tmp_path: Path) -> Path:
        """A published entry; the wheel is a file of the test's own."""
        (tmp_path / "aside").mkdir()
        wheel = tmp_path / "aside" / "horovod-0.28.1-test.whl"
        wheel.write_bytes(b"wheel")
        build.publish(wheel, {"horovod": "0.28.1", "torch": "2.13.0"}, tmp_path / "key")
        return tmp_path / "key"

    def test_a_published_wheel_is_found_with_the_facts_it_was_built_from(self, tmp_path: Path) -> None:
        assert build.cached_wheel(tmp_path / "key") is None
        entry = self.entry(tmp_path)
        assert build.cached_wheel(entry) == entry / "horovod-0.28.1-test.whl"
        assert json.loads((entry / "facts.json").read_text())["torch"] == "2.13.0"

    def test_a_wheel_whose_bytes_changed_is_told_and_published_anew(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        entry = self.entry(tmp_path)
        (entry / "horovod-0.28.1-test.whl").write_bytes(b"whee")
        assert build.cached_wheel(entry) is None
        assert "key is damaged (its bytes changed since it was published): it is built anew" in capsys.readouterr().out
        build.publish(tmp_path / "aside" / "horovod-0.28.1-test.whl", {"horovod": "0.28.1"}, entry)
        assert build.cached_wheel(entry) == entry / "horovod-0.28.1-test.whl"

    def test_what_another_build_publishes_meanwhile_is_never_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wheels = [tmp_path / name / "horovod-0.28.1-test.whl" for name in ("ours", "theirs")]
        for wheel in wheels:
            wheel.parent.mkdir()
            wheel.write_bytes(wheel.parent.name.encode())
        looks, entry = build.cached_wheel, tmp_path / "cache" / "key"

        def looks_just_before_the_other_is_done(at: Path) -> Path | None:
            found = looks(at)
            monkeypatch.setattr(build, "cached_wheel", looks)
            build.publish(wheels[1], {"horovod": "0.28.1"}, entry)
            return found

        monkeypatch.setattr(build, "cached_wheel", looks_just_before_the_other_is_done)
        removed: list[object] = []
        monkeypatch.setattr(build.shutil, "rmtree", lambda path, **_: removed.append(path))
        build.publish(wheels[0], {"horovod": "0.28.1"}, entry)
        assert entry not in removed
        assert looks(entry) is not None

    def test_two_builds_that_finish_together_publish_one_entry_and_both_get_it(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("fork")
        for attempt in range(size(5, 20)):
            cache = tmp_path / str(attempt)
            cache.mkdir()
            barrier, done = context.Barrier(2), context.Queue()
            contents = [b"a" * 100_000, b"b" * 100_000]
            builds = [context.Process(target=publish_one, args=(str(cache), c, barrier, done)) for c in contents]
            for process in builds:
                process.start()
            results = [done.get(timeout=60) for _ in builds]
            for process in builds:
                process.join()
            assert results[0] == results[1]
            assert results[0][1] in contents
            assert build.cached_wheel(cache / "key") == Path(results[0][0])

    def test_a_path_that_would_misplace_the_library_is_refused_before_the_build(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "c++").mkdir()
        monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "c++"))
        with pytest.raises(build.BuildError, match=r"path with '\+' in it .* choose another directory with TMPDIR"):
            build.obtain_wheel(tmp_path / "cache", TestBuildEnvironment.tools, {}, sdist=tmp_path / "never read")
        assert list((tmp_path / "cache").iterdir()) == list((tmp_path / "c++").iterdir()) == []

    def test_a_cached_wheel_is_handed_out_without_a_build(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tools = TestBuildEnvironment.tools
        key = toolchain.cache_key(toolchain.build_facts(tools, {}))
        self.entry(tmp_path).rename(tmp_path / key)
        wheel = build.obtain_wheel(tmp_path, tools, {}, sdist=tmp_path / "would fail")
        build.hand_out(wheel, tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["horovod-0.28.1-test.whl"]
        assert "cached: " in capsys.readouterr().out


class TestVerify:
    report = "Available Frameworks:\n    [ ] TensorFlow\n    [X] PyTorch\nAvailable Controllers:\n    [{}] Gloo\n"

    def test_every_feature_that_is_not_ticked_is_named(self) -> None:
        assert verify.missing_features(self.report.format("X"), nccl=False) == []
        assert verify.missing_features(self.report.format(" "), nccl=True) == ["Gloo", "NCCL"]

    @pytest.mark.parametrize(
        ("gpus", "nccl", "where"),
        [
            (0, False, "on the CPU through Gloo"),
            (0, True, "on the CPU through Gloo, because no GPU is here: NCCL is built in and was not run"),
            (1, True, "on 1 GPU through NCCL"),
            (8, True, "on 2 GPUs through NCCL"),
        ],
    )
    def test_it_says_what_was_run(self, gpus: int, nccl: bool, where: str) -> None:
        assert verify.place(gpus, nccl=nccl) == where

    def test_without_horovod_it_says_so(self, bare_python: str) -> None:
        done = subprocess.run([bare_python, str(FOLDER / "verify.py")], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "horovodrun --check-build --verbose failed" in done.stderr
        assert "No module named 'horovod'" in done.stderr
