"""Compiled code is each rank's own, in every round: what a round has compiled, the next one finds."""

from __future__ import annotations

import json


def test_a_restart_finds_what_each_rank_has_compiled_before(warm, tmp_path, ranks_gate):
    running = warm.start("job_compiled:compiles_twice", tmp_path / "job", environment=ranks_gate.environment)
    first = sorted(json.loads(line) for line in ranks_gate.heard(2))
    ranks_gate.let_go(1)
    second = sorted(json.loads(line) for line in ranks_gate.heard(2))
    ended = running.wait()
    assert (ended.code, ended.left) == (0, [])
    assert [each[:2] for each in (*first, *second)] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert all(kept == used for _, _, kept, used, _, _ in (*first, *second))
    assert first[0][2] != first[1][2], "each rank keeps its own"
    assert [each[2] for each in first] == [each[2] for each in second]
    (*_, built, found), (*_, built_again, found_again) = first[0], second[0]
    assert built == built_again > 0
    assert (found, found_again) == (0, 1)
