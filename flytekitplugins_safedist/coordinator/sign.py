"""Who leads a job is written in the store: the leader's sign, beside the outputs. The value, and both sides' rules.

A leader begins nothing and ends nothing before it has read back its own sign; else one that dies early leaves no trace,
and the next takes itself for the first. Freshness is watched on the reader's own clock: no other machine's counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from mashumaro.mixins.dict import DataClassDictMixin

from .books import Leader
from .rules import Rules

PAUSE_SECONDS = 1.0
"""Between two calls of a coordinator or an agent: that process itself stood still."""

_DOUBT_SECONDS = 1.0
"""Between two looks of a leader in doubt: nothing begins meanwhile."""


@dataclass(frozen=True)
class Sign(DataClassDictMixin):
    """The leader's sign. ``beat`` grows with each renewal: who watches it sees that it is alive."""

    leader: Leader
    beat: int = 0

    def dump(self) -> bytes:
        """As a file in the store."""
        return json.dumps(self.to_dict()).encode()

    @classmethod
    def parse(cls, content: bytes) -> Sign:
        """The inverse.

        Raises:
            ValueError: it is none.
        """
        try:
            return cls.from_dict(json.loads(content))
        except Exception as error:  # mashumaro's, of any type
            raise ValueError(f"not a sign of who leads this job: {content[:200]!r}") from error


@dataclass(frozen=True)
class StoreLook:
    """What the store says; there is none where it cannot be read.

    Attributes:
        since: when the look was begun, by this process's clock.
        sign: the leader's; of no leader, where one has left what nobody can read.
        is_decided: the attempt's verdict is there.
    """

    since: float
    sign: Sign | None
    is_decided: bool


class Lead:
    """Whether a process leads its job, as far as it may know.

    Args:
        me: the process.
        rules: the job's.
        now: seconds, of a clock that only grows; as in every call.
    """

    def __init__(self, me: str, rules: Rules, now: float) -> None:
        self._me = me
        self._rules = rules
        self.term = 1 if rules.is_alone else 0
        """0 until the store was read."""
        self.is_first = rules.is_alone
        """Nobody has led this job before."""
        self.in_doubt = not rules.is_alone
        """It does not know whether it still leads."""
        self._since = now  # of the doubt
        self._others = 0  # the highest term of another leader
        self._beat = 0
        self._sign: Sign | None = None
        self._looked = float("-inf")

    @property
    def leader(self) -> Leader:
        """As others know it."""
        return Leader(self.term, self._me)

    def take_sign(self) -> Sign | None:
        """What is to be put into the store now: a new sign after each look that counts, once."""
        sign, self._sign = self._sign, None
        return sign

    def doubt(self, now: float) -> None:
        """It may not lead any more; looks that were begun before count nothing."""
        if not self._rules.is_alone:
            self.in_doubt, self._since = True, now

    def on_leader(self, leader: Leader, now: float) -> None:
        """Somebody has obeyed this leader."""
        if leader.process != self._me:
            self._others = max(self._others, leader.term)
            if not self.in_doubt and leader > self.leader:
                self.doubt(now)

    def is_due(self, now: float) -> bool:
        """Whether the store is to be looked at now."""
        between = _DOUBT_SECONDS if self.in_doubt else self._rules.renew
        if self._rules.is_alone or now - self._looked < between:
            return False
        self._looked = now
        return True

    def on_look(self, look: StoreLook) -> str:
        """What the store says of who leads; why this process does not, "" where it may."""
        sign, self._sign = look.sign, None
        if look.since < self._since or self._rules.is_alone:
            return ""
        if self.term and sign is not None and sign.leader > self.leader:
            return "another process leads this job"
        self.is_first = self.is_first or (not self.term and sign is None)
        others = max(self._others, sign.leader.term if sign is not None and sign.leader.process != self._me else 0)
        self.term, self._beat = max(self.term, others + 1), self._beat + 1
        self.in_doubt = self.in_doubt and (sign is None or sign.leader != self.leader)
        self._sign = Sign(self.leader, self._beat)
        return ""

    def gives_up(self, now: float) -> bool:
        """Whether it has been in doubt for longer than the store may be away."""
        return self.in_doubt and now - self._since > self._rules.upload


class SignWatch:
    """How long a sign has been the same, for one who reads it again and again."""

    def __init__(self) -> None:
        self.sign: Sign | None = None
        self._since: float | None = None
        self._changed = float("-inf")

    def on_look(self, sign: Sign | None, now: float) -> None:
        """It was read."""
        if self._since is not None and sign is not None and sign != self.sign:
            self._changed = now
        if self._since is None or sign != self.sign:
            self.sign, self._since = sign, now

    def forget(self) -> None:
        """This process stood still: it does not know for how long it has watched, nor whether who led still leads."""
        self._since, self._changed = None, float("-inf")

    def has_changed(self, since: float) -> bool:
        """Whether somebody leads the job: the sign has changed *since* then, while it was watched."""
        return self._changed > since

    def is_fresh(self, rules: Rules, now: float) -> bool:
        """Whether somebody may lead the job: there is a sign, and it was not watched for long enough."""
        return self.sign is not None and (self._since is None or now - self._since < rules.stale)
