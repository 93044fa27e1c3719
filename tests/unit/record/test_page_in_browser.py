"""The page as a browser shows it, narrow and wide, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.record import page
from flytekitplugins_safedist.record.findings import Findings
from flytekitplugins_safedist.record.summary import NodeSummary, RankSummary, RoundSummary, StageTimes
from tests.harness import needs

pytestmark = pytest.mark.processes

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SCHEMES = {"dark": 0, "light": 1}
"""As Blink numbers them."""
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(23, 24, 28)"
LOOK = """<script>
const seen = [...document.querySelectorAll(".sd, .sd td.bar, .sd svg")].map(each => each.getBoundingClientRect());
document.title = JSON.stringify({
  over: document.documentElement.scrollWidth - innerWidth, flat: seen.filter(each => each.height < 5).length,
  count: seen.length, back: getComputedStyle(document.querySelector(".sd")).backgroundColor});
</script>"""


def fragment() -> str:
    """Of two nodes with four ranks, which fail in the end."""
    stages = {"load": StageTimes(100, 10.0, 40.0), "a stage with a long name": StageTimes(100, 20, 40.5)}
    shown = {"phases": [("function", 0.0, 87.0)], "stages": stages, "durations": {-10: 50, -5: 50}, "peak": 1 << 30}
    nodes = []
    for node in range(2):
        ranks = [
            RankSummary(2 * node + at, 3.0, 90.0, "raised ValueError", pace="123456789" * 9, rate=1.0, **shown)
            for at in range(2)
        ]
        rounds = [RoundSummary(0, 3.0, 90.0, 4, ranks=ranks)]
        nodes.append(NodeSummary(node, f"train-worker-{node}", [("prepare", 0.0, 3.0)], rounds))
    end = page.JobEnd("train", "USER:ValueError", "rank 3 raised ValueError: " + "x" * 300, ["restart: " + "y" * 300])
    return page.fragment(Findings(nodes), end)


def opened(html: str, file: Path, *, width: int, scheme: str) -> dict[str, Any]:
    """What a page measures."""
    if BROWSER is None:
        needs.missing("there is no Chromium on PATH", bring="apt-get install chromium && make test")
    file.write_text(f'<meta charset="utf-8">{html}{LOOK}')
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--enable-logging=stderr", "--dump-dom", f"--user-data-dir={file.parent / 'profile'}"]
    command += [f"--window-size={width},1000"]
    command += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    [title] = re.findall(r"<title>(\{.*?\})</title>", done.stdout)
    measured: dict[str, Any] = json.loads(unescape(title))
    return measured


def test_a_page_fits_its_window_and_is_dark_only_where_nobody_frames_it(tmp_path):
    pages = [
        (page.whole(fragment(), "train"), 500, "dark", DARK),
        (page.whole(fragment(), "train"), 1100, "light", LIGHT),
        (fragment(), 500, "dark", LIGHT),
    ]
    for html, width, scheme, back in pages:
        found = opened(html, tmp_path / "page.html", width=width, scheme=scheme)
        assert found["over"] <= 0, "nothing is wider than the window"
        assert found["count"] > 10
        assert (found["flat"], found["back"]) == (0, back)
