"""The table that decisions rest on follows what steps took, and is stored when it moved.

A drafter whose rounds were slow for two seconds comes back; one that stays slow stays out, within the budget.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from alphaloop.costs import HALF_LIFE_S, CostKind, CostPoint
from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import ProposalShape, Step
from tests.fixtures.costs import Store
from tests.fixtures.deciding import choose, inferred
from tests.fixtures.simulated import Clock
from worker.costs.learning import LiveCosts

POINTS = (
    *(CostPoint(None, batch, width, 10.0 + batch * width, 9) for batch in (1, 4) for width in (1, 9)),
    *(CostPoint("model", batch, width, 1.0 * width, 9) for batch in (1, 4) for width in (2, 9)),
    CostPoint(None, 1, 64, 30.0, 9, 0, CostKind.PREFILL),
)
HALF_LIFE = 16


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


def live(store: Store, clock: Clock, points: Sequence[CostPoint] = POINTS) -> LiveCosts:
    return LiveCosts(points, half_life=HALF_LIFE, save=store, clock=clock)


def step(costs_ms: float, *, draft_ms: float = 0.0, batch: int = 1, width: int = 1, **changes: Any) -> Step:
    """A round of the time that is given, a tenth of the target's in overhead."""
    made = Step(
        (),
        (),
        batch,
        width,
        (costs_ms + draft_ms) / 1000,
        draft_s=draft_ms / 1000,
        verify_s=0.9 * costs_ms / 1000,
        overhead_s=0.1 * costs_ms / 1000,
        context=256,
        drafter="model" if draft_ms else None,
    )
    return replace(made, **changes)


def test_kin_have_one_drafters_times_and_its_corrections(store: Store, clock: Clock) -> None:
    stale = [replace(point, drafter="gated", median_ms=77.0) for point in POINTS if point.drafter == "model"]
    costs = LiveCosts([*POINTS, *stale], half_life=HALF_LIFE, save=store, timed={"gated": "model"}, clock=clock)
    calibrated, vanilla = costs.table.part_ms("model", 1, 3), costs.table.part_ms(None, 1, 3)
    for name, times in (("gated", 2), ("model", 3)):
        assert costs.table.part_ms("gated", 1, 3) == costs.table.part_ms("model", 1, 3)
        for _ in range(3 * HALF_LIFE):
            costs.observe(step(vanilla, draft_ms=times * calibrated, width=3, drafter=name))
        for other in ("model", "gated"):
            assert costs.table.part_ms(other, 1, 3) == pytest.approx(times * calibrated, rel=0.01)
    assert set(costs.parts) == {point.drafter for point in POINTS}
    assert costs.save()
    (saved,) = store.saved
    of_model = [replace(point, drafter="gated") for point in saved if point.drafter == "model"]
    assert [point for point in saved if point.drafter == "gated"] == of_model != []


def test_reading_a_prompt_takes_what_was_calibrated_times_how_slow_the_target_is(store: Store, clock: Clock) -> None:
    costs = live(store, clock)
    assert [costs.read_s(num_tokens) for num_tokens in (0, 64, 640)] == pytest.approx([0.0, 0.03, 0.3])
    for _ in range(6 * HALF_LIFE):
        costs.observe(step(2 * 11.0))
    assert costs.table is not None
    assert costs.read_s(64) == pytest.approx(0.06, rel=0.02)
    assert live(store, clock, [point for point in POINTS if point.kind is CostKind.ROUND]).read_s(64) == 0.0


def test_a_device_twice_as_slow_is_known_in_every_shape_while_its_drafter_is_not(store: Store, clock: Clock) -> None:
    costs = live(store, clock)
    for _ in range(HALF_LIFE + 1):
        costs.observe(step(2 * 11))
    assert costs.table.rounds(4).round_ms(None, 8) == pytest.approx(2 * 46)
    assert costs.table.part_ms("model", 1, 9) == pytest.approx(9.0, rel=0.01)
    assert costs.level(None) == pytest.approx(2.0)
    assert costs.level("model") == pytest.approx(1.0, rel=0.01)
    assert costs.table.prefill_ms(None, 64) == pytest.approx(2 * 30.0)


