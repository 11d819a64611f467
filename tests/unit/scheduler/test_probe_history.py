"""The chain of comparisons: every fall stands where it happened."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import Interval
from scheduler.drift.memory import ALPHA_MARGIN
from scheduler.drift.watching import State, state_of
from scheduler.probe_history import ProbeSetup, PromptPair, alpha_change, differences, probe_histories
from tests.fixtures.drift import FIRST, day, history, measured

TARGET_2 = replace(FIRST, target_revision="target-2")
HIGH, LOW = [16, 15, 17, 16, 15, 16], [8, 7, 9, 8, 7, 8]


def test_a_target_change_is_not_blamed_for_a_later_fault() -> None:
    found = history(
        measured(0, HIGH), measured(2, HIGH), measured(3, HIGH, TARGET_2), measured(8, HIGH, TARGET_2),
        measured(9, LOW, TARGET_2), measured(10, LOW, TARGET_2),
    )  # fmt: skip
    (step,) = found.falls()
    assert differences(step.across.before, step.across.after) == ()
    assert (step.began_after, step.began_before) == (day(8), day(9))
    assert step.left.state is State.FELL


@pytest.mark.parametrize(
    ("targets", "num_falls"),
    [
        ({}, 1),
        ({"target-1": "a", "target-2": "a"}, 1),
        ({"target-2": "a"}, 1),
        ({"target-1": "a", "target-2": "b"}, 0),
    ],
)
def test_a_task_that_was_bound_to_another_target_is_no_fall_and_new_weights_of_one_target_may_be(
    targets: dict[str, str], num_falls: int
) -> None:
    results = [*measured(0, HIGH), *measured(3, LOW, TARGET_2), *measured(4, LOW, TARGET_2)]
    (found,) = probe_histories(results, {}, targets)
    assert len(found.falls()) == num_falls
    (back,) = probe_histories([*results, *measured(5, HIGH)], {}, targets)
    assert not back.falls()


def test_both_falls_are_found() -> None:
    lowest = [2] * 6
    found = history(
        measured(0, HIGH), measured(3, LOW, TARGET_2), measured(8, LOW, TARGET_2), measured(9, lowest, TARGET_2)
    )
    target, fault = found.falls()
    assert differences(target.across.before, target.across.after) == ("target",)
    assert differences(fault.across.before, fault.across.after) == ()


def test_a_set_that_is_registered_again_does_not_heal() -> None:
    found = history(measured(0, HIGH), measured(3, LOW, TARGET_2), measured(5, LOW, TARGET_2, first_prompt=2))
    (step,) = found.falls()
    assert step.left.num_prompts == 4, "the prompts that both versions have"


def test_what_recovered_is_no_fall() -> None:
    found = history(measured(0, HIGH), measured(3, LOW, TARGET_2), measured(5, HIGH, TARGET_2))
    assert found.falls() == []
    assert [step.across.state for step in found.steps()] == [State.FELL, State.ROSE]
    assert all(step.left.state in (State.STEADY, State.ROSE) for step in found.steps())


def test_a_setup_that_comes_back_is_compared_with_itself() -> None:
    found = history(measured(0, HIGH), measured(3, LOW, TARGET_2), measured(5, HIGH))
    (step,) = [s for s in found.steps() if s.across.before == s.across.after]
    assert (step.across.before, step.across.state) == (FIRST, State.STEADY)
    assert found.falls() == []


def test_a_fall_under_a_former_setup_lasts_until_it_is_healed() -> None:
    engine = replace(FIRST, engine="engine-2")
    runs = [measured(0, HIGH), measured(4, LOW), measured(6, LOW, engine)]
    (step,) = history(*runs).falls()
    assert step.across.before == step.across.after == FIRST
    assert history(*runs, measured(8, HIGH, engine)).falls() == []


def test_a_new_draft_is_compared_with_its_predecessor_under_the_same_target() -> None:
    old, new = TARGET_2, ProbeSetup("target-2", "draft-2", "engine-1")
    found = history(measured(0, HIGH), measured(3, LOW, old), measured(5, LOW, new))
    step = found.steps()[-1]
    assert (step.across.before, step.across.state) == (old, State.STEADY)
    (stale,) = found.falls()
    assert stale.across.after == old, "the new draft is as low, so the first fall lasts"


def test_a_parent_comes_before_a_newer_draft() -> None:
    other, child = replace(FIRST, draft_revision="draft-x"), replace(FIRST, draft_revision="draft-2")
    runs = [measured(0, HIGH), measured(2, LOW, other), measured(4, LOW, child)]
    assert history(*runs).steps()[-1].across.before == other
    assert history(*runs, parents={"draft-2": "draft-1"}).steps()[-1].across.before == FIRST


def test_across_needs_a_measurement_on_both_sides() -> None:
    found = history(measured(1, HIGH), measured(2, HIGH), measured(9, LOW))
    assert found.across(day(0), day(3)) is None
    assert found.across(day(3), day(10)) is None
    verdict = found.across(day(3), day(4))
    assert (verdict.state, verdict.trials_before, verdict.trials_after) == (State.FELL, 240, 120)


@pytest.mark.parametrize("newest", [10, 11, 13])
def test_across_finds_a_fall_that_healed_since(newest: int) -> None:
    """A restart heals a fault; the measurements behind it must not hide that the fall of traffic was the fault's."""
    runs = (measured(n, LOW if n == 9 else HIGH) for n in range(newest + 1))
    verdict = history(*runs).across(day(8), day(8.5))
    assert (verdict.state, verdict.measured_after, verdict.trials_after) == (State.FELL, day(9), 120)


