#!/usr/bin/env python3
"""Build the project's image with the package index, the certificates and the local wheels that this machine's pip uses.

``docker build .`` by itself sees none of them. What pip is configured with is read from pip (never from a list of our
own), handed to the build as secrets, and so is in no layer and in no file of the repository. Local wheel directories
(pip's ``find-links``) become a throwaway image, because a build can mount an image but not a directory elsewhere; with
them go the Horovod wheels that this machine has built, of which the build takes the one that its own key names.

Standard library only. Exit status: 0 built; 1 failed, and the message says why.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "horovod_build"))

from toolchain import BuildError, default_cache  # noqa: E402

TAG = "flytekitplugins-safedist:dev"
BASE_IMAGE = "python:3.11-slim-bookworm"
TORCH = re.findall(r"^torch==[\d.]+", (ROOT / "requirements" / "torch.txt").read_text(), re.MULTILINE)[0]
WHEELS_TAG = "flytekitplugins-safedist-wheels:local"
DEBIANS_CLIENT = "/usr/bin/docker"  # where another client comes first on PATH
CA_IN_BUILD = "/run/secrets/ca.pem"


class ImageError(Exception):
    """The image cannot be built. The message says what to do."""


def find_docker() -> str:
    """A docker client that can build with BuildKit: built in before version 23, a plugin (buildx) since."""
    seen = []
    for candidate in dict.fromkeys(filter(None, [os.environ.get("DOCKER"), shutil.which("docker"), DEBIANS_CLIENT])):
        version = output([candidate, "--version"])
        number = re.search(r"version (\d+)", version)
        if number is None:
            continue
        if int(number[1]) < 23 or output([candidate, "buildx", "version"]):
            return candidate
        seen.append(f"{candidate} ({version.strip()}) lacks the buildx plugin")
    hint = "; ".join(seen) or "no docker client on PATH"
    raise ImageError(
        f"no docker client that can build: {hint}. Debian: apt-get install docker.io; or set DOCKER to one"
    )


def output(command: list[str]) -> str:
    """What a command prints; empty when it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


# --- pip's settings ---------------------------------------------------------------------------------------------------


def pip_settings(listing: str) -> dict[str, str]:
    """``pip config list`` as a mapping; the environment's word wins, as it does for pip."""
    found: dict[str, str] = {}
    # pip prints the environment's lines in no order that could be relied on: they are applied last.
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in {"global", "install", ":env:"}:
            with contextlib.suppress(ValueError, SyntaxError):
                found[key] = str(ast.literal_eval(value))
    return found


