"""Where the record of a run goes: beside what the task makes, or, in a local run, in a directory of flytekit's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flytekit.core.data_persistence import FileAccessProvider


@dataclass(frozen=True)
class Kept:
    """One place for the files of a record.

    Attributes:
        address: of the directory.
        access: flytekit's way to it.
        is_local: whether it is one of this machine.
    """

    address: str
    access: FileAccessProvider
    is_local: bool

    @classmethod
    def of(cls, *, is_local: bool) -> Kept:
        """A new place."""
        from flytekit import FlyteContextManager

        access = FlyteContextManager.current_context().file_access
        address = access.get_random_local_directory() if is_local else access.get_random_remote_directory()
        return cls(address, access, is_local)

    def put(self, name: str, data: bytes) -> None:
        """Leave a file. One try: what is tried for long is the verdict, not its picture.

        Raises:
            Exception: whatever the store's client raises.
        """
        if self.is_local:
            (Path(self.address) / name).write_bytes(data)
        else:
            self.access.get_filesystem_for_path(self.address).pipe_file(f"{self.address}/{name}", data)
