"""Endpoints for requests that have to run alone: which one is kept for them, and for how long.

A kept endpoint takes nothing new; once it is empty and has just shown that it is well, a suspect goes there. At most
half of the fleet is kept at a time, or one. The only open endpoint of a route rests after a suspect for as long as it
was kept, if others wanted it meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

from worker.servers.fleet_member import Member

#: A caller that waits asks again at least so often; what nobody asks for any more is not kept.
ASKS_AGAIN_S: Final = 5.0
#: A server that was well so lately will be alive when the suspect comes.
_WELL_S: Final = 5.0
_JUST_STARTED_S: Final = 600.0


class Alone:
    """Keeps endpoints of a fleet for suspects. One thread uses it."""

    def __init__(self, members: Mapping[str, Member], *, clock: Callable[[], float], rng: Random) -> None:
        self._members, self._clock, self._rng = members, clock, rng
        self._asked_until_s = -math.inf

    def choose(self, candidates: Sequence[Member]) -> str | None:
        """One of the open `candidates` that is empty and well; None: wait, one is kept as soon as it may be."""
        now = self._clock()
        self._asked_until_s = now + ASKS_AGAIN_S
        kept = [member for member in candidates if member.is_kept and not member.has_suspect]
        if not kept and (picked := self._pick(candidates)) is not None:
            picked.reserved_since_s = now
            kept = [picked]
        for member in kept:
            member.reserved_until_s = now + ASKS_AGAIN_S
            if member.places.num_in_flight:
                continue
            if member.circuit.well_s is not None and now - member.circuit.well_s <= _WELL_S:
                return member.endpoint.name
            member.circuit.ask_for_test()
        return None

    def began(self, member: Member) -> None:
        """A suspect goes to the endpoint now."""
        member.has_suspect = True

    def ended(self, member: Member) -> None:
        """The suspect is there no more. Where another waits the endpoint is kept on, unless it has to rest."""
        now = self._clock()
        must_rest = member.is_wanted and self._is_last_of_route(member)
        member.rests_until_s = now + max(0.0, now - member.reserved_since_s) if must_rest else now
        member.has_suspect = member.is_wanted = False
        is_kept_on = now < self._asked_until_s and not must_rest
        member.reserved_since_s, member.reserved_until_s = now, now + ASKS_AGAIN_S if is_kept_on else -math.inf

    def _pick(self, candidates: Sequence[Member]) -> Member | None:
        """The endpoint to keep: rather not the only one of its route, just started, with few in flight."""
        opened = [member for member in self._members.values() if member.is_open]
        if sum(member.is_kept for member in opened) >= max(1, len(opened) // 2):
            return None
        now = self._clock()
        free = [
            (self._is_last_of_route(member), not self._has_just_started(member), member.places.num_in_flight, member)
            for member in candidates
            if not member.is_kept
        ]
        free = [found for found in free if not found[0] or now >= found[3].rests_until_s]
        if not free:
            return None
        least = min(found[:3] for found in free)
        return self._rng.choice([member for *key, member in free if tuple(key) == least])

    def _is_last_of_route(self, member: Member) -> bool:
        others = [other for other in self._members.values() if other is not member]
        served = {route for other in others if other.is_open and not other.is_kept for route in other.routes}
        return not served.issuperset(member.routes)

    def _has_just_started(self, member: Member) -> bool:
        up_again_s = member.circuit.up_again_s
        return up_again_s is not None and self._clock() - up_again_s <= _JUST_STARTED_S
