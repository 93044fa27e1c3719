"""The roles of a job's pods: which there are, and how many of each. Nothing else derives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .options import SafeDistributed

NAMES = ("master", "worker")


@dataclass(frozen=True)
class Role:
    """One role.

    Attributes:
        name: as in the config.
        replicas: pods that it has; None where nobody can tell.
        written: kfpytorch's class, as the user wrote it, or None.
    """

    name: str
    replicas: int | None
    written: Any

    @property
    def restart_policy(self) -> str:
        """As flyteidl says it. What names none gets OnFailure (Flyte's own default is Never for all).

        A pod that exits non-zero has died undecided: it comes back, in place or as a new pod of the same name, and
        takes its old place, or finds that the attempt has its verdict. With Never, the operator fails the whole job for
        it, a retry of the task's is spent, and what was uploaded is not read (training-operator v1.9.0,
        pytorchjob_controller.go, UpdateJobStatus).
        """
        policy = getattr(self.written, "restart_policy", None)
        return "ON_FAILURE" if policy is None or policy.name == "FAILURE" else str(policy.name)


def roles(config: SafeDistributed, low: int, high: int) -> tuple[Role, ...]:
    """The roles of a job of so many nodes: none for one, which is an ordinary pod; where the number cannot be read (0),
    all that there can be."""
    counts: dict[str, int | None] = {} if high else dict.fromkeys(NAMES)
    if high > 1:
        counts = {"worker": high} if low != high else {"master": 1, "worker": high - 1}
    return tuple(Role(name, count, getattr(config, name)) for name, count in counts.items())
