"""What earlier pairs make of the next expectation: its bias, its spread, and the decision."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.acceptance import Z95, Interval
from alphaloop.costs import CostPoint, CostTable
from alphaloop.deciding.decision import Reason
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationError, ExpectationErrors
from alphaloop.deciding.goodput import DrafterState, weigh
from alphaloop.deciding.inference import PairPosterior
from alphaloop.deciding.policy import decide
from alphaloop.deciding.posterior import Posterior
from alphaloop.experiment.figures import ExpectationPair
from tests.fixtures.deciding import context_of
from tests.fixtures.runs import subject

NOW = datetime(2026, 3, 1, tzinfo=UTC)
HALF_LIFE = timedelta(days=3)
COLD = ExpectationErrors(HALF_LIFE).of("code", "lookup", NOW)


def pair(
    error: float, *, task: str = "code", model_sd: float = 0.02, age: timedelta = timedelta(), number: int = 0
) -> ExpectationPair:
    """Measured is exp(`error`) times what was expected before corrections, and known to ± 2 %."""
    measured = 1.5 * math.exp(error)
    return ExpectationPair(
        subject=subject(task),
        expected=Interval(1.5, 1.4, 1.6),
        uncorrected=1.5,
        model_sd=model_sd,
        measured=Interval(measured, measured * 0.98, measured * 1.02),
        num_blocks=8,
        min_num_draft_tokens=4,
        max_num_draft_tokens=4,
        mean_running=4.0,
        covers_from=NOW - age - timedelta(minutes=10 * number + 10),
        covers_to=NOW - age - timedelta(minutes=10 * number),
        computed_at=NOW,
    )


def error_of(*pairs: ExpectationPair, task: str = "code") -> ExpectationError:
    return ExpectationErrors(HALF_LIFE, pairs).of(task, "lookup", NOW)


def repeated(error: float, num: int, task: str = "code") -> list[ExpectationPair]:
    return [pair(error, task=task, number=number) for number in range(num)]


def test_without_a_pair_nothing_is_corrected_and_bounds_allow_for_some_error() -> None:
    assert COLD.bias == 0
    assert 0.05 < COLD.sd < 0.12


@pytest.mark.parametrize("error", [-0.3, -0.1, -0.05, 0.05, 0.3])
def test_thin_evidence_changes_little_and_evidence_that_agrees_changes_most(error: float) -> None:
    assert abs(error_of(pair(error)).bias) < 0.5 * abs(error)
    many = error_of(*repeated(error, 16))
    assert 0.8 < many.bias / error <= 1
    assert many.sd < 0.5 * COLD.sd


def test_pairs_that_contradict_each_other_widen_instead_of_correcting() -> None:
    found = error_of(*(pair(-0.3 if number % 2 else 0.3, number=number) for number in range(8)))
    assert abs(found.bias) < 0.03
    assert found.sd > 0.2


def test_an_error_within_the_stated_bounds_says_little() -> None:
    assert abs(error_of(*(pair(-0.2, model_sd=0.3, number=n) for n in range(4))).bias) < 0.05


def test_tasks_have_their_own_bias_and_lend_some_to_a_new_one() -> None:
    pairs = [*repeated(-0.2, 12, "code"), *repeated(-0.2, 12, "sql"), *repeated(0.0, 12, "chat")]
    errors = ExpectationErrors(HALF_LIFE, pairs)
    assert errors.of("code", "lookup", NOW).bias == pytest.approx(-0.2, abs=0.02)
    assert errors.of("chat", "lookup", NOW).bias == pytest.approx(0.0, abs=0.02)
    assert -0.1 < errors.of("new", "lookup", NOW).bias < -0.005
    assert errors.of("new", "lookup", NOW).sd > errors.of("code", "lookup", NOW).sd
    assert errors.of("code", "another drafter", NOW) == COLD


def test_old_pairs_fade_to_the_prior() -> None:
    fresh, old = error_of(*repeated(-0.2, 8)), error_of(*(pair(-0.2, number=n, age=900 * HALF_LIFE) for n in range(8)))
    assert fresh.bias < -0.16
    assert abs(old.bias) < 0.002
    assert old.sd == pytest.approx(COLD.sd, rel=0.02)


def test_a_pair_that_is_added_again_counts_once_and_a_new_one_counts_at_once() -> None:
    errors = ExpectationErrors(HALF_LIFE, [pair(-0.2)])
    once = errors.of("code", "lookup", NOW)
    errors.add([pair(-0.2)])
    assert errors.of("code", "lookup", NOW) == once
    errors.add([pair(-0.2, number=1)])
    assert errors.of("code", "lookup", NOW).bias < once.bias


def test_corrected_intervals_hold_the_next_measurement_as_often_as_they_say() -> None:
    """Tasks with biases of their own and moments that differ: of 600 next pairs 95 % lie within the bounds."""
    rng = random.Random(5)
    held = before = total = 0
    for _ in range(60):
        biases = [rng.gauss(-0.1, 0.05) for _ in range(4)]
        errors = ExpectationErrors(HALF_LIFE)
        for number in range(14, 0, -1):
            for task, bias in enumerate(biases):
                seen = bias + rng.gauss(0, 0.05) + rng.gauss(0, 0.02)
                if number <= 3:
                    known = errors.of(str(task), "lookup", NOW)
                    width = Z95 * math.hypot(known.sd, 0.02)
                    total += 1
                    held += abs(seen - known.bias) <= width
                    before += abs(seen) <= Z95 * 0.02
                errors.add([pair(seen, task=str(task), number=number)])
    assert before / total < 0.4
    assert 0.92 < held / total < 0.98


def posterior(error: ExpectationError) -> Posterior:
    its = PairPosterior.unknown(4, 0.7, 0.05).for_a_task()
    return Posterior(its.profile, its.reach, 20.0, 1.0, error=error)


def test_the_correction_moves_the_expectation_its_bounds_and_the_decision() -> None:
    points = [CostPoint(None, 1, width, 10.0 + width, 15) for width in (1, 5)]
    costs = CostTable((*points, *(CostPoint("lookup", 1, width, 3.0, 15) for width in (2, 5))))
    lookup = DrafterState("lookup", "r1", 4)
    context = context_of(1, 1, 100.0)
    found = {}
    for error in (NO_ERROR, ExpectationError(-0.1, 0.1), ExpectationError(-1.0, 0.1)):
        posteriors = {"lookup": posterior(error)}
        best = next(way for way in weigh(posteriors, [lookup], costs, 1) if way.drafter)
        decision = decide(posteriors, [lookup], costs, context)
        found[error] = best, decision
    plain, corrected = found[NO_ERROR][0], found[ExpectationError(-0.1, 0.1)][0]
    assert corrected.speedup == pytest.approx(plain.speedup * math.exp(-0.1))
    assert corrected.tokens_per_s == pytest.approx(plain.tokens_per_s * math.exp(-0.1))
    below = math.log(corrected.speedup / corrected.speedup_low)
    assert below == pytest.approx(math.hypot(math.log(plain.speedup / plain.speedup_low), Z95 * 0.1))
    assert corrected.expected.uncorrected == pytest.approx(plain.speedup)
    assert corrected.expected.model_sd == pytest.approx(plain.expected.model_sd, rel=0.05)
    assert found[NO_ERROR][1].reason is Reason.FASTER
    assert found[NO_ERROR][1].expected == plain.expected
    slow = found[ExpectationError(-1.0, 0.1)][1]
    assert (slow.drafter, slow.reason) == (None, Reason.NOT_FASTER), "what measured slower is not called faster"
