"""File systems that lie, refuse or run full: staging is slower and right, or one clear error with nothing published."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import fusefs, needs
from tests.harness.objectstore import ObjectStore
from tests.harness.pod import PROGRAM, Pod
from tests.harness.procs import ROOT
from tests.harness.registered import registered
from tests.harness.staging_actors import (  # noqa: F401  (fixtures)
    actors_fixture,
    all_at_once,
    archive,
    content,
    left_in,
    place_fixture,
)
from tests.harness.tarballs import directory, member, targz

NOBODY = 65534

BROKEN = {
    "locks refused": {"locks": "ENOLCK"},
    "stale attributes": {"stale_attrs": 2.0},
    "stale attributes, locks always granted, no links": {"stale_attrs": 2.0, "locks": "dropped", "links": False},
}


@pytest.mark.parametrize("rules", BROKEN.values(), ids=BROKEN.keys())
def test_on_a_broken_file_system_staging_is_slower_and_right(place, actors, rules):
    fusefs.require()
    if not rules.get("links", True):  # a hard link in an archive needs one on the disk, as with tar
        archive(place.uri, linked=False)
    with fusefs.FuseMount(place.root / "backing", place.root / "mount", **rules) as client:
        outcomes = all_at_once([actors(place.uri, client.path / "dest") for _ in range(4)])
        assert [outcome for outcome in outcomes if "error" in outcome] == []
        assert content(place.root / "backing/dest") == place.expected()
    assert left_in(place.root / "backing") == left_in(place.root / "backing/dest") == []


@pytest.mark.parametrize("rules", [{}, {"locks": "dropped", "late": [0, 1], "stale_attrs": 1.0}], ids=["plain", "nfs"])
def test_several_nodes_may_have_one_destination_volume(place, actors, rules):
    fusefs.require()
    with (
        fusefs.FuseMount(place.root / "volume", place.root / "node0", **rules) as node0,
        fusefs.FuseMount(place.root / "volume", place.root / "node1", **rules) as node1,
    ):
        outcomes = all_at_once([actors(place.uri, node.path / "code") for node in (node0, node1) for _ in range(2)])
    assert [outcome for outcome in outcomes if "error" in outcome] == []
    assert content(place.root / "volume/code") == place.expected()


# --- the disk says no --------------------------------------------------------------------------------------------
@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=755", "tmpfs", path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        needs.missing(
            f"a tmpfs cannot be mounted: {mounted.stderr.strip()}",
            bring="sudo make test (in a container: --privileged)",
        )
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_named_and_has_changed_nothing(place, actors, tmpfs):
    (tmpfs / "main.py").write_text("the image's")
    outcome = actors(place.uri, tmpfs).go().end()
    assert outcome["error"] == "StagingError"
    for words in ("unpack the code", "no space", "ENOSPC", "bytes", "free in", "room for the archive", "Fix:"):
        assert words in outcome["message"]
    assert [path.name for path in tmpfs.iterdir()] == ["main.py"]
    assert (tmpfs / "main.py").read_text() == "the image's"
    subprocess.run(["mount", "-o", "remount,size=64m", tmpfs], check=True)
    assert "error" not in actors(place.uri, tmpfs).go().end()
    assert content(tmpfs) == place.expected()


def test_a_disk_that_fills_while_an_object_is_downloaded_is_no_matter_of_the_stores(place, actors, tmpfs):
    with ObjectStore(targz([member("data.bin", os.urandom(1 << 20))])) as store:
        outcome = actors(store.url, tmpfs).go().end()
        assert (outcome["error"], store.requests["GET"]) == ("StagingError", 1)
        assert f"room for the archive ({len(store.content)} bytes)" in outcome["message"]
    assert "ENOSPC" in outcome["message"]
    assert list(tmpfs.iterdir()) == []


@pytest.mark.parametrize("size", [None, 0, 100], ids=["nothing", "an empty file", "a small file"])
def test_a_disk_that_an_archives_last_bytes_fill_is_no_fault_of_the_archive(place, actors, tmpfs, size):
    behind = [] if size is None else [member("m/z.py", b"x" * size)]
    place.uri.write_bytes(targz([member("m/big.bin", bytes(300 << 10)), *behind]))
    assert actors(place.uri, tmpfs).go().end()["error"] == "StagingError"


@pytest.fixture
def bound(place) -> Iterator[Callable[[Path, Path], None]]:
    """Mounts one path at another."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    mounted: list[Path] = []

    def bind(source: Path, target: Path) -> None:
        subprocess.run(["mount", "--bind", source, target], check=True)
        mounted.append(target)

    yield bind
    for target in mounted:
        subprocess.run(["umount", "-l", target], check=True)


