"""The user's exception as a record. All that it says of itself is the user's code: it may fail, or never return."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .. import failures
from ..errors import SafedistError
from ..hangs.stacks import raised_at
from ..texts import ask, left_by, said
from .outcome import Raised
from .users_code import imported

_CODE_CHARACTERS = 200

_MOST_MEMBERS, _MEMBER_CHARACTERS = 3, 200
"""Of a group's that stand in its first line; and letters of each."""


def record(error: BaseException, shown: str, *, rank: int = 0, world_size: int = 1) -> Raised:
    """An exception as text, with its traceback as it is to be ``shown``, of a rank of ``world_size``."""
    name = type(error).__qualname__
    module = type(error).__module__
    qualified = name if module in ("builtins", "__main__") else f"{module}.{name}"
    message = _message(error)
    pairs = failures.evidence(error, lambda each: message if each is error else said(each))
    links = [link for _, link in pairs]
    failure = failures.of_exception(links, world_size=world_size)
    is_platforms = failure.row.payer is failures.Payer.FLYTE
    of_another = any(isinstance(each, SafedistError) and each.of_another for each, _ in pairs)
    of_another = of_another or any(
        rank not in found for each, _ in pairs if (found := failures.failures_of_ranks(each))
    )
    return Raised(
        type=qualified[:_CODE_CHARACTERS],
        message=_with_members(message, pairs),
        traceback=shown,
        failure=failure,
        repeats=not of_another and failures.repeats(failure, links),
        errnos=failures.errnos(links),
        of_another=of_another,
        code="" if is_platforms else ask(lambda: _own_code(error), str),
    )


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        if isinstance(words := vars(error).get("words"), str):  # of a script (:mod:`..run`)
            return words
        code = ask(lambda: repr(error.code), lambda: "...")
        at = raised_at(error)
        place = at and f", at {at}"
        return f"the task function called sys.exit({code}) instead of returning a value{place}{left_by(error)}"
    return said(error)


def _with_members(message: str, pairs: Sequence[tuple[BaseException, failures.ChainLink]]) -> str:
    """What a group says, with what those in it say, a few of them: of one that is a group again, those in that."""
    said = {id(each): f"{link.type}: {link.message}".partition("\n")[0] for each, link in pairs[1:]}
    todo, lines = failures.members(pairs[0][0]), dict[str, None]()
    while todo:
        each = todo.pop(0)
        line, inside = said.pop(id(each), None), failures.members(each)
        if line is not None and inside:
            todo[:0] = inside
        elif line is not None and line not in message:
            lines[line[:_MEMBER_CHARACTERS]] = None
    if not lines:
        return message
    first, newline, rest = message.partition("\n")
    more = [f"and {len(lines) - _MOST_MEMBERS} more"] if len(lines) > _MOST_MEMBERS else []
    return f"{first}: {'; '.join([*[*lines][:_MOST_MEMBERS], *more])}{newline}{rest}"


def _own_code(error: BaseException) -> str:
    """An ``error_code`` that the user gave their exception: flytekit shows it (FlyteUserRuntimeException)."""
    try:
        code = getattr(error, "error_code", None)
        return str(code)[:_CODE_CHARACTERS] if isinstance(code, (str, int)) else ""
    except Exception:  # a property of the user's; the error has a name all the same
        return ""


def shown(error: BaseException) -> str:
    """What an interpreter prints of an exception that ends it: of a SystemExit the text that it was given alone."""
    if isinstance(error, SystemExit):
        return ask(lambda: f"{error.code}\n" if isinstance(error.code, str) else "", str)
    return own_frames_cut(error)


def told_to_hook(error: BaseException) -> str:
    """Have what the user or a library has set for an exception that ends an interpreter know of it: a tracker tells its
    run so. What it has printed of it, unless that is the traceback again."""
    # Python's own, and the one that flytekit sets.
    only_prints = getattr(sys.excepthook, "__module__", "") in ("sys", "rich.traceback")
    if only_prints or isinstance(error, (SystemExit, KeyboardInterrupt)):
        return ""
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
        said = sys.stderr.getvalue()
    except BaseException:  # whatever it raises, or wants: the rank ends by its own error
        said = ""
    finally:
        sys.stderr = stderr
    return (
        "" if type(error).__name__ in "".join(said.split()) else said
    )  # whose lines may be no longer than a terminal's


def own_frames_cut(error: BaseException) -> str:
    """The traceback as the user wrote it: without the frames above the user's code, this package's, those of
    :func:`..run.run_script`, and of blocks that an exception came through."""
    ours = (str(Path(__file__).parents[1]) + os.sep, "<frozen runpy>", contextlib.__file__)

    def first_foreign(trace: TracebackType | None) -> TracebackType | None:
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
            # A module that is not there has no frame; any other error of ours alone shows where it is.
            if trace.tb_next is None and trace.tb_frame.f_code is not imported.__code__:
                break
            trace = trace.tb_next
        return trace

    trace = first_foreign(error.__traceback__)

    def without_text() -> str:
        frames = "".join(traceback.format_tb(trace))
        return f"Traceback (most recent call last):\n{frames}{type(error).__name__}\n"

    return ask(lambda: "".join(traceback.format_exception(type(error), error, trace)), without_text)
