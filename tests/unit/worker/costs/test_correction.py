"""Costs of shapes: how they are calibrated, and how rounds correct them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.costs import (
    HALF_LIFE_ROUNDS,
    HALF_LIFE_S,
    PRIOR_SD,
    CostKind,
    CostPoint,
    CostTable,
    LogEstimate,
    with_shared_weights,
)
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import EndpointStatus, SuspectCounts
from alphaloop.errors import DecodeFailed
from alphaloop.measurements import UnansweredAlarm
from alphaloop.settings import WorkerSettings
from tests.fakes import FakeEngine
from worker.costs.calibration import NUM_PASSES, Plan, Shape, calibrate, calibrate_servers, plan, timed_by
from worker.costs.correction import Correction, ExponentialMedian, Moment

HALF_LIFE = 32
NOW = Moment(0.0, 0)
SIZES = ("narrow", "wide", "seldom")

ratios = st.floats(1e-3, 1e3)


class OfTheTarget(Correction[str]):
    """Of the target, which takes part in every round."""

    def __init__(self, known: Mapping[str, LogEstimate]) -> None:
        super().__init__(HALF_LIFE, known, NOW)

    def took(self, shape: str, ratio: float) -> None:
        self.observe(shape, ratio, NOW, None)


def calibrated() -> OfTheTarget:
    return OfTheTarget(dict.fromkeys(SIZES, LogEstimate(0.0, 0.0)))


def factor(correction: Correction[str], shape: str) -> float:
    return math.exp(correction.log_level + correction.deviation(shape).mean)


@settings(max_examples=40)
@given(st.lists(ratios, min_size=HALF_LIFE - 1, max_size=HALF_LIFE - 1), st.integers(0, 200))
def test_no_disturbance_shorter_than_the_half_life_moves_anything(burst: list[float], num_before: int) -> None:
    correction = calibrated()
    for _ in range(num_before):
        correction.took("narrow", 1.0)
    for ratio in burst:
        correction.took("narrow", ratio)
        assert factor(correction, "narrow") == pytest.approx(1.0)
        assert factor(correction, "seldom") == pytest.approx(1.0)
    for _ in range(3 * HALF_LIFE):
        correction.took("narrow", 1.0)
        assert factor(correction, "narrow") == pytest.approx(1.0)


@settings(max_examples=40)
@given(ratios, st.lists(st.sampled_from(SIZES), max_size=200))
def test_a_lasting_change_is_believed_in_full_after_one_half_life(ratio: float, before: list[str]) -> None:
    correction = calibrated()
    for shape in before:
        correction.took(shape, 1.0)
    for _ in range(HALF_LIFE + 1):
        correction.took("wide", ratio)
    assert correction.level(NOW, None).factor == pytest.approx(ratio)
    # Shapes that were not decoded meanwhile have become as slow, or speculation would be judged by yesterday's device.
    for shape in SIZES:
        assert factor(correction, shape) == pytest.approx(ratio)
    for _ in range(3 * HALF_LIFE):
        correction.took("wide", ratio)
        assert factor(correction, "wide") == pytest.approx(ratio)


def test_a_shape_calibrated_in_a_bad_moment_is_distinguished_from_a_slow_device(rng: random.Random) -> None:
    correction = calibrated()
    for _ in range(900):
        shape = rng.choice(("narrow", "wide"))
        noise = math.exp(rng.gauss(0, 0.05))  # as a quiet machine shows it
        correction.took(shape, noise * (1.6 if shape == "wide" else 1.0))
    assert factor(correction, "wide") / factor(correction, "narrow") == pytest.approx(1.6, rel=0.15)
    assert correction.deviation("wide").num_rounds > 300
    assert correction.deviation("seldom").num_rounds == 0


@given(st.integers(1, 40), st.lists(st.floats(-5, 5), max_size=400))
def test_the_median_is_the_weighted_median_of_all_values_kept(half_life: int, values: list[float]) -> None:
    median = ExponentialMedian(half_life, 0.5)
    for value in values:
        median.add(value)
    kept = values[-5 * half_life :][::-1]
    weighted = [(value, 2 ** (-age / half_life)) for age, value in enumerate(kept)]
    total = 1 / (1 - 2 ** (-1 / half_life))
    weighted.append((0.5, total - sum(weight for _, weight in weighted)))
    below = sum(weight for value, weight in weighted if value < median.value)
    above = sum(weight for value, weight in weighted if value > median.value)
    assert below <= total / 2 + 1e-6
    assert above <= total / 2 + 1e-6
    assert median.num_values == len(values)


@given(st.integers(1, 40), st.floats(0.01, 2), st.floats(0.1, 1), st.floats(-2, 2))
def test_what_was_known_first_is_doubted_less_with_every_value(
    half_life: int, variance: float, share: float, value: float
) -> None:
    median = ExponentialMedian(half_life, value, variance, share)
    before = median.variance
    for _ in range(4 * half_life):
        median.add(value)
        assert median.variance < before
        before = median.variance
    assert before < variance / 8


def test_the_variance_is_that_of_a_median_of_independent_values() -> None:
    rng, half_life = random.Random(1), 16
    medians, variances = [], []
    for _ in range(200):
        median = ExponentialMedian(half_life, 0.0)
        for _ in range(6 * half_life):
            median.add(rng.gauss(0, 0.1))
        medians.append(median.value)
        variances.append(median.variance)
    assert statistics.mean(variances) == pytest.approx(statistics.variance(medians), rel=0.3)


def of_a_drafter() -> Correction[str]:
    return Correction(HALF_LIFE, {"shape": LogEstimate(0.0, 0.0)}, NOW)


def use(correction: Correction[str], level: float, now: Moment, num_rounds: int = 4 * HALF_LIFE) -> None:
    for _ in range(num_rounds):
        correction.observe("shape", math.exp(level), now, 0.0)


def test_seconds_and_rounds_of_the_target_each_bring_it_closer_to_the_targets_and_make_it_doubtful() -> None:
    correction = of_a_drafter()
    use(correction, 1.0, NOW, HALF_LIFE + 2)  # short enough to count as no lasting slowness
    before = correction.level(NOW, 0.0)
    assert before.mean == pytest.approx(1.0)
    for now in (Moment(HALF_LIFE_S, 0), Moment(0.0, HALF_LIFE_ROUNDS), Moment(HALF_LIFE_S / 2, HALF_LIFE_ROUNDS // 2)):
        level = correction.level(now, 0.0)
        assert level.mean == pytest.approx(0.5, abs=0.05)
        assert level.variance == pytest.approx(before.variance / 4 + 0.75 * PRIOR_SD**2, rel=0.05)
        assert correction.level(now, -1.0).mean == pytest.approx(0.0, abs=0.05)


def test_the_target_itself_does_not_fade() -> None:
    correction = of_a_drafter()
    for _ in range(4 * HALF_LIFE):
        correction.observe("shape", 2.0, NOW, None)
    level = correction.level(Moment(100 * HALF_LIFE_S, 0), None)
    assert level.factor == pytest.approx(2.0)
    assert level.variance < 0.01


@given(st.floats(-2, 2), st.floats(1, 50))
def test_after_a_pause_a_few_rounds_of_its_own_are_believed(level: float, pause: float) -> None:
    correction = of_a_drafter()
    use(correction, 1.0, NOW, HALF_LIFE + 1)
    now = Moment(pause * 2 * HALF_LIFE_S, 0)
    use(correction, level, now, HALF_LIFE // 2)
    assert correction.level(now, 0.0).mean == pytest.approx(level, abs=0.05)


def test_one_slow_round_after_a_pause_is_not_believed() -> None:
    correction = of_a_drafter()
    use(correction, 0.0, NOW)
    now = Moment(20 * HALF_LIFE_S, 0)
    correction.observe("shape", 100.0, now, 0.0)
    assert correction.level(now, 0.0).mean == pytest.approx(0.0)


def test_between_rounds_of_other_drafters_nothing_is_forgotten() -> None:
    correction = of_a_drafter()
    for number in range(40 * HALF_LIFE):
        correction.observe("shape", 3.0, Moment(number * HALF_LIFE_S / 50, 0), 0.0)
    now = Moment(40 * HALF_LIFE * HALF_LIFE_S / 50, 0)
    assert correction.level(now, 0.0).factor == pytest.approx(3.0, rel=0.05)


def test_what_has_been_slow_for_long_fades_slowly_until_it_was_seen_fast() -> None:
    def left_after_a_half_life(num_slow: int, num_fast: int) -> float:
        correction = of_a_drafter()
        use(correction, 1.0, NOW, num_slow)
        use(correction, 0.0, NOW, num_fast)
        use(correction, 1.0, NOW, HALF_LIFE + 2)
        return correction.level(Moment(HALF_LIFE_S, 0), 0.0).mean

    brief, lasting, over = (
        left_after_a_half_life(*n) for n in ((0, 0), (40 * HALF_LIFE, 0), (40 * HALF_LIFE, 4 * HALF_LIFE))
    )
    assert brief == pytest.approx(0.5, abs=0.05)
    assert lasting > 0.9
    assert over == pytest.approx(brief, abs=0.05)


SETTINGS = WorkerSettings(batch_size=8)
DRAFTERS = (DrafterState("lookup", "r1", 8), DrafterState("model", "r1", 4))


def target_ms(batch: int, width: int, context: int) -> float:
    return 10.0 + batch * width + batch * context / 1000


class TimedEngine(FakeEngine):
    """Every measurement takes its own time on a clock that nothing else moves."""

    def __init__(
        self,
        *,
        drafters: tuple[DrafterState, ...] = DRAFTERS,
        context_length: int = 8192,
        num_slots: int = 4,
        slow_pass: int | None = None,
    ) -> None:
        super().__init__(drafters=drafters, context_length=context_length, num_slots=num_slots)
        self.now_s = 0.0
        self.asked: list[Shape] = []
        self._slow_pass = slow_pass

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        shape = Shape(drafter or "", batch, width, context)
        ms = target_ms(batch, width, context) if drafter is None else 0.5 * batch * width
        return self._taken(shape, ms, num_samples)

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        return self._taken(Shape(drafter or "", 1, num_tokens, 0, CostKind.PREFILL), 0.5 * num_tokens, num_samples)

    def _taken(self, shape: Shape, ms: float, num_samples: int) -> float:
        if self.asked.count(shape) == self._slow_pass:
            ms *= 7
        self.asked.append(shape)
        self.now_s += ms * num_samples / 1000
        return ms


def measure(engine: TimedEngine, wanted: Plan, budget_s: float, **more: Any) -> list[CostPoint]:
    return calibrate(engine, wanted, budget_s=budget_s, clock=lambda: engine.now_s, **more)


def test_of_kin_the_one_with_the_longest_drafts_is_measured() -> None:
    shared_weights = [
        DrafterState("short", "r1", 3, shared_weights="w"),
        DrafterState("long", "r1", 5, shared_weights="w"),
    ]
    others = [
        DrafterState("long too", "r1", 5, shared_weights="w"),
        DrafterState("alone", "r1", 4, shared_weights="v"),
        DRAFTERS[0],
    ]
    assert timed_by([*shared_weights, *others]) == {"short": "long", "long too": "long"}
    engine = TimedEngine(drafters=(*shared_weights, *others))
    points = with_shared_weights(measure(engine, plan(engine, SETTINGS), 0.0), timed_by(engine.drafters))
    assert {shape.drafter for shape in engine.asked} == {"", "long", "alone", "lookup"}
    costs = CostTable(points)
    for name in ("short", "long too"):
        assert costs.part_ms(name, 8, 3) == costs.part_ms("long", 8, 3)
        assert costs.prefill_ms(name, 64) == costs.prefill_ms("long", 64) > 0
    assert plan(engine, SETTINGS, points).missing(points) == Plan((), ())


@pytest.mark.parametrize("from_call", [1, 20])
def test_a_drafter_that_cannot_be_measured_is_left_out(from_call: int) -> None:
    """It costs neither the worker's start nor what is known of the target and the other drafters."""

    class Broken(TimedEngine):
        num_asked = 0

        def _taken(self, shape: Shape, ms: float, num_samples: int) -> float:
            if shape.drafter == "model":
                self.num_asked += 1
                if self.num_asked >= from_call:
                    raise DecodeFailed("it raised")
            return super()._taken(shape, ms, num_samples)

    engine = Broken()
    points = measure(engine, plan(engine, SETTINGS), 1000.0)
    whole = TimedEngine()
    all_points = measure(whole, plan(whole, SETTINGS), 1000.0)
    assert {point.drafter for point in points} == {None, "lookup"}
    assert {Shape.of(point) for point in points if point.drafter is None} == {
        Shape.of(point) for point in all_points if point.drafter is None
    }


