"""An error of the platform's, as Flyte and the log are told."""

from __future__ import annotations

from flytekitplugins_safedist import lastwords
from flytekitplugins_safedist.flyte.error_document import SystemFailure, document


def test_what_would_move_a_terminals_cursor_is_spelled_out_wherever_the_error_is_read():
    said = "the store says:\n\tno \x1b[2J\r\x07, of caf\udce9"
    shown = "the store says:\n\tno \\x1b[2J\\x0d\\x07, of caf\\udce9"
    failure = SystemFailure("SYSTEM:\x1bStorage", said, 1)
    assert document(failure).error.message == shown
    assert document(failure).error.code == "SYSTEM:\\x1bStorage"
    lastwords.keep(said.replace("\n\t", " "))
    assert lastwords.take() == lastwords.FAILED + shown.replace("\n\t", " ")
