"""Where a job's leader has its sign: in the store, beside the outputs of the attempt; and whether these are there."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ..coordinator.books import NO_LEADER
from ..coordinator.sign import Sign, StoreLook
from ..fs.atomic import atomic_write
from ..rank.task_context import uploaded_to
from ..store.patience import within
from ..store.put_new import path_of

if TYPE_CHECKING:
    from flytekit.core.data_persistence import FileAccessProvider

logger = logging.getLogger(__name__)

NAME = ".safedist-leader.json"
"""Of the object; hidden, for it is nobody's output."""

RENEW_SECONDS = 60.0
"""Between two renewals; shorter where nodes are to notice each other's loss in a shorter time."""

ANSWER_SECONDS = 60.0
"""For each call: there are clients that wait for ever on a connection that has died (gcsfs 2026.10 sets no limit), and
file servers; and nothing is begun, ended or uploaded before the next look."""


class LeaderStore:
    """Of one attempt. Each call raises whatever the store's client raises, and TimeoutError where it says nothing.

    Args:
        prefix: of the attempt's outputs.
        access: the way to the store.
    """

    def __init__(self, prefix: str, access: FileAccessProvider) -> None:
        self.address = f"{prefix.rstrip('/')}/{NAME}"
        self._prefix, self._access = prefix, access
        self._told: bytes | None = None  # what was there in place of a sign

    def look(self) -> StoreLook:
        """What is there."""
        since = time.monotonic()
        return within(ANSWER_SECONDS, lambda: StoreLook(since, self._sign(), uploaded_to(self._prefix, self._access)))

    def is_decided(self) -> bool:
        """Whether the attempt's verdict is there."""
        return within(ANSWER_SECONDS, lambda: uploaded_to(self._prefix, self._access))

    def put(self, sign: Sign) -> None:
        """Replace what is there."""
        within(ANSWER_SECONDS, lambda: self._put(sign))

    def _put(self, sign: Sign) -> None:
        data, path = sign.dump(), path_of(self.address)
        if path is None:
            self._access.get_filesystem_for_path(self.address).pipe_file(self.address, data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=False) as file:
            file.write(data)

    def _sign(self) -> Sign | None:
        path = path_of(self.address)
        try:
            if path is None:
                data = self._access.get_filesystem_for_path(self.address).cat_file(self.address)
            else:
                data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return Sign.parse(data)
        except ValueError as error:  # the other nodes say who has led the job
            if data != self._told:
                logger.warning(f"{self.address} is {error}; the next leader puts its own there")
            self._told = data
            return Sign(NO_LEADER)


class NoStore:
    """In its place where there is none: whoever leads knows of nobody else."""

    def __init__(self) -> None:
        self._sign: Sign | None = None

    def look(self) -> StoreLook:
        """What was put here."""
        return StoreLook(time.monotonic(), self._sign, is_decided=False)

    def is_decided(self) -> bool:
        """Nobody has put any."""
        return False

    def put(self, sign: Sign) -> None:
        """Replace it."""
        self._sign = sign