def test_prompts_are_corrected_by_steps_that_read_nothing_else(store: Store, clock: Clock) -> None:
    costs = live(store, clock)
    for _ in range(3 * HALF_LIFE):
        costs.observe(step(11.0))
        costs.observe(replace(step(0.0), num_prefill_tokens=128, verify_s=0.120))
    assert costs.table.prefill_ms(None, 64) == pytest.approx(60.0), "twice what was calibrated for 128 tokens"
    assert costs.table.part_ms(None, 1, 1) == pytest.approx(11.0)
    assert costs.table.prefill_ms("model", 64) == live(store, clock).table.prefill_ms("model", 64)


@pytest.mark.parametrize("proposers", [("model",), ("model", "lookup")])
def test_a_drafters_prompts_are_corrected_by_the_rounds_that_read_them(
    store: Store, clock: Clock, proposers: tuple[str, ...]
) -> None:
    points = [*POINTS, CostPoint("model", 1, 64, 8.0, 3, 0, CostKind.PREFILL)]
    costs = live(store, clock, points)
    first, all_of_them = costs.table.part_ms("model", 1, 2), costs.table.part_ms("model", 1, 9)

    def round_of(draft_ms: float, num_read: int = 0, width: int = 9) -> Step:
        read = step(10.0 + width, width=width, draft_ms=draft_ms, num_draft_prefill_tokens=num_read)
        if len(proposers) == 1:
            return read
        seconds = {"model": draft_ms / 1000, "lookup": 0.001}
        shape = {"model": ProposalShape(1, width, num_read)}
        return replace(read, drafter=None, draft_s_by_proposer=seconds, shape_by_proposer=shape)

    for _ in range(3 * HALF_LIFE):
        costs.observe(round_of(all_of_them))
        costs.observe(round_of(3 * 16.0 + all_of_them - first, 128))
        costs.observe(round_of(500.0, 512, width=1))
    assert costs.table.prefill_ms("model", 64) == pytest.approx(24.0, rel=0.02), "three times what was calibrated"
    assert costs.table.part_ms("model", 1, 9) == pytest.approx(all_of_them), "rounds are not thought slower for it"
    assert costs.table.prefill_ms(None, 64) == live(store, clock).table.prefill_ms(None, 64)


def test_rounds_of_several_proposers_teach_what_each_of_them_takes(store: Store, clock: Clock) -> None:
    """Each by the sequences it proposed for: half of the batch costs less than all of it, and is not thought faster."""
    shape = {1: ProposalShape(1, 9), 4: ProposalShape(4, 3)}
    calibrated = live(store, clock).table
    for batch, times in ((1, 1.0), (4, 3.0)):
        costs = live(store, clock)
        its = shape[batch]
        seconds = times * calibrated.part_ms("model", its.batch, its.width) / 1000
        for _ in range(3 * HALF_LIFE):
            costs.observe(
                step(
                    *(46.0,),
                    batch=4,
                    width=9,
                    drafter=None,
                    draft_s=seconds + 0.5,
                    draft_s_by_proposer={"model": seconds, "grammar": 0.5},
                    shape_by_proposer={"model": its},
                )
            )
        assert costs.table is not None
        assert costs.level("model") == pytest.approx(times, rel=0.02)
        assert costs.level(None) == pytest.approx(1.0, rel=0.02)


