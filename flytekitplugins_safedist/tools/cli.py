"""See a task's job before it is registered; examine a machine; see what a job waits for, and what its ranks do."""

# Parses, calls, prints; --help begins with the line above.

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import log
from ..errors import SafedistError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0: all is well, 1: there are findings, 2: it could not be done."""
    log.install()
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        status: int = options.run(options)
    except SafedistError as error:
        print(f"safedist {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="safedist", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    render = commands.add_parser("render", help="show the job of a task as Kubernetes will see it")
    render.set_defaults(run=_render)
    render.add_argument("file", type=Path, help="the Python file that defines the task")
    render.add_argument("task", help="the name of the task in it")
    render.add_argument("--image", action="append", default=[], help="NAME=IMAGE or IMAGE, as for pyflyte")
    render.add_argument("--no-fast", action="store_true", help="without fast registration: the code is in the image")
    render.add_argument("--json", action="store_true", help="JSON instead of YAML, without the summary")
    doctor = commands.add_parser("doctor", help="examine this image or machine; 1 if something is broken")
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--path", action="append", default=[], type=Path, help="examine this directory's file system")
    doctor.add_argument(
        "--store", action="append", default=[], help="a URI prefix that must be readable (s3://bucket/)"
    )
    doctor.add_argument("--backend", choices=("horovod", "torch"), help="what must work; default: whatever is there")
    doctor.add_argument("--json", action="store_true", help="for programs")
    stacks = commands.add_parser("stacks", help="in a running pod: where each rank stands, and who stands elsewhere")
    stacks.set_defaults(run=_stacks)
    stacks.add_argument("--scratch", type=Path, default=Path("/"), help="only jobs with scratch below this directory")
    why = commands.add_parser("why", help="why an execution's jobs wait, or why they ended, by what Kubernetes holds")
    why.set_defaults(run=_why)
    why.add_argument("name", help="an execution, a PyTorchJob or a pod")
    why.add_argument("-n", "--namespace", help="Flyte's is PROJECT-DOMAIN; default: the context's own, then all")
    why.add_argument("--context", help="of the kubeconfig; default: its current one")
    return parser


@contextlib.contextmanager
def _others_to_stderr() -> Iterator[None]:
    """Meanwhile, what others print (flytekit's log, the user's module and what it starts, a library) goes to standard
    error: standard output is this command's answer, for a file or a program."""
    own = sys.stdout
    own.flush()
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        own.flush()  # what was printed to it by its name
        os.dup2(answer, 1)
        os.close(answer)


def _render(options: argparse.Namespace) -> int:
    import yaml

    with _others_to_stderr():
        from .render import job_manifest, load_task, summary, template_of

        task = load_task(options.file, options.task)
        template = template_of(task, images=options.image, fast=not options.no_fast)
    job = job_manifest(template)
    if options.json:
        print(json.dumps(job, indent=2))
    else:
        print("\n".join([*summary(task, template), "---"]))
        yaml.safe_dump(json.loads(json.dumps(job)), sys.stdout, width=120)  # nothing shared: no anchors
    return 0


def _stacks(options: argparse.Namespace) -> int:
    from ..hangs import picture, snapshot

    jobs = snapshot.running_below(options.scratch)
    for directory, ranks in sorted(jobs.items()):
        print(f"the job in {directory}")
        print(picture.text(snapshot.take(ranks, snapshot.by_ourselves)))
    if not jobs:
        hint = "call it in the pod, as the user that the task runs as"
        print(f"safedist stacks: no rank runs here; {hint}", file=sys.stderr)
    return 0 if jobs else 2


def _why(options: argparse.Namespace) -> int:
    from .cluster import Cluster
    from .why import explain

    pictures = Cluster(options.context, os.environ).pictures(options.name, options.namespace)
    explanations = [explain(picture) for picture in pictures]
    for each in explanations:
        print("\n".join(each.lines))
    return 0 if all(each.is_well for each in explanations) else 1


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import examine

    findings = []
    for finding in examine(paths=options.path, stores=options.store, backend=options.backend, env=os.environ):
        findings.append(finding)
        if not options.json:
            print(finding, flush=True)
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    return int(any(finding.status == "broken" for finding in findings))
