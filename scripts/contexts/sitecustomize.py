"""Tell coverage.py for which test a line was run, in agents, rank servers and ranks as well.

On the module path of a run of `make coverage`: Python imports it in every process as it starts, pytest as a plugin. A
process belongs to the test that pytest names in its environment; so does one that is forked, which may be another's.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

_SECONDS: dict[str, float] = defaultdict(float)


def belong(test: str | None = None) -> None:
    """Let what this process runs from now on be run for a test: by default for the one that its environment names."""
    if (coverage := sys.modules.get("coverage")) and (current := coverage.Coverage.current()):
        current.switch_context(test or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])


def _forked() -> None:
    belong()
    os.register_at_fork(after_in_child=_forked)  # behind coverage's own, of which each fork has one more


def pytest_runtest_logstart(nodeid: str) -> None:
    belong(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    _SECONDS[report.nodeid] += math.inf if report.failed else report.duration


def pytest_sessionfinish(session: Any) -> None:
    """How long each test took that passes; each worker's reports come to the first process, too."""
    if not hasattr(session.config, "workerinput"):
        passed = {test: seconds for test, seconds in _SECONDS.items() if seconds < math.inf}
        Path("build", "coverage", "seconds.json").write_text(json.dumps(passed))


os.register_at_fork(after_in_child=_forked)
belong()
