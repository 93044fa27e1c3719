"""How an MPIJob ends whose launcher is told to stop, or cannot go on: with the platform's verdict, and exit 0.

The launcher is the one pod of ours that is not replaced: since Kubernetes 1.27 a deleted pod is first Failed or
Succeeded, as its containers' exit codes say, and then the job is what its launcher is (training-operator v1.9.0,
``mpijob_controller.go``, updateMPIJobStatus). Failed, it would spend one of the task's ``retries``, with no cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import lastwords, stopping, termination
from ...errors import SafedistError
from ...flyte import error_document
from ...job import verdict
from .. import early


def settle(error: SafedistError, agent: Sequence[str]) -> int:
    """The launcher's exit status: 0 where the verdict is in the store.

    Args:
        error: why the launcher ends.
        agent: the agents' command, which says where verdicts go.
    """
    prefix, ended = early.output_prefix(agent), verdict.of_error(error)
    if prefix is not None and ended is not None:
        failure = error_document.SystemFailure(ended.code, str(error), ended.time_ns)
        is_uploaded = early.upload(failure, prefix)
        if is_uploaded:
            return 0
    termination.say(lastwords.text_of(error))
    return stopping.EXIT_UNDECIDED
