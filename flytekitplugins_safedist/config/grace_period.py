"""How long a pod may take to stop, from our own waits: what Kubernetes is asked for, and what a pod reckons with."""

from __future__ import annotations

import math

from .options import Timeouts

END_SECONDS = 10.0
"""From the ranks' end to this process's, after a signal: to leave the other nodes, and to remove scratch."""

UPLOAD_SECONDS = 25.0
"""For an upload that runs when the pod is told to stop, or begins then: outputs, or the one error."""


def needed(timeouts: Timeouts) -> int:
    """Whole seconds that a pod needs between SIGTERM and SIGKILL: ranks save their work and are ended, and what there
    is to upload is uploaded."""
    return math.ceil(timeouts.preemption + timeouts.stop + END_SECONDS + UPLOAD_SECONDS)