def test_across_adds_up_a_fall_that_lasts() -> None:
    verdict = history(*(measured(n, LOW if n >= 9 else HIGH) for n in range(13))).across(day(8), day(8.5))
    assert (verdict.state, verdict.measured_after, verdict.trials_after) == (State.FELL, day(12), 360)


def test_nothing_tested_is_no_measurement() -> None:
    silent = [replace(result, trials=(), accepts=()) for result in measured(3, HIGH)]
    assert len(history(measured(0, HIGH), silent).measurements) == 1
    assert history(silent).newest is None


changes = st.floats(-1, 1).flatmap(
    lambda mean: st.tuples(st.just(mean), st.floats(-1, mean), st.floats(mean, 1)).map(lambda t: Interval(*t))
)


@given(changes)
def test_a_verdict_is_never_bolder_than_its_interval(change: Interval) -> None:
    state = state_of(change)
    if state is State.STEADY:
        assert -ALPHA_MARGIN <= change.low <= change.high <= ALPHA_MARGIN
    if state is State.FELL:
        assert change.high < 0
        assert change.mean < -ALPHA_MARGIN
    mirrored = state_of(Interval(-change.mean, -change.high, -change.low))
    assert (state is State.FELL) == (mirrored is State.ROSE)
    assert (state is State.STEADY) == (mirrored is State.STEADY)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ((-0.088, -0.127, -0.048), State.FELL),  # a review found it told as steady
        ((-0.21, -0.5, 0.08), State.TOO_LITTLE),  # .80 then, .59 now, over four prompts
        ((0.0, -0.03, 0.03), State.STEADY),
        ((-0.03, -0.055, -0.005), State.TOO_LITTLE),
        ((0.2, 0.1, 0.3), State.ROSE),
    ],
)
def test_verdicts(change: tuple[float, float, float], state: State) -> None:
    assert state_of(Interval(*change)) is state


def test_only_shared_prompts_at_the_same_k_are_compared() -> None:
    found = history(
        measured(0, [16, 16, 16]), measured(1, [16, 4], first_prompt=2), measured(2, [4] * 3, num_draft_tokens=5)
    )
    first, second, third = found.measurements
    over = found.compare(first, second)
    assert (over.num_prompts, over.state) == (1, State.TOO_LITTLE)
    none = found.compare(first, third)
    assert (none.num_prompts, none.change, none.state) == (0, None, State.TOO_LITTLE)


@pytest.mark.parametrize(
    ("pairs", "mean", "half"),
    [
        pytest.param([PromptPair(10, 8, 10, 5)] * 4, -0.3, 0.0, id="the same fall on every prompt has no spread"),
        # Changes -.02 and -.04 with equal trials: mean -.03, standard error .01, Student's t(1) is 12.7062.
        pytest.param([PromptPair(100, 80, 100, n) for n in (78, 76)], -0.03, 0.127062, id="two prompts"),
    ],
)
def test_a_change_by_hand(pairs: list[PromptPair], mean: float, half: float) -> None:
    change = alpha_change(pairs)
    assert (change.mean, change.low, change.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-5)


def test_one_prompt_says_nothing_about_the_spread() -> None:
    change = alpha_change([PromptPair(10, 8, 10, 5)])
    assert (change.low, change.high) == (-1.0, 1.0)


def test_without_trials_there_is_no_change() -> None:
    assert alpha_change([]) is None
    assert alpha_change([PromptPair(5, 4, 0, 0)]) is None


def test_the_interval_covers_the_true_change(rng: random.Random, seed: int) -> None:
    covered, repeats = 0, 400
    for _ in range(repeats):
        pairs = []
        for _ in range(8):
            alpha = rng.uniform(0.5, 0.9)
            before = sum(rng.random() < alpha for _ in range(20))
            after = sum(rng.random() < alpha - 0.1 for _ in range(20))
            pairs.append(PromptPair(20, before, 20, after))
        change = alpha_change(pairs)
        covered += change.low <= -0.1 <= change.high
    print(f"seed {seed}: {covered / repeats:.1%} of 95 % intervals hold the true change")
    assert covered / repeats > 0.90
