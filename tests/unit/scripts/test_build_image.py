"""What the image build takes over from this machine's pip, and what stays out of it."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import build_image


def executable(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


class TestPipSettings:
    def test_the_environment_wins_over_files_wherever_pip_lists_it(self) -> None:
        listing = ":env:.index-url='https://b.example/simple'\nglobal.index-url='https://a.example/simple'\n"
        assert build_image.pip_settings(listing) == {"index-url": "https://b.example/simple"}

    def test_other_commands_settings_and_odd_lines_are_left_alone(self) -> None:
        assert build_image.pip_settings("freeze.all='yes'\nnonsense\nglobal.timeout=not quoted\n") == {}

    def test_remote_indexes_go_into_the_build_and_local_ones_do_not(self) -> None:
        settings = {
            "index-url": "https://user:word@a.example/simple",
            "extra-index-url": "file:///somewhere/simple https://b.example/simple",
            "find-links": "/somewhere/wheels",
        }
        assert build_image.pip_conf(settings, ca=True) == (
            "[global]\n"
            "index-url = https://user:word@a.example/simple\n"
            "extra-index-url = https://b.example/simple\n"
            "cert = /run/secrets/ca.pem\n"
        )
        assert build_image.pip_conf({}, ca=False) == "[global]\n"

    def test_wheels_come_from_every_local_directory_that_exists(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            (tmp_path / name / f"{name}.whl").touch()
        (tmp_path / "one" / "notes.txt").touch()
        places = f"{tmp_path}/one file://{tmp_path}/two /nowhere https://c.example/wheels"
        found = build_image.local_wheels({"find-links": places})
        assert [wheel.name for wheel in found] == ["one.whl", "two.whl"]

    def test_horovod_wheels_that_this_machine_has_built_go_in_whole_and_half_made_ones_do_not(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "local").mkdir()
        (tmp_path / "local" / "torch.whl").touch()
        cache = tmp_path / "cache"
        for name in ("horovod-key", ".building-horovod-key-host-1"):
            (cache / name).mkdir(parents=True)
            (cache / name / "horovod.whl").touch()
            (cache / name / "facts.json").touch()
        (cache / "horovod-key.lock").touch()
        (cache / "horovod-other").mkdir()
        (cache / "horovod-other" / "horovod.whl").touch()
        found = build_image.wheels_and_their_places({"find-links": str(tmp_path / "local")}, cache, "torch")
        assert found == {
            "torch.whl": tmp_path / "local" / "torch.whl",
            "horovod/horovod-key/facts.json": cache / "horovod-key" / "facts.json",
            "horovod/horovod-key/horovod.whl": cache / "horovod-key" / "horovod.whl",
        }
        assert build_image.wheels_and_their_places({}, tmp_path / "no cache", "torch") == {}

    @pytest.mark.parametrize(
        ("torch", "taken"),
        [
            ("torch==2.13.0", {"2.13.0_cpu", "2.13.0_cu130"}),
            ("torch==2.13.0+cpu", {"2.13.0_cpu", "2.13.0_cu130"}),
            ("torch>=2.5", {"2.13.0_cpu", "2.13.0_cu130", "2.13.01_cpu"}),
        ],
    )
    def test_a_horovod_wheel_for_another_torch_leaves_the_image_of_wheels_as_it_is(
        self, tmp_path: Path, torch: str, taken: set[str]
    ) -> None:
        keys = {version: f"horovod-0.28.1-torch-{version}-cpython-311-0" for version in ("2.13.0_cpu", "2.13.0_cu130")}
        keys["2.13.01_cpu"] = "horovod-0.28.1-torch-2.13.01_cpu-cpython-311-0"
        for key in keys.values():
            (tmp_path / key).mkdir()
            (tmp_path / key / "facts.json").touch()
        found = build_image.wheels_and_their_places({}, tmp_path, torch)
        assert set(found) == {f"horovod/{keys[version]}/facts.json" for version in taken}

    def test_the_certificates_are_those_that_pip_was_told_to_trust(self, tmp_path: Path) -> None:
        mine, other = tmp_path / "mine.pem", tmp_path / "other.pem"
        mine.touch()
        other.touch()
        assert build_image.certificates({"cert": str(mine)}, {"SSL_CERT_FILE": str(other)}) == mine
        assert build_image.certificates({}, {"SSL_CERT_FILE": str(other)}) == other
        assert build_image.certificates({"cert": "/nowhere.pem"}, {}) is None
        assert build_image.certificates({}, {}) is None

    def test_the_handed_in_file_is_private_and_gone_afterwards(self) -> None:
        with build_image.secrets({"index-url": "https://user:word@a.example/simple"}, {}) as options:
            conf = Path(options[1].removeprefix("id=pip_conf,src="))
            assert conf.stat().st_mode & 0o777 == 0o600
            assert "word" in conf.read_text()
            assert not any("word" in option for option in options)
        assert not conf.exists()


class TestClient:
    """Clients are scripts of the test's own: they print what real ones print."""

    def test_an_old_client_has_buildkit_built_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        old = executable(tmp_path / "docker", 'test "$1" = --version && echo "Docker version 20.10.24+dfsg1"')
        monkeypatch.setenv("DOCKER", old)
        assert build_image.find_docker() == old

    def test_a_new_client_without_its_plugin_is_passed_over_for_one_that_can_build(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        new = executable(tmp_path / "new", 'test "$1" = --version && echo "Docker version 28.2.2"')
        able = executable(tmp_path / "docker", 'echo "Docker version 28.2.2"')
        monkeypatch.setenv("DOCKER", new)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert build_image.find_docker() == able

    def test_without_any_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(
            "DOCKER", executable(tmp_path / "new", 'test "$1" = --version && echo "Docker version 28.2.2"')
        )
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        monkeypatch.setattr(build_image, "DEBIANS_CLIENT", str(tmp_path / "no such client"))
        with pytest.raises(build_image.ImageError, match=r"lacks the buildx plugin.*apt-get install docker\.io"):
            build_image.find_docker()


class TestBaseImage:
    def client(self, directory: Path, *, daemon: bool) -> str:
        """A client that answers as docker does where nothing is there and nothing can be pulled."""
        refused = "Error response from daemon: dial tcp: no route to host"
        version = "echo 28" if daemon else "exit 1"
        return executable(
            directory / "docker",
            f'case "$1" in image) exit 1;; version) {version};; pull) echo "{refused}" >&2; exit 1;; esac',
        )

    def test_where_it_cannot_be_pulled_the_script_that_makes_it_is_named(self, tmp_path: Path) -> None:
        client = self.client(tmp_path, daemon=True)
        with pytest.raises(
            build_image.ImageError, match=r"cannot be pulled \(.*no route to host\).*scripts/base_image\.sh"
        ):
            build_image.require_base(client, build_image.BASE_IMAGE)

    def test_without_a_daemon_it_is_the_daemon_that_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(build_image.ImageError, match=r"no docker daemon answers .*scripts/dockerd\.sh start"):
            build_image.require_base(self.client(tmp_path, daemon=False), build_image.BASE_IMAGE)


def test_the_dockerfile_mounts_what_this_script_hands_in() -> None:
    text = (build_image.ROOT / "Dockerfile").read_text()
    assert "id=pip_conf,target=/etc/pip.conf" in text
    assert f"id=ca,target={build_image.CA_IN_BUILD}" in text
    assert "cp -rn /wheels/horovod/. /var/cache/safedist-horovod/" in text
    assert f"ARG BASE_IMAGE={build_image.BASE_IMAGE}\n" in text
    for argument in ("WHEELS_IMAGE", "TORCH", "EXTRA_PACKAGES", "COMPILER"):
        assert f"\nARG {argument}=" in text


@pytest.mark.parametrize(("said", "given"), [((), "HOROVOD_GPU=none"), (("--gpu", "nccl"), "HOROVOD_GPU=nccl")])
def test_a_horovod_for_gpus_is_asked_of_the_dockerfile(said: tuple[str, ...], given: str) -> None:
    command = build_image.build_command("docker", build_image.parse([*said]), wheels_image=None)
    dockerfile = (build_image.ROOT / "Dockerfile").read_text()

    assert given in command
    assert "ARG HOROVOD_GPU=none" in dockerfile
    assert 'horovod_build/build.py --gpu "${HOROVOD_GPU}"' in dockerfile
    for before, word in pairwise(command):
        if before == "--build-arg":
            assert f"ARG {word.partition('=')[0]}=" in dockerfile, "a name that the Dockerfile lacks would be ignored"


@pytest.mark.parametrize(
    ("variables", "torch"),
    [
        ({}, build_image.TORCH),
        ({"TORCH": "torch==2.15.0"}, "torch==2.15.0"),
        ({"TORCH": "torch==2.15.0", "IMAGE_TORCH": "torch==2.13.0"}, "torch==2.13.0"),
    ],
)
def test_an_image_may_have_another_torch_than_the_environment_beside_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], torch: str
) -> None:
    for name in ("TORCH", "IMAGE_TORCH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert build_image.parse([]).torch == torch


def test_the_dockerfile_says_which_torch_it_takes() -> None:
    """The default index's torch is a CUDA build."""
    header = (build_image.ROOT / "Dockerfile").read_text().partition("\n\n")[0]
    assert "CPU torch" not in header
    assert "CUDA build" in header