def test_the_corners_are_needed_and_what_lies_between_refines() -> None:
    wanted = plan(TimedEngine(), SETTINGS)
    assert set(wanted.needed) == {
        *(Shape("", batch, width, 256) for batch in (1, 8) for width in (1, 9)),
        *(Shape("lookup", batch, width, 256) for batch in (1, 8) for width in (2, 9)),
        *(Shape("model", batch, width, 256) for batch in (1, 8) for width in (2, 5)),
        *(Shape(name, 1, 64, 0, CostKind.PREFILL) for name in ("", "lookup", "model")),
    }
    between = {shape for group in wanted.refining for shape in group}
    assert {Shape("", 1, 2048, 0, CostKind.PREFILL)} & between == set()
    assert {
        Shape("", 1, 512, 0, CostKind.PREFILL),
        Shape("model", 1, 512, 0, CostKind.PREFILL),
        Shape("", 8, 9, 2048),
        Shape("model", 1, 5, 2048),
        Shape("", 1, 2, 256),
        Shape("", 8, 5, 256),
        Shape("", 4, 9, 256),
    } < between
    assert not between & set(wanted.needed)


def test_a_short_model_is_measured_within_its_context() -> None:
    engine = TimedEngine(context_length=64)
    wanted = plan(engine, SETTINGS)
    every = [*wanted.needed, *(shape for group in wanted.refining for shape in group)]
    assert {s.context for s in every if s.kind is CostKind.ROUND} == {32}
    assert {s.width for s in every if s.kind is CostKind.PREFILL} == {32}


