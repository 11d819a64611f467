"""Slices of one server's time in which nothing ran but requests of one evidence key of ours.

A slice begins with the first request to an idle server and ends when the server is idle again. What its counters moved
by is evidence of that key if all of its requests ended well and were alone there. Between two slices nothing of ours
runs, so the reading at the end of one is the beginning of the next.

    began, ended … ended → Due: read the counters → read → SliceCounts, or None
"""

from __future__ import annotations

from dataclasses import dataclass, field

from alphaloop.acceptance import prompt_bucket
from worker.engine import SliceCounts
from worker.servers.counters import Counters, counts_between, lags


@dataclass(frozen=True, slots=True)
class SliceKey:
    """What of a request's evidence key is known before it is sent."""

    task: str
    segment: str
    sampling_bucket: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that ended well."""

    num_prompt_tokens: int
    num_tokens: int  #: of the text


@dataclass(slots=True)
class _Open:
    """A slice that runs."""

    key: SliceKey
    since: Counters
    answered: list[Answered] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Due:
    """The server is idle: its counters are to be read now."""

    turn: int
    since: Counters | None  #: None: the reading only begins the next slice
    answered: tuple[Answered, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(one.num_tokens for one in self.answered)


class CounterSlices:
    """The slices of one endpoint that drafts k = `num_draft_tokens`. Pure; one thread uses it."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._k = num_draft_tokens
        self._idle: Counters | None = None  #: as read since the last request ended; None: not known
        self._open: _Open | None = None
        self._num_in_flight = 0
        self._turn = 0

    def began(self, key: SliceKey) -> None:
        """A request is sent there now."""
        if not self._num_in_flight:
            self._open = _Open(key, self._idle) if self._idle is not None else None
        elif self._open is not None and self._open.key != key:
            self._open = None
        self._idle = None
        self._num_in_flight += 1
        self._turn += 1

    def ended(self, answered: Answered | None) -> Due | None:
        """A request ended; None: it failed or was given up. The counters are due if it was the last.

        Requests of one slice also have prompts of one bucket.
        """
        self._num_in_flight -= 1
        found = self._open
        if found is not None and answered is not None:
            found.answered.append(answered)
        if answered is None or (found is not None and len({_bucket(one) for one in found.answered}) > 1):
            self._open = found = None
        if self._num_in_flight:
            return None
        self._open = None
        return Due(self._turn, found.since, tuple(found.answered)) if found else Due(self._turn, None)

    def is_early(self, due: Due, found: Counters) -> bool:
        """Whether another reading may show more."""
        if due.turn != self._turn or due.since is None:
            return False
        return lags(due.since, found, len(due.answered), due.num_tokens)

    def read(self, due: Due, found: Counters) -> SliceCounts | None:
        """The counters as they were read for `due`: what the slice says; None where it says nothing."""
        if due.turn != self._turn:
            return None  # another request began meanwhile, and may be in them
        self._idle = found
        if due.since is None:
            return None
        num, num_tokens = len(due.answered), due.num_tokens
        counts = counts_between(due.since, found, num, num_tokens, self._k)
        if counts is None:
            return None
        return SliceCounts(num, sum(one.num_prompt_tokens for one in due.answered), num_tokens, counts)


def _bucket(answered: Answered) -> object:
    return prompt_bucket(answered.num_prompt_tokens)
