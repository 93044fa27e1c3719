"""The run of a job as one node sees it: fed with what becomes of its ranks, it keeps the node's summary, sends it to
node 0, measures, and makes the page of the whole job on the node that uploads the verdict."""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ..config.options import Metrics
from ..errors import FsTimeoutError
from ..fs.store import bounded
from ..hangs.gpus import GpuUse
from ..hangs.waits import Steps
from ..log import PREFIX
from ..scrub import scrubber
from ..store.errors import one_line
from . import exporters, layout, page, run_page, trace
from .clocks import Offset
from .exporters import Instrument, Readings
from .findings import Findings
from .line import Line, Pace, on_terminal, status
from .run_page import ConsoleDeck
from .summary import EARLIER, GpuSummary, NodeSummary, RoundSummary, merged, packed

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at the ranks and the GPUs."""

PAGE_SECONDS = 60.0
"""Between two uploads of the page of a job that runs, at least."""

_LEAVE_SECONDS = 10.0
"""For a file that is left in a store."""

_JOB_BYTES = 16 << 20
_NODE_BYTES = 16 << 10, 256 << 10
"""What all nodes may send to node 0, and a single one at least and at most."""

_FULL_ROUNDS = 8
"""The latest; of those before them nothing is kept of single ranks."""

_MOST_ROUNDS = 100
_WHY_CHARACTERS = 300


@dataclass(frozen=True)
class RankView:
    """One rank of this node, as its agent sees it.

    Attributes:
        rank: its number.
        memory: what it notes of itself (:mod:`.layout`).
        how: it ended, as in :class:`.RankSummary`; ``running``.
        until: when it ended, or now, by the monotonic clock.
        profile: file that it leaves what torch.profiler saw in.
        decks: says name and HTML of those that it has left so far.
        steps, steps_to_come: how far it is, and how many there are, where it says so.
        resident: bytes of memory that its process holds; None where there is none.
        debugs: says whether a person is asked in its debugger now.
    """

    rank: int
    memory: memoryview
    how: str
    until: float
    profile: Path
    steps: Steps = field(default_factory=Steps)
    steps_to_come: int = 0
    resident: int | None = None
    debugs: Callable[[], bool] = bool
    decks: Callable[[], Sequence[Mapping[str, str]]] = tuple


@dataclass(eq=False)
class RunRecord:
    """This node's part, and on node 0 the whole.

    Attributes:
        task: its name.
        is_local: nothing of it goes to Flyte.
        has_deck: whether Flyte shows the task's decks.
        console: where the page is uploaded while the job runs; None: nowhere.
        environment: variables whose values must not show.
        terminal: variables of this process, which may have a terminal.
        metrics: which of them the user wants.
        labels: of all metrics, with OpenTelemetry's names.
        gpus: how those of this node are used.
        inputs: files and bytes that were downloaded for all its ranks, so far.
        prepared: seconds that preparing took.
        nproc_per_node: ranks of each node.
        hosts: whether the job's coordinator is in this process.
        send: takes this node's summary, for node 0.
        others: what other nodes have sent so, and what to add to their times for this node's.
        course: what the job has spent so far: for each ``restart`` and each ``loss`` of a node, why.
    """

    task: str
    is_local: bool
    has_deck: bool
    console: ConsoleDeck | None
    environment: Mapping[str, str]
    terminal: Mapping[str, str]
    metrics: Metrics
    labels: Mapping[str, str]
    gpus: Callable[[], Sequence[GpuUse]]
    inputs: Callable[[], tuple[int, int]]
    prepared: float
    nproc_per_node: int
    hosts: Callable[[], bool]
    send: Callable[[str], object]
    others: Callable[[], Iterable[tuple[str, Offset]]]
    course: Callable[[], Mapping[str, Sequence[str]]]

    def __post_init__(self) -> None:
        self._scrub = scrubber(self.environment)
        self._node = NodeSummary(-1, socket.gethostname())
        self._is_open = self._lacks = False  # whether a round goes on, and whether something was not noted
        self._paces: defaultdict[int, Pace] = defaultdict(Pace)
        self._next_look = self._next_page = self._waited = 0.0
        self._waiting_since = now = time.monotonic()
        began = now - self.prepared
        for name, (since, seconds) in (EARLIER.value or {}).items():
            self._phase(name, since, seconds)
            self._phase("import", since + seconds, began - since - seconds)
        self._phase("prepare", began, self.prepared)
        self._views: Sequence[RankView] = ()
        self._directory = ""
        self._values: Readings = {}
        self._upload: Future[None] | None = None
        self._line: Line | None = None
        self._held = ExitStack()
        exporters.begin(self.metrics, lambda: self._values, self.labels, self._held, logger.warning)
        if self.is_local and on_terminal(self.terminal):
            self._line = Line(lambda: any(view.debugs() for view in self._views))
            self._held.enter_context(self._line.shown())

    def _phase(self, name: str, since: float, seconds: float) -> None:
        if seconds > 0:
            self._node.phases.append((name, since, seconds))
        del self._node.phases[: -2 * _MOST_ROUNDS]

    # --- round by round ----------------------------------------------------------------------------------------------
    def begins(self, number: int, node_rank: int, *, nnodes: int, checked: float = 0.0) -> None:
        """Every node is there, and was *checked* for so many seconds: a round begins."""
        now = time.monotonic()
        waited = now - checked - self._waiting_since
        self._waited += waited
        self._phase("rendezvous", self._waiting_since, waited)
        self._phase("preflight", now - checked, checked)
        self._node.node = node_rank
        self._node.rounds.append(RoundSummary(number, now, now, nnodes * self.nproc_per_node))
        del self._node.rounds[:-_MOST_ROUNDS]
        self._is_open = True
        for rank, pace in self._paces.items():
            self._paces[rank] = Pace(pace.steps, pace.stalled)

    def why(self, text: str) -> None:
        """Why the latest round ended, as the coordinator says."""
        if self._node.rounds:
            self._node.rounds[-1].why = self._scrub(text)[:_WHY_CHARACTERS]

    def over(self, views: Callable[[], Sequence[RankView]], why: str = "") -> None:
        """The ranks of the round have ended, for what this node has found: node 0 is to know, before it hears of that
        end itself."""
        if why or self._is_open:
            self.why(why)
        if self._is_open:
            self._is_open, self._waiting_since = False, time.monotonic()
            self._note(lambda: self._end_round(views()))

    def _note(self, work: Callable[[], object]) -> None:
        """No job fails for its picture."""
        try:
            work()
        except Exception as error:  # of the file system, of a terminal that is gone, of what a rank has left
            if not self._lacks:
                logger.warning(f"the record of this run is not whole: {type(error).__name__}: {error}")
            self._lacks = True

    def _end_round(self, views: Sequence[RankView]) -> None:
        self._read([replace(view, how="nobody saw its end") if view.how == "running" else view for view in views])
        for older in self._node.rounds[:-_FULL_ROUNDS]:
            older.ranks = []
        self._see(views)
        self._send_summary()

    def _read(self, views: Sequence[RankView]) -> None:
        """Have the latest round be as its ranks have noted it."""
        latest = self._node.rounds[-1]
        ranks = []
        for view in views:
            summary = layout.read(view.memory, view.rank, since=latest.since, until=view.until, how=view.how)
            with suppress(OSError):
                summary.profile = view.profile.read_text()
            ranks.append(summary)
        until = max((view.until for view in views), default=time.monotonic())
        self._node.rounds[-1] = replace(latest, until=until, ranks=ranks)

    def _send_summary(self) -> None:
        least, most = _NODE_BYTES
        nnodes = self._node.rounds[-1].world_size // self.nproc_per_node
        self.send(packed(self._node, min(most, max(least, _JOB_BYTES // nnodes))))

    # --- while it runs -----------------------------------------------------------------------------------------------
    def look(self, views: Callable[[], Sequence[RankView]]) -> None:
        """Where it is time, see how far the ranks are, and tell: metrics, a person at a terminal, node 0, and from
        there Flyte's console. One upload at a time, in a thread: a store that is slow holds up nothing here."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._note(lambda: self._look(views(), now))

    def _look(self, views: Sequence[RankView], now: float) -> None:
        self._see(views)
        if not views:
            return
        if self._line is not None and self._is_open:
            self._line.draw(self._status(views, now))
        if self.console is None or now < self._next_page or not (self._upload is None or self._upload.done()):
            return
        self._next_page = now + PAGE_SECONDS
        if self._is_open:  # else its ranks here have ended; those of other nodes may go on
            self.why("it goes on")
            self._read(views)
        if not self.hosts():
            self._send_summary()
            return
        node = replace(self._node, rounds=list(self._node.rounds))
        self._upload = self.console.put(lambda: self._decks(node))
        self._upload.add_done_callback(_tell)

    def _decks(self, node: NodeSummary) -> dict[str, str]:
        """The page of the run that goes on, and what rank 0 has left so far."""
        html = page.fragment(Findings(merged(node, self.others())), self._end(goes_on=True))
        left = next((view.decks() for view in self._views if view.rank == 0), ())
        return {run_page.NAME: html, **{deck["name"]: deck["html"] for deck in left}}

    def _see(self, views: Sequence[RankView]) -> None:
        now, self._views = time.monotonic(), views or self._views  # who has the terminal is asked after the round, too
        for view in views:
            self._paces[view.rank].see(view.steps.told[0], layout.stall_seconds(view.memory, view.until), now)
        gpus, self._node.inputs = self.gpus(), self.inputs()
        summaries = {each.index: each for each in self._node.gpus}
        for gpu in gpus:
            if gpu.busy is not None and gpu.memory is not None:
                new = GpuSummary(gpu.index, gpu.uuid, gpu.memory_total or 0, now)
                summary = summaries.setdefault(gpu.index, new)
                summary.note(gpu.busy, gpu.memory, now)
                summary.slowed = gpu.slowed or summary.slowed
        self._node.gpus = list(summaries.values())
        self._values = self._measured(views, gpus)

    def _measured(self, views: Sequence[RankView], gpus: Sequence[GpuUse]) -> Readings:
        running = [view for view in views if view.resident is not None]
        paces = {rank: pace for rank, pace in self._paces.items() if pace.steps}
        of_node: dict[Instrument, float] = {exporters.RENDEZVOUS: self._waited}
        of_node[exporters.FILES], of_node[exporters.BYTES] = self._node.inputs
        if EARLIER.value is not None and "staging" in EARLIER.value:
            of_node[exporters.STAGING] = EARLIER.value["staging"][1]
        if self._node.node == 0:  # what all nodes know would count several times
            course = self.course()
            of_node |= {exporters.RESTARTS: len(course["restart"]), exporters.LOSSES: len(course["loss"])}
        return {
            **{instrument: {"": value} for instrument, value in of_node.items()},
            exporters.STEP: {view.rank: view.steps.step for view in running if view.steps.step >= 0},
            exporters.STEPS: {rank: pace.steps for rank, pace in paces.items()},
            exporters.STALLED: {rank: pace.stalled for rank, pace in paces.items()},
            exporters.MEMORY: {view.rank: view.resident or 0 for view in running},
            exporters.GPU_BUSY: {gpu.index: gpu.busy / 100 for gpu in gpus if gpu.busy is not None},
            exporters.GPU_MEMORY: {gpu.index: gpu.memory for gpu in gpus if gpu.memory is not None},
        }

    def _status(self, views: Sequence[RankView], now: float) -> str:
        behind, latest = min(views, key=lambda view: view.steps.step), self._node.rounds[-1]
        where = f"{PREFIX}{len(views)} rank(s), round {latest.round}: "
        rate, lasted = self._paces[behind.rank].rate, now - latest.since
        return where + status(behind.steps.step, behind.steps_to_come, rate, lasted)

    def _end_upload(self) -> None:
        """What is uploaded from here on is the last: an upload that is under way is not to come after it."""
        if self.console is not None and self._upload is not None:
            self.console.cancel(self._upload)

    # --- at its end --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """The job has ended here."""
        for work in (self._end_upload, lambda: self._see(()), self._held.close):
            self._note(work)

    def leave(self, name: str, text: str) -> str:
        """Leave a text beside what the task makes, without its secrets; its address, or why it is not there: no failure
        waits for long until it can be told whole."""
        return self._left(name, lambda: self._scrub(text).encode("utf-8", "backslashreplace"))

    def _left(self, name: str, make: Callable[[], bytes]) -> str:
        late = FsTimeoutError("the store has not answered", seen=f"{_LEAVE_SECONDS:g} s")
        try:
            self._directory = self._directory or run_page.new_directory(is_local=self.is_local)
            address = f"{self._directory}/{name}"
            bounded(partial(run_page.leave, address, make()), _LEAVE_SECONDS, late)
        except Exception as error:  # whatever the store's client raises
            return self._scrub(f"could not be left ({one_line(error)})")
        return address

    def show(self, say: Callable[[str], object], *, code: str = "", cause: str = "") -> tuple[str, str]:
        """Make the page of the run, for Flyte's deck, and leave it in a file in a local run: the page, and where it is;
        "" for what there is not: no job fails for its picture.

        Args:
            say: takes who held the others back.
            code, cause: of the job's verdict; "" where it succeeded.
        """
        self._note(self._end_upload)
        try:
            found = Findings(merged(self._node, self.others()))
            if found.held_line:
                say(found.held_line.rstrip("."))
            if found.alone_line:
                logger.warning(found.alone_line)
            if not self.is_local and not self.has_deck:
                return "", ""
            place = self._left("trace.json.gz", lambda: trace.trace(found))
            html = page.fragment(found, self._end(code, cause, trace=place))
            return html, self._left("run.html", page.whole(html, self.task).encode) if self.is_local else ""
        except Exception as error:  # what the job has made counts
            logger.warning(f"the record of this run could not be shown: {type(error).__name__}: {error}")
            return "", ""

    def _end(self, code: str = "", cause: str = "", *, trace: str = "", goes_on: bool = False) -> page.JobEnd:
        spent = [self._scrub(f"{kind}: {why}") for kind, whys in self.course().items() for why in whys]
        return page.JobEnd(self.task, code, self._scrub(cause), spent, trace, goes_on)


def _tell(upload: Future[None]) -> None:
    error = None if upload.cancelled() else upload.exception()
    if error is not None:  # whatever the store's client raises
        logger.debug(f"the page of the run is not uploaded now: {type(error).__name__}: {error}")
