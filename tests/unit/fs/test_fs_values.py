from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.errors import FsError
from flytekitplugins_safedist.fs.collective import again, plain

KEYS = st.text().filter(lambda key: key != "__safedist__")  # which is refused, as is said below
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([Path("/a"), Path("b/c")]),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@given(VALUES)
def test_small_values_come_back_as_they_were(value):
    assert again(plain(value)) == value


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}, lambda: 0, {"__safedist__": "path"}])
def test_what_cannot_be_written_down_is_refused_with_the_way_out(value):
    with pytest.raises(FsError, match="write it to a file and return the path"):
        plain(value)


def test_large_values_are_refused():
    with pytest.raises(FsError, match="too large"):
        plain("x" * (1 << 20))


def test_a_value_that_holds_itself_is_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(FsError):
        plain(value)
