"""Where ranks of torch meet: rank 0 listens before anybody looks for it, and no longer than the group that is there."""

from __future__ import annotations

import os


def test_rank_0_listens_before_it_has_a_group_and_not_between_two(warm, tmp_path):
    for name in ("here", "heard", "destroyed", "looked"):
        os.mkfifo(tmp_path / name)
    ended = warm.run("job_groups_meet:looks", tmp_path / "job", inputs={"fifos": str(tmp_path)})
    assert (ended.code, ended.value) == (0, [2.0, 2.0])
