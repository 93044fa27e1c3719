"""What is measured of a run while it goes on: names, paces, and exporters that cannot begin."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from flytekitplugins_safedist import Metrics
from flytekitplugins_safedist.live import exporters
from flytekitplugins_safedist.live.instruments import TABLE
from flytekitplugins_safedist.live.pace import Pace

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_of_metrics_lists_all_of_them_under_both_names() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|", DOCS.read_text(), re.MULTILINE)
    assert rows == [(each.name, each.in_prometheus + "_total" * each.counts) for each in TABLE]


def test_names_follow_the_conventions_of_both() -> None:
    for each in TABLE:
        assert re.fullmatch(r"safedist(\.[a-z]+)+", each.name)
        assert re.fullmatch(r"s|By|1|\{[a-z]+\}", each.unit), "UCUM: base units, or what is counted, in braces"
        assert each.in_prometheus.endswith({"s": "_seconds", "By": "_bytes", "1": "_ratio"}.get(each.unit, ""))


def test_a_pace_is_of_the_last_minute_and_counts_over_rounds() -> None:
    pace = Pace()
    pace.see(0, 100.0)
    assert (pace.rate, pace.steps) == (0, 0)
    for second in range(200):
        pace.see(1 + second * (2 if second < 100 else 5), 101.0 + second)
    assert pace.rate == pytest.approx(5)
    assert pace.steps == 996
    pace.again()
    assert pace.rate == 0
    pace.see(4, 400.0)
    pace.see(5, 401.0)
    assert (pace.steps, pace.rate) == (1001, 1)


def test_a_step_that_takes_ten_times_as_long_as_the_others_is_a_stall_from_its_begin() -> None:
    pace = Pace()
    for second in range(11):
        pace.see(2 * second, float(second))
    for second in range(11, 15):
        pace.see(20, float(second))
    assert pace.stalled == 0, "no step of half a second has lasted for five"
    pace.see(20, 16.0)
    assert pace.stalled == 6
    pace.see(20, 25.0)
    assert pace.stalled == 15
    pace.see(22, 26.0)
    for second in range(27, 31):
        pace.see(22, float(second))
    assert pace.stalled == 15, "what was a stall does not count as usual"


def test_nothing_is_a_stall_that_is_short_or_the_first_step() -> None:
    pace = Pace()
    pace.see(0, 0.0)
    pace.see(0, 1000.0)
    pace.see(1, 1001.0)
    pace.see(1, 2000.0)
    assert pace.stalled == 0, "how long a step takes is not known yet"
    for tenth in range(1, 100):
        pace.see(1 + 10 * tenth, 2000.0 + tenth / 10)
    pace.see(991, 2010.5)
    assert pace.stalled == 0, "less than a second"


def test_what_is_off_begins_nothing_and_what_is_not_installed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    with ExitStack() as held:
        exporters.begin(Metrics(), dict, {}, held, warned.append)
        assert held.pop_all()._exit_callbacks == type(held._exit_callbacks)()  # type: ignore[attr-defined]
    assert warned == []
    for module in ("prometheus_client", "opentelemetry.sdk.metrics", "opentelemetry.sdk.metrics.export"):
        monkeypatch.setitem(sys.modules, module, None)
    with ExitStack() as held:
        exporters.begin(Metrics(prometheus=1, otlp=True), dict, {}, held, warned.append)
    assert [text.partition(":")[0] for text in warned] == ["no metrics for prometheus", "no metrics for otlp"]
    assert all(text.endswith("the image needs it (docs/metrics.md)") for text in warned)
