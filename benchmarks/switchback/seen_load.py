"""The load of both simulated servers as one worker sees it: its own fleet counts it, on the simulation's clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Final

from worker.engine import ServerLoad
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import FleetEndpoint
from worker.servers.load import Flight

_NAMES: Final = ("vanilla", "speculative")  #: by whether a server speculates
_MOST: Final = 100_000  #: requests at a server: never the limit here


class SeenLoad:
    """Counts a worker's requests, and reads now and then how many each server has.

    `every_s` infinite: it never reads, and knows of its own requests alone. A number read is `delay_s` old.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random, every_s: float, delay_s: float) -> None:
        endpoints = [FleetEndpoint(name, None, 0, _MOST) for name in _NAMES]
        self._fleet = Fleet(endpoints, clock=clock, rng=random.Random(0))
        self._clock, self._rng, self._every_s, self._delay_s = clock, rng, every_s, delay_s
        self._asks_at_s = math.inf if math.isinf(every_s) else rng.uniform(0.0, every_s)
        self._answered_at_s = math.inf
        self._answer: tuple[tuple[int, int], ...] = ()  # present and our own, by server, when it was asked

    @property
    def next_s(self) -> float:
        """When it asks the servers, or their answer comes."""
        return min(self._asks_at_s, self._answered_at_s)

    def look(self, num_at: Sequence[int]) -> None:
        """Ask, or take the answer, if it is time; `num_at` are the requests at each server now."""
        now_s = self._clock()
        if now_s >= self._answered_at_s:
            for name, (present, own) in zip(_NAMES, self._answer, strict=True):
                self._fleet.told_load(name, present, (own + self._fleet.num_own(name)) / 2)
            self._answered_at_s = math.inf
        if now_s >= self._asks_at_s:
            self._answer = tuple((num_at[index], self._fleet.num_own(name)) for index, name in enumerate(_NAMES))
            self._answered_at_s = now_s + self._delay_s
            self._asks_at_s = now_s + max(self._every_s * self._rng.uniform(0.9, 1.1), self._delay_s)

    def began(self, speculates: bool) -> Flight:
        """A request of the worker goes to a server."""
        return self._fleet.began(_NAMES[speculates])

    def ended(self, flight: Flight) -> ServerLoad:
        """It ended: the load meanwhile, the means."""
        return self._fleet.ended(flight).load