def test_a_file_that_is_mounted_in_the_destination_is_found_before_any_file_changes(place, actors, bound):
    (place.dest / "pkg").mkdir(parents=True)
    for name in ("main.py", "pkg/m7.py"):
        (place.dest / name).write_text("the image's")
    (place.root / "config").write_text("mounted")
    bound(place.root / "config", place.dest / "pkg/m7.py")
    outcome = actors(place.uri, place.dest).go().end()
    assert outcome["error"] == "PathBlockedError"
    assert f"path={place.dest}/pkg/m7.py" in outcome["message"]
    assert (place.dest / "main.py").read_text() == "the image's"


def test_another_mount_of_the_same_file_system_is_copied_into(place, actors, bound):
    (place.dest / "pkg").mkdir(parents=True)
    (place.root / "volume").mkdir()
    bound(place.root / "volume", place.dest / "pkg")
    assert "error" not in actors(place.uri, place.dest).go().end()
    assert content(place.dest) == place.expected()


def test_a_full_volume_inside_the_destination_is_found_before_any_file_changes(place, actors, tmpfs):
    place.dest.mkdir()
    (place.dest / "main.py").write_text("the image's")
    (place.dest / "pkg").symlink_to(tmpfs)
    assert "no space" in actors(place.uri, place.dest).go().end()["message"]
    assert (place.dest / "main.py").read_text() == "the image's"
    assert list(tmpfs.iterdir()) == []


def test_thousands_of_files_cross_into_a_volume_with_few_descriptors(place, actors, tmpfs):
    place.uri.write_bytes(targz([member(f"pkg/m{number}.py", b"1") for number in range(1500)]))
    subprocess.run(["mount", "-o", "remount,size=64m", tmpfs], check=True)
    place.dest.mkdir()
    (place.dest / "pkg").symlink_to(tmpfs)
    assert actors(place.uri, place.dest, descriptors=64).go().end()["new"] == 1500
    assert len(list(tmpfs.iterdir())) == 1500


def test_a_directory_that_crosses_into_a_volume_keeps_its_mode(place, actors, tmpfs):
    place.uri.write_bytes(targz([directory("pkg/private", 0o750), member("pkg/private/m.py", b"1")]))
    place.dest.mkdir()
    (place.dest / "pkg").symlink_to(tmpfs)
    assert actors(place.uri, place.dest).go().end()["new"] == 1
    assert (tmpfs / "private").stat().st_mode & 0o777 == 0o750


def test_a_read_only_destination_is_named(place, actors, tmpfs):
    (tmpfs / "dest").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    message = actors(place.uri, tmpfs / "dest").go().end()["message"]
    for words in ("read-only", str(tmpfs / "dest"), "EROFS"):
        assert words in message


@pytest.mark.parametrize(
    ("op", "name", "words"),
    [
        ("write", "ENOSPC", "no space"),
        ("create", "EDQUOT", "quota"),
        ("rename", "EIO", "server failed"),
        ("mkdir", "EIO", "server failed"),
    ],
)
def test_failing_devices_are_one_error_and_publish_nothing(place, actors, op, name, words):
    fusefs.require()
    with fusefs.FuseMount(place.root / "backing", place.root / "mount") as client:
        actor = actors(place.uri, client.path / "dest", stop_at=["begun"]).go().until("begun")
        client.set(faults=[{"op": op, "errno": name, "when": "before", "every": 1}])
        outcome = actor.go().end()
        client.set(faults=[])
        assert outcome["error"] == "StagingError"
        assert words in outcome["message"]
    assert [name for _, names, files in os.walk(place.root / "backing/dest") for name in names + files] == []


# --- other users -------------------------------------------------------------------------------------------------
@pytest.fixture
def for_nobody(place) -> Iterator[Path]:
    """A directory of user nobody that nobody can reach (pytest's own are closed to other users)."""
    needs.root("become another user")
    home = Path(tempfile.mkdtemp(prefix="safedist-test-", dir="/tmp"))
    home.chmod(0o755)
    shutil.copy(place.uri, home / "fast.tar.gz")
    place.uri = home / "fast.tar.gz"
    (home / "own").mkdir()
    os.chown(home / "own", NOBODY, NOBODY)
    yield home
    shutil.rmtree(home)


