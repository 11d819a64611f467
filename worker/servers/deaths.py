"""When endpoints went away, and whether all of them did so at once.

As soon as one has gone, the others are tested. One that passes shows that the network is well; where none does, it was
an outage of all, and says nothing against the requests that were in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from worker.servers.fleet_member import Member
from worker.servers.places import Flight

#: Endpoints that go away within this time of each other did so at once: a test may take as long until it is given up.
_AT_ONCE_S: Final = 90.0
_RECENT_S: Final = 600.0
_REMEMBERED: Final = 256


@dataclass(slots=True, eq=False)
class Death:
    """An endpoint that was up went away."""

    endpoint: str
    at_s: float
    left: frozenset[str]  #: endpoints that were still there
    is_witnessed: bool = False  #: whether one of them was well afterwards, before it went away too


class Deaths:
    """The last deaths of a fleet's endpoints. One thread uses it; times are seconds on the clock."""

    def __init__(self, members: Mapping[str, Member], *, clock: Callable[[], float]) -> None:
        self._members, self._clock = members, clock
        self._deaths = {name: deque[Death](maxlen=_REMEMBERED) for name in members}

    def note(self, name: str) -> Death:
        """The endpoint has gone away now. Those that are left are to be tested."""
        states = {other: member.circuit.state for other, member in self._members.items() if other != name}
        left = frozenset(other for other, state in states.items() if state in ("up", "doubted"))
        for other in left:
            self._members[other].circuit.ask_for_test()
        death = Death(name, self._clock(), left)
        self._deaths[name].append(death)
        return death

    def passed(self, name: str) -> None:
        """An endpoint that was not down has passed a test: it is a witness of the deaths between its start and that."""
        circuit = self._members[name].circuit
        up_since_s = -math.inf if circuit.up_again_s is None else circuit.up_again_s
        for deaths in self._deaths.values():
            for death in deaths:
                if name in death.left and up_since_s <= death.at_s <= circuit.test_began_s:
                    death.is_witnessed = True

    def in_flight(self, flight: Flight) -> Death | None:
        """The last death of the endpoint while the request was there; None where there was none."""
        deaths = self._deaths[flight.endpoint]
        return deaths[-1] if deaths and deaths[-1].at_s >= flight.began_s else None

    def is_outage(self, death: Death) -> bool:
        """Whether all endpoints went away at the same time, this one last or not: then it was none of the requests."""
        if death.is_witnessed:
            return False
        if death.left:
            return all(self._went_after(other, death) for other in death.left)
        return any(self._went_before(other, death) for other in self._members if other != death.endpoint)

    def is_settled(self, death: Death) -> bool:
        """Whether it is known if the death was an outage's; if not, tests of other endpoints are under way."""
        if death.is_witnessed:
            return True
        not_gone = [other for other in death.left if not self._went_after(other, death)]
        return not any(self._members[other].circuit.is_test_coming for other in not_gone)

    def flapping(self, besides: Collection[Death]) -> set[str]:
        """Endpoints that died more than once of late, other than in `besides`."""
        since_s = self._clock() - _RECENT_S
        return {
            name
            for name, deaths in self._deaths.items()
            if sum(death.at_s >= since_s and death not in besides for death in deaths) > 1
        }

    def _went_after(self, name: str, death: Death) -> bool:
        return any(0 <= other.at_s - death.at_s <= _AT_ONCE_S for other in self._deaths[name])

    def _went_before(self, name: str, death: Death) -> bool:
        return any(
            0 <= death.at_s - other.at_s <= _AT_ONCE_S and death.endpoint in other.left and not other.is_witnessed
            for other in self._deaths[name]
        )
