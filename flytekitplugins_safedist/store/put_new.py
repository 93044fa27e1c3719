"""Put a small object where none is: of two who would, the store lets one, and what is there stays whole.

S3 has ``If-None-Match: *`` for it, GCS ``ifGenerationMatch=0``; a file system has link(2). On one without hard links
the last of two that come at once stays; it is whole there, too.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from ..failures import names_of
from ..fs.atomic import aside, atomic_write, fsync_dir, link_new
from .errors import one_line

_IS_THERE = {"PreconditionFailed", "412", "ConditionNotMet"}
"""S3, GCS and Azure say 412. S3's 409, ConditionalRequestConflict, says that nothing was put because of another
request, and asks for another try (API reference, PutObject)."""

_NO_CONDITION = {"NotImplemented", "501"}
"""S3-like servers without conditional puts say so (501, or the header is an argument that they do not take)."""


class NoConditionError(Exception):
    """This object store has nothing that arbitrates; nothing was put."""


def put_new(filesystem: Any, address: str, data: bytes) -> bool:
    """Put an object, whole; False, and nothing is changed, where one is there already.

    One try. A try whose reply was lost may have put it: then the next one finds it there.

    Args:
        filesystem: of fsspec, for object stores; a path or ``file://`` does without.
        address: the object's.
        data: all of it.

    Raises:
        NoConditionError: see above.
        Exception: whatever else the store's client raises.
    """
    path = path_of(address)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = aside(path)
        try:
            with atomic_write(draft) as file:
                file.write(data)
            is_new = link_new(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        if is_new:
            fsync_dir(path.parent)
        return is_new
    condition = _condition(filesystem)
    try:
        filesystem.pipe_file(address, data, **condition)
    except FileExistsError:
        return False
    except Exception as error:
        said = names_of(error)
        if said & _IS_THERE:
            return False
        if said & _NO_CONDITION:
            raise NoConditionError(one_line(error)) from error
        raise
    return True


def path_of(address: str) -> Path | None:
    """Of an address that is on a file system of this machine; None for an object store's."""
    path = address.removeprefix("file://")
    return None if "://" in path else Path(path)


def _condition(filesystem: Any) -> dict[str, Any]:
    """The argument that means "where none is", as the client's method names it. One that names none may take it all the
    same, among further arguments, and put without it (s3fs 2024.9 and 2024.10)."""
    named = inspect.signature(filesystem.pipe_file).parameters
    for name, value in (("mode", "create"), ("overwrite", False)):  # fsspec's own word; adlfs's
        if name in named:
            return {name: value}
    raise NoConditionError("this version of its fsspec package has no conditional put")
