"""Where a task's saves are: one place for all attempts of a node.

Flyte tells an attempt where it may keep checkpoints: each attempt has another such prefix. So the first one that comes
so far leaves a pointer to its place beside its outputs (``.../<node>/data/<attempt>``), where later attempts find
it by counting down. They save where it points to.

An execution that recovers another one (Flyte's "Recover") is told the checkpoint prefix of that one's last attempt, and
nothing else of it. So an attempt that resumes from another place than its own leaves a pointer beside its own prefix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..compat import flytekit as flytekit_inside
from ..errors import CheckpointError
from .store import Store

POINTER = "safedist-checkpoints.json"
POINTER_TO_GIVEN = "safedist-checkpoints-given.json"
"""To a place that the user has given: no attempt looks for its own there, which another ``Checkpoints`` may have."""
SIBLING = "-safedist"
"""Beside Flyte's checkpoint prefix, not in it: all that is in there is ``current_context().checkpoint``'s."""
_ATTEMPTS = 10
"""Of another execution: how many are looked at."""


@dataclass(frozen=True)
class Facts:
    """What is known before any store is asked.

    Attributes:
        own: the user's place, or this attempt's.
        given: whether it is the user's.
        outputs: the prefix of this attempt's outputs; None outside an execution.
        attempt: from 0.
        execution: project, domain and name; None outside an execution.
        before: the own place of the attempt that Flyte has this one go on from, where the user has given none.
    """

    own: str
    given: bool = True
    outputs: str | None = None
    attempt: int = 0
    execution: tuple[str, str, str] | None = None
    before: str | None = None


def gather(where: str | os.PathLike[str] | None, *, attempt: int) -> Facts:
    """The facts of this attempt, from the user's word and from Flyte's context.

    Raises:
        CheckpointError: neither says where.
    """
    from flytekit import FlyteContextManager

    parameters: Any = FlyteContextManager.current_context().user_space_params
    destination, source = flytekit_inside.checkpoint_places(parameters) if parameters is not None else (None, None)
    if where == "" or (where is None and not destination):  # of a variable that is not set: not where this runs
        raise CheckpointError(
            "there is no place for checkpoints",
            seen="no Flyte checkpoint prefix in this process, and no place given" if where is None else "an empty text",
            hint='give one: Checkpoints("/shared/run-7") or Checkpoints("s3://bucket/run-7")',
        )
    execution = getattr(parameters, "execution_id", None)
    return Facts(
        _from_here(where) if where is not None else _beside(destination or ""),
        given=where is not None,
        outputs=getattr(parameters, "output_metadata_prefix", None),
        attempt=attempt,
        execution=(execution.project, execution.domain, execution.name) if execution is not None else None,
        before=_beside(source) if source and where is None else None,
    )


def _beside(prefix: str) -> str:
    return prefix.rstrip("/") + SIBLING


def _from_here(where: str | os.PathLike[str]) -> str:
    """The place, wherever the working directory is later."""
    from fsspec.core import strip_protocol

    text = os.fspath(where)
    return text if "://" in text else str(strip_protocol(text))


def outputs_before(facts: Facts) -> list[str]:
    """The output prefixes of the attempts before this one, the latest first. Pure.

    Flyte numbers them: the last part of the prefix is the attempt. Where it is not, there is nothing to count down.
    """
    head, _, last = (facts.outputs or "").rstrip("/").rpartition("/")
    return [f"{head}/{number}" for number in reversed(range(facts.attempt))] if last == str(facts.attempt) else []


def outputs_of(facts: Facts, execution: str) -> list[str]:
    """The output prefixes at which another execution of the same project, domain and node may have left its pointers:
    attempts 0 to 9, the latest first. Pure.

    Raises:
        CheckpointError: this execution's own prefix does not show where the other's are.
    """
    project, domain, name = facts.execution or ("", "", "")
    parts = (facts.outputs or "").rstrip("/").split("/")
    for index, part in enumerate(parts):
        if name and part in (f"{project}-{domain}-{name}", name):
            root = "/".join([*parts[:index], part.removesuffix(name) + execution, *parts[index + 1 : -1]])
            return [f"{root}/{number}" for number in reversed(range(_ATTEMPTS))]
    raise CheckpointError(
        "it cannot be told from this execution where another one's checkpoints are",
        where={"resume_from": execution},
        seen=f"execution {facts.execution}, output prefix {facts.outputs}",
        hint='give the address of its checkpoints instead: its log names it ("saves go to ...")',
    )


def find(facts: Facts) -> str:
    """The place of all attempts. Writes nothing: a place that the user has given may be one to read from only.

    Where this attempt has saved counts first: one before it that is cut off may leave a pointer of its own only then.
    """
    prefixes = [facts.outputs, *outputs_before(facts)] if facts.outputs and not facts.given else []
    return next(filter(None, map(_pointer, prefixes)), facts.own)


def leave_pointer(facts: Facts, place: str) -> None:
    """Leave it where later attempts and other executions look."""
    if facts.outputs:
        name = POINTER_TO_GIVEN if facts.given else POINTER
        Store(facts.outputs).put(name, json.dumps({"place": place}).encode())


def before(facts: Facts) -> Iterator[str]:
    """Places to resume from where this execution has saved nothing: of the one that it recovers, by Flyte's word."""
    if facts.before is not None:
        yield facts.before
        if place := _pointer(facts.before):
            yield place


def leave_trail(facts: Facts, place: str) -> None:
    """Leave it where an execution that recovers this one looks."""
    if not facts.given and place != facts.own:
        Store(facts.own).put(POINTER, json.dumps({"place": place}).encode())


def of_execution(facts: Facts, resume_from: str) -> str:
    """The place that the user names to resume from, by its address or by an execution's name.

    Raises:
        CheckpointError: that execution has left no pointer.
    """
    if "/" in resume_from:
        return resume_from
    prefixes = outputs_of(facts, resume_from)
    pointers = (_pointer(prefix, name) for name in (POINTER, POINTER_TO_GIVEN) for prefix in prefixes)
    place = next(filter(None, pointers), None)
    if place is None:
        raise CheckpointError(
            "that execution has left no record of checkpoints",
            where={"resume_from": resume_from},
            seen=f"no {POINTER} beside the outputs of its attempts",
            hint="see whether it has saved, at the same node of the workflow, or give the address of its place",
        )
    return place


def _pointer(prefix: str, name: str = POINTER) -> str | None:
    data = Store(prefix).get(name)
    try:
        return None if data is None else str(json.loads(data)["place"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "the record of where checkpoints are cannot be read",
            where={"object": f"{prefix}/{name}"},
            seen=f"{type(error).__name__}: {error}",
            hint="restore it, or remove it and name the place to resume from: resume_from=URL",
        ) from error
