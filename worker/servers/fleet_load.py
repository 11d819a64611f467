"""The requests at all endpoints of a fleet, whoever sent them. One thread uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from worker.servers.places import Places
from worker.servers.whole_load import LoadSums

#: Servers are asked on for so long after the last request of ours began.
_LINGERS_S: Final = 10.0


class FleetLoad:
    """What servers tell comes in here, and what a request's life is compared with goes out."""

    def __init__(self, places: Mapping[str, Places], *, clock: Callable[[], float]) -> None:
        self._places, self._clock = places, clock
        self._began_s: float | None = None

    def began(self) -> LoadSums:
        """A request of ours begins: the sums over time of all endpoints, up to now."""
        self._began_s = self._clock()
        return self.sums()

    def sums(self) -> LoadSums:
        """Requests summed over time, of all endpoints, up to now."""
        return LoadSums.of_all(one.load_sums for one in self._places.values())

    def is_wanted(self) -> bool:
        """Whether requests of ours are under way, or were a moment ago, so that it is worth asking for the load."""
        if any(one.num_in_flight for one in self._places.values()):
            return True
        return self._began_s is not None and self._clock() - self._began_s < _LINGERS_S

    def num_own(self, name: str) -> int:
        """Our requests in flight at the endpoint."""
        return self._places[name].num_in_flight

    def told(self, name: str, num_present: int, num_own: float) -> None:
        """The endpoint says that it has `num_present` requests, whoever sent them. `num_own` are ours of these."""
        self._places[name].told(num_present, num_own)
