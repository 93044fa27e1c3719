"""Which node of how many is this, and who says so: from the environment, without touching it.

:func:`from_env` is pure: a mapping goes in, a :class:`Topology` comes out. Each operator that can start a pod of ours
has one adapter in :mod:`.adapters`; at most one of them may recognise the environment, and what it reads is checked
against what was decided at registration.
"""

from __future__ import annotations

from .adapters import ADAPTERS, Adapter, from_env, is_alone
from .model import Endpoint, Topology

__all__ = ["ADAPTERS", "Adapter", "Endpoint", "Topology", "from_env", "is_alone"]
