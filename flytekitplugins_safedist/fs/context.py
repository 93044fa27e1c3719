"""The calling process as the helpers see it: its rank and the job's settings.

Of ``fs``, only this module and ``group`` read ``os.environ``: under torchrun, horovodrun or in a single process nobody
else is there to hand the values in. A safedist task's ranks have torchrun's variables, too (``backends``).
"""

from __future__ import annotations

import math
import os
import threading

from .. import envvars
from ..errors import FsError
from ..handoff import HERE
from .identity import Identity, identity_from_env

DEFAULT_TIMEOUT_S = 300.0
"""Parallel file systems have been seen to take 60 s to show a directory; a rank that starts late takes minutes."""

_lock = threading.Lock()


def use_identity(identity: Identity | None) -> None:
    """Say which rank this process is, instead of leaving it to the environment; None takes it back."""
    with _lock:
        HERE.identity = identity


def current_identity() -> Identity:
    """This process's rank: as given to ``use_identity``, else from the environment.

    Raises:
        FsIdentityError: the environment names it only in part, or contradicts itself.
    """
    with _lock:
        given: Identity | None = HERE.identity
    return given if given is not None else identity_from_env(os.environ)


def says_timeout(given: float | None) -> bool:
    """Whether somebody, the call or the job's environment, has set how long to wait."""
    return given is not None or bool(os.environ.get(envvars.FS_TIMEOUT))


def timeout_s(given: float | None) -> float:
    """Seconds to wait: the call's own word, else SAFEDIST_FS_TIMEOUT for the whole job, else five minutes.

    Raises:
        FsError: it is not a positive number.
    """
    source, value = "timeout", given
    if value is None:
        text = os.environ.get(envvars.FS_TIMEOUT)
        if not text:
            return DEFAULT_TIMEOUT_S
        source = envvars.FS_TIMEOUT
        try:
            value = float(text)
        except ValueError:
            value = math.nan
    if not value > 0:
        seen = os.environ.get(envvars.FS_TIMEOUT) if given is None else given
        raise FsError(f"{source} is not a usable time", seen=repr(seen), expected="seconds, more than 0")
    return value


def who() -> str:
    """This process in a message: its rank, or why that is not known."""
    try:
        return str(current_identity())
    except FsError as error:
        return f"unknown ({error.what})"
