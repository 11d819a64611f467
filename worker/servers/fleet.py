"""Which endpoint a request goes to, and what its outcome says about that endpoint.

    choose → began → the request → ended → succeeded, or failed → judge
    due_tests → a test → tested

Pure: the caller sends requests and tests, and asks again when something changed. One thread uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import AlphaloopError, ModelNotServed, RequestKillsServer
from worker.servers.fleet_member import EndpointStatus, InferenceServer, Member, SuspectCounts
from worker.servers.health import (
    ASKS_AGAIN_S,
    Alone,
    Deaths,
    FailureVerdict,
    Suspicion,
    needs_test,
)
from worker.servers.load import Flight, Landing, LoadSums

#: Servers are asked for their load so long after the last request of ours began.
_LOAD_LINGERS_S: Final = 10.0


class Fleet:
    """The endpoints of one worker. `clock` gives seconds and never goes back."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self.servers: Final = {server.name: server for server in servers}
        self.members: Final = {server.name: Member(server, clock=clock, rng=rng) for server in servers}
        self._clock, self._rng = clock, rng
        self._last_began_s = -math.inf
        self._alone = Alone(self.members, clock=clock, rng=rng)
        self._deaths = Deaths(self.members, clock=clock)
        self._num_killers = 0
        self.suspicion: Final = Suspicion(self._deaths)

    def choose(
        self,
        drafter: str | None,
        *,
        is_bound: bool,
        avoid: Collection[str] = (),
        barred: Collection[str] = (),
        alone: bool = False,
    ) -> str | None:
        """The endpoint for a request of a route: the least loaded that has room; None: wait, and ask again.

        A request that is not bound goes to another route where its own has no room, and so does one whose route no
        endpoint has any more. While a bound one waits, it takes no place where that one may go. Endpoints in `avoid`
        get a request only where no other is open, and those in `barred` never. `alone`: the endpoint has nothing in
        flight, and takes nothing else until the request has ended.

        Whoever waits asks again when something changed, at least every `ASKS_AGAIN_S` seconds, the longest waiting
        first. Whoever got a name says `began` before anyone asks again.
        """
        members = [member for name, member in self.members.items() if name not in barred]
        of_route = [member for member in members if drafter in member.routes]
        is_bound = is_bound and bool(of_route)
        usable = [member for member in (of_route if is_bound else members) if member.is_open]
        usable = [member for member in usable if member.server.name not in avoid] or usable
        if alone:
            return self._alone.choose(usable)
        for member in usable:
            member.is_wanted |= member.is_kept
        usable = [member for member in usable if not member.is_kept]
        own = [member for member in usable if drafter in member.routes]
        if is_bound:
            return self._bound(own)
        own, usable = self._left_to_ordinary(own), self._left_to_ordinary(usable)
        return self._least_loaded(own) or self._least_loaded(usable)

    def is_away(self, drafter: str | None, *, is_bound: bool, barred: Collection[str] = ()) -> bool:
        """Whether every endpoint is away that `choose` could name for such a request."""
        members = [member for name, member in self.members.items() if name not in barred]
        of_route = [member for member in members if drafter in member.routes]
        return all(member.is_away for member in (of_route if is_bound and of_route else members))

    def switches(self, name: str, obeys: bool) -> None:
        """Whether the endpoint drafts as each request asks. If not, it is no vanilla route, and drafts as started."""
        member = self.members[name]
        member.switches = obeys and member.server.endpoint.switches_drafts

    def drafters(self) -> tuple[DrafterState, ...]:
        """What drafts, each once; of one length where any of its endpoints does not draft as requests ask."""
        found: dict[str, DrafterState] = {}
        for member in self.members.values():
            if (drafter := member.server.drafter) is not None:
                found.setdefault(drafter.name, drafter)
                if not member.switches:
                    found[drafter.name] = replace(drafter, least_draft_tokens=drafter.max_draft_tokens)
        return tuple(found.values())

    def began(
        self, name: str, *, drafter: str | None = None, num_draft_tokens: int | None = None, alone: bool = False
    ) -> Flight:
        """A request goes to the endpoint now. The flight is handed back to `ended`, however the request ends.

        `drafter` is its route, `num_draft_tokens` the k of its decision, if any. The flight says which k the request
        has to ask the endpoint for.
        """
        member = self.members[name]
        if alone:
            member.has_suspect = True
        asked = member.server.asked_for(drafter, num_draft_tokens) if member.switches else None
        self._last_began_s = self._clock()
        return member.places.add(name, self._load_sums(), is_alone=alone, num_draft_tokens=asked)

    def ended(self, flight: Flight) -> Landing:
        """A request ended or was given up: how many were in flight while it was."""
        member = self.members[flight.endpoint]
        landing = member.places.remove(flight, self._load_sums())
        if flight.is_alone:
            self._alone.ended(member)
        return landing

    def is_load_wanted(self) -> bool:
        """Whether requests of ours are under way, or were a moment ago, so that it is worth asking for the load."""
        return self.num_in_flight > 0 or self._clock() - self._last_began_s < _LOAD_LINGERS_S

    def failed(self, name: str, error: AlphaloopError) -> None:
        """A request failed there. Not called for one that was cancelled or is over its deadline."""
        if self.members[name].failed(error):
            self._deaths.note(name)

    def needs_test(self, flight: Flight, error: AlphaloopError) -> bool:
        """After `failed`: whether a test of the endpoint has to end before `judge` can tell whose fault it was.

        One is due then, or under way. It is not waited for where the endpoint is known to be gone, or is retired.
        """
        state = self.members[flight.endpoint].circuit.state
        return state != "retired" and needs_test(error) and self._deaths.in_flight(flight) is None

    def judge(
        self, job_id: str, flight: Flight, error: AlphaloopError, test: AlphaloopError | None = None
    ) -> FailureVerdict | None:
        """What happens to a job whose request failed, after `failed`.

        Where `needs_test` said so, after the next `tested` of that endpoint, whose error `test` is; None: it passed.
        No verdict yet: a job was alone where a server died, and it is not known if all servers are gone, so that it was
        the network; ask again after each `tested`.
        """
        if needs_test(error) and self.members[flight.endpoint].circuit.state == "retired":
            test = ModelNotServed()
        verdict = self.suspicion.judge(job_id, flight, error, test)
        self._num_killers += verdict is not None and isinstance(verdict.error, RequestKillsServer)
        return verdict

    def all_retired(self) -> str | None:
        """Where no endpoint is left, and waiting brings none back: why, in words."""
        if any(member.circuit.state != "retired" for member in self.members.values()):
            return None
        return "; ".join(f"{status.name}: {status.reason}" for status in self.statuses())

    def due_tests(self) -> tuple[str, ...]:
        """Endpoints to test now. Each is under test until the caller says `tested`.

        A test should ask for a short text: servers whose engine has died may still list their models.
        """
        due = tuple(name for name, member in self.members.items() if member.circuit.is_test_due())
        for name in due:
            self.members[name].circuit.test_begins()
        return due

    def tested(self, name: str, error: AlphaloopError | None) -> None:
        """The test of the endpoint ended; None: it passed."""
        member = self.members[name]
        was_down = member.circuit.state == "down"
        if member.tested(error):
            self._deaths.note(name)
        elif error is None and not was_down:
            self._deaths.passed(name)

    def next_change_s(self) -> float | None:
        """Seconds until time alone changes something: a test is due, or a pause ends. None: nothing is pending.

        Look again after each call of `choose` and `failed`, because both can make a test due.
        """
        now = self._clock()
        tests = [member.circuit.test_due_s for member in self.members.values()]
        pauses = [member.places.paused_until_s for member in self.members.values() if member.places.is_paused]
        moments = [moment for moment in tests if moment is not None] + pauses
        return max(0.0, min(moments) - now) if moments else None

    @property
    def num_in_flight(self) -> int:
        """Requests that began and have not ended."""
        return sum(member.places.num_in_flight for member in self.members.values())

    def suspects(self) -> SuspectCounts:
        """Jobs that failed and have to run alone, and those that killed servers."""
        return SuspectCounts(self.suspicion.num_alone, self._num_killers)

    def unavailable(self) -> str | None:
        """Why no job can be sent at all, in words; None where an endpoint is up, if only busy."""
        if any(member.circuit.state in ("up", "doubted") for member in self.members.values()):
            return None
        said = [
            f"{status.name} is {status.state} for {status.since_s:.0f} s ({status.reason})"
            for status in self.statuses()
        ]
        return f"no inference server can be sent jobs: {'; '.join(said)}"

    def statuses(self) -> tuple[EndpointStatus, ...]:
        """How each endpoint is."""
        return tuple(member.status() for member in self.members.values())

    def _load_sums(self) -> LoadSums:
        """Requests summed over time, of all endpoints, up to now."""
        return LoadSums.of_all(member.places.load_sums for member in self.members.values())

    def _bound(self, own: Sequence[Member]) -> str | None:
        found = self._least_loaded(own)
        for member in own:
            member.awaited_until_s = self._clock() + ASKS_AGAIN_S if found is None else -math.inf
        return found

    def _left_to_ordinary(self, members: Sequence[Member]) -> list[Member]:
        """The endpoints for which no bound request waits."""
        now = self._clock()
        return [member for member in members if now >= member.awaited_until_s]

    def _least_loaded(self, members: Sequence[Member]) -> str | None:
        if not (free := [member for member in members if member.has_room]):
            return None
        least = min(member.load for member in free)
        return self._rng.choice([member for member in free if member.load == least]).server.name
