"""The page of a run: one HTML of at most 300 kB, with nothing of it fetched from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean

from ..texts import cut, human
from . import pictures
from .findings import Findings, shown_seconds, steps_of
from .pictures import Bar, table
from .summary import RankSummary, percentile

LIMIT = 300_000
"""Bytes of the page, at most."""

_MOST_ROWS, _MOST_ENDS, _MOST_STAGES = 64, 256, 12
_TEXT_CHARACTERS, _LINE_CHARACTERS = 24_000, 300

_STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")

_NO_ONE = (
    ": none was later than the others at the end of a stage. (One with a collective in it ends "
    "on all ranks at once: give the collective a stage of its own.)"
)


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


def fragment(found: Findings, end: JobEnd) -> str:
    """The page's content, for Flyte's deck: at most :data:`LIMIT` bytes.

    Args:
        found: in the record of all nodes.
        end: what else there is to say, without secrets; no other text in it comes from outside the ranks.
    """
    pages = (_made(found, end, rows) for rows in (_MOST_ROWS, _MOST_ROWS // 2, 8))
    return next((made for made in pages if len(made.encode()) <= LIMIT), "") or _made(found, end, 0)


def whole(content: str, title: str) -> str:
    """A page of its own, dark for whom wants that: Flyte's frame is white."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    own = "<style>:root{color-scheme:light dark}body{margin:0}</style>"
    head = f"{head}<title>{escape(title)}</title>{own}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body class="own">{content}</body></html>'


def _made(found: Findings, end: JobEnd, most: int) -> str:
    """With so many rows: of very many ranks those that held the others back, and then the first."""
    marked = {held.rank for held in found.held}
    ranks = sorted(found.ranks, key=lambda rank: (rank.rank not in marked, rank.rank))[:most]
    ranks.sort(key=lambda rank: rank.rank)
    sections = [
        _summary(found, end),
        f"<h3>Root cause</h3><pre>{escape(cut(end.cause, _TEXT_CHARACTERS))}</pre>" if end.code else "",
        _times(found, ranks, end),
        _spent(found),
        _stages(found, ranks),
        _steps(ranks),
        _memory(ranks),
        _gpus(found, most),
        f"<h3>Nodes</h3>{_nodes(found)}",
    ]
    return f'<style>{_STYLE}</style><div class="sd">{"".join(sections)}</div>'


def _figure(title: str, *content: str) -> str:
    """What is drawn, and its table last; nothing where that has no rows."""
    return f"<h3>{escape(title)}</h3><figure>{''.join(content)}</figure>" if content[-1] else ""


