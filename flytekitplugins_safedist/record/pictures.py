"""The pictures of the page, as SVG made by hand. Pure.

Rows that are alike share one path for each colour, so that sixty-four ranks take kilobytes. Colours are classes, for
light, dark and paper; they are Okabe and Ito's, which colour-blind people tell apart, and nothing is told by colour
alone: each picture has a table behind it. Amounts of ranks are bars in the cells of their tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .findings import Findings, shown_seconds
from .summary import GpuSummary, NodeSummary

WIDTH, LEFT = 1000, 64
_PACES = ("", "low", "low", "low", "mid", "mid", "mid", "high", "high", "high")
_LEAST = 8
"""Columns of the picture that a pace is shown for, at least."""
_FEW = 24
"""Rows; more are thinner, and every fourth has its name."""
_THICK = {"stall": 0.3, "save": 0.9}
"""Parts of a row's height that a mark has; the others 0.7."""


def _label(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(text)}</text>'


def _path(kind: str, pieces: Sequence[str], width: float) -> str:
    return f'<path class="{escape(kind)}" stroke-width="{width:g}" d="{"".join(pieces)}"/>' if pieces else ""


def _axis(length: float, bottom: float, scale: Callable[[float], float]) -> list[str]:
    """Marks below a time axis, at round numbers."""
    units = [base * 10**power for power in range(-3, 2) for base in (1, 2, 5)]
    units += [60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400]
    every = next((unit for unit in units if length / unit <= 8), length / 4 or 1.0)
    marks = [every * number for number in range(int(length / every) + 1)]
    return [
        _label(scale(mark), bottom, shown_seconds(mark) if mark else "0", ' text-anchor="middle"') for mark in marks
    ]


def timeline(found: Findings, ranks: Sequence[int], round_ends: Mapping[int, str]) -> str:
    """Rank by time: phases, pace, stalls, saves and rounds of these ranks."""
    rows: dict[str, list[_Mark]] = {f"rank {rank}": [] for rank in ranks}
    for node in found.nodes:
        for rank, marks in _marks(node, _least(found)):
            rows.get(f"rank {rank}", []).extend(marks)
    lines = {f"round {number}": (since, round_ends[number]) for number, (since, _, _) in found.rounds.items()}
    return _over_time("time", "What each rank did when", found, rows, lines, heights=(16, 9))


def gpus(found: Findings, tracks: Mapping[str, GpuSummary]) -> str:
    """GPU by time: how busy each was; by their names."""
    rows = {
        name: _paces([round(busy * 9 / 100) for busy in gpu.busy], gpu.since, gpu.every, _least(found))
        for name, gpu in tracks.items()
    }
    return _over_time("gpus", "How busy each GPU was", found, rows, {}, heights=(12, 8))


_Mark = tuple[str, float, float]
"""A colour, its begin and seconds."""


def _least(found: Findings) -> float:
    """Seconds that a pace is shown for, at least."""
    return _LEAST * _length(found) / (WIDTH - LEFT)


def _length(found: Findings) -> float:
    return max(found.until - found.since, 1e-3)


def _over_time(
    name: str,
    title: str,
    found: Findings,
    rows: Mapping[str, Iterable[_Mark]],
    lines: Mapping[str, tuple[float, str]],
    *,
    heights: tuple[int, int],
) -> str:
    """A picture of rows over time, of few or of many; each of the *lines* from its top to its bottom has a time and a
    text."""
    each, length, step = heights[len(rows) > _FEW], _length(found), 1 if len(rows) <= _FEW else 4
    bottom = 18 + each * len(rows)

    def x(time: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * (time - found.since) / length

    pieces: dict[str, list[str]] = {}
    for at, marks in enumerate(rows.values()):
        for kind, since, seconds in marks:
            wide = max(0.6, x(since + seconds) - x(since))
            pieces.setdefault(kind, []).append(f"M{x(since):.1f} {18 + each * (at + 0.5):g}h{wide:.1f}")
    inside = [_path(kind, its, each * _THICK.get(kind, 0.7)) for kind, its in pieces.items()]
    inside += [_label(2, 18 + each * (at + 0.5) + 4, row) for at, row in enumerate(rows) if at % step == 0]
    for label, (since, text) in lines.items():
        inside.append(f"<g><title>{escape(f'{label}: {text}')}</title>")
        inside.append(f'<path class="round" d="M{x(since):.1f} 12V{bottom:g}"/>{_label(x(since) + 2, 10, label)}</g>')
    inside += _axis(length, bottom + 14, lambda mark: x(found.since + mark))
    about = f"{len(rows)} rows over {shown_seconds(length)}"
    head = f'<svg viewBox="0 0 {WIDTH} {bottom + 20:g}" role="img" aria-labelledby="{name}-t {name}-d">'
    text = f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{about}</desc>'
    return f"{head}{text}{''.join(inside)}</svg>"


def _marks(node: NodeSummary, least: float) -> Iterable[tuple[int, Iterable[_Mark]]]:
    """By rank: what is drawn of it, its begin and seconds; what lies on top last."""
    for rank in {rank.rank for every in node.rounds for rank in every.ranks}:
        yield rank, [(f"p-{name}", since, seconds) for name, since, seconds in node.phases]
    for each in (rank for every in node.rounds for rank in every.ranks):
        yield each.rank, [(f"p-{name}", each.since + at, seconds) for name, at, seconds in each.phases]
        yield each.rank, _paces([*map(int, each.pace)], each.since + each.sliced, each.every, least)
        yield each.rank, [("stall", each.since + at, seconds) for at, seconds in each.stalls]
        yield each.rank, [("save", each.since + at, seconds) for _, at, seconds in each.saves]


def _paces(digits: Sequence[int], since: float, every: float, least: float) -> Iterable[_Mark]:
    """Stretches of one pace; of slices that are shorter than *least* several."""
    group = max(1, math.ceil(least / max(every, 1e-9)))
    means = [math.ceil(sum(digits[at : at + group]) / group) for at in range(0, len(digits), group)]
    at = since
    for kind, alike in itertools.groupby(_PACES[mean] for mean in means):
        seconds = len(list(alike)) * group * every
        if kind:
            yield kind, at, seconds
        at += seconds


@dataclass(frozen=True)
class Bar:
    """A cell with an amount as a bar behind its text: from one part (0 to 1) of its width to another."""

    text: str
    until: float
    since: float = 0.0
    kind: str = ""


def _cell(cell: object) -> str:
    if not isinstance(cell, Bar):
        return f"<td>{escape(str(cell))}</td>"
    place = f"--a:{100 * cell.since:.1f}%;--b:{max(100 * cell.until, 100 * cell.since + 0.5):.1f}%"
    return f'<td class="bar {escape(cell.kind)}" style="{place}">{escape(cell.text)}</td>'


def table(heads: str, rows: Iterable[Sequence[object]], name: str = "") -> str:
    """Numbers; *heads* with bars between them. One with a *name* is there for whoever opens it."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads.split("|"))
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    inside = f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    return f"<details><summary>{escape(name)}</summary>{inside}</details>" if name else inside


def legend(kinds: Mapping[str, str]) -> str:
    """Which colour is what; with words."""
    marks = (
        f'<span><svg viewBox="0 0 14 10" aria-hidden="true"><path class="{kind}" stroke-width="9" d="M0 5h14"/></svg> '
        f"{escape(name)}</span>"
        for kind, name in kinds.items()
    )
    return f'<p class="legend">{" ".join(marks)}</p>'