def test_of_a_drafter_that_asks_one_of_two_the_mean_counts(store: Store, clock: Clock, rng: random.Random) -> None:
    """Rounds of a fiftieth and rounds of what was calibrated: their median is the time of one kind."""
    mixed = LiveCosts(POINTS, half_life=HALF_LIFE, save=store, mixed=["model"], clock=clock)
    for _ in range(20 * HALF_LIFE):
        mixed.observe(step(19.0, draft_ms=9.0 if rng.random() < 0.4 else 9.0 / 50, width=9))
    assert mixed.table.part_ms("model", 1, 9) == pytest.approx(9.0 * (0.4 + 0.6 / 50), rel=0.25)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prefill_tokens": 500, "num_positions": 1},
        {"verify_s": 0.0},
        {"batch": 0},
    ],
    ids=["reads a prompt beside it", "had no round", "was empty"],
)
def test_steps_that_tell_nothing_of_rounds_teach_nothing(store: Store, clock: Clock, changes: dict[str, Any]) -> None:
    costs = live(store, clock)
    for _ in range(10 * HALF_LIFE):
        costs.observe(step(500.0, draft_ms=500.0, **changes))
    assert costs.table.points == live(store, clock).table.points


def test_what_several_drafters_took_is_nobodys(store: Store, clock: Clock) -> None:
    costs = live(store, clock)
    for _ in range(10 * HALF_LIFE):
        costs.observe(step(11.0, draft_ms=500.0, drafter=None))
    assert costs.table.part_ms("model", 1, 9) == 9.0


def test_a_ragged_pass_is_judged_by_what_it_holds(store: Store, clock: Clock) -> None:
    costs = live(store, clock)
    for _ in range(4 * HALF_LIFE):
        # One sequence of four proposes eight tokens: twelve positions, as many as three a sequence.
        costs.observe(step(10 + 12, batch=4, width=9, num_positions=12))
    assert costs.table.part_ms(None, 4, 9) == pytest.approx(46.0)


def test_corrections_are_stored_when_due_and_moved(store: Store, clock: Clock) -> None:
    costs = live(store, clock)
    for _ in range(HALF_LIFE + 1):
        costs.observe(step(22.0))
    assert not costs.save_when_due()
    clock.now_s = 61.0
    assert costs.save_when_due()
    assert not costs.save_when_due()
    clock.now_s = 122.0
    assert not costs.save_when_due()  # nothing has moved since
    (saved,) = store.saved
    assert all(p.correction == pytest.approx(2.0) for p in saved if p.drafter is None)
    fading = math.exp(math.log(2.0) * (1 - 2 ** -(61 / HALF_LIFE_S)))
    assert all(p.correction == pytest.approx(fading, rel=0.01) for p in saved if p.drafter), "it was not used"
    assert [p.median_ms for p in saved] == [p.median_ms for p in POINTS]


def test_a_restart_begins_where_the_last_life_ended(store: Store, clock: Clock) -> None:
    first = live(store, clock)
    for _ in range(4 * HALF_LIFE):
        first.observe(step(22.0, draft_ms=3.0, width=1))
    assert first.save()
    second = live(store, clock, store.saved[-1])
    assert second.table.points == first.table.points
    assert any(point.num_corrections > HALF_LIFE for point in second.table.points)
    assert not second.save()
    second.observe(step(1000.0))
    assert second.table.part_ms(None, 1, 1) == pytest.approx(22.0)


def test_rounds_that_move_nothing_are_stored_all_the_same_after_ten_minutes(store: Store, clock: Clock) -> None:
    costs = live(store, clock)
    for clock.now_s in range(0, 600, 20):
        costs.observe(step(19.0, draft_ms=9.0, width=9))
        assert not costs.save()
    clock.now_s = 601.0
    assert costs.save()
    clock.now_s = 10_000.0
    assert not costs.save(), "nothing was timed since"


def test_rounds_count_as_of_when_they_were_decoded(store: Store, clock: Clock) -> None:
    costs = live(store, clock)
    for _ in range(HALF_LIFE + 1):
        costs.observe(step(19.0, draft_ms=3 * 9.0, width=9))
    clock.now_s = HALF_LIFE_S  # an idle worker asks for its costs with the next job
    assert costs.table.part_ms("model", 1, 9) == pytest.approx(9.0 * math.sqrt(3.0), rel=0.05)


