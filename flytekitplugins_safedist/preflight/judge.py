"""What all nodes' checks say before a job's first rank: which machine is not fit, or far slower than others. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median
from typing import Literal

from mashumaro.mixins.dict import DataClassDictMixin

CLOCK_SECONDS = 1.0
"""By which clocks may differ: more than where something sets them, and less than where nothing does."""
DISK = "disk, MB/s:"
"""What is measured of a disk: in the log and never broken, since another pod may write there at that moment."""
_CHARACTERS, _PAIRS = 4000, 50
"""Of a text that may be about thousands of nodes, and listed in it: all pairs may be millions."""

Subject = Literal["Checks", "Clock", "Dns", "Gpu", "Disk", "Network", "SharedMemory", "Speed"]
"""What a check is about: a failure's code is ``SYSTEM:Preflight`` and this."""


@dataclass(frozen=True)
class Trouble:
    """A finding of :mod:`.machine`, but for what is well.

    Attributes:
        subject: what it is about.
        is_broken: a task will fail; else it may be meant so.
        text: with what to do about it.
    """

    subject: Subject
    is_broken: bool
    text: str


@dataclass(frozen=True)
class NodeReport(DataClassDictMixin):
    """What one node has found.

    Attributes:
        troubles: what is not well.
        measured: by what, with its unit, and by which (a GPU; "" where there is one): more is better.
        unreached: nodes that it cannot connect to, by node_rank, and why.
        ahead: by how many seconds its clock is ahead of node 0's.
        slack: how far that may be off.
    """

    troubles: tuple[Trouble, ...] = ()
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    unreached: dict[int, str] = field(default_factory=dict)
    ahead: float = 0.0
    slack: float = 0.0


@dataclass(frozen=True)
class Judged:
    """What the checks of all nodes come to.

    Attributes:
        text: for the log, or the error.
        code: of the error; "" where all nodes are fit.
    """

    text: str
    code: str


def judge(reports: Mapping[int, NodeReport], names: Mapping[int, str], slow: float) -> Judged:
    """Judge a job's nodes.

    Args:
        reports: by node_rank.
        names: of the nodes, for people.
        slow: the part of the median of all below which a figure is too low.
    """
    reports = dict(sorted(reports.items()))  # they come in any order
    figures: dict[str, dict[tuple[int, str], float]] = {}
    for node, report in reports.items():
        for kind, values in report.measured.items():
            figures.setdefault(kind, {}).update({(node, which): value for which, value in values.items()})
    troubles = [*_unreached(reports, names), *_alike(reports, names), *_far_off(figures, names, slow)]
    troubles.sort(key=lambda trouble: not trouble.is_broken)
    text = "; ".join(trouble.text for trouble in troubles)[:_CHARACTERS] or "all is well"
    spans = [f"{kind} {min(all_of.values()):.3g} to {max(all_of.values()):.3g}" for kind, all_of in figures.items()]
    code = f"SYSTEM:Preflight{troubles[0].subject}" if troubles and troubles[0].is_broken else ""
    return Judged(f"{text}. {len(reports)} node(s): {', '.join(spans) or 'nothing was measured'}", code)


def _unreached(reports: Mapping[int, NodeReport], names: Mapping[int, str]) -> Iterator[Trouble]:
    """Pairs that cannot talk; or the one node that is in all of them."""
    pairs = [(one, other, why) for one, report in reports.items() for other, why in report.unreached.items()]
    if pairs:
        common = [node for node in pairs[0][:2] if all(node in pair[:2] for pair in pairs)] if len(pairs) > 2 else []
        alone = f"{names[common[0]]} is cut off: " if len(common) == 1 else ""
        listed = [f"{names[one]} cannot connect to {names[other]} ({why})" for one, other, why in islice(pairs, _PAIRS)]
        more = f", and {len(pairs) - _PAIRS} more" if len(pairs) > _PAIRS else ""
        yield Trouble("Network", is_broken=True, text=alone + ", ".join(listed) + more)


def _alike(reports: Mapping[int, NodeReport], names: Mapping[int, str]) -> Iterator[Trouble]:
    """Each finding once, with all nodes that have it."""
    nodes: dict[Trouble, list[str]] = {}
    for node, report in reports.items():
        for trouble in report.troubles:
            nodes.setdefault(trouble, []).append(names[node])
        if abs(report.ahead) - report.slack > CLOCK_SECONDS:
            text = f"{names[node]}: its clock is {report.ahead:+.1f} s off node 0's (NTP sets it)"
            yield Trouble("Clock", is_broken=False, text=text)
    yield from (replace(trouble, text=f"{', '.join(of)}: {trouble.text}") for trouble, of in nodes.items())


def _far_off(
    figures: Mapping[str, Mapping[tuple[int, str], float]], names: Mapping[int, str], slow: float
) -> Iterator[Trouble]:
    for kind, values in figures.items():
        usual = median(values.values())
        for (node, which), value in values.items():
            if value < slow * usual:
                where = names[node] + (f", {which}" if which else "")
                text = f"{where}: {kind} {value:.3g}, where most have {usual:.3g}"
                yield Trouble("Speed", is_broken=kind != DISK, text=text)
