"""The broken file system of the race tests breaks only what its rules say: its server's threads share its tables."""

from __future__ import annotations

from typing import Any

from tests.harness import fusefs_server


class _MeanwhileMade(str):
    """A path at which another thread of the server makes a file, the moment that it is looked at."""

    operations: Any

    def startswith(self, *args: Any) -> bool:
        self.operations.sight.made("/other")
        return str.startswith(self, *args)


def test_a_rename_is_answered_while_others_make_files(tmp_path):
    operations = fusefs_server._Operations(str(tmp_path), {})
    for name in ("old", "other"):
        (tmp_path / name).mkdir()
    inside = _MeanwhileMade("/old/inside")
    inside.operations = operations
    operations.sight.mine.update({inside, "/old/second"})

    operations("rename", "/old", "/new")

    assert operations.sight.mine == {"/new", "/new/inside", "/new/second", "/other"}