def test_all_is_measured_where_there_is_time_and_interleaved() -> None:
    engine = TimedEngine()
    wanted = plan(engine, SETTINGS)
    every = {*wanted.needed, *(shape for group in wanted.refining for shape in group)}
    points = measure(engine, wanted, budget_s=1e6)
    assert {Shape.of(point) for point in points} == every
    per_pass = [engine.asked[i : i + len(every)] for i in range(0, len(engine.asked), len(every))]
    assert len(per_pass) == NUM_PASSES
    assert all(set(asked) == every for asked in per_pass)


@pytest.mark.parametrize("slow_pass", range(NUM_PASSES))
def test_a_slow_moment_leaves_no_trace(slow_pass: int) -> None:
    engine = TimedEngine(slow_pass=slow_pass)
    for point in measure(engine, plan(engine, SETTINGS), budget_s=1e6):
        if point.drafter is None and point.kind is CostKind.ROUND:
            assert point.median_ms == target_ms(point.batch, point.width, point.context)


@pytest.mark.parametrize("budget_s", [0.0, 2.0, 4.0, 8.0, 16.0])
def test_the_budget_ends_the_refining_but_never_the_needed(budget_s: float) -> None:
    engine = TimedEngine()
    wanted = plan(engine, SETTINGS)
    points = measure(engine, wanted, budget_s)
    measured = {Shape.of(point) for point in points}
    assert set(wanted.needed) <= measured
    needed_s = 3 * NUM_PASSES * sum(p.median_ms for p in points if Shape.of(p) in wanted.needed) / 1000
    # What a group takes is foreseen from what was measured, so it may be off; never by much.
    assert engine.now_s <= max(1.001 * needed_s, 1.3 * budget_s)
    # A group is measured whole: half a row of widths would look flat where it ends.
    for group in wanted.refining:
        assert measured.issuperset(group) or not measured.intersection(group)


