"""The lint of words sees a word that pages and messages do not use, and only that."""

from __future__ import annotations

import pytest

from scripts import words


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("killed for want of memory", [(1, "for want of memory")]),
        ("fine\nWhat ranks import late", [(2, "What ranks import late")]),
        ("Thus we utilize it", [(1, "Thus"), (1, "utilize")]),
        ("we use it, simplified", []),
        ('"thus spoke"  # words: allow, a quotation', []),
    ],
)
def test_a_word_is_found_with_its_line(text: str, seen: list[tuple[int, str]]) -> None:
    assert [(number, word) for number, word, _ in words.found(text)] == seen
