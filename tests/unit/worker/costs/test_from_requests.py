"""Costs of servers from traffic alone: right, sure as far as they should be, stored, and good enough to decide by."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from alphaloop.acceptance import Z95
from alphaloop.costs import PRIOR_SD, CostKind, CostPoint
from alphaloop.deciding.decision import Reason
from alphaloop.deciding.goodput import DrafterState
from tests.fixtures.costs import ServerLaw, Store, answered, step_of
from tests.fixtures.deciding import choose, inferred
from tests.fixtures.simulated import Clock
from worker.costs.learning import ASSUMED_RATIO, RequestCosts

NGRAM = DrafterState("ngram", "r1", 4, least_draft_tokens=4)
VANILLA_LAW = ServerLaw(20.0, 1.0, 0.005)
NGRAM_LAW = ServerLaw(26.0, 4.0, 0.008)
LOADS = (1, 2, 4, 8, 16)
TOKENS = 2.2  #: a round of ngram


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def store() -> Store:
    return Store()


def made(store: Store, clock: Clock, points: Sequence[CostPoint] = ()) -> RequestCosts:
    return RequestCosts([NGRAM], points, most_in_flight=32, half_life=32, save=store, clock=clock)


def serve(
    costs: RequestCosts,
    clock: Clock,
    number: int,
    *,
    seed: int = 0,
    routes: Sequence[str | None] = (None, "ngram"),
    slower: float = 1.0,
) -> None:
    rng = random.Random(seed)
    for _ in range(number):
        for route in routes:
            law = VANILLA_LAW if route is None else NGRAM_LAW
            law = replace(law, fixed_ms=slower * law.fixed_ms, each_ms=slower * law.each_ms)
            ways = {"drafter": "ngram", "k": 4, "tokens_per_round": TOKENS} if route else {}
            costs.observe(step_of([answered(rng, law, rng.choice(LOADS), **ways)]))  # type: ignore[arg-type]
        costs.save_when_due()
        clock.now_s += 0.5


def test_before_any_request_nothing_is_known(store: Store, clock: Clock) -> None:
    costs = made(store, clock)
    assert not costs.table.points
    assert costs.parts == (None, "ngram")
    assert (costs.level(None), costs.level("ngram"), costs.read_s(100)) == (1.0, 1.0, 0.0)
    assert not costs.save()
    assert choose({"ngram": inferred(0.7, k=4)}, drafters=[NGRAM], costs=costs.table).reason is Reason.NO_COSTS


@pytest.mark.parametrize("seed", range(2))
def test_a_hundred_requests_a_route_tell_rounds_within_a_tenth_at_every_load(
    store: Store, clock: Clock, seed: int
) -> None:
    costs = made(store, clock)
    serve(costs, clock, 100, seed=seed)
    points = {(p.drafter, p.batch, p.context, p.kind): p for p in costs.table.points}
    covered = []
    for drafter, law, kind in ((None, VANILLA_LAW, CostKind.ROUND), ("ngram", NGRAM_LAW, CostKind.SERVED)):
        for load in LOADS:
            ms = costs.table.rounds(load, 500).part_ms(drafter, 5 if drafter else 1)
            assert ms == pytest.approx(law.round_ms(load, 500), rel=0.1)
            point = points[drafter, load, 256, kind]
            off = abs(math.log(point.ms / law.round_ms(load, 256)))
            covered.append(off <= Z95 * math.sqrt(point.correction_variance))
        for num_tokens in (100, 400, 700):
            assert costs.table.prefill_ms(drafter, num_tokens) == pytest.approx(0.1 * num_tokens, rel=0.15)
    assert sum(covered) >= len(covered) - 1
    assert costs.read_s(400) == pytest.approx(0.04, rel=0.15)


@pytest.mark.parametrize(("asked", "other"), [(None, "ngram"), ("ngram", None)])
def test_a_route_without_requests_is_assumed_and_doubtful(
    store: Store, clock: Clock, asked: str | None, other: str | None
) -> None:
    costs = made(store, clock)
    serve(costs, clock, 60, routes=[asked])
    here = costs.table.rounds(4)
    assert here.part_ms("ngram", 5) == pytest.approx(ASSUMED_RATIO * here.part_ms(None, 1), rel=0.01)
    assert math.sqrt(here.variance(other)) >= 0.9 * PRIOR_SD > 2 * math.sqrt(here.variance(asked))
    assert costs.save()
    assert {point.drafter for point in store.saved[-1]} == {asked}, "what is assumed is not stored"


def test_doubt_grows_while_a_route_gets_no_requests(store: Store, clock: Clock) -> None:
    costs = made(store, clock)
    serve(costs, clock, 100)
    before = costs.table.rounds(4)
    for _ in range(60):
        clock.now_s += 10.0
        serve(costs, clock, 1, routes=[None])
    after = costs.table.rounds(4)
    assert math.sqrt(before.variance("ngram")) < 0.12
    assert math.sqrt(after.variance("ngram")) > 0.3
    assert after.variance(None) < 1.5 * before.variance(None)
    assert after.part_ms("ngram", 5) == pytest.approx(before.part_ms("ngram", 5), rel=0.05)


def test_what_was_stored_is_where_the_next_worker_begins(store: Store, clock: Clock) -> None:
    costs = made(store, clock)
    serve(costs, clock, 100)
    assert costs.save()
    assert not costs.save(), "no news"
    points = store.saved[-1]
    assert all(point.correction == 1.0 and point.num_samples == 100 for point in points)
    again = made(store, clock, points)
    for load in LOADS:
        for drafter, width in ((None, 1), ("ngram", 5)):
            now, then = (one.table.rounds(load, 600).part_ms(drafter, width) for one in (again, costs))
            assert now == pytest.approx(then, rel=0.05)
    # Stored values are times like others: where the server has changed, requests outweigh them.
    first = again.level("ngram")
    assert first == pytest.approx(1.0, rel=0.3)
    serve(again, clock, 150, seed=2, slower=2.0)
    assert again.level("ngram") > 1.6 * first
    assert again.table.rounds(4).part_ms("ngram", 5) == pytest.approx(86.0, rel=0.1)


def test_a_database_that_is_away_is_tried_again(store: Store, clock: Clock) -> None:
    costs = made(store, clock)
    serve(costs, clock, 20)
    store.is_away = True
    assert not costs.save()
    store.is_away = False
    assert not costs.save_when_due()
    clock.now_s += 60.0
    assert costs.save_when_due()


@pytest.mark.parametrize("seed", range(2))
def test_after_some_traffic_the_better_route_is_chosen_at_every_load(store: Store, clock: Clock, seed: int) -> None:
    """The laws cross: drafts pay while few requests are in flight. Within a tenth both routes are the same."""
    costs = made(store, clock)
    serve(costs, clock, 150, seed=seed)
    posteriors = {"ngram": inferred(0.5, k=4, sd=1e-3)}
    tokens = posteriors["ngram"].tokens[4]
    chosen = []
    for num_running in range(1, 17):
        asked = {"num_running": num_running, "expected_tokens": 80.0, "prompt_tokens": 400.0}
        decision = choose(posteriors, drafters=[NGRAM], costs=costs.table, **asked)

        def job_ms(law: ServerLaw, tokens_per_round: float, load: int = num_running) -> float:
            return law.prompt_ms * 400 + 80 * law.round_ms(load, 440) / tokens_per_round

        speedup = job_ms(VANILLA_LAW, 1.0) / job_ms(NGRAM_LAW, tokens)
        if abs(math.log(speedup)) > 0.1:
            assert (decision.drafter is not None) == (speedup > 1), num_running
            chosen.append(decision.drafter)
        way = next(a for a in decision.alternatives if a.drafter == "ngram")
        assert way.speedup_low / 1.05 <= speedup <= way.speedup_high * 1.05
    assert set(chosen) == {None, "ngram"}


def test_a_server_that_tells_only_sums_tells_its_rounds(store: Store, clock: Clock) -> None:
    rng, costs = random.Random(3), made(store, clock)
    for _ in range(80):
        exact = answered(rng, NGRAM_LAW, 4, drafter="ngram", k=4, tokens_per_round=TOKENS)
        num_rounds = exact.served.num_rounds or 0
        sums = replace(
            exact.served, num_rounds=None, granularity="sums", num_proposed=100, num_accepted=80 - num_rounds
        )
        costs.observe(step_of([replace(exact, served=sums)]))
        untold = replace(exact.served, num_rounds=None, granularity="nothing", decode_s=1e6)
        costs.observe(step_of([replace(exact, served=untold)]))
    assert costs.table.rounds(4).part_ms("ngram", 5) == pytest.approx(NGRAM_LAW.round_ms(4), rel=0.1)


def test_decisions_do_not_wait_for_a_fit_but_see_the_first_times_at_once(store: Store, clock: Clock) -> None:
    costs, rng = made(store, clock), random.Random(0)

    def answer(slower: float) -> float:
        law = replace(VANILLA_LAW, fixed_ms=slower * VANILLA_LAW.fixed_ms)
        costs.observe(step_of([answered(rng, law, 1)]))
        clock.now_s += 2.0
        return costs.table.rounds(1).round_ms(None, 0) or 0.0

    assert answer(1.0) != answer(1.0), "each of the first times is in the table"
    for _ in range(20):
        known = answer(1.0)
    assert answer(9.0) == known, "a later one waits for a turn without a decision"
    costs.save_when_due()
    assert costs.table.rounds(1).round_ms(None, 0) != known
