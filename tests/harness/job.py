"""Pods of one job, each a real agent in a process of its own, on loopback, with the variables that the operator sets.

What is not real here is the network between them; container tests have that.
"""

from __future__ import annotations

import json
import socket
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.procs import Ended, Running, Warm
from tests.harness.product import ReservedPort


def operators_variables(pod: int, *, nodes: str, nproc_per_node: int, port: int) -> dict[str, str]:
    """What a pod of a PyTorchJob sees (training-operator v1.9.0, pkg/controller.v1/pytorch/envvar.go and elastic.go).

    Args:
        pod: its index: the master has 0.
        nodes: "2", or "2:3" for an elastic policy.
        nproc_per_node: ranks of each; the operator hands it on for an elastic policy only.
        port: where node 0 listens.
    """
    if ":" in nodes:
        return {
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_RDZV_BACKEND": "c10d",
            "PET_NNODES": nodes,
            "PET_NPROC_PER_NODE": str(nproc_per_node),
            "PET_MAX_RESTARTS": "1",
        }
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": nodes,
        "RANK": str(pod),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "PET_NNODES": nodes,
        "PET_NODE_RANK": str(pod),
        "PET_NPROC_PER_NODE": "auto",
    }


class Job:
    """Pods of one job: the same execution, the same place to meet.

    Attributes:
        module: the one of ``tests/jobs`` that has the task.
        nodes: "2", or "2:3" for a range.
        nproc_per_node: ranks of each pod.
        registered: what pods are told of the job otherwise than usual.
        port: of the job's store.
        environment: of all pods.
    """

    module = "job_nodes"
    nodes = "2"
    nproc_per_node = 2

    def __init__(
        self,
        warm: Warm,
        directory: Path,
        task: str,
        how: str = "",
        more: Mapping[str, str] | None = None,
        *,
        nproc_per_node: int | None = None,
    ) -> None:
        """A job that has not begun.

        Args:
            warm: forks the agents.
            directory: for what the pods write; its name is the execution's.
            task: its name in the module; or ``module:task``.
            how: what is to become of it, as the task understands it.
            more: variables of all pods.
            nproc_per_node: ranks of each pod, where they are not as many as usual.
        """
        module, _, self.task = task.rpartition(":")
        self.module = module or self.module
        if nproc_per_node is not None:
            self.nproc_per_node = nproc_per_node
        reserved = ReservedPort()
        weakref.finalize(self, reserved.close)
        self.port: int = reserved.port
        self.warm, self.directory = warm, directory
        self.environment = {"TEST_HOW": how, **(more or {})}
        self.registered: Mapping[str, Any] = {}
        self.started = 0

    def variables(self, pod: int) -> dict[str, str]:
        """What a pod sees, but for ``environment``."""
        size: dict[str, Any] = {"nodes": self.nodes, "nproc_per_node": self.nproc_per_node}
        told = {"TEST_REGISTERED": json.dumps(self.registered)}
        operators = operators_variables(pod, port=self.port, **size)
        return {"FLYTE_INTERNAL_EXECUTION_ID": self.directory.name, **told, **operators, "TEST_POD": str(pod)}

    def start(
        self,
        pod: int,
        more: Mapping[str, str] | None = None,
        *,
        task: str = "",
        arguments: Sequence[str] = (),
        outputs: Path | None = None,
    ) -> Running:
        """Start a pod, or the next one in its place.

        Args:
            pod: its index.
            more: variables of this one.
            task: another than the job's.
            arguments: further ones for pyflyte-execute.
            outputs: the attempt's output prefix, where pods are to find what others have uploaded.
        """
        self.started += 1
        files = self.directory / f"node-{pod}-{self.started}"
        if outputs is None:
            # Each has its own, to see who uploads; below one directory, by which pods of one job know each other.
            outputs = self.directory / "uploads" / files.name
            files.mkdir(parents=True)
            (files / "outputs").symlink_to(outputs)
        prefix = ("--output-prefix", str(outputs.resolve()))
        return self.warm.start(
            f"{self.module}:{task or self.task}",
            files,
            environment={**self.variables(pod), **self.environment, **(more or {})},
            kind="execute",
            arguments=[*prefix, *arguments],
            registered=f"{self.module}:{self.task}",
        )

    def run(self) -> tuple[Ended, Ended]:
        """Start node 1, then node 0, and wait for both; nothing may be left of them."""
        waiting = self.start(1)
        first, second = ended(self.start(0), waiting)
        return first, second

    def listening(self) -> bool:
        """Whether somebody holds the job's store."""
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", self.port)) == 0

    def a_node_is_done(self) -> bool:
        """Whether a node has said that its ranks have returned."""
        logs = self.directory.glob("node-*/err")
        return any("the ranks of this node have returned" in log.read_text() for log in logs)


def ended(*pods: Running) -> tuple[Ended, ...]:
    """These pods, ended; nothing may be left of them."""
    found = tuple(pod.wait() for pod in pods)
    assert [pod.left for pod in found] == [[] for _ in pods]
    assert [pod.scratch for pod in found] == [[] for _ in pods]
    return found


def succeeded(*pods: Running) -> tuple[Ended, ...]:
    """The same of pods that leave with 0."""
    found = ended(*pods)
    assert [pod.code for pod in found] == [0 for _ in pods], "\n".join(pod.err for pod in found)
    return found
