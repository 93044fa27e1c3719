"""Values that the agent and its ranks leave for each other in files."""

from __future__ import annotations

import json
from typing import TypeVar

from mashumaro.config import BaseConfig
from mashumaro.mixins.dict import DataClassDictMixin

R = TypeVar("R", bound="Record")


class Record(DataClassDictMixin):
    """A dataclass as one line of JSON."""

    class Config(BaseConfig):
        """Agent and ranks have one version of this package: what one of them does not know is damage."""

        forbid_extra_keys = True

    def to_json(self) -> str:
        """In ASCII, whatever bytes a name or a variable is made of."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: the text is no whole record of this kind.
        """
        try:
            return cls.from_dict(json.loads(text))
        except Exception as error:  # mashumaro's and json's, which have no class in common
            raise ValueError(f"not a {cls.__name__}: {type(error).__name__}: {error}") from error
