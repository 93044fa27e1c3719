"""Where to save, and where attempts and executions before this one may have saved.

Flyte tells an attempt its own checkpoint prefix and that of the attempt before it, no more. So each attempt leaves a
record of its place and of all places that it knows to come before it, twice: in the place itself, and beside the
attempt's outputs (``.../<node>/data/<attempt>``), where later attempts find it by counting down. An attempt that died
before it left one has saved nothing either, because the record comes before the first save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError
from .stores import Store, open_store

RECORD = "safedist-checkpoints.json"
_ATTEMPTS = 10
"""Of another execution: how many are looked at."""


@dataclass(frozen=True)
class Facts:
    """What is known before any store is asked.

    Attributes:
        own: where this attempt saves.
        before: the place that Flyte names as the one before; None where it names none.
        outputs: the prefix of this attempt's outputs; None outside an execution.
        attempt: from 0.
        execution: project, domain and name; None outside an execution.
    """

    own: str
    before: str | None = None
    outputs: str | None = None
    attempt: int = 0
    execution: tuple[str, str, str] | None = None


def outputs_before(facts: Facts) -> list[str]:
    """The output prefixes of the attempts before this one, the latest first. Pure.

    Flyte numbers them: the last part of the prefix is the attempt. Where it is not, there is nothing to count down.
    """
    head, _, last = (facts.outputs or "").rstrip("/").rpartition("/")
    if not head or last != str(facts.attempt):
        return []
    return [f"{head}/{attempt}" for attempt in reversed(range(facts.attempt))]


def outputs_of(facts: Facts, execution: str) -> list[str]:
    """The output prefixes at which another execution of the same project, domain and node may have left its records:
    attempts 0 to 9, the latest first. Pure.

    Raises:
        CheckpointError: this execution's own prefix does not show where the other's are.
    """
    project, domain, name = facts.execution or ("", "", "")
    parts = (facts.outputs or "").rstrip("/").split("/")
    for index, part in enumerate(parts):
        if name and part in (f"{project}-{domain}-{name}", name):
            others = part.removesuffix(name) + execution
            root = "/".join([*parts[:index], others, *parts[index + 1 : -1]])
            return [f"{root}/{attempt}" for attempt in reversed(range(_ATTEMPTS))]
    raise CheckpointError(
        "it cannot be told from this execution where another one's checkpoints are",
        where={"resume_from": execution},
        seen=f"execution {facts.execution}, output prefix {facts.outputs}",
        hint='give the address of its checkpoints instead: its log names it ("saves go to ...")',
    )


def known_before(
    facts: Facts, opened: Callable[[str], Store] = open_store, *, records_at: Sequence[str] | None = None
) -> list[str]:
    """Every place of this execution but its own, the latest attempt's first.

    Args:
        facts: of this attempt.
        opened: opens a store.
        records_at: where to look for records instead: another execution's output prefixes.
    """
    found: list[str] = []
    if records_at is None:
        prefixes, waiting = outputs_before(facts), [facts.own, *([facts.before] if facts.before else [])]
    else:
        prefixes, waiting = list(records_at), []
    for prefix in prefixes:
        waiting += _record(opened(prefix))
    seen: set[str] = set()
    while waiting:
        place = waiting.pop(0).rstrip("/")
        if place in seen:
            continue
        seen.add(place)
        if place != facts.own.rstrip("/"):
            found.append(place)
        waiting += _record(opened(place))
    return found


def leave_record(facts: Facts, before: Sequence[str], opened: Callable[[str], Store] = open_store) -> None:
    """Leave this attempt's record, before its first save."""
    data = json.dumps({"places": [facts.own, *before]}, indent=1).encode()
    opened(facts.own).put(RECORD, data)
    if facts.outputs:
        opened(facts.outputs).put(RECORD, data)


def _record(store: Store) -> list[str]:
    data = store.get(RECORD)
    if data is None:
        return []
    try:
        places = json.loads(data)["places"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "the record of earlier checkpoints cannot be read",
            where={"object": f"{store.url}/{RECORD}"},
            seen=f"{type(error).__name__}: {error}",
            hint="restore it, or remove it and name the place to resume from: resume_from=URL",
        ) from error
    return [str(place) for place in places]
