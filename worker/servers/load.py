"""How many requests one endpoint has, our own and those of others, and how many of ours it takes now.

`Places` is the limit: from one after a restart to the endpoint's most, and fewer when it is busy. It grows with time,
not with finished requests, because a text can take minutes. Below the level at which the server last worked it doubles
each second; above it grows evenly. An answer "busy" halves it.

`WholeLoad` sums requests over time. Our own are counted as they come and go. A server tells about twice a second how
many it has; what is above our own count at that moment is taken for the requests of others until it tells again.
Pure; one thread uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from worker.engine import ServerLoad

_DOUBLES_S: Final = 1.0
_RECOVERS_S: Final = 60.0  #: even growth over the endpoint's whole range
#: Refusals come in crowds: those of the requests that were sent together count once.
_ONE_CROWD_S: Final = 1.0
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
#: A longer Retry-After is taken for a mistake.
_LONGEST_ASKED_PAUSE_S: Final = 600.0
_BUSY_IN_A_ROW: Final = 6
#: A server's report holds for this long; later the requests of others are unknown.
FRESH_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Flight:
    """A request on its way, as `Fleet.began` hands it out and `Fleet.ended` takes it back."""

    endpoint: str
    began_s: float
    here: LoadSums  #: of the endpoint up to `began_s`
    everywhere: LoadSums  #: of all endpoints, this one included
    is_alone: bool
    num_draft_tokens: int | None = None  #: that it asks the endpoint for; None: for nothing, so as it was started

    @property
    def is_undrafted(self) -> bool:
        """Whether it asks an endpoint that drafts for a text without drafts."""
        return self.num_draft_tokens == 0


@dataclass(frozen=True, slots=True)
class Landing:
    """A request that ended or was given up."""

    num_beside: float  #: our mean requests in flight at its endpoint meanwhile, itself included
    load: ServerLoad  #: with those of others


class Places:
    """The limit of one endpoint and what is in flight there. One thread uses it."""

    def __init__(self, most: int, *, clock: Callable[[], float], rng: Random) -> None:
        self._most, self._clock, self._rng = most, clock, rng
        self._limit, self._known_good = float(most), float(most)
        self._grown_s = clock()
        self._load = WholeLoad(self._grown_s)
        self._paused_until_s = self._last_cut_s = -math.inf
        self._num_busy = 0
        self._num_undrafted = 0

    @property
    def num_in_flight(self) -> int:
        """Requests that began and have not ended."""
        return self._load.num_own

    @property
    def num_undrafted(self) -> int:
        """Of those, asked for without drafts where something drafts."""
        return self._num_undrafted

    @property
    def limit(self) -> int:
        """How many may be in flight now, 1 to the endpoint's most; what is there already may be more."""
        self._grow()
        return max(1, int(self._limit))

    @property
    def is_paused(self) -> bool:
        """Whether the server asked for quiet, so that nothing new is sent now."""
        return self._clock() < self._paused_until_s

    @property
    def paused_until_s(self) -> float:
        """When the last pause ends or ended, on the clock; minus infinity where there was none."""
        return self._paused_until_s

    @property
    def is_busy(self) -> bool:
        """Whether the server's last word was that it is busy."""
        return self._num_busy > 0

    @property
    def is_full_size(self) -> bool:
        """Whether the limit is the endpoint's most."""
        return self.limit >= self._most

    @property
    def num_others(self) -> float | None:
        """Requests of other clients there; None where the server did not report them lately."""
        return self._load.num_others(self._clock())

    @property
    def load_sums(self) -> LoadSums:
        """Requests there summed over time, up to now."""
        return self._load.sums(self._clock())

    def told(self, num_present: int, num_own: float) -> None:
        """The server says that it has `num_present` requests. `num_own` are ours of these."""
        self._load.told(self._clock(), num_present, num_own)

    def add(
        self, endpoint: str, everywhere: LoadSums, *, is_alone: bool, num_draft_tokens: int | None = None
    ) -> Flight:
        """One request more; `num_draft_tokens` is what it asks for, if anything.

        `everywhere`: of all endpoints, up to now.
        """
        now = self._clock()
        flight = Flight(endpoint, now, self._load.sums(now), everywhere, is_alone, num_draft_tokens)
        self._load.change(now, +1)
        self._num_undrafted += flight.is_undrafted
        return flight

    def remove(self, flight: Flight, everywhere: LoadSums) -> Landing:
        """One request less. `everywhere`: of all endpoints, up to now."""
        now = self._clock()
        here, life_s, num_own = self._load.sums(now) - flight.here, now - flight.began_s, float(self._load.num_own)
        self._load.change(now, -1)
        self._num_undrafted -= flight.is_undrafted
        load = mean_load(here, everywhere - flight.everywhere, life_s, num_own)
        return Landing(here.own / life_s if life_s > 0 else num_own, load)

    def start_slowly(self) -> None:
        """The server is new: begin with one request."""
        self._limit, self._known_good = 1.0, float(self._most)
        self._grown_s = self._clock()
        self._num_busy = 0
        self._paused_until_s = -math.inf

    def worked(self) -> None:
        """The server finished a request."""
        self._num_busy = 0

    def refused(self, retry_after_s: float | None) -> bool:
        """The server is busy: halve the limit, and send nothing for as long as it asks.

        Where it does not say how long: from one second on, twice as long for each time in a row. Whether it was busy so
        often in a row that it is no use to go on.
        """
        now = self._clock()
        if retry_after_s is not None:
            until_s = now + min(retry_after_s, _LONGEST_ASKED_PAUSE_S)
            self._paused_until_s = max(self._paused_until_s, until_s)
        if now - self._last_cut_s < _ONE_CROWD_S:
            return False
        self._grow()
        self._limit = self._known_good = max(1.0, min(self._limit, float(self.num_in_flight)) / 2)
        self._last_cut_s = self._grown_s = now
        self._num_busy += 1
        if retry_after_s is None:
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self._num_busy - 1), _LONGEST_PAUSE_S)
            self._paused_until_s = max(self._paused_until_s, now + pause_s * self._rng.uniform(0.5, 1.0))
        return self._num_busy >= _BUSY_IN_A_ROW

    def _grow(self) -> None:
        """Bring the limit up to now; it does not grow during a pause."""
        if self._limit >= self._most:
            return
        now = self._clock()
        passed_s = max(0.0, now - max(self._grown_s, self._paused_until_s))
        self._grown_s = now
        doubling_s = _DOUBLES_S * math.log2(self._known_good / self._limit) if self._limit < self._known_good else 0.0
        if passed_s < doubling_s:
            self._limit *= 2 ** (passed_s / _DOUBLES_S)
        else:
            evenly = (passed_s - doubling_s) * self._most / _RECOVERS_S
            self._limit = min(float(self._most), max(self._limit, self._known_good) + evenly)


