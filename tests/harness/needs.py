"""What some tests need of the machine: found, or said in one line of the summary; where it is required, a failure."""

from __future__ import annotations

import os
from collections import Counter
from typing import NoReturn

import pytest

_LEFT_OUT = "this machine cannot run it: "


def missing(what: str, *, bring: str, required: str = "SAFEDIST_CI") -> NoReturn:
    """Leave the calling test out; fail it where it must not be, as in CI.

    Args:
        what: is missing.
        bring: the command that brings it.
        required: a variable; set, it makes this a failure.
    """
    if os.environ.get(required, "0") not in ("", "0"):
        pytest.fail(f"required here ({required}), but {what}", pytrace=False)
    pytest.skip(f"{_LEFT_OUT}{what}. To run it: {bring}")


def root(to: str) -> None:
    """Leave the calling test out unless this is root, who alone can do what it does."""
    if os.geteuid() != 0:
        missing(f"only root can {to}", bring="sudo make test")


def left_out(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What was missing for the test, if it was left out; else nothing."""
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    return reason.partition(_LEFT_OUT)[2]


def in_one_line_each(reports: list[pytest.TestReport]) -> list[str]:
    """For the summary: everything that was missing, with the number of tests, and the command that brings it."""
    count = Counter(left_out(report) for report in reports)
    return [f"{number} tests left out: {what.replace(' it: ', ' them: ')}" for what, number in count.most_common()]
