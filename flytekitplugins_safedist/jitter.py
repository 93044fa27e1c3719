"""Pauses that differ from process to process, and take nothing from the random numbers of the user's code."""

from __future__ import annotations

import random

# Not ``random`` itself: a rank that waited would then draw other numbers next than the ranks that did not. And from the
# kernel, so that processes forked from one another, as ranks are, share no state.
_RANDOM = random.SystemRandom()


def jittered(seconds: float, least: float, most: float) -> float:
    """``seconds``, times a factor between ``least`` and ``most``."""
    return seconds * _RANDOM.uniform(least, most)