@dataclass(frozen=True, slots=True)
class LoadSums:
    """At one moment, since the beginning."""

    own: float = 0.0  #: seconds times our requests
    others: float = 0.0  #: the same of others', as far as it is known; the errors of single moments cancel in it
    unknown_s: float = 0.0  #: seconds in which it was not

    def __sub__(self, before: LoadSums) -> LoadSums:
        return LoadSums(self.own - before.own, self.others - before.others, self.unknown_s - before.unknown_s)

    @classmethod
    def of_all(cls, sums: Iterable[LoadSums]) -> LoadSums:
        """Of several endpoints together; seconds unknown at two of them count twice."""
        own, others, unknown_s = 0.0, 0.0, 0.0
        for one in sums:
            own, others, unknown_s = own + one.own, others + one.others, unknown_s + one.unknown_s
        return cls(own, others, unknown_s)


class WholeLoad:
    """The requests at one endpoint. Times are seconds by one clock that never goes back."""

    def __init__(self, now_s: float) -> None:
        self.num_own = 0
        self._own = self._others = self._unknown_s = 0.0
        self._counted_s = now_s
        self._num_others = 0.0
        self._known_until_s = now_s

    def change(self, now_s: float, by: int) -> None:
        """Add `by` to the number of our requests."""
        self._count(now_s)
        self.num_own += by

    def told(self, now_s: float, num_present: int, num_own: float) -> None:
        """The server says that it has `num_present` requests; `num_own` are ours of these.

        It may say one less than we have sent, because a request is on its way. So the difference may be below zero, and
        is not cut here: cut at every moment, it would be too large on average.
        """
        self._count(now_s)
        self._num_others = num_present - num_own
        self._known_until_s = now_s + FRESH_S

    def is_known(self, now_s: float) -> bool:
        """Whether the server reported its requests lately."""
        return now_s < self._known_until_s

    def num_others(self, now_s: float) -> float | None:
        """Requests of others now; None where that is not known."""
        return max(0.0, self._num_others) if self.is_known(now_s) else None

    def sums(self, now_s: float) -> LoadSums:
        """Up to now."""
        self._count(now_s)
        return LoadSums(self._own, self._others, self._unknown_s)

    def _count(self, now_s: float) -> None:
        passed_s = now_s - self._counted_s
        known_s = min(max(self._known_until_s - self._counted_s, 0.0), passed_s)
        self._own += self.num_own * passed_s
        self._others += self._num_others * known_s
        self._unknown_s += passed_s - known_s
        self._counted_s = now_s


def mean_load(here: LoadSums, everywhere: LoadSums, life_s: float, num_here: float) -> ServerLoad:
    """Mean load over a request's life of `life_s`, of its own endpoint and of the others, from what both sums grew by.

    `num_here` is its endpoint's own count, for a life that had no time.
    """
    if life_s <= 0:
        return ServerLoad(num_here, 0.0, is_whole=False)
    elsewhere = everywhere - here
    return ServerLoad(
        num_beside=(here.own + max(0.0, here.others)) / life_s,
        num_elsewhere=max(0.0, elsewhere.own + max(0.0, elsewhere.others)) / life_s,
        is_whole=everywhere.unknown_s <= 0,
    )
