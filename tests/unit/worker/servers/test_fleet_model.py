"""A fleet under any order of calls: limits hold, free places are found, suspects are alone, and everything ends."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alphaloop.errors import (
    AlphaloopError,
    PromptTooLong,
    ReplyCut,
    ReplyInvalid,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerLoginRefused,
    ServerSilent,
    ServerUnavailable,
    ServerUnreachable,
)
from tests.fixtures.simulated import Clock
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import EndpointStatus, FleetEndpoint
from worker.servers.health import ASKS_AGAIN_S
from worker.servers.load import Flight

FAILURES: tuple[AlphaloopError, ...] = (
    PromptTooLong(),
    RequestRefused(),
    ServerUnavailable(),
    ServerUnreachable(),
    ServerLoginRefused(),
    ServerSilent(),
    ServerFailed(),
    ReplyCut(),
    ReplyInvalid(),
    ServerBusy(),
    ServerBusy(retry_after_s=3.0),
)
DRAFTERS = (None, "ngram")


class FleetModel(RuleBasedStateMachine):
    """Calls a fleet as an engine does, in any order, and says what must hold whatever came before."""

    @initialize(seed=st.integers(0, 2**32), most=st.lists(st.integers(1, 5), min_size=1, max_size=4))
    def start(self, seed: int, most: list[int]) -> None:
        self.clock, self.rng = Clock(), Random(seed)
        self.endpoints = {
            f"s{number}": FleetEndpoint(f"s{number}", DRAFTERS[number % 2], 4 * (number % 2), num)
            for number, num in enumerate(most)
        }
        self.fleet = Fleet(list(self.endpoints.values()), clock=self.clock, rng=Random(seed))
        self.flights: list[Flight] = []
        self.tests: list[str] = []
        self.bound_waited_s = dict.fromkeys(DRAFTERS, -1e9)
        self.num_jobs = 0

    @property
    def statuses(self) -> dict[str, EndpointStatus]:
        return {status.name: status for status in self.fleet.statuses()}

    def has_room(self, name: str) -> bool:
        status = self.statuses[name]
        return status.num_in_flight < status.limit and not status.is_for_suspect

    def has_route(self, drafter: str | None) -> bool:
        return drafter in {endpoint.drafter for endpoint in self.endpoints.values()}

    @rule(drafter=st.sampled_from(DRAFTERS), is_bound=st.booleans(), avoids=st.booleans())
    def send(self, drafter: str | None, is_bound: bool, avoids: bool) -> None:
        avoid = {self.rng.choice(list(self.endpoints))} if avoids else set()
        free = {name for name in self.endpoints if self.has_room(name)}
        own = {name for name in free if self.endpoints[name].drafter == drafter}
        name = self.fleet.choose(drafter, is_bound=is_bound, avoid=avoid)
        # A route that no endpoint has binds nobody.
        is_bound = is_bound and self.has_route(drafter)
        is_awaited = max(self.bound_waited_s.values()) > self.clock() - ASKS_AGAIN_S
        if name is None:
            assert avoid or not own or (is_awaited and not is_bound), "a free place of the route was not found"
            assert avoid or not free or is_bound or is_awaited, "a free place of another route was not found"
            if is_bound:
                self.bound_waited_s[drafter] = self.clock()
            return
        assert name in (own if is_bound else free)
        assert name in own or avoid or is_awaited or not own, "another route, though the own one has room"
        assert name not in avoid or not (self.opened(drafter if is_bound else ...) - avoid)
        self.flights.append(self.fleet.began(name))

    def opened(self, drafter: object) -> set[str]:
        return {
            name
            for name, status in self.statuses.items()
            if status.limit and not status.is_for_suspect and (drafter is ... or status.drafter == drafter)
        }

    def kept(self) -> set[str]:
        return {name for name, status in self.statuses.items() if status.is_for_suspect and status.limit}

    @rule(drafter=st.sampled_from(DRAFTERS), is_bound=st.booleans())
    def send_suspect(self, drafter: str | None, is_bound: bool) -> None:
        kept = self.kept()
        name = self.fleet.choose(drafter, is_bound=is_bound, alone=True)
        if self.kept() - kept:
            opened = [status for status in self.statuses.values() if status.limit]
            assert len(self.kept()) <= max(1, len(opened) // 2), "the fleet is left to others by half"
        if name is not None:
            assert self.statuses[name].num_in_flight == 0
            assert not is_bound or self.endpoints[name].drafter == drafter or not self.has_route(drafter)
            self.flights.append(self.fleet.began(name, alone=True))

    @precondition(lambda self: self.flights)
    @rule(which=st.integers(0, 1000), failure=st.sampled_from((None, None, *FAILURES)))
    def end(self, which: int, failure: AlphaloopError | None) -> None:
        flight = self.flights.pop(which % len(self.flights))
        mean = self.fleet.ended(flight).num_beside
        assert mean >= 1 - 1e-9
        assert not flight.is_alone or mean < 1 + 1e-9
        if failure is None:
            self.fleet.succeeded(flight.endpoint)
            return
        self.fleet.failed(flight.endpoint, failure)
        if not self.fleet.needs_test(flight, failure):
            self.num_jobs += 1
            self.fleet.judge(f"job-{self.num_jobs % 5}", flight, failure)

    @rule(seconds=st.sampled_from((0.01, 0.5, 2.0, 7.0, 40.0)))
    def wait(self, seconds: float) -> None:
        self.clock.pass_s(seconds)

    @rule()
    def begin_tests(self) -> None:
        due = self.fleet.due_tests()
        assert not set(due) & set(self.tests), "one test at a time"
        self.tests += due

    @precondition(lambda self: self.tests)
    @rule(failure=st.sampled_from((None, None, ServerUnreachable(), ServerFailed(), ServerBusy())))
    def end_test(self, failure: AlphaloopError | None) -> None:
        self.fleet.tested(self.tests.pop(0), failure)

    @invariant()
    def limits_hold(self) -> None:
        for name, status in self.statuses.items():
            assert 0 <= status.limit <= self.endpoints[name].max_requests
            assert 0 <= status.num_in_flight <= self.endpoints[name].max_requests
            assert status.state in ("up", "starting", "busy") or status.limit == 0

    @invariant()
    def suspects_are_alone(self) -> None:
        for flight in self.flights:
            if flight.is_alone:
                assert sum(other.endpoint == flight.endpoint for other in self.flights) == 1

    def teardown(self) -> None:
        """Once servers answer again, both kinds of requests find a place, bound ones and suspects too."""
        if not hasattr(self, "fleet"):
            return
        for flight in self.flights:
            self.fleet.ended(flight)
        for name in self.tests:
            self.fleet.tested(name, None)
        waiting = [(drafter, alone) for drafter in {one.drafter for one in self.endpoints.values()} for alone in (0, 1)]
        for _ in range(200):
            self.clock.pass_s(1.0)
            for name in self.fleet.due_tests():
                self.fleet.tested(name, None)
            for drafter, alone in list(waiting):
                name = self.fleet.choose(drafter, is_bound=True, alone=bool(alone))
                if name is not None:
                    waiting.remove((drafter, alone))
                    self.fleet.ended(self.fleet.began(name, alone=bool(alone)))
        assert not waiting
        assert self.fleet.unavailable() is None


TestFleetModel = FleetModel.TestCase
TestFleetModel.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=60)
