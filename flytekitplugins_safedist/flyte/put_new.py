"""Put a small object where none is: of two who would, the store lets one, and what is there stays whole.

S3 has ``If-None-Match: *`` for it, GCS ``ifGenerationMatch=0``; a file system has link(2).
"""

from __future__ import annotations

import errno
import inspect
import os
from pathlib import Path
from typing import Any

from ..fs.atomic import aside, fsync_dir
from ..texts import chain
from .storage_errors import one_line

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What link(2) says where there are no hard links, or not enough of them."""


class NoConditionError(Exception):
    """This store has nothing that arbitrates; nothing was put."""


def put_new(filesystem: Any, address: str, data: bytes) -> bool:
    """Put an object; False, and nothing is changed, where one is there already.

    One try. A try whose reply was lost may have put it: then the next one finds it there.

    Args:
        filesystem: of fsspec, for object stores; a path or ``file://`` does without.
        address: the object's.
        data: all of it.

    Raises:
        NoConditionError: see above.
        Exception: whatever else the store's client raises.
    """
    if "://" not in address or address.startswith("file://"):
        return _link_new(Path(address.removeprefix("file://")), data)
    condition = _condition(filesystem)
    try:
        filesystem.pipe_file(address, data, **condition)
    except FileExistsError:
        return False
    except Exception as error:
        if _precondition_failed(error):
            return False
        if _not_implemented(error):
            raise NoConditionError(one_line(error)) from error
        raise
    return True


def _condition(filesystem: Any) -> dict[str, Any]:
    """The argument that means "where none is", as the client's method names it. One that names none may take it all the
    same, among further arguments, and put without it (s3fs 2024.9 and 2024.10)."""
    named = inspect.signature(filesystem.pipe_file).parameters
    for name, value in (("mode", "create"), ("overwrite", False)):  # fsspec's own word; adlfs's
        if name in named:
            return {name: value}
    raise NoConditionError("this version of its fsspec package has no conditional put")


def _link_new(path: Path, data: bytes) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = aside(path)
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise NoConditionError(one_line(error)) from error
            raise
    finally:
        draft.unlink(missing_ok=True)
    fsync_dir(path.parent)
    return True


def _code(error: BaseException) -> str:
    for cause in chain(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        status = getattr(cause, "status", getattr(cause, "code", None))
        if status is not None:
            return str(status)
    return ""


def _precondition_failed(error: BaseException) -> bool:
    """S3, GCS and Azure say 412; S3 says ConditionalRequestConflict (409) when two puts race: the other one wins."""
    return _code(error) in {"PreconditionFailed", "412", "ConditionalRequestConflict", "ConditionNotMet"}


def _not_implemented(error: BaseException) -> bool:
    """S3-like servers without conditional puts say so (501, or the header is an argument that they do not take)."""
    return _code(error) in {"NotImplemented", "501"}
