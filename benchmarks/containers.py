"""Two containers, node 0 and one worker of a SafeTorch job of 2 x 2 ranks, started together: how long until the user's
code runs, and until both have ended.

The pods are those that the operator makes of what the image's own ``safedist render`` shows: fast registration, the
archive, inputs and outputs behind an S3 API in a third container. Their start and end are the daemon's (``StartedAt``,
``FinishedAt``). Each rank says when the user's module began, when the function was entered, and when the first step of
an optimizer was made, with the gradients of all ranks; the last rank of a pod counts.

Images are made from one base and differ in this package alone. After a run of each that does not count, runs are
interleaved, and medians are printed.

    python benchmarks/containers.py --runs 5
    python benchmarks/containers.py --runs 5 --before ../earlier --before ../long-ago    # beside other checkouts

Needs a docker daemon (``scripts/dockerd.sh start``), and the base image where none can be pulled
(``scripts/base_image.sh``).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docker.errors import DockerException
from docker.types import Mount

from tests.containers import network
from tests.containers.cluster import Pod
from tests.containers.engine import BUCKET, S3, Docker, Options, start_s3, state
from tests.harness.flyte import executed, pods

HERE = Path(__file__).resolve().parents[1]
PROJECT = Path(__file__).parent / "containers_project"
TAG = "flytekitplugins-safedist-benchmark"
S3_PACKAGES = "flask flask-cors moto[s3]"  # as the container tests have it
REACH = 3.0
NOW = "now"


@dataclass(frozen=True)
class Run:
    """Seconds of one run.

    Attributes:
        module, entered, stepped: from the worker's start to the first line of the user's module, to that of the
            function, and to the first step.
        worker, node_0: how long each container lived.
        end: from node 0's last line of the function to the end of its container.
        whole: from the first start to the last end.
        apart: between the starts of the two.
    """

    module: float
    entered: float
    stepped: float
    worker: float
    node_0: float
    end: float
    whole: float
    apart: float


TITLES = ("module", "function", "first step", "worker lived", "node 0 lived", "node 0's end", "whole", "apart")


# --- images ----------------------------------------------------------------------------------------------------------
def project_image(tag: str, packages: str = "") -> str:
    """The project's image as ``make image`` makes it; layers that are there are not made again."""
    command = [sys.executable, str(HERE / "scripts" / "build_image.py"), "--tag", tag, "--extra-packages", packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit("\n".join([*(done.stdout + done.stderr).splitlines()[-40:], "the image does not build"]))
    return tag


def commit_of(checkout: Path) -> str:
    """Of what it has checked out."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    number: str = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return number.strip()


def image_of(docker: Docker, checkout: Path, base: str) -> str:
    """The base with the package of a checkout's commit in the place of its own."""
    source = subprocess.run(["git", "-C", checkout, "archive", "HEAD"], check=True, capture_output=True).stdout
    install = "pip install -q --no-deps --no-index --no-build-isolation --no-cache-dir --force-reinstall /tmp/source"
    steps = f"FROM {base}\nUSER 0\nADD source.tar /tmp/source/\nRUN {install} && rm -rf /tmp/source\nUSER 1000:1000\n"
    context = pack({"Dockerfile": steps.encode(), "source.tar": source})
    tag = f"{TAG}:{commit_of(checkout)}"
    docker.client.images.build(fileobj=io.BytesIO(context), custom_context=True, tag=tag, rm=True)
    return tag


def pack(files: dict[str, bytes], how: str = "w") -> bytes:
    """A tar archive."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode=how) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return whole.getvalue()


# --- a job -----------------------------------------------------------------------------------------------------------
def render(docker: Docker, image: str) -> Any:
    """The job, as the image's own package shows it."""
    command = ("safedist", "render", "--json", "--image", image, "/project/containers_tasks.py", "train")
    done = docker.once(image, command, Options(mounts=(Mount("/project", str(PROJECT), type="bind", read_only=True),)))
    if done.returncode != 0:
        raise SystemExit(f"{image} does not render the task:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Place:
    """Where jobs run: a network with an S3 server that has the code's archive."""

    docker: Docker
    network: str
    s3: S3

    def run(self, job: Any) -> Run:
        """One run, to its end."""
        name = f"f{uuid.uuid4().hex[:15]}"
        files = {
            "{{ .remote_package_path }}": f"s3://{BUCKET}/code.tar.gz",
            "{{ .dest_dir }}": "/root",
            "{{.input}}": self.s3.put(f"metadata/{name}/inputs.pb", b""),
            "{{.outputPrefix}}": f"s3://{BUCKET}/metadata/{name}/0",
            "{{.rawOutputDataPrefix}}": f"s3://{BUCKET}/raw/{name}",
            "{{.checkpointOutputPrefix}}": f"s3://{BUCKET}/checkpoints/{name}",
            "{{.prevCheckpointPrefix}}": "",
        }
        with tempfile.TemporaryDirectory(prefix="containers-") as volumes, ThreadPoolExecutor(2) as together:
            options, specs = Options(self.s3.environment), pods(executed(job, files, name=name))
            both = [Pod(self.docker, spec, self.network, options, Path(volumes)) for spec in specs]
            try:
                list(together.map(Pod.start, both))
                ends = [pod.wait() for pod in both]
                if any(end.code for end in ends) or f"metadata/{name}/0/outputs.pb" not in self.s3.names(""):
                    raise SystemExit("\n".join(["a job has failed", *(end.log for end in ends)]))
                return measure(*both)
            finally:
                for pod in both:
                    pod.remove()


def measure(node_0: Pod, worker: Pod) -> Run:
    """What the daemon and the ranks say of a run."""
    (began_0, ended_0), (began, ended) = lives = [life(pod) for pod in (node_0, worker)]
    module, entered, stepped, _ = (at - began for at in times_of(worker))
    return Run(
        module=module,
        entered=entered,
        stepped=stepped,
        worker=ended - began,
        node_0=ended_0 - began_0,
        end=ended_0 - times_of(node_0)[-1],
        whole=max(end for _, end in lives) - min(start for start, _ in lives),
        apart=abs(began - began_0),
    )


def life(pod: Pod) -> tuple[float, float]:
    """When its container started and ended, in seconds since the epoch."""
    shown = state(pod.container)
    start, end = (re.sub(r"(\.\d{6})\d*Z", r"\1+00:00", shown[key]) for key in ("StartedAt", "FinishedAt"))
    return datetime.fromisoformat(start).timestamp(), datetime.fromisoformat(end).timestamp()


def times_of(pod: Pod) -> list[float]:
    """The last of its ranks' times, place by place."""
    lines = re.findall(r"measured ([\d. ]+)$", pod.log, re.MULTILINE)
    ranks = [map(float, line.split()) for line in lines]
    return [max(times) for times in zip(*ranks, strict=True)]


# --- the whole -------------------------------------------------------------------------------------------------------
@contextmanager
def place(docker: Docker) -> Iterator[Place]:
    """A network and a store of its own, removed at the end."""
    try:
        name = f"safedist-{docker.session}"
        network.make(docker, name)
        s3 = start_s3(docker, project_image(f"{TAG}:s3", S3_PACKAGES), name)
        code = {file.name: file.read_bytes() for file in PROJECT.glob("*.py")}
        s3.put("code.tar.gz", pack(code, "w:gz"))
        yield Place(docker, name, s3)
    finally:
        docker.remove_everything()


def main() -> None:
    """Run everything, interleaved, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--before", type=Path, action="append", default=[], help="another checkout: its commit's package"
    )
    options = parser.parse_args()
    try:
        docker = Docker(uuid.uuid4().hex[:8])
    except DockerException as error:
        print(f"left out: no docker daemon answers ({error}); scripts/dockerd.sh start starts one")
        return
    print(f"medians of {options.runs}, interleaved; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    with place(docker) as where:
        images = {NOW: project_image(f"{TAG}:{NOW}")}
        images |= {commit_of(each): image_of(docker, each, images[NOW]) for each in options.before}
        jobs = {name: render(docker, image) for name, image in images.items()}
        for job in jobs.values():
            where.run(job)
        runs: dict[str, list[Run]] = {name: [] for name in jobs}
        for _ in range(options.runs):
            for name, job in jobs.items():
                runs[name].append(where.run(job))
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    report(runs)


def report(runs: dict[str, list[Run]]) -> None:
    """Print the table, and the ratios."""
    print(f"{'':12} {'from the start of the worker to':^36}")
    print(f"{'':12} " + " ".join(f"{title:>12}" for title in TITLES))
    medians = {
        name: [statistics.median(each) for each in zip(*map(astuple, of), strict=True)] for name, of in runs.items()
    }
    for name, seconds in medians.items():
        print(f"{name:12} " + " ".join(f"{each:10.2f} s" for each in seconds))
    for name, seconds in medians.items():
        ratios = [now / before for now, before in zip(medians[NOW], seconds, strict=True)]
        if name != NOW:
            print(f"{'/ ' + name:12} " + " ".join(f"{each:12.2f}" for each in ratios[:-1]))
    entered = medians[NOW][1]
    print(f"{'reached' if entered <= REACH else 'NOT reached'}: to the function {entered:.2f} s <= {REACH} s")


if __name__ == "__main__":
    main()
