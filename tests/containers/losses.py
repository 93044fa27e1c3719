"""How a pod is lost, and what the operator and the kubelet then do, with restart policy OnFailure.

A pod that is deleted is made anew under its name, with another address. A container that fails is started again in
place (docker does it by itself). A pod whose machine is cut off is given up in the end: it is made anew, and what ran
there may come back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tests.containers.cluster import Ended, Pod
from tests.containers.engine import DEADLINE, freeze

LIMIT = "1g"
"""Memory of a pod that is to run out of it: several times what a pod of these tests takes."""


class Loss:
    """One loss of a pod.

    Args:
        pod: is lost.
        noticed: waits until the others have noticed.
    """

    def __init__(self, pod: Pod, noticed: Callable[[], None]) -> None:
        self.pod = pod
        self.noticed = noticed

    def happen(self) -> None:
        """Lose it."""
        raise NotImplementedError

    def come_back(self) -> None:
        """What is done for it to come back."""


class Deleted(Loss):
    """At once, as by force."""

    def happen(self) -> None:
        self.before = self.pod.address
        self.pod.remove()

    def come_back(self) -> None:
        assert self.pod.start().address != self.before


class Told(Deleted):
    """With SIGTERM first: drained, or preempted."""

    def happen(self) -> None:
        self.before = self.pod.address
        told = self.pod.stop(grace=100)
        assert told.code == 137, told.log


class OutOfMemory(Loss):
    """The kernel OOM-kills the agent, and with it the container, which is started again in place."""

    def happen(self) -> None:
        self.pod.container.update(mem_limit=LIMIT, memswap_limit=LIMIT)
        Path(f"/proc/{self.pod.pid}/oom_score_adj").write_text("1000")
        # Files in memory are the container's, and no process can be killed for them.
        with contextlib.suppress(Exception):  # docker's own, of a container that ends meanwhile
            self.pod.container.exec_run(["dd", "if=/dev/zero", "of=/dev/shm/much", "bs=1M", "count=2000"])
        self.pod.docker.ends.wait(lambda: self.pod.codes, f"{self.pod.name} is out of memory", DEADLINE)
        assert self.pod.codes == (137,)


class CutOff(Loss):
    """Nobody is told, and its connections stay open; then the network is there again."""

    def happen(self) -> None:
        self.cut = contextlib.ExitStack()
        self.cut.enter_context(self.pod.partitioned())
        self.noticed()

    def come_back(self) -> None:
        self.cut.close()


class Frozen(Loss):
    """It is frozen until Kubernetes has given it up and another pod has its name; then it wakes and must end itself."""

    def happen(self) -> None:
        self.pod.container.update(restart_policy={"Name": "no"})
        freeze(self.pod.container)
        self.noticed()

    def come_back(self) -> None:
        before = self.pod.address
        _, self.older = self.pod.give_up()
        assert self.pod.start().address != before

    def wake(self) -> None:
        """The older one comes back."""
        self.older.unpause()

    def settle(self) -> None:
        """It ends itself."""
        ends = self.pod.docker.ends
        ends.wait(lambda: ends.of(self.older), f"the older {self.pod.name} ends itself", DEADLINE)


def ended(pods: list[Pod], within: float) -> list[Ended]:
    """Wait until every pod has left for good."""
    for pod in pods:  # that it does not run may be known before its last run's exit code is
        pod.docker.ends.wait(pod.ended_for_good, f"{pod.name} leaves", within)
    return [pod.wait(within=within) for pod in pods]
