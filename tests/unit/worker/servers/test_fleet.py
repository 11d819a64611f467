"""A fleet: where requests go, what outcomes say of endpoints, and what holds under any order of calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import EndpointStatus
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
from tests.fixtures.simulated import Clock, server_of
from worker.servers.fleet import ASKS_AGAIN_S, Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.load import NEITHER, Flight, RequestKind
from worker.servers.request_body import AskedDrafts

PLAIN = server_of("plain", None, 0, 4)
PLAIN_2 = server_of("plain-2", None, 0, 4)
NGRAM = server_of("ngram", "ngram", 4, 4)
NGRAM_2 = server_of("ngram-2", "ngram", 4, 4)
BOTH = server_of("both", "ngram", 4, 4, switches_drafts=True)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fleet_of(clock: Clock, *endpoints: InferenceServer, seed: int = 0) -> Fleet:
    return Fleet(endpoints, clock=clock, rng=Random(seed))


def state_of(fleet: Fleet) -> str:
    return fleet.statuses()[0].state


def limit_of(fleet: Fleet) -> int:
    return fleet.statuses()[0].limit


def pass_test(fleet: Fleet, clock: Clock, *, after_s: float = 0.0) -> None:
    clock.pass_s(after_s)
    for name in fleet.due_tests():
        fleet.tested(name, None)


def test_a_job_avoids_where_it_failed_unless_nothing_else_is_open(clock: Clock) -> None:
    fleet = fleet_of(clock, PLAIN, PLAIN_2)
    assert {fleet.choose(None, is_bound=True, avoid={"plain"}) for _ in range(20)} == {"plain-2"}
    fleet.failed("plain-2", ServerUnavailable())
    assert fleet.choose(None, is_bound=True, avoid={"plain"}) == "plain"


def test_an_endpoint_that_cannot_follow_a_jobs_settings_never_gets_it(clock: Clock) -> None:
    fleet = fleet_of(clock, PLAIN, NGRAM)
    assert {fleet.choose("ngram", is_bound=False, barred={"ngram"}) for _ in range(20)} == {"plain"}
    assert fleet.choose(None, is_bound=False, barred={"plain", "ngram"}) is None


@pytest.mark.parametrize("error", [ServerUnavailable("away"), ServerLoginRefused("no key")])
def test_a_server_that_is_away_is_tested_with_longer_and_longer_waits(clock: Clock, error: AlphaloopError) -> None:
    fleet = fleet_of(clock, PLAIN)
    fleet.failed("plain", error)
    assert state_of(fleet) == "down"
    assert fleet.choose(None, is_bound=False) is None
    waits_s = []
    for _ in range(8):
        assert fleet.due_tests() == ()
        wait_s = fleet.next_change_s()
        waits_s.append(wait_s)
        clock.pass_s(wait_s)
        assert fleet.due_tests() == ("plain",)
        assert fleet.due_tests() == (), "one test at a time"
        assert fleet.next_change_s() is None
        fleet.failed("plain", error)  # a request that was on its way says nothing new
        assert fleet.due_tests() == ()
        fleet.tested("plain", error)
    for wait_s, longest_s in zip(waits_s, (1, 2, 4, 8, 16, 30, 30, 30), strict=True):
        assert longest_s / 2 <= wait_s <= longest_s
    assert len({wait_s / longest_s for wait_s, longest_s in zip(waits_s[-3:], (30, 30, 30), strict=True)}) == 3


def test_a_server_that_is_back_starts_slowly(clock: Clock) -> None:
    fleet = fleet_of(clock, server_of("plain", None, 0, 64))
    fleet.failed("plain", ServerUnavailable())
    pass_test(fleet, clock, after_s=1.0)
    limits = []
    for _ in range(8):
        limits.append((state_of(fleet), limit_of(fleet)))
        clock.pass_s(1.0)
    assert limits == [("starting", 2**power) for power in range(6)] + [("up", 64)] * 2


@pytest.mark.parametrize("error", [ServerFailed(), ReplyCut(), ServerSilent(), ReplyInvalid()])
def test_a_doubted_server_gets_nothing_until_its_test_has_passed(clock: Clock, error: AlphaloopError) -> None:
    fleet = fleet_of(clock, PLAIN)
    fleet.failed("plain", error)
    fleet.members["plain"].succeeded()
    assert state_of(fleet) == "doubted"
    assert fleet.choose(None, is_bound=False) is None
    assert fleet.unavailable() is None
    assert fleet.due_tests() == ("plain",)
    fleet.tested("plain", None)
    assert (state_of(fleet), limit_of(fleet)) == ("up", 4), "nothing was wrong with it"


def test_a_doubted_server_that_fails_its_test_is_down(clock: Clock) -> None:
    fleet = fleet_of(clock, PLAIN)
    fleet.failed("plain", ServerFailed())
    assert fleet.due_tests() == ("plain",)
    fleet.tested("plain", ServerFailed("the server answered 500"))
    assert state_of(fleet) == "down"
    clock.pass_s(1.5)
    assert fleet.unavailable() == (
        "no inference server can be sent jobs: plain is down for 2 s (the server answered 500)"
    )
    pass_test(fleet, clock)
    assert (state_of(fleet), limit_of(fleet)) == ("starting", 1)


def test_replies_that_are_invalid_in_a_row_open_the_circuit_whatever_tests_say(clock: Clock) -> None:
    fleet = fleet_of(clock, PLAIN)
    for _ in range(2):
        fleet.failed("plain", ReplyInvalid())
        pass_test(fleet, clock)
    assert state_of(fleet) == "up"
    fleet.failed("plain", ReplyInvalid("usage: missing"))
    assert state_of(fleet) == "down"


def test_a_busy_server_is_sent_half_as_many_and_nothing_for_as_long_as_it_asks(clock: Clock) -> None:
    fleet = fleet_of(clock, server_of("plain", None, 0, 60))
    flights = [fleet.began("plain") for _ in range(60)]
    for flight in flights[40:]:  # twenty are refused at once: that counts once
        fleet.ended(flight)
        fleet.failed("plain", ServerBusy(retry_after_s=5.0))
    assert (state_of(fleet), limit_of(fleet)) == ("busy", 0)
    assert fleet.unavailable() is None
    assert fleet.next_change_s() == pytest.approx(5.0)
    clock.pass_s(5.0)
    assert limit_of(fleet) == 29
    fleet.members["plain"].succeeded()
    clock.pass_s(10.0)
    assert limit_of(fleet) == pytest.approx(39, abs=1), "one of 60 places more each second"
    clock.pass_s(60.0)
    assert (state_of(fleet), limit_of(fleet)) == ("up", 60)


def test_a_server_that_is_busy_again_and_again_is_down(clock: Clock) -> None:
    fleet = fleet_of(clock, PLAIN)
    pauses_s = []
    while state_of(fleet) != "down":
        fleet.failed("plain", ServerBusy())
        if state_of(fleet) == "busy":
            pauses_s.append(fleet.next_change_s() or 0.0)
            clock.pass_s(max(pauses_s[-1], 1.0))
    assert len(pauses_s) == 5
    for pause_s, longest_s in zip(pauses_s, (1, 2, 4, 8, 16), strict=True):
        assert longest_s / 2 <= pause_s <= longest_s
    clock.pass_s(30.0)
    assert fleet.due_tests() == ("plain",)
    fleet.tested("plain", ServerBusy())
    assert state_of(fleet) == "down"


def test_a_mistaken_retry_after_does_not_keep_a_server_out_for_a_day(clock: Clock) -> None:
    fleet = fleet_of(clock, PLAIN)
    fleet.failed("plain", ServerBusy(retry_after_s=86_400.0))
    assert fleet.next_change_s() == pytest.approx(600.0)


def test_a_route_is_away_where_all_its_endpoints_are_or_asked_for_a_long_quiet(clock: Clock) -> None:
    fleet = fleet_of(clock, PLAIN, PLAIN_2, NGRAM)
    fleet.failed("plain", ServerUnavailable())
    assert not fleet.is_away(None, is_bound=True)
    fleet.failed("plain-2", ServerBusy(retry_after_s=4.0))
    assert not fleet.is_away(None, is_bound=True), "soon back"
    fleet.failed("plain-2", ServerBusy(retry_after_s=60.0))
    assert fleet.is_away(None, is_bound=True)
    assert not fleet.is_away(None, is_bound=False)
    assert fleet.is_away(None, is_bound=False, barred={"ngram"})
    clock.pass_s(58.0)
    assert not fleet.is_away(None, is_bound=True)


@pytest.mark.parametrize(
    ("drafter", "k", "asked"),
    [(None, None, 0), ("ngram", 1, 1), ("ngram", 3, 3), ("ngram", 4, None), ("ngram", None, None), ("eagle", 2, None)],
)
def test_a_request_asks_an_endpoint_that_switches_drafts_for_the_k_of_its_decision(
    clock: Clock, drafter: str | None, k: int | None, asked: int | None
) -> None:
    fleet = fleet_of(clock, BOTH)
    assert fleet.statuses()[0].is_obeying
    expected = None if asked is None else AskedDrafts(asked)
    assert fleet.began("both", drafter=drafter, num_draft_tokens=k).asked == expected
    fleet.switches("both", obeys=False)
    assert not fleet.statuses()[0].is_obeying
    assert fleet.began("both", drafter=drafter, num_draft_tokens=k).asked is None


@pytest.mark.parametrize(
    ("drafter", "k", "asked"),
    [
        (None, None, AskedDrafts(0)),
        ("small", 3, AskedDrafts(3)),
        ("small", None, AskedDrafts(4)),
        ("lookup", 9, AskedDrafts(9, is_lookup=True)),
        ("lookup", None, AskedDrafts(12, is_lookup=True)),
        ("elsewhere", 7, AskedDrafts(4)),
    ],
)
def test_a_request_asks_a_server_with_two_drafters_for_either_up_to_the_k_of_that_drafter(
    clock: Clock, drafter: str | None, k: int | None, asked: AskedDrafts
) -> None:
    both = server_of("both", "small", 12, 4, switches_drafts=True, lookup=DrafterState("lookup", "r1", 12))
    server = replace(both, drafter=DrafterState("small", "r1", 4))
    fleet = fleet_of(clock, server)
    choose = partial(fleet.choose, is_bound=True)
    assert [choose(route) for route in ("small", "lookup", None)] == ["both"] * 3
    assert fleet.began("both", drafter=drafter, num_draft_tokens=k).asked == asked
    assert {each.name: each.max_draft_tokens for each in fleet.drafters()} == {"small": 4, "lookup": 12}
    assert server.drafting(asked) == {None: None, "lookup": server.lookup}.get(drafter, server.drafter)
    fleet.switches("both", obeys=False)
    assert fleet.began("both", drafter=drafter, num_draft_tokens=k).asked is None
    as_started = server.drafting(None)
    assert as_started is not None
    assert (as_started.name, as_started.least_draft_tokens, as_started.max_draft_tokens) == ("small", 12, 12)
    assert next(each for each in fleet.drafters() if each.name == "small") == as_started


@pytest.mark.parametrize("other", [RequestKind(is_sampled=True), RequestKind(is_adapted=True)])
def test_requests_take_turns_at_an_endpoint_whose_texts_are_other_ones_beside_a_kind(
    clock: Clock, other: RequestKind
) -> None:
    fleet = fleet_of(clock, replace(NGRAM, keeps_apart=other))
    choose = partial(fleet.choose, "ngram", is_bound=True)
    plain = [fleet.began(name, kind=NEITHER) for _ in range(2) if (name := choose(kind=NEITHER))]
    assert len(plain) == 2
    assert choose(kind=other) is None
    assert choose(kind=NEITHER) is None, "it would keep the other one waiting"
    for flight in plain:
        fleet.ended(flight)
    others = [fleet.began(name, kind=other) for _ in range(2) if (name := choose(kind=other))]
    assert len(others) == 2
    assert choose(kind=NEITHER) is None
    for flight in others:
        fleet.ended(flight)
    # The plain one that waited was cancelled.
    flight = fleet.began(choose(kind=other) or "", kind=other)
    assert choose(kind=other) == "ngram"
    fleet.ended(flight)
    assert choose(kind=NEITHER) == "ngram"

    fleet = fleet_of(clock, replace(NGRAM, keeps_apart=other), NGRAM_2)
    fleet.began("ngram", kind=other)
    for _ in range(3):
        assert fleet.choose("ngram", is_bound=True, kind=NEITHER) == "ngram-2"
    assert {fleet.choose("ngram", is_bound=True, kind=other) for _ in range(20)} == {"ngram-2"}, "the least loaded"
    for _ in range(2):
        fleet.began("ngram-2")
    assert fleet.choose("ngram", is_bound=True, kind=other) == "ngram", "no request waits for its turn"


def test_requests_are_kept_apart_by_what_changes_texts_there_and_by_nothing_else(clock: Clock) -> None:
    kinds = [RequestKind(sampled, adapted) for sampled in (False, True) for adapted in (False, True)]
    for keeps_apart, first, second in product(kinds, kinds, kinds):
        fleet = fleet_of(clock, replace(NGRAM, keeps_apart=keeps_apart))
        fleet.began("ngram", kind=first)
        differs = any(one != other and apart for one, other, apart in zip(first, second, keeps_apart, strict=True))
        assert (fleet.choose("ngram", is_bound=True, kind=second) is None) == differs, (keeps_apart, first, second)


def test_an_endpoint_is_the_last_of_its_route_if_nobody_else_has_one_of_its_two(clock: Clock) -> None:
    for others, kept in (((PLAIN,), "plain"), ((NGRAM,), "ngram")):
        fleet = fleet_of(clock, BOTH, *others)
        fleet.choose(None, is_bound=False, alone=True)
        assert [name for name, member in fleet.members.items() if member.is_kept] == [kept]


def ask_alone(fleet: Fleet, *, is_bound: bool = False) -> str | None:
    """Ask as a suspect does; the tests that are asked for pass."""
    if (name := fleet.choose(None, is_bound=is_bound, alone=True)) is not None:
        return name
    for due in fleet.due_tests():
        fleet.tested(due, None)
    return fleet.choose(None, is_bound=is_bound, alone=True)


def test_an_endpoint_is_tested_just_before_a_suspect_goes_there(clock: Clock) -> None:
    fleet = fleet_of(clock, PLAIN, PLAIN_2)
    assert fleet.choose(None, is_bound=False, alone=True) is None
    assert fleet.next_change_s() == 0
    (name,) = fleet.due_tests()
    fleet.tested(name, None)
    assert fleet.choose(None, is_bound=False, alone=True) == name
    clock.pass_s(6.0)
    assert fleet.choose(None, is_bound=False, alone=True) is None
    assert fleet.due_tests() == (name,)


def test_a_suspect_rather_takes_no_routes_only_endpoint(clock: Clock) -> None:
    for seed_s in range(10):
        clock.pass_s(float(seed_s))
        assert ask_alone(fleet_of(clock, PLAIN, NGRAM, NGRAM_2)) in ("ngram", "ngram-2")
    assert ask_alone(fleet_of(clock, PLAIN, NGRAM, NGRAM_2), is_bound=True) == "plain"


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
            f"s{number}": server_of(f"s{number}", DRAFTERS[number % 2], 4 * (number % 2), num)
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
        return status.num_in_flight < status.limit and not self.fleet.members[name].is_kept

    def has_route(self, drafter: str | None) -> bool:
        return drafter in {endpoint.drafter_name for endpoint in self.endpoints.values()}

    @rule(drafter=st.sampled_from(DRAFTERS), is_bound=st.booleans(), avoids=st.booleans())
    def send(self, drafter: str | None, is_bound: bool, avoids: bool) -> None:
        avoid = {self.rng.choice(list(self.endpoints))} if avoids else set()
        free = {name for name in self.endpoints if self.has_room(name)}
        own = {name for name in free if self.endpoints[name].drafter_name == drafter}
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
            if status.limit and name not in self.kept() and (drafter is ... or status.drafter == drafter)
        }

    def kept(self) -> set[str]:
        return {name for name, member in self.fleet.members.items() if member.is_kept and member.is_open}

    @rule(drafter=st.sampled_from(DRAFTERS), is_bound=st.booleans())
    def send_suspect(self, drafter: str | None, is_bound: bool) -> None:
        kept = self.kept()
        name = self.fleet.choose(drafter, is_bound=is_bound, alone=True)
        if self.kept() - kept:
            opened = [status for status in self.statuses.values() if status.limit]
            assert len(self.kept()) <= max(1, len(opened) // 2), "the fleet is left to others by half"
        if name is not None:
            assert self.statuses[name].num_in_flight == 0
            assert not is_bound or self.endpoints[name].drafter_name == drafter or not self.has_route(drafter)
            self.flights.append(self.fleet.began(name, alone=True))

    @precondition(lambda self: self.flights)
    @rule(which=st.integers(0, 1000), failure=st.sampled_from((None, None, *FAILURES)))
    def end(self, which: int, failure: AlphaloopError | None) -> None:
        flight = self.flights.pop(which % len(self.flights))
        mean = self.fleet.ended(flight).num_beside
        assert mean >= 1 - 1e-9
        assert not flight.is_alone or mean < 1 + 1e-9
        if failure is None:
            self.fleet.members[flight.endpoint].succeeded()
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
        waiting = [
            (drafter, alone) for drafter in {one.drafter_name for one in self.endpoints.values()} for alone in (0, 1)
        ]
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
