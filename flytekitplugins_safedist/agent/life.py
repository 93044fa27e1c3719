"""The sign that a container leaves on its pod's scratch volume, which outlives it: how it was at last.

Where the kernel ends a whole container for its memory, nobody is left to say so, and the kubelet starts it again in the
same pod. The next process finds the sign. Only one of the same pod and attempt counts: where the kernel does not show
which pod this is, none is left.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mashumaro.mixins.dict import DataClassDictMixin

from .. import envvars, termination
from ..coordinator.books import Memory
from ..handoff import Slot
from ..store.patience import within
from . import memory

logger = logging.getLogger(__name__)

_LOOK_SECONDS, _RENEW_SECONDS, _MOVES = 1.0, 10.0, 0.02
"""Between two looks at the container's memory; and between two renewals of the sign, unless that has moved by more
than this part of its limit."""

END_SECONDS = 5.0
"""For the last word of a sign."""

_OF_POD = re.compile(r"/pods/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/\S* /etc/hosts ")
"""In ``/proc/self/mountinfo``: the kubelet has the hosts file of each pod in a directory of the pod's uid."""


@dataclass(frozen=True)
class Life(DataClassDictMixin):
    """One start of a container.

    Attributes:
        attempt: that it was started for.
        starts: how many there were before it in this pod.
        at: when it was seen last, in seconds since the epoch.
        memory: of it then; None where it is not limited.
        code: its exit status; None where it could not say.
    """

    attempt: str
    starts: int
    at: float
    memory: Memory | None = None
    code: int | None = None

    def __str__(self) -> str:
        clock = time.strftime("%H:%M:%S UTC", time.gmtime(self.at))
        how = "without a verdict" if self.code is None else f"with exit status {self.code}"
        text = f"this container was started before ({self.starts + 1} time(s)), and ended at {clock} {how}"
        if self.memory is not None:
            text += f"; its memory then: {self.memory}"
        if self.code is None and self.memory is not None and self.memory.is_full:
            text += ", so most likely the kernel ended it. Fix: raise mem= in requests and limits, or use less of it: "
            text += "fewer ranks per node, fewer loader workers"
        return text


BEFORE: Slot[Life] = Slot()
"""The last one before this, for the others of the job: from the entrypoint to the agent."""

_OWN: Slot[SignOfLife] = Slot()
"""The sign of this process: from its first line to its last."""


class SignOfLife:
    """The sign of this process, renewed by a thread.

    Args:
        path: of the file.
        life: this one.
    """

    def __init__(self, path: Path, life: Life) -> None:
        self._path, self._life = path, life
        self._ends, self._writing = threading.Event(), threading.Lock()
        self._renew(life)
        with suppress(RuntimeError):  # the container may have no further thread now: the sign is an older one then
            threading.Thread(target=self._look_on, name="safedist sign of life", daemon=True).start()

    def end(self, code: int) -> None:
        """The process ends by itself. What has ended for good needs no sign."""
        self._ends.set()
        if code == 0:
            with self._writing, suppress(OSError):
                self._path.unlink()
        else:
            self._renew(replace(self._now(), code=code))

    def _look_on(self) -> None:
        while not self._ends.wait(_LOOK_SECONDS):
            now, last = self._now(), self._life
            if now.at - last.at > _RENEW_SECONDS or _has_moved(last.memory, now.memory):
                self._renew(now)

    def _now(self) -> Life:
        return replace(self._life, at=time.time(), memory=memory.in_use())

    def _renew(self, life: Life) -> None:
        """Not synced: what outlives the process, but not its machine, is all that is needed."""
        draft = self._path.with_suffix(".new")
        with self._writing:
            if self._ends.is_set() and life.code is None:
                return
            with suppress(OSError):
                draft.write_text(json.dumps(life.to_dict()))
                draft.replace(self._path)
                self._life = life


def _has_moved(last: Memory | None, now: Memory | None) -> bool:
    if last is None or now is None:
        return last != now
    return abs(now.used - last.used) > _MOVES * now.limit


def begin(environment: Mapping[str, str], root: Path = Path("/")) -> None:
    """Leave a sign, where this is a job's pod with a scratch volume; and say what an earlier one in its place says.

    Args:
        environment: the pod's variables.
        root: where ``proc`` lies; another one in tests.
    """
    volume, pod = environment.get(envvars.SCRATCH_ROOT), pod_uid(root)
    names = (envvars.JOB, envvars.FLYTE_EXECUTION_ID, envvars.FLYTE_ATTEMPT)
    if not volume or pod is None or not all(environment.get(name) for name in names):
        return  # no job's, or nobody says which pod or attempt: another one's sign must not pass for its own
    path = Path(volume) / f".safedist-{pod}"
    attempt = f"{environment[envvars.FLYTE_EXECUTION_ID]}-{environment[envvars.FLYTE_ATTEMPT]}"
    before = _read(path, attempt)
    if before is not None:
        logger.warning(str(before))
        termination.say(str(before))  # this one may be ended as well, without another word
    BEFORE.value = before
    _OWN.value = SignOfLife(path, Life(attempt, 0 if before is None else before.starts + 1, time.time()))


def end(code: int) -> None:
    """This process ends by itself, with an exit status."""
    sign = _OWN.take()
    if sign is not None:
        with suppress(TimeoutError):  # a file server that does not answer must not keep this process
            within(END_SECONDS, lambda: sign.end(code))


def pod_uid(root: Path = Path("/")) -> str | None:
    """Of the pod that this is; None where the kernel does not show one."""
    with suppress(OSError):
        found = _OF_POD.search((root / "proc/self/mountinfo").read_text(errors="replace"))
        return None if found is None else found[1]
    return None


def _read(path: Path, attempt: str) -> Life | None:
    try:
        life = Life.from_dict(json.loads(path.read_bytes()))
    except Exception:  # there is none, or it is damaged: mashumaro's errors have no class in common with json's
        return None
    return life if life.attempt == attempt else None
