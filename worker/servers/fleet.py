"""Which endpoint a request goes to, and what its outcome says about that endpoint.

    choose → began → the request → ended → succeeded or failed
    due_tests → a test → tested

Pure: the caller sends requests and tests, and asks again when something changed. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random

from alphaloop.errors import AlphaloopError
from worker.servers.fleet_member import EndpointStatus, FleetEndpoint, Member
from worker.servers.places import Flight


class Fleet:
    """The endpoints of one worker. `clock` gives seconds and never goes back."""

    def __init__(self, endpoints: Sequence[FleetEndpoint], *, clock: Callable[[], float], rng: Random) -> None:
        self._members = {endpoint.name: Member(endpoint, clock=clock, rng=rng) for endpoint in endpoints}
        if not endpoints or len(self._members) != len(endpoints):
            raise ValueError(f"expected endpoints of different names, found {[found.name for found in endpoints]}")
        self._clock, self._rng = clock, rng

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

        A request that is not bound goes to another route where its own has no room. Endpoints in `avoid` get it only
        where no other is open, those in `barred` never. The caller says `began` before it asks again.
        """
        usable = [member for member in self._members.values() if member.is_open and member.endpoint.name not in barred]
        usable = [member for member in usable if not is_bound or member.endpoint.drafter == drafter]
        usable = [member for member in usable if member.endpoint.name not in avoid] or usable
        if alone:
            usable = [member for member in usable if not member.places.num_in_flight]
        own = [member for member in usable if member.endpoint.drafter == drafter]
        return self._least_loaded(own) or self._least_loaded(usable)

    def began(self, name: str, *, alone: bool = False) -> Flight:
        """A request goes to the endpoint now. The flight is handed back to `ended`, however the request ends."""
        return self._members[name].places.add(name, is_alone=alone)

    def ended(self, flight: Flight) -> float:
        """A request ended or was given up: the mean number in flight there while it was, itself included."""
        return self._members[flight.endpoint].places.remove(flight)

    def succeeded(self, name: str) -> None:
        """A request was finished there."""
        self._members[name].succeeded()

    def failed(self, name: str, error: AlphaloopError) -> None:
        """A request failed there. Not called for one that was cancelled or is over its deadline."""
        self._members[name].failed(error)

    def retired(self, name: str, reason: str) -> None:
        """Another model or other settings stand behind the endpoint's address: it is out until a person looks."""
        self._members[name].circuit.retire(reason)

    def due_tests(self) -> tuple[str, ...]:
        """Endpoints to test now. Each is under test until the caller says `tested`.

        A test should ask for a short text: servers whose engine has died may still list their models.
        """
        due = tuple(name for name, member in self._members.items() if member.circuit.is_test_due())
        for name in due:
            self._members[name].circuit.test_begins()
        return due

    def tested(self, name: str, error: AlphaloopError | None) -> None:
        """The test of the endpoint ended; None: it passed."""
        self._members[name].tested(error)

    def next_change_s(self) -> float | None:
        """Seconds until time alone changes something: a test is due, or a pause ends. None: nothing is pending."""
        now = self._clock()
        tests = [member.circuit.test_due_s for member in self._members.values()]
        pauses = [member.places.paused_until_s for member in self._members.values() if member.places.is_paused]
        moments = [moment for moment in tests if moment is not None] + pauses
        return max(0.0, min(moments) - now) if moments else None

    @property
    def num_in_flight(self) -> int:
        """Requests that began and have not ended."""
        return sum(member.places.num_in_flight for member in self._members.values())

    @property
    def num_places(self) -> int:
        """Requests that may be in flight now, at all endpoints that are open."""
        return sum(member.places.limit for member in self._members.values() if member.is_open)

    def unavailable(self) -> str | None:
        """Why no job can be sent at all, in words; None where an endpoint is up, if only busy."""
        if any(member.circuit.state in ("up", "doubted") for member in self._members.values()):
            return None
        said = [
            f"{status.name} is {status.state} for {status.since_s:.0f} s ({status.reason})"
            for status in self.statuses()
        ]
        return f"no inference server can be sent jobs: {'; '.join(said)}"

    def statuses(self) -> tuple[EndpointStatus, ...]:
        """How each endpoint is."""
        return tuple(member.status(is_for_suspect=False) for member in self._members.values())

    def _least_loaded(self, members: Sequence[Member]) -> str | None:
        free = [member for member in members if member.has_room]
        if not free:
            return None
        least = min(member.load for member in free)
        return self._rng.choice([member for member in free if member.load == least]).endpoint.name