def _summary(found: Findings, end: JobEnd) -> str:
    ranks, middles = found.ranks, sorted(percentile(rank.durations, 0.5) for rank in found.ranks if rank.durations)
    nodes = sum(every.round == found.round for node in found.nodes for every in node.rounds)
    count = f"{len(ranks)} of {found.world_size}" if len(ranks) < found.world_size else len(ranks)
    kind = "bad" if end.code else "soft" if end.goes_on else "good"
    words = [
        f"failed: {end.code}" if end.code else "running" if end.goes_on else "succeeded",
        shown_seconds(found.until - found.since),
        f"{count} rank(s) on {nodes} node(s)",
        f"{len(found.rounds)} round(s)",
    ]
    if middles:
        half = shown_seconds(middles[len(middles) // 2])
        words.append(f"{max(map(steps_of, ranks))} steps, half of them within {half}")
    values = next((rank.values for rank in ranks if rank.values), {})
    words += [f"{name} {value:.6g}" for name, value in values.items()]
    before = len(end.budgets) - _MOST_ROWS
    budgets = [f"{before} before these"] if before > 0 else []
    budgets = [f"<li>{escape(each)}</li>" for each in (*budgets, *end.budgets[-_MOST_ROWS:])]
    lines = [f"<p>{escape(each)}</p>" for each in (found.held_line, found.alone_line) if each]
    trace = f'<p class="soft">Trace for Perfetto: {escape(end.trace)}</p>' if end.trace else ""
    head = f'<h2>{escape(end.task)}</h2><p class="{kind}">{escape("; ".join(words))}</p>'
    return f"{head}{''.join(lines)}<ul>{''.join(budgets)}</ul>{trace}"


def _times(found: Findings, ranks: Sequence[RankSummary], end: JobEnd) -> str:
    ends = {number: why or "the job ended" for number, (_, _, why) in found.rounds.items()}
    if end.code and ends:
        ends[max(ends)] = end.cause.partition("\n")[0][:_LINE_CHARACTERS]
    rounds = [
        (number, shown_seconds(since - found.since), shown_seconds(until - since), ends[number])
        for number, (since, until, _) in list(found.rounds.items())[-_MOST_ROWS:]
    ]
    rows, shown = [], [rank.rank for rank in ranks]
    there = [(every, rank) for node in found.nodes for every in node.rounds for rank in every.ranks]
    for every, rank in sorted(there, key=lambda each: (-each[0].round, each[1].rank)):
        step, lasted = rank.step if rank.step >= 0 else "", shown_seconds(rank.until - every.since)
        if rank.rank in shown:
            rows.append((every.round, rank.rank, rank.how, step, lasted, len(rank.stalls), rank.saved))
    tables = table("round|began after|lasted|ended because", rounds, "Rounds")
    tables += table("round|rank|ended|step|ran|stalls|saves", rows[:_MOST_ENDS], "Ranks, of the latest rounds")
    return _figure("Ranks over time", pictures.timeline(found, shown, ends), tables if rows else "")


def _spent(found: Findings) -> str:
    most, whole_ = max(found.spent.values()), sum(found.spent.values())
    rows = [
        (name, shown_seconds(each), Bar(f"{100 * each / whole_:.1f}%", each / most, kind=name))
        for name, each in found.spent.items()
        if each > 0
    ]
    return _figure("Where the time went", table("phase|seconds of all ranks|part", rows))


def _stages(found: Findings, ranks: Sequence[RankSummary]) -> str:
    names = list(dict.fromkeys(name for rank in ranks for name in rank.stages))[:_MOST_STAGES]
    if not names:
        return ""
    marks = {(each.rank, each.stage): "▶ " for each in found.held}

    def cell(rank: RankSummary, name: str) -> str:
        stage, mark = rank.stages.get(name), marks.get((rank.rank, name), "")
        return f"{mark}{shown_seconds(stage.seconds / stage.times)}" if stage is not None else ""

    rows = [(rank.rank, *(cell(rank, name) for name in names)) for rank in ranks]
    each = table("|".join(["rank", *names]), rows, "Average of each stage and rank; ▶ held the others back")
    return f"<h3>Stages</h3><p>{escape(_compared(found))}</p>{each}"


def _compared(found: Findings) -> str:
    """What the comparison of ranks has come to, where it names nobody. In a stage in which ranks cannot be compared
    somebody may have been late."""
    uneven, among = ", ".join(map(repr, found.uneven[:_MOST_STAGES])), f" {found.compared}" if found.compared else ""
    not_compared = f"Not compared: {uneven}, which some ranks ended more often than others." if uneven else ""
    if found.held or all(name in found.uneven for rank in found.ranks for name in rank.stages):
        return not_compared
    if sum(bool(rank.stages) for rank in found.ranks) < 2:
        return f"Not compared: stages{among or ' of one rank'}."
    return f"No rank{among} stands out{' in the other stages' if uneven else ''}{_NO_ONE} {not_compared}"


def _steps(ranks: Sequence[RankSummary]) -> str:
    rows, most = [], max((percentile(rank.durations, 0.95) for rank in ranks), default=0.0) or 1.0
    for rank in (rank for rank in ranks if rank.durations):
        low, middle, high, last = (percentile(rank.durations, part) for part in (0.05, 0.5, 0.95, 1.0))
        bar = Bar(f"{shown_seconds(low)} to {shown_seconds(high)}", high / most, since=low / most)
        rows.append((rank.rank, steps_of(rank), shown_seconds(middle), bar, shown_seconds(last)))
    heads = f"rank|steps|half of them within|from 5% to 95% (0 to {shown_seconds(most)})|longest"
    return _figure("Step times", table(heads, rows))


def _memory(ranks: Sequence[RankSummary]) -> str:
    most, most_gpu = (max(sizes, default=0) for sizes in ([rank.peak for rank in ranks], [rank.gpu for rank in ranks]))

    def bar(size: int, of: int) -> Bar | str:
        return Bar(f"{size / 2**20:.0f} MiB", size / of) if of and size else ""

    rows = [
        (rank.rank, bar(rank.peak, most), bar(rank.gpu, most_gpu), shown_seconds(rank.cpu)) for rank in ranks if most
    ]
    heads = f"rank|most memory (0 to {most / 2**20:.0f} MiB)|most of its GPU's|processor time"
    return _figure("Memory", table(heads, rows))


def _gpus(found: Findings, most: int) -> str:
    """Of each GPU how it was used; of very many those that were used least."""
    gpus = [(node.node, gpu, fmean(gpu.busy)) for node in found.nodes for gpu in node.gpus if gpu.busy]
    gpus = sorted(sorted(gpus, key=lambda each: each[2])[:most], key=lambda each: (each[0], each[1].index))
    rows = []
    for node, gpu, busy in gpus:
        memory = f"{max(gpu.memory) / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB"
        rows.append((node, gpu.index, gpu.uuid, f"{busy:.0f}%", memory, gpu.slowed))
    picture = pictures.gpus(found, {f"{node}: GPU {gpu.index}": gpu for node, gpu, _ in gpus})
    return _figure("GPUs", picture, table("node|GPU|id|busy|most memory|slowed for", rows))


def _nodes(found: Findings) -> str:
    rows = []
    for node in list(found.nodes)[:_MOST_ROWS]:
        error = node.error
        clock = "unknown" if error is None else f"{shown_seconds(abs(node.offset))} ± {shown_seconds(error)}"
        before = ", ".join(f"{name} {shown_seconds(seconds)}" for name, _, seconds in node.phases[-4:])
        files, size = node.inputs
        rows.append((node.node, node.host, clock, before, f"{files} files, {human(size)}" if files else ""))
    return table("node|host|clock against node 0|before its ranks|inputs, downloaded once", rows, "Table")
