"""Tasks whose ranks agree on something before any backend is initialised; ``$TEST_WORD`` says on what."""

from __future__ import annotations

import os

from flytekit import map_task, task, workflow

from flytekitplugins_safedist import SafeHorovod, SafeTorch
from flytekitplugins_safedist.fs import once_per_job
from tests.jobs.exchanging import exchange


def agree() -> list[str]:
    """What one of them made for all, and what each of them said."""
    word = os.environ["TEST_WORD"]
    made = once_per_job("vocabulary", lambda: word, timeout=120)
    return [made, *exchange("word", word)]


@task(task_config=SafeTorch(nproc_per_node=2))
def torch() -> list[str]:
    return agree()


@task(task_config=SafeHorovod(nproc_per_node=2))
def horovod() -> list[str]:
    return agree()


@task(task_config=SafeTorch(nproc_per_node=2))
def vocabulary(word: str) -> list[str]:
    """What both ranks of one task of a map task have, by one key in all of them."""
    return exchange("made", once_per_job("vocabulary", lambda: word, timeout=120))


@workflow
def vocabularies(words: list[str]) -> list[list[str]]:
    return map_task(vocabulary)(word=words)
