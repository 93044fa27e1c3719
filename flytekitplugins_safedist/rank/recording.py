"""The user's exception as a record. All that it says of itself is the user's code: it may fail, or never return."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path
from types import TracebackType

from .. import failures
from ..errors import HangError, SafedistError
from ..failures import ChainLink, Failure
from ..store.errors import failed_by_itself
from ..texts import ask, chain, said
from .outcome import Raised
from .users_code import imported

_CODE_CHARACTERS = 200


def record(error: BaseException, shown: str, *, world_size: int = 1) -> Raised:
    """An exception as text, with its traceback as it is to be ``shown``, of one of ``world_size`` ranks."""
    name = type(error).__qualname__
    module = type(error).__module__
    qualified = name if module in ("builtins", "__main__") else f"{module}.{name}"
    message = _message(error)
    by_class, echo = _by_class(error), error.echo if isinstance(error, SafedistError) else 0
    links = [
        ChainLink(type(each).__qualname__, message if each is error else said(each), depth, failures.in_setup(each))
        for each, depth in failures.linked(error)
    ]
    causes = [cause for cause in chain(error, implied=True) if isinstance(cause, OSError)]
    errnos = tuple(cause.errno for cause in causes if isinstance(cause.errno, int))
    failure = failures.of_exception(links, errnos, by_class=by_class, world_size=world_size, is_word_of_loss=echo == 2)
    return Raised(
        type=qualified[:_CODE_CHARACTERS],
        message=message,
        traceback=shown,
        failure=failure,
        repeats=(failure is Failure.OWN and _comes_again(error)) or failures.repeats(failure, links, errnos),
        errnos=errnos,
        of_another=echo == 1,
        code=ask(lambda: _own_code(error, by_class), str),
    )


def _comes_again(error: BaseException) -> bool:
    return error.repeats if isinstance(error, SafedistError) else isinstance(error, (ImportError, SyntaxError))


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        code = ask(lambda: repr(error.code), lambda: "...")
        return f"the task function called sys.exit({code}) instead of returning a value"
    return said(error)


def _own_code(error: BaseException, by_class: Failure) -> str:
    """An ``error_code`` that the user gave their exception: flytekit shows it (FlyteUserRuntimeException). Of the
    platform's that of our class, if it has one."""
    if by_class is Failure.STORAGE:
        return error.platforms if isinstance(error, SafedistError) else ""
    try:
        code = getattr(error, "error_code", None)
        return str(code)[:_CODE_CHARACTERS] if isinstance(code, (str, int)) else ""
    except Exception:  # a property of the user's; the error has a name all the same
        return ""


@functools.cache
def flytes_errors() -> tuple[type[Exception], type[Exception]]:
    """Found before the user's function runs, which may empty ``sys.modules``."""
    from flytekit.exceptions.base import FlyteRecoverableException
    from flytekit.exceptions.system import FlyteSystemException

    return FlyteSystemException, FlyteRecoverableException


def _by_class(error: BaseException) -> Failure:
    system, recoverable = flytes_errors()
    # Order matters: flytekit's system errors (upload, download) are recoverable by inheritance.
    if isinstance(error, system):
        return Failure.STORAGE
    if isinstance(error, (recoverable, HangError)):
        return Failure.RECOVERABLE
    # Ours say by their class whose doing they are, or by what they were raised from.
    is_platforms = isinstance(error, SafedistError) and (error.platforms or failed_by_itself(error))
    return Failure.STORAGE if is_platforms else Failure.OWN


def shown(error: BaseException) -> str:
    """What an interpreter prints of an exception that ends it: of a SystemExit the text that it was given alone."""
    if isinstance(error, SystemExit):
        return ask(lambda: f"{error.code}\n" if isinstance(error.code, str) else "", str)
    return own_frames_cut(error)


def own_frames_cut(error: BaseException) -> str:
    """The traceback as the user wrote it: without the frames above the user's code, this package's and those of
    :func:`..run.run_script`."""
    ours = (str(Path(__file__).parents[1]), "<frozen runpy>")

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
