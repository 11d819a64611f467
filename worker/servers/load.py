"""How many requests one endpoint has, our own and those of others, and how many of ours it takes now.

The limit goes from one after a restart to the endpoint's most, and is lower when it is busy. It grows with time, not
with finished requests, because a text can take minutes. Below the level at which the server last worked it doubles each
second; above it grows evenly. An answer "busy" halves it.

Requests are summed over time. Our own are counted as they come and go. A server reports about twice a second how many
it has; what is above our own count at that moment is taken for the requests of others until the next report.

Where the endpoint has a reserve, others go first (`most_beside`): a share of its places stays free for them, and
nothing new is sent while any of theirs waits or the server does not report its load. What runs goes on to its end.
Pure; one thread uses it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

from alphaloop.engine import ServerLoad
from alphaloop.wording import span
from worker.servers.request_body import AskedDrafts

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
#: Beside a reserve, others have what they had at most in this time. A request runs for many reports: filled by each of
#: them, an endpoint would be as full as the lowest one allows.
PEAK_S: Final = 5.0


class Present(NamedTuple):
    """Requests of all clients at a server, at one moment. Each text of a request with several counts as one."""

    num_running: int
    num_waiting: int

    @property
    def num(self) -> int:
        """All of them."""
        return self.num_running + self.num_waiting


def most_beside(most: int, num_kept: int, num_others: int | None, *, others_wait: bool = False) -> int:
    """How many requests of ours may be in flight beside `num_others`, so that `num_kept` of `most` places stay free.

    None: the others are not known, so nothing is sent. `others_wait`: some of theirs wait for a place.
    """
    if num_others is None or others_wait:
        return 0
    return max(0, most - num_kept - num_others)


class RequestKind(NamedTuple):
    """What may change other texts of its batch at some servers, which then decode requests of unlike kinds in turn.

    Of an endpoint: the parts by which it keeps requests apart.
    """

    is_sampled: bool = False  #: its tokens are drawn. On vLLM's CPU build greedy texts beside it can be wrong
    is_adapted: bool = False  #: it has an adapter. On vLLM's CPU build texts without one beside it are the adapter's

    def only(self, kept_apart: RequestKind) -> RequestKind:
        """The part of it that counts where requests are kept apart by this."""
        return RequestKind(*(is_so and counts for is_so, counts in zip(self, kept_apart, strict=True)))


#: Greedy, of the model itself; or nothing that is kept apart.
NEITHER: Final = RequestKind()


@dataclass(frozen=True, slots=True)
class Flight:
    """A request on its way, as `Fleet.began` hands it out and `Fleet.ended` takes it back."""

    endpoint: str
    began_s: float
    here: LoadSums  #: of the endpoint up to `began_s`
    everywhere: LoadSums  #: of all endpoints, this one included
    shared_s: float  #: what a request would have had that was there since the beginning
    is_alone: bool
    #: The drafts that it asks the endpoint for; None: for nothing, so as it was started.
    asked: AskedDrafts | None = None
    kind: RequestKind = NEITHER
    num_texts: int = 1

    @property
    def is_undrafted(self) -> bool:
        """Whether it asks an endpoint that drafts for a text without drafts."""
        return self.asked is not None and not self.asked.num_draft_tokens


@dataclass(frozen=True, slots=True)
class Landing:
    """A request that ended or was given up."""

    num_beside: float  #: our mean requests in flight at its endpoint meanwhile, itself included
    load: ServerLoad  #: with those of others
    #: Its share of the endpoint's time: each moment divided by our requests that were there. The shares of all requests
    #: add up to the time in which the endpoint had one.
    share_s: float


class LoadSums(NamedTuple):
    """At one moment, since the beginning."""

    own: float = 0.0  #: seconds times our requests
    others: float = 0.0  #: the same of others', as far as it is known; the errors of single moments cancel in it
    unknown_s: float = 0.0  #: seconds in which it was not

    def __sub__(self, before: LoadSums) -> LoadSums:
        return LoadSums(*(now - then for now, then in zip(self, before, strict=True)))

    @classmethod
    def of_all(cls, sums: Iterable[LoadSums]) -> LoadSums:
        """The sums of several endpoints; seconds unknown at two of them count twice."""
        return cls(*map(sum, zip(*sums, strict=True)))


class Places:
    """The limit of one endpoint and what is in flight there. One thread uses it."""

    def __init__(self, most: int, *, num_kept: int = 0, clock: Callable[[], float], rng: Random) -> None:
        self._most, self._clock, self._rng = most, clock, rng
        self.num_kept: Final = num_kept  #: places that stay free for others; 0: these make no difference
        self.num_in_flight = 0  #: requests that began and have not ended
        self.num_texts = 0  #: of those, all together: a server counts each as a request
        self.num_undrafted = 0  #: of those, asked for without drafts where something drafts
        self._kinds: Counter[RequestKind] = Counter()  # of those
        self.paused_until_s = -math.inf  #: the server asked for quiet, so that nothing new is sent until then
        self._limit, self._known_good = float(most), float(most)
        self._grown_s = self._counted_s = clock()
        self._last_cut_s = self._known_until_s = -math.inf
        # When a report came, and the requests of others in it. Other threads read it, so it is replaced as a whole.
        self._lately: tuple[tuple[float, int], ...] = ()
        self._num_new = 0  # texts that were sent since the last report
        self._num_waiting = 0  # requests that waited there longer than those, at the last report
        self._sums, self._num_others, self._num_busy = LoadSums(), 0.0, 0
        self._shared_s = 0.0  # the share of a request that was there since the beginning

    @property
    def limit(self) -> int:
        """How many may be in flight now, up to the endpoint's most; what is there already may be more.

        0 only where the endpoint has a reserve.
        """
        return min(self._pace, self._beside_others)

    @property
    def has_room(self) -> bool:
        """Whether one request more may be in flight. One with several texts takes as many places, and needs one."""
        return self.num_in_flight < self._pace and (not self.num_kept or self.num_texts < self._beside_others)

    @property
    def held(self) -> str | None:
        """Why nothing new is sent there, in words, where that is for the sake of others; None where it is not."""
        if self.has_room or self.num_in_flight >= self._pace:
            return None
        if (num_others := self._most_others) is None:
            since = f"for {span(self._clock() - self._lately[-1][0])}" if self._lately else "yet"
            return f"held: the server has not reported its load {since}"
        if self._others_wait:
            waits = "request waits" if self._num_waiting == 1 else "requests wait"
            return f"held for others: {self._num_waiting} {waits} at the server"
        num_free = max(0, self._most - num_others - self.num_texts)
        return f"held for others: {num_free} of {self._most} places are free, {self.num_kept} stay free"

    @property
    def kind(self) -> RequestKind:
        """What any request in flight is."""
        return RequestKind(*map(any, zip(*(kind for kind, num in self._kinds.items() if num), strict=True)))

    @property
    def is_paused(self) -> bool:
        """Whether the server asked for quiet, so that nothing new is sent now."""
        return self._clock() < self.paused_until_s

    @property
    def is_busy(self) -> bool:
        """Whether the server's last word was that it is busy."""
        return self._num_busy > 0

    @property
    def is_full_size(self) -> bool:
        """Whether only the requests of others keep the limit below the endpoint's most."""
        return self._pace >= self._most

    @property
    def num_others(self) -> float | None:
        """Requests of other clients there; None where the server did not report them lately."""
        return max(0.0, self._num_others) if self._clock() < self._known_until_s else None

    @property
    def load_sums(self) -> LoadSums:
        """Requests there summed over time, up to now."""
        now = self._clock()
        passed_s = now - self._counted_s
        known_s = min(max(self._known_until_s - self._counted_s, 0.0), passed_s)
        own, others, unknown_s = self._sums
        own, others = own + self.num_in_flight * passed_s, others + self._num_others * known_s
        self._shared_s += passed_s / self.num_in_flight if self.num_in_flight else 0.0
        self._sums, self._counted_s = LoadSums(own, others, unknown_s + passed_s - known_s), now
        return self._sums

    def reported(self, present: Present, num_own: float) -> None:
        """The server says which requests it has; `num_own` of these are texts of ours.

        It may say one less than we have sent, because a request is on its way. So the difference may be below zero, and
        is not cut here: cut at every moment, it would be too large on average.
        """
        _ = self.load_sums  # up to now the last report holds
        now = self._clock()
        self._num_others, self._known_until_s = present.num - num_own, now + FRESH_S
        # What we sent a moment ago may wait for the next step of the server. Where others waited before, all of that
        # waits after them, and more waits than that.
        self._num_waiting, self._num_new = max(0, present.num_waiting - self._num_new), 0
        recent = (report for report in self._lately if report[0] > now - PEAK_S)
        self._lately = (*recent, (now, round(max(0.0, self._num_others))))

    def add(
        self,
        endpoint: str,
        everywhere: LoadSums,
        *,
        is_alone: bool,
        asked: AskedDrafts | None = None,
        kind: RequestKind = NEITHER,
        num_texts: int = 1,
    ) -> Flight:
        """One request more; `asked` is what it asks for, if anything.

        `everywhere`: of all endpoints, up to now.
        """
        here = self.load_sums
        flight = Flight(
            endpoint,
            self._counted_s,
            here,
            everywhere,
            self._shared_s,
            is_alone,
            asked=asked,
            kind=kind,
            num_texts=num_texts,
        )
        self.num_in_flight += 1
        self.num_texts += num_texts
        self._num_new += num_texts
        self.num_undrafted += flight.is_undrafted
        self._kinds[kind] += 1
        return flight

    def remove(self, flight: Flight, everywhere: LoadSums) -> Landing:
        """One request less. `everywhere`: of all endpoints, up to now."""
        here, num_own = self.load_sums - flight.here, float(self.num_in_flight)
        life_s = self._counted_s - flight.began_s
        self.num_in_flight -= 1
        self.num_texts -= flight.num_texts
        self.num_undrafted -= flight.is_undrafted
        self._kinds[flight.kind] -= 1
        if life_s <= 0:
            return Landing(num_own, ServerLoad(num_own, 0.0, is_whole=False), 0.0)
        grown = everywhere - flight.everywhere
        elsewhere = grown - here
        load = ServerLoad(
            num_beside=(here.own + max(0.0, here.others)) / life_s,
            num_elsewhere=max(0.0, elsewhere.own + max(0.0, elsewhere.others)) / life_s,
            is_whole=grown.unknown_s <= 0,
        )
        return Landing(here.own / life_s, load, self._shared_s - flight.shared_s)

    def start_slowly(self) -> None:
        """The server is new: begin with one request."""
        self._limit, self._known_good = 1.0, float(self._most)
        self._grown_s = self._clock()
        self._num_busy = 0
        self.paused_until_s = -math.inf

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
            self.paused_until_s = max(self.paused_until_s, now + min(retry_after_s, _LONGEST_ASKED_PAUSE_S))
        if now - self._last_cut_s < _ONE_CROWD_S:
            return False
        self._grow()
        self._limit = self._known_good = max(1.0, min(self._limit, float(self.num_in_flight)) / 2)
        self._last_cut_s = self._grown_s = now
        self._num_busy += 1
        if retry_after_s is None:
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self._num_busy - 1), _LONGEST_PAUSE_S)
            self.paused_until_s = max(self.paused_until_s, now + pause_s * self._rng.uniform(0.5, 1.0))
        return self._num_busy >= _BUSY_IN_A_ROW

    @property
    def _pace(self) -> int:
        """How many may be in flight whatever others have, 1 to the endpoint's most."""
        self._grow()
        return max(1, int(self._limit))

    @property
    def _beside_others(self) -> int:
        if not self.num_kept:
            return self._most
        return most_beside(self._most, self.num_kept, self._most_others, others_wait=self._others_wait)

    @property
    def _most_others(self) -> int | None:
        """Requests of others there, the most of the last reports; None where the server did not report them lately."""
        if self.num_others is None:
            return None
        since_s = self._clock() - PEAK_S
        return max((num for at_s, num in self._lately if at_s > since_s), default=None)

    @property
    def _others_wait(self) -> bool:
        return self._num_waiting > 0 and bool(self._most_others)

    def _grow(self) -> None:
        """Bring the limit up to now; it does not grow during a pause."""
        if self._limit >= self._most:
            return
        now = self._clock()
        passed_s = max(0.0, now - max(self._grown_s, self.paused_until_s))
        self._grown_s = now
        doubling_s = _DOUBLES_S * math.log2(self._known_good / self._limit) if self._limit < self._known_good else 0.0
        if passed_s < doubling_s:
            self._limit *= 2 ** (passed_s / _DOUBLES_S)
        else:
            evenly = (passed_s - doubling_s) * self._most / _RECOVERS_S
            self._limit = min(float(self._most), max(self._limit, self._known_good) + evenly)
