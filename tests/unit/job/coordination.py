"""A coordinator without time, network or nodes: what it is told, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from flytekitplugins_safedist.job.coordinator import Coordinator, Disconnected, Said, Tick
from flytekitplugins_safedist.job.facts import Cause, Rules
from flytekitplugins_safedist.job.messages import Beat, Ended, Go, Hello, Message, Refused, Stop

M = TypeVar("M", bound=Message)

FIXED = Rules("job", 3, 3, fixed=True, max_restarts=2, max_replacements=4, timeout=900, heartbeat=20, stop=5)
RANGE = Rules("job", 2, 4, fixed=False, max_restarts=2, max_replacements=4, timeout=900, heartbeat=20, last_call=10)
STEP = 0.5


class Job:
    """A coordinator in process ``a``, and all that it has sent. Processes are named by letters.

    Args:
        rules: of the job.
        host: its process.
        now: the clock at its start.
    """

    def __init__(self, rules: Rules = FIXED, host: str = "a", now: float = 100.0) -> None:
        self.rules = rules
        self.now = now
        self.it = Coordinator(rules, host, now)
        self.sent: list[tuple[str, Message]] = []
        self.silent: set[str] = set()
        self.connected: dict[str, None] = {}

    def hello(self, process: str, node: int | None = None, **facts: object) -> None:
        """A process says hello; as node 0, 1, 2 for ``a``, ``b``, ``c`` where the size is fixed."""
        if node is None and self.rules.fixed:
            node = ord(process[0]) - ord("a")
        known = {"started_ns": 1, "host": f"host-{process}", **facts}
        self.connected[process] = None
        self.say(process, Hello("job", process, node, **known))  # type: ignore[arg-type]

    def say(self, process: str, message: Message) -> None:
        self._on(Said(process, message))

    def lose(self, *processes: str) -> None:
        """Connections are lost."""
        for process in processes:
            self.connected.pop(process, None)
            self._on(Disconnected(process))

    def wait(self, seconds: float) -> None:
        """Time passes; who is connected, and not silent, is heard."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for process in [each for each in self.connected if each not in self.silent]:
                self._on(Said(process, Beat()))
            self._on(Tick())

    def pause(self, seconds: float) -> None:
        """The coordinator's own process stands still, and goes on with a look at the clock."""
        self.now += seconds
        self._on(Tick())

    def _on(self, event: Said | Disconnected | Tick) -> None:
        sent = self.it.on(event, self.now)
        self.sent += sent
        for process, message in sent:
            if isinstance(message, Refused):
                self.connected.pop(process, None)

    def heard(self, kind: type[M]) -> dict[str, M]:
        """The latest message of a kind to each process, since this was asked last; then nothing is known any more."""
        found = {process: message for process, message in self.sent if isinstance(message, kind)}
        self.sent.clear()
        return found

    def all_end(
        self, *processes: str, round_no: int | None = None, cause: Cause | None = None, cut: bool = False
    ) -> None:
        for process in processes:
            self.say(process, Ended(self.it.history.round if round_no is None else round_no, cause, cut=cut))

    @property
    def budgets(self) -> tuple[int, int]:
        """How many restarts, and how many replacements, are spent."""
        return len(self.it.history.restarts), len(self.it.history.losses)


def begun(rules: Rules = FIXED, processes: Iterable[str] = "abc") -> Job:
    """A job in its first round."""
    job = Job(rules)
    for process in processes:
        job.hello(process)
    if not rules.fixed:
        job.wait(rules.last_call + STEP)
    assert job.heard(Go).keys() == set(processes)
    return job


def cause(rank: int = 0, *, echo: int = 0, time_ns: int = 1000, **facts: bool) -> Cause:
    """A failure; with ``echo`` one that only says that a peer was lost."""
    return Cause(echo, bool(echo), time_ns, rank, "ConnectionError" if echo else "ValueError", **facts)


def stopped(job: Job) -> set[str]:
    """Who was told to end its ranks."""
    return set(job.heard(Stop))
