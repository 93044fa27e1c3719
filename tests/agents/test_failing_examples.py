"""The examples that fail on purpose say what their own texts promise, and so does the record of each run."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from tests.harness.procs import Ended


def left(ended: Ended) -> tuple[str, dict[tuple[int, int], list[str]]]:
    """Of the page of a local run: its text, and what its table says of the end of each rank, by round and rank."""
    [address] = re.findall(r"the record of this run: (\S+/run\.html)", ended.err)
    html = Path(address).read_text().partition("</style>")[2]
    table = html.partition("Ranks, of the latest rounds")[2].partition("</table>")[0]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr><td>.*?</tr>", table)]
    return unescape(re.sub(r"<[^>]*>", "\n", html)), {(int(row[0]), int(row[1])): row[2:] for row in rows}


def test_a_sample_that_cannot_be_read_is_the_error_with_its_rank(warm, tmp_path):
    ended = warm.run("job_failing_examples:bad_data", tmp_path / "job")
    assert "rank 1 (local_rank 1) on node 0" in str(ended.error)
    assert "raised ValueError: sample 13 is cut short" in str(ended.error)
    page, ranks = left(ended)
    assert "failed: USER:ValueError" in page
    assert "in read" in page, "the traceback"
    assert ranks[0, 1][0] == "raised ValueError"


def test_a_rank_that_leaves_the_loop_is_named_and_its_stall_is_shown(warm, tmp_path):
    ended = warm.run("job_failing_examples:hang", tmp_path / "job")
    assert "rank 1 is at hang.py" in str(ended.error)
    page, ranks = left(ended)
    assert "failed: USER:HangError" in page
    assert [stalls for *_, stalls, _ in ranks.values()] == ["1", "1"], "both stand still: one waits for the other"


def test_a_rank_that_is_killed_once_costs_a_round_and_the_saves_are_shown(warm, tmp_path):
    ended = warm.run("job_failing_examples:lost_rank", tmp_path / "job", inputs={"where": str(tmp_path / "saves")})
    assert ended.value in (6, 8), "after a save: the one of step 7 may have been committed"
    page, ranks = left(ended)
    assert "succeeded" in page
    assert "2 round(s)" in page
    assert "restart: rank 1 failed" in page
    assert ranks[0, 1][0] == "SIGKILL"
    how, step, *_, saves = ranks[1, 0]
    assert (how, step) == ("returned", "11")
    assert int(saves) >= 2
