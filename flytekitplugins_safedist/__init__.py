"""Safe distributed Horovod and PyTorch tasks for Flyte.

Importing this package imports neither torch nor horovod, and not even flytekit until a task config is asked for: the
file-system helpers and the ranks' own code use it too, and pay only for what they touch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import errors
from .lazy import names_of

if TYPE_CHECKING:
    from .config.options import Hangs as Hangs
    from .config.options import Logs as Logs
    from .config.options import Metrics as Metrics
    from .config.options import Preflight as Preflight
    from .config.options import Profile as Profile
    from .config.options import SafeHorovod as SafeHorovod
    from .config.options import SafeTorch as SafeTorch
    from .config.options import Scratch as Scratch
    from .config.options import Timeouts as Timeouts
    from .errors import *  # noqa: F403
    from .plugin.task import RecoverableRankFailedError as RecoverableRankFailedError
    from .rank.context import RankContext as RankContext
    from .rank.context import current_rank as current_rank
    from .record.writer import stage as stage

# Public name -> the module it lives in. A task config is useless to flytekit until its task type is registered, so
# the modules named here are those whose import also registers it.
_PUBLIC = {
    **dict.fromkeys(("Hangs", "Logs", "Metrics", "Preflight", "Profile", "Scratch", "Timeouts"), "config.options"),
    **dict.fromkeys(("RecoverableRankFailedError", "SafeHorovod", "SafeTorch"), "plugin.task"),
    **dict.fromkeys(("RankContext", "current_rank"), "rank.context"),
    **dict.fromkeys((*errors.PUBLIC, "Problem"), "errors"),
    "stage": "record.writer",
}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  (one table, not two)
__getattr__, __dir__ = names_of(__name__, _PUBLIC)
