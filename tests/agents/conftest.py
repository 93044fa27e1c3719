"""What these tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.harness import ends
from tests.harness.procs import Ended


@pytest.fixture
def as_promised(request: pytest.FixtureRequest) -> Callable[[Ended], None]:
    """Asserts that an end is the one of docs/failures.md that the test is tagged with."""
    (tag,) = [mark.args for mark in request.node.iter_markers("end") if len(mark.args) > 1]
    row, code = tag
    return partial(ends.as_promised, row=row, code=code)
