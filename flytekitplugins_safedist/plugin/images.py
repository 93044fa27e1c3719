"""Images that cannot hold ``safedist-execute``, the command of every pod."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..config.roles import Role

_DEFAULT = re.compile(r"(?:[^/]+/)?flyteorg/flytekit(?:[:@].*)?")
"""``DefaultImages`` of flytekit, whichever registry a platform mirrors it in."""


def warning_of_image(image: str | None, roles: Sequence[Role]) -> str | None:
    """Why the pods of a task cannot begin in their *image*, or None.

    Args:
        image: of the primary container.
        roles: of the job, which may each name an image of their own.
    """
    if roles and all(getattr(role.written, "image", None) for role in roles):
        return None
    if image and not _DEFAULT.fullmatch(image):
        return None
    what = f"the image {image} is flytekit's default one, which has" if image else "no image is named: flytekit's has"
    return (
        f"{what} no safedist-execute, the command of every pod: none would start. Build one with this package and the "
        "training's own, and name it with container_image= of @task, or --image: the README's "
        '"Install" shows an ImageSpec'
    )
