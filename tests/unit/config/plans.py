"""Plans, for tests that need one and are about something else; and what a user may write by mistake."""

from __future__ import annotations

from typing import Any

from flytekitplugins_safedist.config.arguments import TaskArguments
from flytekitplugins_safedist.config.options import SafeDistributed
from flytekitplugins_safedist.config.plan import Plan, plan


class Hidden:
    """What can be neither shown nor compared."""

    def __repr__(self) -> str:
        raise ValueError("not shown")

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = object.__hash__


def planned(config: SafeDistributed, **arguments: Any) -> Plan:
    """The plan of a task with that config, and those arguments of ``@task``."""
    made, problems = plan(config, TaskArguments(**arguments))
    assert made is not None, problems
    return made
