"""The loop of a node's agent: what it hears goes to the policy, and what that decides is carried out."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .. import stopping
from ..coordinator.messages import Want
from ..coordinator.sign import StoreLook
from ..errors import SafedistError
from . import ending
from .actions import Action, DropLink, Exit, LookAtStore, Say, Upload
from .link import LinkLost
from .membership import Membership
from .policy import NodePolicy

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""Between two looks at the ranks, where the inbox brings nothing."""

_BUG = "report this as a bug of safedist, with the log"

Finish = Upload | Exit
"""How a node's part in a job ends: it uploads the verdict, or ends its process."""


class Loop:
    """That of a node without ranks, which has only to say why.

    Args:
        job: this process in its job.
    """

    def __init__(self, job: Membership) -> None:
        self._job = job
        replaced = not job.place.alone
        self.policy = NodePolicy(job.rules, job.first, time.monotonic(), leads=job.leads, is_replaced=replaced)
        self._queue: deque[Action] = deque()
        self._finish: Finish | None = None
        self._takes: dict[type, Callable[[Any], object]] = {
            Want: lambda want: self._act(self.policy.on_want(want, time.monotonic())),
            LinkLost: self._lose_link,
            StoreLook: lambda look: self._act(self.policy.on_look(look, time.monotonic())),
        }
        self._does: dict[type, Callable[[Any], object]] = {
            LookAtStore: lambda _: job.look(),
            DropLink: lambda _: job.link.drop(),
            Say: lambda action: logger.info(action.text),
            Upload: self._end,
            Exit: self._end,
        }

    def drive(self) -> Finish:
        """Run until this node has no further part in the job.

        Raises:
            RendezvousError: nodes of other images are in this job.
        """
        self._job.link.begin(self.policy.status)
        while self._finish is None:
            self._hear(LOOK_SECONDS)
            self._carry_out()
            self._watch()
            self._act(self.policy.on_tick(time.monotonic()))
            self._carry_out()
        return self._finish

    def to_the_end(self) -> bool:
        """Drive until the job has ended, and leave in order.

        Returns:
            Whether this node is the one to upload the end; if not, the upload is done.

        Raises:
            SafedistError: nothing is uploaded, or nobody here knows.
        """
        finish, job = self.drive(), self._job
        if isinstance(finish, Exit):
            if finish.code != 0:
                raise ending.undecided(finish, job)
            logger.info(finish.why)
            job.close(decided=True)
            return False
        stopping.finish()
        if job.rules.is_alone:
            job.close(decided=False)  # nobody else is to hear of it
        else:
            ending.stay(job)
        return True

    # --- inside -------------------------------------------------------------------------------------------------------
    def _hear(self, seconds: float) -> None:
        """Take in what has come, or comes within some seconds; nothing is carried out.

        Raises:
            Exception: the coordinator in this process has failed, or the link.
        """
        try:
            item = self._job.inbox.get(timeout=seconds)
            while True:
                if isinstance(item, BaseException):
                    raise item
                take = self._takes.get(type(item))
                if take is None:
                    raise SafedistError("something comes that this agent does not know", seen=item, hint=_BUG)
                take(item)
                item = self._job.inbox.get_nowait()
        except queue.Empty:
            return

    def _watch(self) -> None:
        """Look at what runs here."""

    def _act(self, actions: Sequence[Action]) -> None:
        """Say at once how this node is now; what it is to do comes after that."""
        self._job.link.tell(self.policy.status)
        self._queue.extend(actions)

    def _carry_out(self) -> None:
        while self._queue:
            action = self._queue.popleft()
            do = self._does.get(type(action))
            if do is not None:
                do(action)

    def _lose_link(self, lost: LinkLost) -> None:
        self._queue.extend(self.policy.on_disconnect(lost.why, time.monotonic()))
        self._job.link.begin(self.policy.status)

    def _end(self, finish: Finish) -> None:
        self._finish = self._finish or finish