def test_a_destination_of_somebody_else_is_named(place, actors, for_nobody):
    (for_nobody / "roots").mkdir()
    outcome = actors(place.uri, for_nobody / "roots", user=NOBODY).go().end()
    for words in ("permission denied", str(for_nobody / "roots"), "this task's user"):
        assert words in outcome["message"]


def test_an_archive_that_may_not_be_read_is_a_matter_of_credentials(place, actors, for_nobody):
    place.uri.chmod(0o600)
    outcome = actors(place.uri, for_nobody / "own/dest", user=NOBODY).go().end()
    assert "refused access" in outcome["message"]


@pytest.mark.parametrize("bad", [False, True])
def test_ordinary_users_can_stage_read_only_directories_and_nothing_stays_of_a_refused_one(
    place, actors, for_nobody, bad
):
    members = [directory("./", 0o555), directory("ro", 0o555), member("ro/x", b"1", mode=0o444)]
    members += [member("none", b"1", mode=0), *([member("../bad", b"")] if bad else [])]
    place.uri.write_bytes(targz(members))
    home = for_nobody / "own"
    for _ in range(2):
        assert actors(place.uri, home / "dest", user=NOBODY).go().end().get("error") == (
            "ArchiveError" if bad else None
        )
    assert sorted(os.listdir(home / "dest")) == ([] if bad else ["none", "ro"])


def test_what_a_killed_staging_left_read_only_is_removed_by_an_ordinary_user(place, actors, for_nobody):
    dest = for_nobody / "own/dest"
    left = dest / f".safedist-{'0' * 8}-{'1' * 12}"
    (left / "ro" / "inner").mkdir(parents=True)
    (left / "ro" / "inner" / "f").touch()
    for directory_ in (left / "ro" / "inner", left / "ro", left, dest):
        os.chown(directory_, NOBODY, NOBODY)
        directory_.chmod(0o555 if directory_.parent != dest and directory_ != dest else 0o700)
    assert "error" not in actors(place.uri, dest, user=NOBODY).go().end()
    assert left_in(dest) == []


def test_read_only_directories_are_merged_again_by_an_ordinary_user(place, actors, for_nobody):
    arguments = (place.uri, for_nobody / "own/dest")
    place.uri.write_bytes(targz([directory("ro", 0o555), directory("ro/inner", 0o555), member("ro/inner/f", b"1")]))
    assert "error" not in actors(*arguments, user=NOBODY).go().end()
    named = [directory(name, 0o555) for name in ("ro", "ro/inner", "ro/new")]
    files = [member(f"ro/{name}", b"2") for name in ("inner/f", "inner/g", "h", "new/i")]
    place.uri.write_bytes(targz([*named, *files]))
    assert actors(*arguments, user=NOBODY).go().end().get("message") is None
    for name in ("inner/f", "inner/g", "h", "new/i"):
        assert (for_nobody / "own/dest/ro" / name).read_bytes() == b"2"


# --- a root that is read-only --------------------------------------------------------------------------------------
IN_THE_IMAGE = """
import json, os
from flytekit import task
import lib, only_in_the_image

@task
def report() -> str:
    return json.dumps({"lib": lib.__file__, "image": only_in_the_image.WHO, "cwd": os.getcwd()})
"""


def test_a_read_only_root_leaves_nothing_on_the_scratch_volume_whatever_ends_it(warm, tmp_path, tmpfs):
    (tmpfs / "only_in_the_image.py").write_text("WHO = 'the image'")
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    pod = Pod(tmp_path / "pod", {"workflows.py": IN_THE_IMAGE, "lib.py": ""}, warm)
    pod.cwd = tmpfs
    pod.environment["SAFEDIST_SCRATCH_ROOT"] = str(scratch)
    done = pod.fast("report")
    assert done.code == 0, done.err
    found = pod.output()
    assert found["image"] == "the image"
    assert str(found["cwd"]).startswith(str(scratch))
    assert found["lib"] == f"{found['cwd']}/lib.py"
    assert os.listdir(scratch) == []

    with ObjectStore(b"") as store:
        store.fault = lambda *_: "hang"
        arguments = ["--additional-distribution", store.url, "--dest-dir", "."]
        killed = pod.start(*arguments, "--", *pod.command("report"))
        store.hanging.wait()
        killed.kill()
        killed.communicate()
    assert len(os.listdir(scratch)) == 1
    assert pod.fast("report").code == 0
    assert os.listdir(scratch) == []


