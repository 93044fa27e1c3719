"""Images that cannot hold ``safedist-execute``, the command of every pod."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_DEFAULT = re.compile(r"(?:[^/]+/)?flyteorg/flytekit(?:[:@].*)?")
"""``DefaultImages`` of flytekit, whichever registry a platform mirrors it in."""


def warning_of_image(image: str | None, custom: Mapping[str, Any] | None) -> str | None:
    """Why the pods of a task cannot begin in their *image*, or None.

    Args:
        image: of the primary container.
        custom: the job's message, whose roles may each name an image of their own.
    """
    roles = [role for role in (custom or {}).values() if isinstance(role, Mapping) and role.get("replicas")]
    if roles and all(role.get("image") for role in roles):
        return None
    if image and not _DEFAULT.fullmatch(image):
        return None
    what = f"the image {image} is flytekit's default one, which has" if image else "no image is named: flytekit's has"
    return (
        f"{what} no safedist-execute, the command of every pod: none would start. Build one with this package and the "
        "training's own, and name it with container_image= of @task, or --image: the README's "
        '"Install" shows an ImageSpec'
    )
