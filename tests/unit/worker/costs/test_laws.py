"""A law of times that is known is found again from times with errors, and its bounds hold it.

Rounds by draft length at servers that follow requests in it: right, sure as far as they should be, and monotone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.acceptance import Z95
from alphaloop.costs import CostKind, CostPoint
from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.goodput import DrafterState
from tests.fixtures.costs import ServerLaw, Store, answered, step_of
from tests.fixtures.deciding import choose, inferred
from tests.fixtures.simulated import Clock
from worker.costs.laws import Law, Time, fitted, usual
from worker.costs.learning import RequestCosts

NODES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SHAPE = tuple(1 + 0.05 * (load - 1) for load in NODES)
HALF_LIFE = 128


def linear(load: float, context: float) -> float:
    return 20.0 + 1.0 * load + 0.005 * context


def bent(load: float, context: float) -> float:
    """Nearly flat up to eight requests, then in proportion: a server whose device is full."""
    return 20.0 + 0.2 * load + 3.0 * max(0.0, load - 8)


def timed(seed: int, number: int, loads: Sequence[int], law: Callable[[float, float], float] = linear) -> list[Time]:
    rng, found = random.Random(seed), []
    for _ in range(number):
        load, context = rng.choice(loads), rng.uniform(50, 1500)
        found.append(Time(load, context, law(load, context) * math.exp(rng.gauss(0, 0.1)), (3 + load) / 4))
    return found


def fit(found: Sequence[Time]) -> Law:
    return fitted(NODES, found, usual(NODES, SHAPE, found, 0.3), HALF_LIFE)


@pytest.mark.parametrize("law", [linear, bent])
@pytest.mark.parametrize(("number", "within"), [(150, 0.10), (400, 0.07)])
def test_it_comes_within_a_tenth_and_its_bounds_hold_the_law(
    law: Callable[[float, float], float], number: int, within: float
) -> None:
    loads, errors, covered = (1, 2, 4, 8, 16), [], []
    for seed in range(20):
        found = fit(timed(seed, number, loads, law))
        for load in loads:
            for context in (256, 1024):
                told = found.at(load, context)
                error = told.mean - math.log(law(load, context))
                errors.append(abs(math.expm1(error)))
                covered.append(abs(error) <= Z95 * math.sqrt(told.variance))
    errors.sort()
    assert errors[int(0.95 * len(errors))] <= within
    assert sum(covered) / len(covered) >= 0.93


def test_what_lies_far_from_what_was_seen_is_doubtful() -> None:
    found = fit(timed(1, 200, (1, 2)))
    seen, far = found.at(1), found.at(32)
    assert math.sqrt(seen.variance) < 0.05
    assert math.sqrt(far.variance) > 0.3
    assert abs(far.mean - math.log(linear(32, 256))) <= Z95 * math.sqrt(far.variance)


def test_requests_that_stall_move_little() -> None:
    found = timed(2, 200, (1, 4, 8))
    stalled = [time._replace(ms=50 * time.ms) if number % 20 == 0 else time for number, time in enumerate(found)]
    for load in (1, 4, 8):
        assert math.exp(fit(stalled).at(load).mean) == pytest.approx(linear(load, 256), rel=0.1)


def test_with_few_times_a_law_is_that_of_its_prior() -> None:
    leading = fit(timed(5, 300, (1, 2, 4, 8, 16, 32)))
    own = [Time(4.0, 256.0, 2 * linear(4, 256), 4.0)] * 6
    leaning = fitted(NODES, own, leading.as_prior(1.25, 0.4, 0.2), HALF_LIFE)
    none = fitted(NODES, [], leading.as_prior(1.25, 0.4, 0.2), HALF_LIFE)
    for load in (1, 8, 32):
        assert none.at(load).mean - leading.at(load).mean == pytest.approx(math.log(1.25))
        assert 1.6 < math.exp(leaning.at(load).mean - leading.at(load).mean) < 2.1
    assert leaning.at(4).variance < none.at(4).variance


FIXED = DrafterState("lookup", "r1", 4, least_draft_tokens=4)
FREE = DrafterState("lookup", "r1", 4)
VANILLA = ServerLaw(20.0, 1.0, 0.005)
LOADS = (1, 2, 4, 8)


def even(k: int) -> ServerLaw:
    """Every drafted token takes as much, and more with more requests: a pass that computes."""
    return ServerLaw(20.0 + 3.0 * k, 1.0 + 0.5 * k, 0.005)


def flat(k: int) -> ServerLaw:
    """Drafting takes a time of its own, and the pass as long at any width: one that reads weights."""
    return ServerLaw(30.0, 1.5, 0.005) if k else VANILLA


def steep(k: int) -> ServerLaw:
    """One token is almost free, further ones are not."""
    return ServerLaw(20.0 + 5.0 * max(0, k - 1), 1.0, 0.005)


def made(drafter: DrafterState = FREE, points: Sequence[CostPoint] = (), store: Store | None = None) -> RequestCosts:
    return RequestCosts([drafter], points, most_in_flight=8, half_life=32, save=store or Store(), clock=Clock(0.0))


def serve(
    costs: RequestCosts,
    number: int,
    law: Callable[[int], ServerLaw],
    lengths: Sequence[int],
    *,
    seed: int = 0,
) -> None:
    """`number` vanilla requests, and as many of each of these lengths; no table is asked for between them."""
    rng = random.Random(seed)
    for _ in range(number):
        costs.observe(step_of([answered(rng, VANILLA, rng.choice(LOADS))]))
        for k in lengths:
            found = answered(rng, law(k), rng.choice(LOADS), drafter="lookup", k=k, tokens_per_round=2.0)
            costs.observe(step_of([found]))


def ms_of(costs: RequestCosts, k: int, load: float = 4) -> float:
    return costs.table.rounds(load, 500).round_ms("lookup", k)  # type: ignore[return-value]


def test_a_shorter_draft_is_assumed_between_vanilla_and_the_longest() -> None:
    costs = made()
    serve(costs, 60, even, [4])
    here = costs.table.rounds(4, 256)
    vanilla, longest = here.part_ms(None, 1), here.round_ms("lookup", 4)
    for k in (1, 2, 3):
        even_ms = vanilla + (longest - vanilla) * k / 4
        found = here.round_ms("lookup", k)
        assert even_ms <= found <= even_ms + 0.1 * (longest - vanilla), "no length is put below vanilla"
    assert here.variance("lookup", 2) > 2 * here.variance("lookup", 5), "nobody has asked for it"


@pytest.mark.parametrize("law", [even, flat, steep])
@pytest.mark.parametrize("seed", range(2))
def test_the_shortest_and_the_longest_draft_are_learned_within_a_tenth(
    law: Callable[[int], ServerLaw], seed: int
) -> None:
    costs = made()
    serve(costs, 80, law, [1, 4], seed=seed)
    points = {(point.batch, point.width): point for point in costs.table.points if point.context == 256}
    for load in LOADS:
        for k in (1, 4):
            assert ms_of(costs, k, load) == pytest.approx(law(k).round_ms(load, 500), rel=0.1)
            point = points[load, k + 1]
            off = abs(math.log(point.ms / law(k).round_ms(load, 256)))
            assert off <= 1.2 * Z95 * math.sqrt(point.correction_variance)


@pytest.mark.parametrize("law", [even, flat, steep])
@pytest.mark.parametrize(("known", "unknown"), [(1, 4), (4, 1)])
def test_requests_of_one_length_leave_the_others_in_doubt(
    law: Callable[[int], ServerLaw], known: int, unknown: int
) -> None:
    costs = made()
    serve(costs, 60, law, [known])
    here = costs.table.rounds(4, 500)
    assert ms_of(costs, known) == pytest.approx(law(known).round_ms(4, 500), rel=0.1)
    sd, other_sd = (math.sqrt(here.variance("lookup", k + 1)) for k in (known, unknown))
    assert sd < 0.1 < other_sd
    off = abs(math.log(ms_of(costs, unknown) / law(unknown).round_ms(4, 500)))
    assert off < 1.2 * Z95 * other_sd


def test_what_was_stored_of_lengths_is_where_the_next_worker_begins() -> None:
    store = Store()
    costs = made(store=store)
    serve(costs, 60, flat, [4])
    assert costs.save()
    assert {point.width for point in store.saved[-1] if point.kind is CostKind.SERVED} == {5}, "nothing assumed"
    serve(costs, 60, flat, [1, 4], seed=1)
    assert costs.save()
    points = store.saved[-1]
    assert {point.width for point in points if point.kind is CostKind.SERVED} == {2, 5}
    again = made(points=points)
    for k in (1, 2, 4):
        assert ms_of(again, k) == pytest.approx(ms_of(costs, k), rel=0.05)
    assert ms_of(made(FIXED, points), 4) == pytest.approx(ms_of(costs, 4), rel=0.1), "settings may change"


@pytest.mark.parametrize(("alpha", "k"), [(0.9, 4), (0.35, 1), (0.05, 0)])
def test_tasks_of_different_acceptance_get_different_lengths(alpha: float, k: int) -> None:
    costs = made()
    serve(costs, 80, even, [1, 2, 4])
    known = {"lookup": inferred(alpha, k=4, sd=1e-3)}
    decision = choose(known, drafters=[FREE], costs=costs.table, prompt_tokens=200.0)
    assert decision.setting == (DraftSetting("lookup", k) if k else DraftSetting())
    assert {one.num_draft_tokens for one in decision.alternatives} == {0, 1, 2, 3, 4}
    assert not decision.settings_by_running
    assert not decision.posteriors, "it stays as it began"


TIMES = st.lists(
    st.builds(
        Time,
        st.floats(1, 8),
        st.floats(10, 3000),
        st.floats(1, 200),
        st.floats(0.2, 5),
        st.booleans(),
        st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=30)
@given(vanilla=TIMES, drafted=TIMES, context=st.floats(10, 3000), load=st.floats(1, 8))
def test_whatever_was_timed_no_longer_draft_is_faster_and_nothing_is_certain(
    vanilla: list[Time], drafted: list[Time], context: float, load: float
) -> None:
    target = fit([time._replace(length=1.0) for time in vanilla])
    prior = target.as_prior(1.25, 0.4, 0.2)
    for counted in (drafted, [time._replace(length=1.0) for time in drafted], []):
        law = fitted(NODES, counted, prior, HALF_LIFE, target)
        found = [law.at(load, context, length=k / 4) for k in (1, 2, 3, 4)]
        assert all(math.isfinite(one.mean) and one.variance > 0 for one in found)
        assert all(one.mean <= other.mean + 1e-12 for one, other in pairwise(found))
        assert float(law.weights.sum()) == pytest.approx(1.0)


def test_a_request_is_counted_at_no_longer_draft_than_its_route_has() -> None:
    """A server that was started again with another k has points of the one before."""
    costs = made()
    serve(costs, 40, even, [4])
    points = [replace(point, width=9) if point.width == 5 else point for point in costs.table.points]
    stored = [replace(point, num_samples=40, num_corrections=0) for point in points if point.width != 2]
    assert ms_of(made(points=stored), 4) == pytest.approx(ms_of(costs, 4), rel=0.05)
