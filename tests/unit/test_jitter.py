"""Pauses are jittered, and none of that is taken from the random numbers of the user's code."""

from __future__ import annotations

import errno
import random
import re
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins_safedist.fs import download_once, wait_for
from flytekitplugins_safedist.fs.oserrors import retry_os_call
from flytekitplugins_safedist.jitter import jittered
from flytekitplugins_safedist.store.patience import Retry

SOURCE = Path(__file__).parents[2] / "flytekitplugins_safedist"


class FailsFirst:
    """A call whose first tries fail."""

    def __init__(self, error: Exception | None = None, times: int = 1) -> None:
        self._error, self._left = error, times

    def __call__(self, *_: object) -> bool:
        self._left -= 1
        if self._left >= 0 and self._error is not None:
            raise self._error
        return self._left < 0


class Unsteady(LocalFileSystem):
    """A store that fails once."""

    protocol = "unsteady"
    fails: FailsFirst

    def get_file(self, path: str, target: str, **options: object) -> None:
        self.fails()
        super().get_file(path, target, **options)


def waits(place: Path) -> None:
    place.touch()
    wait_for(place, content=FailsFirst(times=3), timeout=60)


def downloads(place: Path) -> None:
    Unsteady.fails = FailsFirst(ConnectionError("reset by peer"))
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    place.write_text("data")
    assert download_once(f"unsteady://{place}", place.with_name("copy")).read_text() == "data"


def asks_a_file_system_again(place: Path) -> None:
    assert retry_os_call(FailsFirst(OSError(errno.EIO, "I/O error")), place, "look")


def asks_a_store_again(place: Path) -> None:
    assert Retry(60).pause(ConnectionError("reset by peer"))


@pytest.mark.parametrize("does", [waits, downloads, asks_a_file_system_again, asks_a_store_again])
def test_a_rank_that_waits_or_tries_again_draws_the_same_number_next_as_the_others(tmp_path, does):
    random.seed(7)
    does(tmp_path / "file")
    assert random.random() == random.Random(7).random()


def test_no_other_module_draws_random_numbers():
    having = {
        path.name for path in SOURCE.rglob("*.py") if re.search(r"^(import|from) random\b", path.read_text(), re.M)
    }
    # The sampler keeps where the user's are, a fork seeds those of libraries anew; neither draws.
    assert having == {"jitter.py", "sampler.py", "fork.py"}


def test_what_is_jittered_differs_and_stays_within_its_bounds():
    drawn = {jittered(10.0, 0.5, 1.5) for _ in range(100)}
    assert len(drawn) > 90
    assert all(5.0 <= seconds <= 15.0 for seconds in drawn)