VANILLA_MS: Final = 20.0
#: One drafted token takes c = .3 of a target pass, and each position more makes the pass a twentieth longer.
DRAFT_MS: Final = 0.3 * VANILLA_MS
POSITION_MS: Final = 0.05 * VANILLA_MS
ALPHA: Final = 0.8
LONGEST: Final = 5
DRAFTER: Final = DrafterState("draft", "r1", LONGEST)
#: What a task with a thousand jobs says of the drafter.
KNOWN: Final = inferred(ALPHA, k=LONGEST, jobs=1000.0)
MEAN_TOKENS: Final = 60


def target_ms(width: int) -> float:
    return VANILLA_MS + POSITION_MS * (width - 1)


@dataclass
class Worker:
    """Decides job by job, alone on the device; the draft's rounds take `slowness` times their time, with 5 % noise."""

    rng: random.Random
    slowness: float = 1.0
    now_s: float = 0.0
    num_tokens: int = 0
    budget: ExplorationBudget = field(default_factory=ExplorationBudget)
    incumbent: DraftSetting | None = None

    def __post_init__(self) -> None:
        points = [
            *(CostPoint(None, 1, width, target_ms(width), 9) for width in (1, LONGEST + 1)),
            *(CostPoint("draft", 1, width, DRAFT_MS * (width - 1), 9) for width in (2, LONGEST + 1)),
        ]
        self.costs = LiveCosts(points, half_life=32, save=lambda points: None, clock=lambda: self.now_s)

    def decode_job(self) -> Decision:
        decision = choose(
            {"draft": KNOWN},
            drafters=[DRAFTER],
            costs=self.costs.table,
            expected_tokens=float(MEAN_TOKENS),
            incumbent=self.incumbent,
            budget=self.budget,
        )
        self.budget, self.incumbent = decision.budget or self.budget, decision.kept
        left = self.rng.randint(MEAN_TOKENS // 2, 3 * MEAN_TOKENS // 2)
        self.num_tokens += left
        while left > 0:
            left -= self.decode_round(decision.num_draft_tokens)
        return decision

    def decode_round(self, k: int) -> int:
        """One round at k; how many tokens it brought."""
        verify_s = target_ms(k + 1) / 1000 * math.exp(self.rng.gauss(0, 0.05))
        draft_s = self.slowness * k * DRAFT_MS / 1000 * math.exp(self.rng.gauss(0, 0.05))
        self.now_s += verify_s + draft_s
        self.costs.observe(
            Step(
                finished=(),
                deltas=(),
                batch=1,
                width=k + 1,
                wall_s=verify_s + draft_s,
                draft_s=draft_s,
                verify_s=verify_s,
                context=256,
                drafter="draft" if k else None,
            )
        )
        return 1 + next((i for i in range(k) if self.rng.random() > ALPHA), k)


def drafts(decision: Decision) -> bool:
    """Whether the policy would draft, were it not for exploration."""
    return decision.kept is not None and decision.kept.drafter is not None


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_was_slow_for_a_moment_is_back_within_200_jobs(seed: int) -> None:
    worker = Worker(random.Random(seed))
    for _ in range(30):
        decision = worker.decode_job()
    worker.slowness = 3.0
    for _ in range(40):
        worker.decode_round(decision.kept.num_draft_tokens)
    worker.slowness = 1.0
    assert not drafts(worker.decode_job()), "the forty rounds are believed"
    num_jobs = 1
    while not drafts(worker.decode_job()):
        num_jobs += 1
        assert num_jobs < 200
    assert all(drafts(worker.decode_job()) for _ in range(6)), "it is back to stay"


def test_a_drafter_that_stays_slow_stays_out_within_the_budget() -> None:
    worker = Worker(random.Random(0), slowness=3.0)
    decisions = [worker.decode_job() for _ in range(300)]
    assert not any(drafts(decision) for decision in decisions[20:])
    assert 0 < sum(decision.drafter is not None for decision in decisions[20:]) < 20
    vanilla_s = worker.num_tokens * VANILLA_MS / 1000
    assert worker.now_s / vanilla_s - 1 < worker.budget.explore_share
    assert worker.budget.spent <= worker.budget.accrued <= (worker.budget.explore_share + 0.002) * worker.num_tokens