NEWER = """
import json
from flytekit import task
import in_source, lib

@task
def report() -> str:
    return json.dumps({"lib": lib.WHO, "in_source": in_source.WHO})
"""


def test_code_on_the_scratch_volume_runs_and_not_what_the_image_has_in_its_place(tmp_path, tmpfs):
    files = {"workflows.py": NEWER, "lib.py": "WHO = 'archive'", "source/in_source.py": "WHO = 'archive'"}
    (tmpfs / "source").mkdir()
    for name in list(files)[1:]:
        (tmpfs / name).write_text("WHO = 'image'")
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    pod = Pod(tmp_path / "pod", files)
    pod.cwd = tmpfs
    named = [str(tmpfs / "source"), str(tmpfs), str(ROOT), *(path for path in sys.path if path)]
    pod.environment |= {"SAFEDIST_SCRATCH_ROOT": str(tmp_path), "PYTHONPATH": os.pathsep.join(named)}
    program = f"import sys; sys.path.remove('')\n{PROGRAM}"  # as for a console script
    process = pod.start(*pod.fast_arguments("report"), program=program)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert pod.output() == {"lib": "archive", "in_source": "archive"}


def test_a_destination_below_what_one_may_not_enter_is_one_error(place, actors, for_nobody):
    (for_nobody / "closed").mkdir(mode=0o700)
    outcome = actors(place.uri, for_nobody / "closed/dest", user=NOBODY).go().end()
    assert "permission denied" in outcome["message"]


AS_NOBODY = f"""
import os, sys
import fsspec.implementations.local  # before: they may lie where that user cannot read
from flytekitplugins_safedist.pod import entrypoint, task_command
from flytekitplugins_safedist.pod import staging
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
entrypoint.main()
"""
SHOW = "IFS=:; for place in $PYTHONPATH; do cat $place/lib.txt; done 2> /dev/null; pwd"


@pytest.mark.parametrize("volume", [True, False], ids=["scratch volume", "no scratch volume"])
def test_a_pod_of_an_ordinary_user_whose_destination_is_closed_stages_on_the_scratch_volume_or_says_why(
    place, for_nobody, volume
):
    (for_nobody / "closed/code").mkdir(parents=True)
    (for_nobody / "closed").chmod(0o700)
    pod = Pod(for_nobody / "pod", {"lib.txt": "staged\n"})
    scratch = for_nobody / "own"
    pod.environment["TMPDIR"] = str(scratch)
    if volume:
        pod.environment["SAFEDIST_SCRATCH_ROOT"] = str(scratch)
    pod.message.touch(mode=0o666)
    dest = for_nobody / "closed/code"
    arguments = ["--additional-distribution", str(pod.archive), "--dest-dir", str(dest), "--", "sh", "-c", SHOW]
    process = pod.start(*arguments, program=AS_NOBODY)
    out, err = process.communicate()
    if volume:
        assert (process.returncode, out.splitlines()) == (0, ["staged", str(pod.cwd)]), err
        assert f"{dest} cannot be written: the code is in {scratch}" in err
    else:
        assert (process.returncode, out) == (137, ""), err
        for words in ("StagingError", "permission denied", str(dest), "this task's user"):
            assert words in err
    assert list(dest.iterdir()) == []


# --- a disk that the task fills ---------------------------------------------------------------------------------------
FILLS = """
import os
from flytekit import task
from flytekitplugins_safedist import SafeTorch

def fill():
    try:
        with open(os.environ["FULL"] + "/data", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError as full:
        return full

@task
def plain() -> str:
    return str(fill())

@task
def fails() -> str:
    raise fill()

@task(task_config=SafeTorch(nproc_per_node=1))
def job() -> str:
    return str(fill())
"""


@pytest.mark.parametrize("task", ["plain", "fails", "job"])
def test_a_verdict_finds_room_on_the_disk_that_its_task_has_filled(warm, tmp_path, tmpfs, task):
    pod = Pod(tmp_path / "pod", {"workflows.py": FILLS}, warm)
    (tmp_path / "scratch").mkdir()
    pod.environment |= {"FULL": str(tmpfs), "TMPDIR": str(tmpfs), "SAFEDIST_SCRATCH_ROOT": str(tmp_path / "scratch")}
    pod.environment |= registered() if task == "job" else {}
    done = pod.fast(task)
    assert done.code == 0, done.err
    if task == "fails":
        assert "No space left on device" in pod.error().message
    else:
        assert pod.uploaded() == ["outputs.pb"]
