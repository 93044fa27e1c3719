"""The pictures of the page, as SVG made by hand. Pure.

Rows that are alike share one path for each colour, so that sixty-four ranks take kilobytes. Colours are classes, for
light, dark and paper; they are Okabe and Ito's, which colour-blind people tell apart, and nothing is told by colour
alone: each picture has a table behind it. Amounts of ranks are bars in the cells of their tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .findings import PHASES, Findings, shown_seconds
from .summary import GpuSummary

WIDTH, LEFT, TOP = 1000, 64, 18
_KINDS = {phase: phase for phase in PHASES}
_KINDS |= {"low": "few steps", "mid": "more", "high": "most steps", "stall": "stall", "save": "save"}
"""Classes of what is drawn, and what they mean; what lies on top comes last."""
_BUSY = {"low": "busy for a third", "mid": "two thirds", "high": "all the time"}
_PACES = ("", "low", "low", "low", "mid", "mid", "mid", "high", "high", "high")
_LEAST = 8
"""Columns of the picture that a pace is shown for, at least."""
_FEW = 24
"""Rows; more are thinner, and every fourth has its name."""
_THICK = {"stall": 0.3, "save": 0.9}
"""Parts of a row's height that a mark has; the others 0.7."""
_UNITS = [base * 10**power for power in range(-3, 2) for base in (1, 2, 5)]
_UNITS += [60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400]
"""Round numbers of seconds."""

_Mark = tuple[str, float, float]
"""A kind, its begin and seconds."""


def timeline(found: Findings, ranks: Sequence[int], round_ends: Mapping[int, str]) -> str:
    """Rank by time: phases, pace, stalls, saves and rounds of these ranks."""
    rows: dict[str, list[_Mark]] = {f"rank {rank}": [] for rank in ranks}
    for node in found.nodes:
        there = [rank for every in node.rounds for rank in every.ranks if rank.rank in ranks]
        for number in {rank.rank for rank in there}:
            rows[f"rank {number}"] += node.phases
        for rank in there:
            rows[f"rank {rank.rank}"] += [piece[:3] for piece in rank.pieces()]
            rows[f"rank {rank.rank}"] += _paces(found, [*map(int, rank.pace)], rank.began, rank.every)
    lines = {f"round {number}": (since, round_ends[number]) for number, (since, _, _) in found.rounds.items()}
    return _over_time("time", "What each rank did when", found, rows, lines, heights=(16, 9)) + _legend(_KINDS)


def gpus(found: Findings, tracks: Mapping[str, GpuSummary]) -> str:
    """GPU by time: how busy each was; by their names."""
    rows = {
        name: _paces(found, [round(busy * 9 / 100) for busy in gpu.busy], gpu.since, gpu.every)
        for name, gpu in tracks.items()
    }
    return _over_time("gpus", "How busy each GPU was", found, rows, {}, heights=(12, 8)) + _legend(_BUSY)


def _paces(found: Findings, digits: Sequence[int], since: float, every: float) -> Iterator[_Mark]:
    """Stretches of one pace; of slices that are too short to be seen several."""
    group = max(1, math.ceil(_LEAST * found.length / (WIDTH - LEFT) / max(every, 1e-9)))
    means = [math.ceil(sum(digits[at : at + group]) / group) for at in range(0, len(digits), group)]
    for kind, alike in itertools.groupby(_PACES[mean] for mean in means):
        seconds = len(list(alike)) * group * every
        yield kind, since, seconds
        since += seconds


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
    text. Below it is an axis, with marks at round numbers."""
    height, step = (heights[0], 1) if len(rows) <= _FEW else (heights[1], 4)
    bottom = TOP + height * len(rows)

    def x(time: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * (time - found.since) / found.length

    inside, pieces = [], dict.fromkeys(_KINDS, "")
    for at, (row, marks) in enumerate(rows.items()):
        middle = TOP + height * (at + 0.5)
        inside += [_label(2, middle + 4, row)] if at % step == 0 else []
        for kind, since, seconds in marks:
            if kind in pieces:
                pieces[kind] += f"M{x(since):.1f} {middle:g}h{max(0.6, x(since + seconds) - x(since)):.1f}"
    for kind, path in pieces.items():
        inside += (
            [f'<path class="{kind}" stroke-width="{height * _THICK.get(kind, 0.7):g}" d="{path}"/>'] if path else []
        )
    for label, (since, text) in lines.items():
        line = f'<path class="round" d="M{x(since):.1f} 12V{bottom:g}"/>{_label(x(since) + 2, 10, label)}'
        inside.append(f"<g><title>{escape(f'{label}: {text}')}</title>{line}</g>")
    every = next((unit for unit in _UNITS if found.length / unit <= 8), found.length / 4)
    for mark in range(int(found.length / every) + 1):
        text = shown_seconds(mark * every) if mark else "0"
        inside.append(_label(x(found.since + mark * every), bottom + 14, text, ' text-anchor="middle"'))
    head = f'<svg viewBox="0 0 {WIDTH} {bottom + 20:g}" role="img" aria-labelledby="{name}-t {name}-d">'
    about = f"{len(rows)} rows over {shown_seconds(found.length)}"
    text = f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{about}</desc>'
    return f"{head}{text}{''.join(inside)}</svg>"


def _label(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(text)}</text>'


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
    if not body:
        return ""
    inside = f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    return f"<details><summary>{escape(name)}</summary>{inside}</details>" if name else inside


def _legend(kinds: Mapping[str, str]) -> str:
    """Which colour is what; with words."""
    marks = (
        f'<span><svg viewBox="0 0 14 10" aria-hidden="true"><path class="{kind}" stroke-width="9" d="M0 5h14"/></svg> '
        f"{escape(name)}</span>"
        for kind, name in kinds.items()
    )
    return f'<p class="legend">{" ".join(marks)}</p>'
