"""Text from outside (an exception, a rank's log, a file's name) as everything that it reaches can hold it.

What an exception of the user's says of itself is the user's code: it may fail, or never return.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TELL_SECONDS = 5.0
"""For an exception to turn itself into text."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
"""What would move a terminal's cursor, clear it or hide what is written."""

# Not from the middle of a word: the time it takes grows with a text's length, not with its square.
_ADDRESS = re.compile(
    r"(?<![\w+.-])([\w+.-]*://)(?:[^\s/?#'\"<>]*@)?([^\s?#'\"<>:]*(?:(?!::[\w+.-]+://):[^\s?#'\"<>:]*)*)([?#][^\s'\"<>)]*)?"
)
"""Scheme, host with path, query with fragment."""


def encodable(text: str) -> str:
    """``text`` as protobuf, files and terminals can hold it: lone surrogates (from names that are not UTF-8) and
    control characters are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").translate(_CONTROLS)


def ask(question: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """What the user's code answers, in a thread of its own; ``otherwise`` where it has not in :data:`TELL_SECONDS`."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no room for a thread
        return question()
    thread.join(TELL_SECONDS)
    return answers[0] if answers else otherwise()


def said(error: BaseException) -> str:
    """``str(error)``, or why there is none."""

    def text() -> str:
        try:
            return str(error)
        except BaseException as problem:  # whatever the user's class raises, and what that in turn cannot say
            told = " ".join("".join(traceback.format_exception_only(type(problem), problem)).split())
            return f"<no message: str() of it raised {told}>"

    return ask(text, lambda: f"<no message: str() of it did not return within {TELL_SECONDS:g} s>")


def named(error: BaseException) -> str:
    """What an error says, behind its type."""
    return f"{type(error).__name__}: {said(error)}"


def left_by(leaving: BaseException) -> str:
    """Of a ``sys.exit()`` in an ``except`` block, what had come there; "" of any other."""
    caught = leaving.__context__
    return "" if caught is None or isinstance(caught, SystemExit) else f", after {named(caught)}"


def cut(text: str, most: int) -> str:
    """A text of at most about so many characters: of a longer one its begin and its end."""
    return text if len(text) <= most else f"{text[: most // 2]}\n... [cut] ...\n{text[len(text) - most // 2 :]}"


def human(size: int) -> str:
    """Bytes for people: ``1.5 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def public(text: str) -> str:
    """``text`` for messages and logs: of the addresses in it, passwords before the host and signatures in a query are
    secrets."""
    return _ADDRESS.sub(lambda found: f"{found[1]}{found[2]}{'?...' if found[3] else ''}", text)


def how_far(done: int, size: int | None, seconds: float) -> str:
    """So many bytes of so many, where that is known, in some seconds; for people."""
    of = f" of {size / 1e6:.1f} MB ({100 * done // max(size, 1)}%)" if size is not None else " MB"
    return f"{done / 1e6:.1f}{of}, {done / 1e6 / max(seconds, 1e-6):.1f} MB/s, {seconds:.0f} s"