def test_what_does_not_fit_the_memory_is_left_out_unless_it_is_needed() -> None:
    class SmallEngine(TimedEngine):
        """Out of memory for eight sequences with a far context, or with any."""

        longest = 256

        def _taken(self, shape: Shape, ms: float, num_samples: int) -> float:
            if shape.batch == 8 and shape.context > self.longest:
                raise DecodeFailed("out of memory")
            return super()._taken(shape, ms, num_samples)

    engine, told = SmallEngine(), list[tuple[int, int]]()
    wanted = plan(engine, SETTINGS)
    points = measure(engine, wanted, 1e6, on_measured=lambda done, total: told.append((done, total)))
    assert {point.context for point in points if point.kind is CostKind.ROUND} == {256}
    assert {(p.batch, p.width) for p in points if p.drafter is None} >= {(4, 9), (8, 5)}  # the groups behind it
    assert told[-1][0] == told[-1][1] == len(engine.asked)
    engine.longest = 0
    with pytest.raises(DecodeFailed, match="out of memory"):
        measure(engine, wanted, budget_s=1e6)


def test_nothing_is_missing_once_measured_and_a_new_drafter_is() -> None:
    engine = TimedEngine()
    points = measure(engine, plan(engine, SETTINGS), budget_s=0.0)
    assert plan(engine, SETTINGS, points).missing(points) == Plan((), ())
    without = [point for point in points if point.drafter != "model"]
    lacking = plan(engine, SETTINGS, without).missing(without)
    assert {shape.drafter for shape in lacking.needed} == {"model"}
    assert lacking.refining  # there is a budget again


def test_a_batch_measured_for_narrow_passes_is_measured_for_wide_ones_too() -> None:
    engine = TimedEngine()
    narrow = [CostPoint(None, batch, width, 10.0, 3) for batch in (1, 4, 8) for width in (1, 5)]
    lacking = plan(engine, SETTINGS, narrow).missing(narrow)
    rounds = {(s.batch, s.width) for s in lacking.needed if not s.drafter and s.kind is CostKind.ROUND}
    assert rounds == {(1, 9), (4, 9), (8, 9)}


