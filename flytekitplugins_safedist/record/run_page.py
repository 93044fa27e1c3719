"""Where the record of a run goes: beside what the task makes, or, in a local run, in a directory of flytekit's."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import cached_property
from pathlib import Path

from ..compat import flytekit as flytekit_inside
from ..fs.atomic import atomic_write
from ..store.put_new import path_of

NAME = "Run"
"""What the page is called among a task's decks."""

DECK_SECONDS = 20.0
"""For one upload of the deck."""

_CANCEL_SECONDS = 5.0


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

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """In a thread, from the first upload on: no job fails for want of one."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="safedist-deck", daemon=True).start()
        return loop

    def put(self, make: Callable[[], Mapping[str, str]]) -> Future[None]:
        """Upload a page of the decks that are made, their HTML by name, in a thread. One try, which may raise whatever
        the store's client raises."""
        loop = self._loop
        return asyncio.run_coroutine_threadsafe(self._put(make), loop)

    def cancel(self, upload: Future[None]) -> None:
        """End one that is under way, or about to begin: wait until it has ended, for some seconds."""
        if upload.cancel():
            wait([asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)], _CANCEL_SECONDS)

    async def _put(self, make: Callable[[], Mapping[str, str]]) -> None:
        from flytekit.core.data_persistence import FileAccessProvider

        html, path = flytekit_inside.deck_page(make()).encode("utf-8", "backslashreplace"), path_of(self._address)
        await asyncio.sleep(0)  # who has cancelled it meanwhile is heard
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path, durable=False) as file:
                file.write(html)
            return
        with tempfile.TemporaryDirectory() as sandbox:
            draft = Path(sandbox) / "deck.html"
            draft.write_bytes(html)
            access = FileAccessProvider(sandbox, self._raw)  # flytekit's own: one try
            told = {"ContentType": "text/html", "content_type": "text/html"}  # as flytekit says it, to S3 and to GCS
            await asyncio.wait_for(access.async_put_data(draft, self._address, **told), DECK_SECONDS)
