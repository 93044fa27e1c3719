"""Quantities: one grammar for every size that a user may write, and it is Kubernetes' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flytekitplugins_safedist import SafeTorch, Scratch
from flytekitplugins_safedist.config.quantities import size_in_bytes
from flytekitplugins_safedist.errors import ConfigError
from flytekitplugins_safedist.plugin.task import SafeTask

SIZES: dict[str | int, int] = {
    **{"1": 1, "1k": 1000, "1Ki": 1024, "1M": 10**6, "1.5Mi": 3 * 2**19, "20Gi": 20 * 2**30},
    **{"2T": 2 * 10**12, "1Ti": 2**40, "1P": 10**15, "1Pi": 2**50, "0.5Gi": 2**29, "0": 0, "0.1": 0, 7: 7},
    **{"1e9": 10**9, "2E3": 2000, "2Ei": 2**61, "1E": 10**18, "1500m": 1, "1500000u": 1, "2500000000n": 2},
    **{"500m": 0, ".5Gi": 2**29, "1.": 1, "+1": 1},
}


def test_a_quantity_is_read_as_kubernetes_reads_it() -> None:
    assert {text: size_in_bytes(text) for text in SIZES} == SIZES


@given(st.integers(min_value=0, max_value=2**63 - 1))
@example(2**53 + 1)
def test_a_number_of_bytes_is_itself_however_large(size: int) -> None:
    assert size_in_bytes(size) == size_in_bytes(str(size)) == size


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans(), st.lists(st.integers())))
@example("9" * 400)
@example("1." + "9" * 400)
@example("1\n")
@example("1e" + "9" * 20)
def test_anything_is_either_a_size_or_not_and_never_a_crash(value: object) -> None:
    size = size_in_bytes(value)
    assert size is None or size >= 0


def test_what_kubernetes_does_not_take_for_a_size_is_none() -> None:
    texts = ("-1", "-1Gi", "1K", "1KiB", "1 Gi", "Gi", "", "1e1000", "1e400", "8Ei", "\u0661")
    assert [value for value in (*texts, True, 1.5, None) if size_in_bytes(value) is not None] == []


def task(shared_memory: str | None = None, **config: Any) -> SafeTask:
    def train() -> None:
        """Never runs."""

    return SafeTask(SafeTorch(**config), train, shared_memory=shared_memory)


TAKEN: dict[str, Callable[[str], Any]] = {
    "scratch.size_limit": lambda size: task(scratch=Scratch(size_limit=size)),
    "shared_memory": task,
}


def said_of(field: str, size: str) -> str:
    """Why it is refused; "" where it is taken."""
    try:
        TAKEN[field](size)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("field", TAKEN)
def test_every_size_of_a_task_is_read_by_the_same_grammar_and_is_a_byte_or_more(field: str) -> None:
    refused = {"500m", "0", "-1Gi", "1K", "big"}
    found = {size: said_of(field, size) for size in ("1e9", "2Ei", ".5Gi", "1k", "64Gi", *refused)}
    assert {size for size, said in found.items() if said} == refused
    assert {size: said for size, said in found.items() if said and f"{field}={size!r} is" not in said} == {}