def is_remote(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def pip_conf(settings: Mapping[str, str], *, ca: bool) -> str:
    """The settings that hold inside the build: remote indexes and the certificates; local paths mean nothing there."""
    lines = ["[global]"]
    for key in ("index-url", "extra-index-url", "trusted-host", "default-timeout"):
        values = settings.get(key, "").split()
        kept = [value for value in values if is_remote(value)] if key.endswith("index-url") else values
        if kept:
            lines.append(f"{key} = {' '.join(kept)}")
    if ca:
        lines.append(f"cert = {CA_IN_BUILD}")
    return "\n".join(lines) + "\n"


def local_wheels(settings: Mapping[str, str]) -> list[Path]:
    """The wheel files in the local directories of pip's ``find-links``."""
    places = [Path(place.removeprefix("file://")) for place in settings.get("find-links", "").split()]
    return sorted(wheel for place in places if place.is_dir() for wheel in place.glob("*.whl"))


def built_wheels(cache: Path, torch: str) -> list[Path]:
    """What horovod_build/build.py keeps in its cache: for each key, a directory with a wheel and its facts.

    Only those for *torch*, where that names one version: a wheel that is built for another would change the image of
    wheels, and everything that is built on it would be built anew.
    """
    pinned = re.fullmatch(r"torch\s*==\s*([\w.]+)(\+.*)?", torch.strip())
    key = f"horovod-*-torch-{pinned[1]}_*" if pinned else "horovod-*"
    return sorted(path for facts in cache.glob(f"{key}/facts.json") for path in facts.parent.iterdir())


def certificates(settings: Mapping[str, str], env: Mapping[str, str]) -> Path | None:
    """The CA bundle that this machine's pip trusts, if it was told to trust another than its own."""
    named = settings.get("cert") or env.get("SSL_CERT_FILE") or env.get("REQUESTS_CA_BUNDLE")
    return Path(named) if named and Path(named).is_file() else None


# --- docker -----------------------------------------------------------------------------------------------------------


def require_base(docker: str, image: str) -> None:
    """Have the base image, pulled where it is not there. Raises ImageError that says where else it can come from."""
    if output([docker, "image", "inspect", "--format", "{{.Id}}", image]):
        return
    if not output([docker, "version"]):
        raise ImageError(f"no docker daemon answers {docker}; scripts/dockerd.sh start starts one (as root, on Debian)")
    done = subprocess.run([docker, "pull", "--quiet", image], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    made = "; make it from Debian's packages, as root: scripts/base_image.sh" if image == BASE_IMAGE else ""
    raise ImageError(
        f"the base image {image} is not here and cannot be pulled ({reason}){made}; "
        "or name one that is here with --base-image"
    )


def wheels_and_their_places(settings: Mapping[str, str], cache: Path, torch: str) -> dict[str, Path]:
    """Name in the image of wheels -> file: pip's local wheels in its root, Horovod's below ``horovod/KEY/``."""
    kept = {f"horovod/{path.parent.name}/{path.name}": path for path in built_wheels(cache, torch)}
    return {wheel.name: wheel for wheel in local_wheels(settings)} | kept


def import_wheels(docker: str, wheels: Mapping[str, Path]) -> str:
    """Make an image that holds the wheels at their places. Imported anew only when the files changed."""
    stamp = " ".join(f"{name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for name, path in wheels.items())
    label = '{{ index .Config.Labels "wheels" }}'
    if output([docker, "image", "inspect", "--format", label, WHEELS_TAG]).strip() == stamp:
        return WHEELS_TAG
    command = [docker, "import", "--change", f'LABEL wheels="{stamp}"', "-", WHEELS_TAG]
    with tempfile.TemporaryFile() as stream:
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name, path in wheels.items():
                archive.add(path, arcname=name)
        stream.seek(0)
        status = subprocess.run(command, stdin=stream, stdout=subprocess.DEVNULL, check=False).returncode
    if status != 0:
        raise ImageError(f"docker import of {len(wheels)} wheels failed (exit status {status})")
    return WHEELS_TAG


@contextlib.contextmanager
def secrets(settings: Mapping[str, str], env: Mapping[str, str]) -> Iterator[list[str]]:
    """The options that hand pip's settings and the certificates to the build, without leaving them in a layer."""
    ca = certificates(settings, env)
    with tempfile.TemporaryDirectory(prefix="safedist-image-") as directory:
        conf = Path(directory, "pip.conf")
        conf.touch(mode=0o600)  # an index URL may hold a password
        conf.write_text(pip_conf(settings, ca=ca is not None))
        yield ["--secret", f"id=pip_conf,src={conf}", *(["--secret", f"id=ca,src={ca}"] if ca else [])]


def build_command(docker: str, options: argparse.Namespace, *, wheels_image: str | None) -> list[str]:
    """The build, the secrets and the directory apart."""
    arguments = {"BASE_IMAGE": options.base_image, "TORCH": options.torch, "HOROVOD_GPU": options.gpu}
    arguments |= {"EXTRA_PACKAGES": options.extra_packages, "COMPILER": options.compiler}
    if wheels_image is not None:
        arguments["WHEELS_IMAGE"] = wheels_image
    command = [docker, "build", "--tag", options.tag, "--progress", "plain"]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    return command


def build(options: argparse.Namespace) -> None:
    """Build the image. Raises ImageError."""
    docker = find_docker()
    require_base(docker, options.base_image)
    settings = pip_settings(output([sys.executable, "-m", "pip", "config", "list"]))
    wheels = wheels_and_their_places(settings, default_cache(os.environ), options.torch)
    command = build_command(docker, options, wheels_image=import_wheels(docker, wheels) if wheels else None)
    with secrets(settings, os.environ) as given:
        env = {**os.environ, "DOCKER_BUILDKIT": "1"}
        status = subprocess.run([*command, *given, str(ROOT)], env=env, check=False).returncode
    if status != 0:
        raise ImageError(f"docker build failed (exit status {status}); its output is above")
    size = output([docker, "image", "inspect", "--format", "{{.Size}}", options.tag])
    print(f"build_image: {options.tag}: {int(size) / 1e6:.0f} MB")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tag", default=TAG, help="default: %(default)s")
    parser.add_argument("--base-image", default=BASE_IMAGE, help="default: %(default)s")
    torch = os.environ.get("IMAGE_TORCH") or os.environ.get("TORCH", TORCH)
    parser.add_argument("--torch", default=torch, help="what pip installs; default: %(default)s")
    parser.add_argument(
        "--gpu", choices=("none", "nccl"), default="none", help="what Horovod reduces GPU tensors with; default: none"
    )
    parser.add_argument("--extra-packages", default="", help="further packages, separated by spaces")
    parser.add_argument("--compiler", default="", help="Debian's package of one, for torch.compile: g++; default: none")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    try:
        build(parse(arguments))
    except (ImageError, BuildError) as error:
        print(f"build_image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
