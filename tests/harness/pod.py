"""A container's view, for ``safedist-execute`` itself: directory, archive, inputs, outputs, termination message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyteidl.core import errors_pb2, literals_pb2

from tests.harness.procs import ROOT, Ended, Running, Warm
from tests.harness.tarballs import project

SAFEDIST_EXECUTE = str(Path(sys.executable).with_name("safedist-execute"))
RESOLVER = ["--resolver", "flytekit.core.python_auto_container.default_task_resolver", "--"]


def pyflyte_execute(call: str, inputs: Path | str, outputs: Path | str, raw: Path | str, *further: str) -> list[str]:
    """``pyflyte-execute`` for a task, ``module:task``, as Flyte writes it."""
    places = ["--inputs", str(inputs), "--output-prefix", str(outputs), "--raw-output-data-prefix", str(raw)]
    module, task = call.split(":")
    return ["pyflyte-execute", *places, *further, *RESOLVER, "task-module", module, "task-name", task]


PROGRAM = """
from flytekitplugins_safedist import termination
from flytekitplugins_safedist.pod import start
termination.PATH = {message!r}
start.main()
"""
"""The console script, with a file of the test's in the place of ``/dev/termination-log``."""


class Pod:
    """One pod, started once or several times.

    Attributes:
        cwd: the container's working directory.
        outputs: where the attempt's verdict goes.
        prefix: the same as the command names it; another where the store is not a directory.
        environment: variables of all its starts.
        message: the termination message's file.
    """

    def __init__(self, root: Path, files: Mapping[str, str], warm: Warm | None = None) -> None:
        """A pod that has not started.

        Args:
            root: a directory for all of it; made where it is missing.
            files: of the code archive, by name.
            warm: for :meth:`running`.
        """
        root.mkdir(parents=True, exist_ok=True)
        self.warm, self.root = warm, root
        self.cwd, self.outputs, self.archive = root / "workdir", root / "outputs", root / "fast.tar.gz"
        self.prefix = str(self.outputs)
        self.message = root / "termination-log"
        self.environment: dict[str, str] = {}
        self.cwd.mkdir()
        (root / "tmp").mkdir()
        self.archive.write_bytes(project(dict(files)))
        (root / "inputs.pb").write_bytes(literals_pb2.LiteralMap().SerializeToString())

    def command(self, task: str, module: str = "workflows") -> list[str]:
        """``pyflyte-execute`` for a task without inputs, as Flyte writes it."""
        saves = ["--checkpoint-path", str(self.root / "check"), "--prev-checkpoint", '""']
        return pyflyte_execute(f"{module}:{task}", self.root / "inputs.pb", self.prefix, self.root / "raw", *saves)

    def fast_arguments(self, task: str, dest: str = ".") -> list[str]:
        """The same behind the archive."""
        return ["--additional-distribution", str(self.archive), "--dest-dir", dest, "--", *self.command(task)]

    def start(self, *arguments: str, program: str = PROGRAM, module: str = "", **more: Any) -> subprocess.Popen[str]:
        """Start it in an interpreter of its own.

        Args:
            arguments: of ``safedist-execute``.
            program: what stands for the console script.
            module: run this one instead of a program.
            more: for Popen.
        """
        self.message.touch()
        how = ["-m", *module.split()] if module else ["-c", program.format(message=str(self.message))]
        return subprocess.Popen(
            [sys.executable, *how, *arguments],
            cwd=self.cwd,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("SAFEDIST")},
                "PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)]),
                "TMPDIR": str(self.root / "tmp"),
                **self.environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def fresh(self, *arguments: str, **more: Any) -> Ended:
        """Start it, and wait: what it does as it begins and ends, and the path that it makes itself."""
        process = self.start(*arguments, **more)
        out, err = process.communicate()
        return Ended(process.returncode, [], out, err, self.root)

    def running(self, *arguments: str) -> Running:
        """Start it in a process that has imported flytekit already."""
        assert self.warm is not None
        files = self.root / f"case-{len(list(self.root.glob('case-*')))}"
        options: dict[str, Any] = {"arguments": arguments, "cwd": self.cwd, "environment": self.environment}
        return self.warm.start("", files, kind="entrypoint", **options)

    def run(self, *arguments: str) -> Ended:
        """The same, to its end; nothing may be left of it."""
        ended = self.running(*arguments).wait()
        assert ended.left == []
        return ended

    def fast(self, task: str, dest: str = ".") -> Ended:
        """Run a task of the archive."""
        return self.run(*self.fast_arguments(task, dest))

    def uploaded(self) -> list[str]:
        """Names of what is in the store, beside the sign of a leader."""
        return sorted(path.name for path in self.outputs.glob("[!.]*"))

    def output(self) -> dict[str, object]:
        """The task's one output, JSON."""
        literals = literals_pb2.LiteralMap.FromString((self.outputs / "outputs.pb").read_bytes())
        found: dict[str, object] = json.loads(literals.literals["o0"].scalar.primitive.string_value)
        return found

    def error(self) -> errors_pb2.ContainerError:
        """The one verdict, an error."""
        assert self.uploaded() == ["error.pb"]
        return errors_pb2.ErrorDocument.FromString((self.outputs / "error.pb").read_bytes()).error
