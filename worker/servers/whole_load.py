"""How many requests are at one endpoint, our own and those of others, summed over time.

Our own are counted as they come and go. A server tells about twice a second how many it has; what is above our own
count at that moment is taken for the requests of others until it tells again. Pure; one thread uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from worker.engine import ServerLoad

#: What a server told holds so long. Then it is not known what others have there.
FRESH_S: Final = 3.0


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
        """So many requests of ours more, or less."""
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
        """Whether the server told how many it has, a moment ago."""
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
    """Over a request's life of `life_s`: the load of its own endpoint and of the others, from what both grew by.

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
