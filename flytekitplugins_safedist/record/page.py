"""The page of a run: one HTML of at most 300 kB, with nothing of it fetched from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..texts import human
from . import findings, pictures
from .events import GpuPart, RankPart, percentile
from .findings import Findings, shown_seconds, stragglers
from .pictures import table

LIMIT = 300_000
"""Bytes of the page, at most."""

_MOST_ROWS, _MOST_ENDS = 64, 256
_TEXT_CHARACTERS = 24_000

_STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")

_NO_ONE = (
    "No rank stands out: none was later than the others at the end of a stage. (One with a collective in it ends "
    "on all ranks at once: give the collective a stage of its own.)"
)
_KINDS = {f"p-{phase}": phase for phase in findings.PHASES}
_KINDS |= {"low": "few steps", "mid": "more", "high": "most steps", "stall": "stall", "save": "save"}


@dataclass(frozen=True)
class JobEnd:
    """What is to be said beside the record.

    Attributes:
        task: its name.
        code: of its verdict; "" where it succeeded.
        cause: the root cause, with its traceback and the last lines that its rank printed.
        budgets: what was spent of restarts and replacements, and why: for each its text.
        trace: where the trace is; "" where there is none.
        goes_on: it has not ended.
    """

    task: str
    code: str = ""
    cause: str = ""
    budgets: Sequence[str] = ()
    trace: str = ""
    goes_on: bool = False


def fragment(found: Findings, told: JobEnd) -> str:
    """The page's content, for Flyte's deck: at most :data:`LIMIT` bytes.

    Args:
        found: in the record of all nodes.
        told: what else there is to say, without secrets; no other text in it comes from outside the ranks.
    """
    for rows in (_MOST_ROWS, _MOST_ROWS // 2, 8):
        made = _made(found, told, rows)
        if len(made.encode()) <= LIMIT:
            return made
    return _made(found, told, 0)


def whole(content: str, title: str) -> str:
    """A page of its own."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    dark = "<style>:root{color-scheme:light dark}body{margin:0}</style>"
    head = f"{head}<title>{escape(title)}</title>{dark}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{content}</body></html>'


def _made(found: Findings, told: JobEnd, rows: int) -> str:
    ranks = _rows(found, rows)
    sections = [
        f"<style>{_STYLE}</style>",
        _summary(found, told),
        _cause(told),
        _times(found, ranks),
        _figure("Where the time went", pictures.spent(found), _spent(found)),
        _stages(found, ranks),
        _steps(found, ranks),
        _memory(ranks),
        _gpus(found, rows),
        _nodes(found),
    ]
    return "".join(sections)


def _rows(found: Findings, most: int) -> list[RankPart]:
    """The ranks that are shown: all, or of very many those that held the others back and then the first."""
    marked = {held.rank for held in found.held[: findings.NAMED]} | stragglers(found.ranks)
    ordered = sorted(found.ranks, key=lambda rank: (rank.rank not in marked, rank.rank))[:most]
    return sorted(ordered, key=lambda rank: rank.rank)


def _figure(title: str, picture: str, more: str) -> str:
    return f"<h3>{escape(title)}</h3><figure>{picture}{more}</figure>"