NGRAM = DrafterState("ngram", "r1", 4, least_draft_tokens=4, num_vanilla_endpoints=1)


class Servers(TimedEngine):
    """One vanilla server and one with look-up, of eight requests each."""

    can_redraft = measures_itself = times_steps = False

    def __init__(self, refuses: tuple[Shape, ...] = (), drafter: DrafterState = NGRAM, num_kept: int = 0) -> None:
        super().__init__(drafters=(drafter,), num_slots=16)
        self._refuses, self._num_kept = refuses, num_kept

    def calibrate(self, budget_s: float = 1000.0) -> list[CostPoint]:
        return calibrate_servers(self, budget_s=budget_s, clock=lambda: self.now_s)

    def endpoints(self) -> Sequence[EndpointStatus]:
        return [
            EndpointStatus(name, drafter, "up", 0, 8, 0.0, None, {}, num_kept=self._num_kept)
            for name, drafter in (("plain", None), ("speculative", "ngram"))
        ]

    def unavailable(self) -> str | None:
        return None

    def suspects(self) -> SuspectCounts:
        return SuspectCounts()

    def doubt(self, alarms: Sequence[UnansweredAlarm]) -> None:
        return

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        kind = CostKind.SERVED if drafter else CostKind.ROUND
        return self._taken(Shape(drafter or "", batch, width, context, kind), 20.0 + batch, num_samples)

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        return self._taken(Shape(drafter or "", 1, num_tokens, 0, CostKind.PREFILL), 0.1 * num_tokens, num_samples)

    def _taken(self, shape: Shape, ms: float, num_samples: int) -> float:
        assert num_samples == 1
        super()._taken(shape, ms, 32)
        if shape in self._refuses:
            raise DecodeFailed("the server is away")
        return ms


def test_each_shape_is_asked_once_and_only_the_servers_own_length() -> None:
    engine = Servers()
    points = engine.calibrate()
    assert [(s.drafter, s.batch, s.width, s.context, s.kind) for s in engine.asked] == [
        ("", 1, 1, 256, CostKind.ROUND),
        ("ngram", 1, 5, 256, CostKind.SERVED),
        ("", 1, 512, 0, CostKind.PREFILL),
        ("ngram", 1, 512, 0, CostKind.PREFILL),
        ("", 8, 1, 256, CostKind.ROUND),
        ("ngram", 8, 5, 256, CostKind.SERVED),
        ("", 4, 1, 256, CostKind.ROUND),
        ("ngram", 4, 5, 256, CostKind.SERVED),
        ("", 2, 1, 256, CostKind.ROUND),
        ("ngram", 2, 5, 256, CostKind.SERVED),
        ("", 1, 1, 2048, CostKind.ROUND),
        ("ngram", 1, 5, 2048, CostKind.SERVED),
    ]
    assert [Shape.of(point) for point in points] == engine.asked
    assert {point.num_samples for point in points} == {1}


def test_servers_that_are_kept_free_for_others_are_asked_for_one_request_at_a_time() -> None:
    engine, whole = Servers(num_kept=2), Servers()
    engine.calibrate()
    whole.calibrate()
    assert engine.asked == [shape for shape in whole.asked if shape.batch == 1]


def test_where_requests_choose_their_draft_length_the_shortest_is_asked_too() -> None:
    engine, fixed = Servers(drafter=replace(NGRAM, least_draft_tokens=1)), Servers()
    engine.calibrate()
    fixed.calibrate()
    assert engine.asked[4] == Shape("ngram", 1, 2, 256, CostKind.SERVED)
    assert engine.asked[:4] + engine.asked[5:] == fixed.asked


def test_the_budget_is_kept_and_routes_are_asked_alike() -> None:
    for budget_s in (0.0, 1.0, 4.0, 9.0):
        engine = Servers()
        points = engine.calibrate(budget_s)
        assert engine.now_s <= budget_s + 32 * 0.06
        assert 0 <= 2 * sum(point.drafter is None for point in points) - len(points) <= 1
    assert Servers().calibrate(0.0) == []


def test_a_server_that_does_not_answer_is_asked_no_more() -> None:
    away = Shape("ngram", 8, 5, 256, CostKind.SERVED)
    engine = Servers(refuses=(away,))
    points = engine.calibrate()
    assert [shape for shape in engine.asked if shape.drafter][-1] == away
    assert engine.asked[-1] == Shape("", 1, 1, 2048)
    assert {Shape.of(point) for point in points} == set(engine.asked) - {away}
