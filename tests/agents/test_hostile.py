"""What a user's code does to its own process, or starts and forgets, harms that rank at most, and is said."""

from __future__ import annotations

import gzip

import pytest

from tests.harness.procs import KILL, uploaded_error, uploaded_output


def test_children_that_end_the_function_too_are_not_the_rank(warm, tmp_path):
    ended = warm.run("job_hostile:forks", tmp_path / "job")
    assert ended.value == [0, 1, 3, 0], "the children's exit status, and outcomes that they left"
    assert ended.out.count("ValueError: in the child") == 1


def test_a_module_that_ends_its_process_at_import_is_a_verdict_with_its_cause(warm, tmp_path):
    options = {"kind": "execute", "environment": {"TEST_BROKEN": "KeyboardInterrupt"}}
    ended = warm.run("job_unloadable:alone", tmp_path / "job", **options)
    assert (ended.code, ended.uploaded) == (0, ["error.pb"])
    error = uploaded_error(ended)
    assert "importing the task's module would have ended this process by KeyboardInterrupt" in error.message
    assert error.kind == 0  # NON_RECOVERABLE: it would repeat
    assert "in broken" in error.message
    assert "if __name__ == '__main__'" in error.message


def test_ranks_that_clear_their_environment_are_ranks_all_the_same(warm, tmp_path):
    ended = warm.run("job_hostile:clears", tmp_path / "job")
    assert ended.value == [1, 2], "who works once for all, and the ranks of a save"


def test_what_a_rank_returns_counts_whatever_it_has_put_in_the_place_of_a_library(warm, tmp_path):
    """At its end it is looked whether ranks have met: nothing of that may cost the result."""
    ended = warm.run("job_hostile:stands_in", tmp_path / "job")
    assert ended.value == [1], ended.err


def test_a_child_that_is_forked_at_import_and_comes_back_from_it_is_nobody(warm, tmp_path):
    """Not a second rank."""
    options = {"kind": "execute", "environment": {"TEST_BROKEN": "in a child"}}
    ended = warm.run("job_unloadable:alone", tmp_path / "job", **options)
    assert uploaded_output(ended) == "ran"
    assert "preload" in ended.err


def test_files_that_a_rank_leaves_open_have_all_that_was_written_to_them(warm, tmp_path):
    ended = warm.run("job_hostile:leaves_open", tmp_path / "job", environment={"TEST_AT": str(tmp_path)})
    assert ended.code == 0, ended.err
    text, zipped, raw = ((tmp_path / name).read_bytes() for name in ("text", "zipped", "bytes"))
    assert [text, gzip.decompress(zipped), raw] == [b"text", b"zipped", b"bytes"]


def test_an_exception_that_never_says_what_it_is_has_a_deadline(warm, tmp_path):
    ended = warm.run("job_hostile:fails", tmp_path / "job", environment={"TEST_HOW": "endless str"})
    assert "raised job_hostile.Endless: <no message: str() of it did not return within 5 s>" in str(ended.error)
    assert "raise Endless" in str(ended.error)


@pytest.mark.parametrize(
    ("how", "said", "code"),
    [
        ("frozen", "raised job_hostile.Frozen: the reason", "USER:Frozen"),
        ("frozen in a block", "raised job_hostile.Frozen: the reason", "USER:Frozen"),
        ("error_code raises", "WithoutCode: the reason", "USER:WithoutCode"),
        ("error_code of 1 MB", "LongCode: the reason", "X" * 200),
        ("no descriptors", "OSError: [Errno 24] Too many open files", "USER:OSError"),
        ("no modules", "ValueError: the reason", "USER:ValueError"),
    ],
)
def test_the_root_cause_is_told_whatever_the_function_has_done_to_its_process(warm, tmp_path, how, said, code):
    options = {"kind": "execute", "environment": {"TEST_HOW": how}}
    ended = warm.run("job_hostile:fails", tmp_path / "job", **options)
    assert ended.uploaded == ["error.pb"]
    error = uploaded_error(ended)
    assert said in error.message.splitlines()[0]
    assert "rank 1" in error.message.splitlines()[0]
    assert "contextlib" not in error.message
    assert error.code == code


@pytest.mark.parametrize("kill", [False, True], ids=["ends", "is killed"])
def test_a_child_that_is_forked_at_import_does_not_outlive_its_agent(warm, tmp_path, ranks_gate, kill):
    environment = {**ranks_gate.environment, "TEST_BROKEN": "leaves a child"}
    running = warm.start("job_unloadable:alone", tmp_path / "job", kind="execute", environment=environment)
    ranks_gate.heard(1)
    if kill:
        running.signal(KILL)
    else:
        ranks_gate.let_go(1)
    ended = running.wait()
    assert (ended.left, ended.scratch) == ([], [])