def _summary(found: Findings, told: JobEnd) -> str:
    ranks, durations = found.ranks, [rank.durations for rank in found.ranks if rank.durations]
    nodes = sum(every.round == found.round for part in found.parts for every in part.rounds)
    words = [
        f"failed: {told.code}" if told.code else "running" if told.goes_on else "succeeded",
        shown_seconds(found.until - found.since),
        f"{len(ranks)} rank(s) on {nodes} node(s)",
        f"{len(found.rounds)} round(s)",
    ]
    if durations:
        middle = sorted(percentile(each, 0.5) for each in durations)[len(durations) // 2]
        words.append(f"{max(map(findings.steps_of, ranks))} steps, half of them within {shown_seconds(middle)}")
    values = next((rank.values for rank in ranks if rank.values), {})
    words += [f"{name} {value:.6g}" for name, value in values.items()]
    kind = "bad" if told.code else "soft" if told.goes_on else "good"
    held = f"<p>{escape(findings.held_line(found.held))}</p>" if found.held else ""
    budgets = "".join(f"<li>{escape(each)}</li>" for each in told.budgets)
    trace = f'<p class="soft">Trace for Perfetto: {escape(told.trace)}</p>' if told.trace else ""
    line = escape("; ".join(words))
    return f'<div class="sd"><h2>{escape(told.task)}</h2><p class="{kind}">{line}</p>{held}<ul>{budgets}</ul>{trace}'


def _cause(told: JobEnd) -> str:
    if not told.code:
        return ""
    cause = told.cause
    if len(cause) > _TEXT_CHARACTERS:
        cause = f"{cause[: _TEXT_CHARACTERS // 2]}\n... [cut] ...\n{cause[-_TEXT_CHARACTERS // 2 :]}"
    return f"<h3>Root cause</h3><pre>{escape(cause)}</pre>"


def _times(found: Findings, ranks: Sequence[RankPart]) -> str:
    if not ranks:
        return ""
    rounds = [
        (number, shown_seconds(since - found.since), shown_seconds(until - since), why or "the job ended")
        for number, (since, until, why) in list(found.rounds.items())[-_MOST_ROWS:]
    ]
    shown = {rank.rank for rank in ranks}
    there = [(every.round, rank) for part in found.parts for every in part.rounds for rank in every.ranks]
    there.sort(key=lambda each: (-each[0], each[1].rank))
    ends = [(number, *_end(rank)) for number, rank in there if rank.rank in shown][:_MOST_ENDS]
    first = table("round|began after|lasted|ended because", rounds, "Rounds")
    heads = "round|rank|ended|step|ran|stalls|saves"
    more = pictures.legend(_KINDS) + first + table(heads, ends, "Ranks, of the latest rounds")
    return _figure("Ranks over time", pictures.timeline(found, [rank.rank for rank in ranks]), more)


def _end(rank: RankPart) -> tuple[object, ...]:
    step, lasted = rank.step if rank.step >= 0 else "", shown_seconds(rank.until - rank.since)
    return rank.rank, rank.how, step, lasted, len(rank.stalls), len(rank.saves)


def _spent(found: Findings) -> str:
    whole_ = sum(found.spent.values()) or 1.0
    rows = [(name, shown_seconds(each), f"{100 * each / whole_:.1f}%") for name, each in found.spent.items()]
    return table("phase|seconds of all ranks|part", rows)


def _stages(found: Findings, ranks: Sequence[RankPart]) -> str:
    names = list(dict.fromkeys(name for rank in ranks for name in rank.stages))[:12]
    if not names:
        return ""
    held = {(each.rank, each.stage) for each in found.held[: findings.NAMED]}

    def cell(rank: RankPart, name: str) -> str:
        stage = rank.stages.get(name)
        if stage is None or not stage.times:
            return ""
        return f"{'▶ ' if (rank.rank, name) in held else ''}{shown_seconds(stage.seconds / stage.times)}"

    rows = [(rank.rank, *(cell(rank, name) for name in names)) for rank in ranks]
    line = "" if found.held else f"<p>{_NO_ONE}</p>"
    each = table("|".join(["rank", *names]), rows, "Average of each stage and rank; ▶ held the others back")
    return f"<h3>Stages</h3>{line}{each}"


def _steps(found: Findings, ranks: Sequence[RankPart]) -> str:
    ranks = [rank for rank in ranks if rank.durations]
    if not ranks:
        return ""
    late = stragglers(ranks)
    rows = []
    for rank in ranks:
        parts = [shown_seconds(percentile(rank.durations, part)) for part in (0.05, 0.5, 0.95, 1.0)]
        rows.append((rank.rank, findings.steps_of(rank), *parts, "slow" if rank.rank in late else ""))
    return _figure("Step times", pictures.steps(found, ranks), table("rank|steps|5%|50%|95%|longest|", rows))


def _memory(ranks: Sequence[RankPart]) -> str:
    if not any(rank.peak for rank in ranks):
        return ""
    rows = []
    for rank in ranks:
        gpu = f"{rank.gpu / 2**20:.0f} MiB" if rank.gpu else ""
        rows.append((rank.rank, f"{rank.peak / 2**20:.0f} MiB", gpu, shown_seconds(rank.cpu)))
    more = table("rank|most memory|most of its GPU's|processor time", rows)
    return _figure("Memory", pictures.memory(ranks), more)


def _gpus(found: Findings, most: int) -> str:
    """Of each GPU how it was used; of very many those that were used least."""
    tracks = [(part.node, gpu) for part in found.parts for gpu in part.gpus if gpu.busy]
    tracks = sorted(tracks, key=lambda each: _mean(each[1]))[:most]
    if not tracks:
        return ""
    tracks.sort(key=lambda each: (each[0], each[1].index))
    rows = [
        (node, gpu.index, gpu.uuid, f"{_mean(gpu):.0f}%", _of(max(gpu.memory), gpu.total), gpu.slowed)
        for node, gpu in tracks
    ]
    picture = pictures.gpus(found, {f"{node}: GPU {gpu.index}": gpu for node, gpu in tracks})
    more = pictures.legend({"low": "busy for a third", "mid": "two thirds", "high": "all the time"})
    return _figure("GPUs", picture, more + table("node|GPU|id|busy|most memory|slowed for", rows))


def _mean(gpu: GpuPart) -> float:
    return sum(gpu.busy) / len(gpu.busy)


def _of(memory: int, total: int) -> str:
    return f"{memory / 2**30:.1f} of {total / 2**30:.1f} GiB"


def _nodes(found: Findings) -> str:
    rows = []
    for part in list(found.parts)[:_MOST_ROWS]:
        clock = "unknown"
        if part.error is not None:
            clock = f"{shown_seconds(abs(part.offset))} ± {shown_seconds(part.error)}"
        before = ", ".join(f"{name} {shown_seconds(seconds)}" for name, _, seconds in part.phases[-4:])
        files, size = part.inputs
        inputs = f"{files} files, {human(size)}" if files else ""
        rows.append((part.node, part.host, clock, before, inputs))
    heads = "node|host|clock against node 0|before its ranks|inputs, downloaded once"
    return f"<h3>Nodes</h3>{table(heads, rows)}</div>"
