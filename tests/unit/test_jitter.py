"""Pauses are jittered, and none of that is taken from the random numbers of the user's code."""

from __future__ import annotations

import random
import re

from flytekitplugins_safedist.jitter import jittered
from tests.unit.test_house import MODULES


def test_a_rank_that_pauses_draws_the_same_number_next_as_the_others():
    random.seed(7)
    jittered(10.0, 0.5, 1.5)
    assert random.random() == random.Random(7).random()


def test_no_other_module_draws_random_numbers():
    having = {path.name for path in MODULES if re.search(r"^\s*(import|from) random\b", path.read_text(), re.M)}
    # The sampler keeps where the user's are, a fork seeds those of libraries anew; neither draws.
    assert having == {"jitter.py", "sampler.py", "fork.py"}


def test_what_is_jittered_differs_and_stays_within_its_bounds():
    drawn = {jittered(10.0, 0.5, 1.5) for _ in range(100)}
    assert len(drawn) > 90
    assert all(5.0 <= seconds <= 15.0 for seconds in drawn)
