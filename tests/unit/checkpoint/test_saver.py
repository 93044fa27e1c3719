"""The thread that writes saves."""

from __future__ import annotations

import contextvars

from flytekitplugins_safedist.checkpoint.saver import Saver

WAY = contextvars.ContextVar("way", default="none")


def test_the_thread_finds_what_its_caller_finds_by_context():
    """flytekit's current context is a context variable: without this, the store's credentials are not found."""
    seen = []
    WAY.set("the caller's")
    saver = Saver(asynchronous=True)
    saver.start("step 1", lambda: seen.append(WAY.get()))
    saver.wait()
    assert seen == ["the caller's"]
