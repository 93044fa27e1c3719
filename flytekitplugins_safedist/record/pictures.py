"""The pictures of the page, as SVG made by hand. Pure.

Rows that are alike share one path for each colour, so that sixty-four ranks take kilobytes. Colours are classes, for
light, dark and paper; they are Okabe and Ito's, which colour-blind people tell apart, and nothing is told by colour
alone: each picture has a table behind it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape

from .events import GpuPart, NodePart, RankPart, percentile
from .findings import Findings, shown_seconds, stragglers

WIDTH, LEFT = 1000, 64
_PACES = ("", "low", "low", "low", "mid", "mid", "mid", "high", "high", "high")
_LEAST = 8
"""Columns of the picture that a pace is shown for, at least."""


def drawing(name: str, title: str, told: str, height: float, inside: Iterable[str]) -> str:
    """An SVG with what a screen reader says of it."""
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{name}-t {name}-d">'
    text = f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(told)}</desc>'
    return f"{head}{text}{''.join(inside)}</svg>"


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


def timeline(found: Findings, ranks: Sequence[int]) -> str:
    """Rank by time: phases, pace, stalls, saves and rounds of these ranks."""
    rows = [f"rank {rank}" for rank in ranks]
    each, bottom = _height(rows, 16, 9), 18 + _height(rows, 16, 9) * len(rows)
    length, x = _over(found)
    least = _LEAST * length / (WIDTH - LEFT)
    marks = [(f"rank {rank}", mark) for part in found.parts for rank, its in _marks(part, least) for mark in its]
    inside = _strips(rows, marks, x, each, {"stall": each * 0.3, "save": each * 0.9})
    for number, (since, _, why) in found.rounds.items():
        title = f"<title>{escape(f'round {number}: {why}')}</title>"
        inside.append(f'<g>{title}<path class="round" d="M{x(since):.1f} 12V{bottom:g}"/>')
        inside.append(_label(x(since) + 2, 10, f"round {number}") + "</g>")
    inside += _axis(length, bottom + 14, lambda mark: x(found.since + mark))
    told = f"{len(ranks)} ranks over {shown_seconds(length)}, {len(found.rounds)} round(s)"
    return drawing("time", "What each rank did when", told, bottom + 20, inside)


def gpus(found: Findings, tracks: Mapping[str, GpuPart]) -> str:
    """GPU by time: how busy each was; by their names."""
    each, rows = _height(tracks, 12, 8), list(tracks)
    length, x = _over(found)
    least = _LEAST * length / (WIDTH - LEFT)
    marks = [
        (name, mark)
        for name, gpu in tracks.items()
        for mark in _paces([round(busy * 9 / 100) for busy in gpu.busy], gpu.since, gpu.every * len(gpu.busy), least)
    ]
    inside = _strips(rows, marks, x, each, {})
    bottom = 18 + each * len(rows)
    inside += _axis(length, bottom + 14, lambda mark: x(found.since + mark))
    return drawing("gpus", "How busy each GPU was", f"{len(rows)} GPUs, by node and index", bottom + 20, inside)


def _over(found: Findings) -> tuple[float, Callable[[float], float]]:
    """The length of the run, and where a time is in the picture."""
    length = max(found.until - found.since, 1e-3)
    return length, lambda time: LEFT + (WIDTH - LEFT - 12) * (time - found.since) / length


def _height(rows: Collection[object], few: float, many: float) -> float:
    return few if len(rows) <= 24 else many


def _names(rows: Sequence[str], each: float, top: float, late: Collection[int] = ()) -> list[str]:
    """The names of rows; of many every fourth, and those that are late."""
    step, marked = 1 if len(rows) <= 32 else 4, ' class="late"'
    return [
        _label(2, top + each * (at + 0.5) + 4, f"▶ {name}" if at in late else name, marked if at in late else "")
        for at, name in enumerate(rows)
        if at % step == 0 or at in late
    ]


def _strips(
    rows: Sequence[str],
    marks: Iterable[tuple[str, tuple[str, float, float]]],
    x: Callable[[float], float],
    each: float,
    thick: Mapping[str, float],
) -> list[str]:
    """Rows over time, with their names: each mark is of a row, and has a colour, its begin and seconds."""
    place, pieces = {row: 18 + each * (at + 0.5) for at, row in enumerate(rows)}, dict[str, list[str]]()
    for row, (kind, since, seconds) in marks:
        if row in place:
            wide = max(0.6, x(since + seconds) - x(since))
            pieces.setdefault(kind, []).append(f"M{x(since):.1f} {place[row]:g}h{wide:.1f}")
    return [_path(kind, its, thick.get(kind, each * 0.7)) for kind, its in pieces.items()] + _names(rows, each, 18)


def _marks(part: NodePart, least: float) -> Iterable[tuple[int, Iterable[tuple[str, float, float]]]]:
    """By rank: what is drawn of it, its begin and seconds; what lies on top last."""
    for rank in {rank.rank for every in part.rounds for rank in every.ranks}:
        yield rank, [(f"p-{name}", since, seconds) for name, since, seconds in part.phases]
    for every in part.rounds:
        for each in every.ranks:
            yield each.rank, [(f"p-{name}", since, seconds) for name, since, seconds in each.phases]
            yield each.rank, _paces([*map(int, each.pace)], every.since, every.until - every.since, least)
            yield each.rank, [("stall", since, seconds) for since, seconds in each.stalls]
            yield each.rank, [("save", since, seconds) for _, since, seconds in each.saves]


def _paces(digits: Sequence[int], since: float, seconds: float, least: float) -> Iterable[tuple[str, float, float]]:
    """Stretches of one pace: their colour, begin and seconds; of slices that are shorter than *least* several."""
    each = seconds / max(1, len(digits))
    group = max(1, math.ceil(least / max(each, 1e-9)))
    means = [math.ceil(sum(digits[at : at + group]) / group) for at in range(0, len(digits), group)]
    at = 0
    for kind, alike in itertools.groupby(_PACES[mean] for mean in means):
        count = len(list(alike))
        if kind:
            yield kind, since + at * group * each, count * group * each
        at += count


def spent(found: Findings) -> str:
    """Where the time went: one bar, a piece for each phase."""
    whole, at, inside = sum(found.spent.values()) or 1.0, 0.0, []
    for name, seconds in found.spent.items():
        wide = (WIDTH - 12) * seconds / whole
        title = f"<title>{escape(f'{name}: {shown_seconds(seconds)}')}</title>"
        shape = f'stroke-width="22" d="M{at:.1f} 14h{max(0.6, wide):.1f}"'
        inside.append(f'<path class="p-{escape(name)}" {shape}>{title}</path>')
        if wide > 70:
            inside.append(_label(at + 3, 40, f"{name} {100 * seconds / whole:.0f}%"))
        at += wide
    told = ", ".join(f"{name} {100 * seconds / whole:.0f}%" for name, seconds in found.spent.items())
    return drawing("spent", "Where the time of all ranks went", told, 46, inside)


def steps(found: Findings, ranks: Sequence[RankPart]) -> str:
    """Of each rank the step times: from the fifth to the 95th percentile, and the median."""
    late = stragglers(ranks) | {held.rank for held in found.held[:3]}
    most = max((percentile(rank.durations, 0.95) for rank in ranks), default=0.0) or 1.0
    each, lines, middles = _height(ranks, 14, 8), [], []

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - 60) * min(seconds / most, 1.05)

    for at, rank in enumerate(ranks):
        low, middle, high = (percentile(rank.durations, part) for part in (0.05, 0.5, 0.95))
        y = each * (at + 0.7)
        lines.append(f"M{x(low):.1f} {y:g}H{x(high) + 0.6:.1f}")
        middles.append(f"M{x(middle):.1f} {y - each * 0.35:g}v{each * 0.7:g}")
    bottom, marked = each * len(ranks) + 22, {at for at, rank in enumerate(ranks) if rank.rank in late}
    names = _names([str(rank.rank) for rank in ranks], each, each * 0.2, marked)
    inside = [_path("range", lines, each * 0.4), _path("middle", middles, 2), *names, *_axis(most, bottom - 6, x)]
    named = ", ".join(map(str, sorted(late))) or "none"
    return drawing("steps", "How long a step took on each rank", f"marked ranks: {named}", bottom, inside)


def memory(ranks: Sequence[RankPart]) -> str:
    """Of each rank the most memory that it held, of the machine and of its GPU."""
    most = max((max(rank.peak, rank.gpu) for rank in ranks), default=0) or 1
    each, wide = _height(ranks, 14, 8), (WIDTH - LEFT - 100) / most
    host = [f"M{LEFT} {each * (at + 0.6):g}h{rank.peak * wide:.1f}" for at, rank in enumerate(ranks)]
    gpu = [f"M{LEFT} {each * (at + 0.85):g}h{rank.gpu * wide:.1f}" for at, rank in enumerate(ranks) if rank.gpu]
    names = _names([f"rank {rank.rank}" for rank in ranks], each, each * 0.1)
    inside = [_path("p-import", host, each * 0.5), _path("p-rendezvous", gpu, each * 0.25), *names]
    told = f"at most {most / 2**30:.2f} GiB"
    return drawing("memory", "The most memory that each rank held", told, each * len(ranks) + 6, inside)


def table(heads: str, rows: Iterable[Sequence[object]], name: str = "Table") -> str:
    """The same in numbers; *heads* with bars between them."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads.split("|"))
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    table_ = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<details><summary>{escape(name)}</summary><div class='wide'>{table_}</div></details>"


def legend(kinds: Mapping[str, str]) -> str:
    """Which colour is what; with words."""
    marks = (
        f'<span><svg viewBox="0 0 14 10" aria-hidden="true"><path class="{kind}" stroke-width="9" d="M0 5h14"/></svg> '
        f"{escape(name)}</span>"
        for kind, name in kinds.items()
    )
    return f'<p class="legend">{" ".join(marks)}</p>'
