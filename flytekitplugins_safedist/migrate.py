"""Where :mod:`flytekitplugins_safedist.tools.migrate` was in 0.1. The next minor version drops this name."""

import warnings

from .tools.migrate import Migration, migrate

__all__ = ["Migration", "migrate"]

warnings.warn(
    "flytekitplugins_safedist.migrate moved: import flytekitplugins_safedist.tools.migrate",
    DeprecationWarning,
    stacklevel=2,
)
