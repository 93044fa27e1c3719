"""Where the record of a run goes: beside what the task makes, or, in a local run, in a directory of flytekit's."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ..compat import flytekit as flytekit_inside
from ..fs.atomic import atomic_write
from ..store.put_new import path_of

NAME = "Run"
"""What the page is called among a task's decks."""

DECK_SECONDS = 20.0
"""For one upload of the deck."""


def new_directory(*, is_local: bool) -> str:
    """The address of a new directory, for the files of one record."""
    from flytekit import FlyteContextManager

    access = FlyteContextManager.current_context().file_access
    return str(access.get_random_local_directory() if is_local else access.get_random_remote_directory())


def leave(address: str, data: bytes) -> None:
    """Leave a file. One try: what is tried for long is the verdict, not its picture.

    Raises:
        Exception: whatever the store's client raises.
    """
    from flytekit import FlyteContextManager

    access = FlyteContextManager.current_context().file_access
    access.get_filesystem_for_path(address).pipe_file(address, data)


class ConsoleDeck:
    """A task's deck, where Flyte's console looks for it: ``deck.html`` at the output prefix.

    flytekit uploads it there when the task ends, and at ``Deck.publish()`` before (flytekit#2779). Of a task with
    ``enable_deck=True`` the backend names that address to the console in every phase, whether anything is there or not
    (flyte#6053, since 1.15; flyteconsole#890 has a button to load it again). ``Deck.publish()`` itself would take all
    decks of the thread's context, try for as long as uploads of the verdict are tried, and could not be ended.

    Args:
        prefix: the attempt's output prefix.
        raw: the attempt's prefix for other data, by which flytekit knows the store.
    """

    def __init__(self, prefix: str, raw: str) -> None:
        self._address, self._raw = f"{prefix.rstrip('/')}/deck.html", raw
        self._cancel: Callable[[], object] = bool
        self._is_cancelled = False

    def put(self, decks: Mapping[str, str]) -> None:
        """Upload a page of these decks, their HTML by name. One try.

        Raises:
            CancelledError: :meth:`cancel` was called, also before.
            Exception: whatever the store's client raises.
        """
        from flytekit.utils.asyn import run_sync

        html, path = flytekit_inside.deck_page(decks).encode("utf-8", "backslashreplace"), path_of(self._address)
        self._go_on()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path, durable=False) as file:
                file.write(html)
            return
        with tempfile.TemporaryDirectory() as directory:
            draft = Path(directory) / "deck.html"
            draft.write_bytes(html)
            run_sync(self._put, str(draft), directory)

    async def _put(self, draft: str, sandbox: str) -> None:
        from flytekit.core.data_persistence import FileAccessProvider

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101
        self._cancel = partial(loop.call_soon_threadsafe, task.cancel)
        self._go_on()
        access = FileAccessProvider(sandbox, self._raw)  # flytekit's own: one try
        told = {"ContentType": "text/html", "content_type": "text/html"}  # as flytekit says it, to S3 and to GCS
        await asyncio.wait_for(access.async_put_data(draft, self._address, **told), DECK_SECONDS)

    def cancel(self) -> None:
        """End the upload that is under way in another thread, or about to begin."""
        self._is_cancelled = True
        self._cancel()

    def _go_on(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
