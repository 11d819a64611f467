from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.deciding.exploration import FIRST_JOBS, ExplorationBudget, Trial, loss, worth_trying
from alphaloop.deciding.goodput import Alternative
from alphaloop.deciding.posterior import Posterior
from tests.fixtures import deciding

NOW = datetime(2026, 9, 1, tzinfo=UTC)
VANILLA = Alternative(None, 0, 1.0, 30.0, 1.0, 1.0, 1.0)
RICH = ExplorationBudget(balance=1e4, accrued=1e4, unseen={})


inferred = partial(deciding.inferred, k=4, jobs=50.0)


def alternative(name: str, k: int, posterior: Posterior, round_ms: float) -> Alternative:
    tokens = posterior.tokens[k]
    speedup = 30.0 * tokens / round_ms
    return Alternative(name, k, tokens, round_ms, speedup, 0.9 * speedup, 1.1 * speedup, 1 / tokens)


def trial(rival: Alternative, posterior: Posterior, budget: ExplorationBudget = RICH) -> Trial | None:
    """Instead of vanilla."""
    return worth_trying(VANILLA, [VANILLA, rival], {"draft": posterior}, budget, 1, 100.0)


def test_certainty_ends_exploration() -> None:
    tried = []
    for sd in (1.0, 0.5, 0.2, 0.05, 0.01):
        posterior = inferred(0.2, sd=sd)
        rival = alternative("draft", 1, posterior, 41.0)
        assert rival.speedup < 0.9
        tried.append(trial(rival, posterior) is not None)
    assert tried == sorted(tried, reverse=True)
    assert tried[0]
    assert not tried[-1]


def test_nothing_is_tried_that_the_budget_cannot_pay() -> None:
    posterior = inferred(0.3, sd=1.0)
    rival = alternative("draft", 1, posterior, 42.0)
    price = loss(VANILLA, rival, 100.0)
    assert price == pytest.approx(100 * (1 / rival.speedup - 1))
    for balance, is_tried in ((price - 0.1, False), (price + 0.1, True)):
        budget = ExplorationBudget(balance=balance, accrued=balance, unseen={})
        assert (trial(rival, posterior, budget) is not None) == is_tried


def test_a_drafter_whose_weights_are_in_use_is_tried_for_its_unseen_positions_alone() -> None:
    posterior = inferred(0.6, sd=0.5, own_sd=1.5)
    gated = alternative("gated", 3, posterior, 40.0)
    one, three, four = (alternative("draft", k, posterior, ms) for k, ms in ((1, 27.5), (3, 41.0), (4, 41.5)))
    posteriors = {"gated": posterior, "draft": posterior}

    def tried(*rivals: Alternative, shared_weights: dict[str, str]) -> Alternative | None:
        ways = [gated, VANILLA, *rivals]
        trial = worth_trying(gated, ways, posteriors, RICH, 1, 100.0, shared_weights=shared_weights)
        return trial.alternative if trial else None

    shared_weights = {"gated": "weights", "draft": "weights"}
    assert tried(one, three, shared_weights=shared_weights) is None
    assert tried(one, three, four, shared_weights=shared_weights) is four, "a position that the choice never reaches"
    for others in ({}, {"draft": "weights"}, {"gated": "weights"}, {"gated": "weights", "draft": "others"}):
        assert tried(three, shared_weights=others) is three
    slow = alternative("draft", 1, posterior, 49.0)
    found = worth_trying(VANILLA, [VANILLA, slow], posteriors, RICH, 1, 100.0, shared_weights=shared_weights)
    assert found is not None, "vanilla is no evidence of a drafter"


def test_a_drafter_that_may_have_become_cheaper_is_worth_a_trial() -> None:
    posterior = inferred(0.5, sd=0.01)
    sure = alternative("draft", 1, posterior, 48.0)
    assert sure.speedup < 0.95
    for cost_sd, is_tried in ((0.0, False), (0.02, False), (0.25, True)):
        rival = sure._replace(cost_sd=cost_sd)
        assert (trial(rival, posterior) is not None) == is_tried


def test_doubt_about_costs_is_resolved_by_one_job_and_doubt_about_acceptance_is_not() -> None:
    # The same doubt, once about acceptance and once about costs.
    posterior, certain = inferred(0.5, sd=0.5, own_sd=0.0), inferred(0.5, sd=0.0, own_sd=0.0)
    by_tokens = alternative("draft", 1, posterior, 49.0)
    sd = posterior.tokens_sd[1] * by_tokens.slope
    by_costs = alternative("draft", 1, certain, 49.0)._replace(cost_sd=sd)
    assert trial(by_tokens, posterior) is None
    assert trial(by_costs, certain) is not None


def test_a_drafter_is_rechecked_after_fewer_jobs_the_more_time_they_took() -> None:
    posterior = inferred(0.3, sd=0.02, jobs=4000.0)
    rival = alternative("draft", 1, posterior, 42.0)

    def after(num_jobs: int, minutes: float, balance: float = 1e4) -> Trial | None:
        budget = ExplorationBudget(balance=balance, accrued=balance, unseen={"draft": 0.0}, decided_at=NOW)
        step = timedelta(minutes=minutes / num_jobs)
        for number in range(1, num_jobs + 1):
            budget = budget.after(1, 1e-6, is_cold=False, now=NOW + number * step)
        return trial(rival, posterior, budget)

    def jobs_until_due(minutes_a_job: float) -> int:
        return next(n for n in range(1, 2000) if after(n, n * minutes_a_job) is not None)

    by_jobs, busy, quiet, quieter = map(jobs_until_due, (0.0, 0.001, 1.0, 60.0))
    assert busy == pytest.approx(by_jobs, rel=0.02)
    assert by_jobs > quiet > quieter
    # With M = a day's jobs, the interval goes by the root of the jobs a day.
    assert quiet / quieter == pytest.approx(math.sqrt(60), rel=0.2)
    assert after(quiet - 1, quiet - 1.0) is None
    found = after(quiet, float(quiet))
    assert found.why == f"draft was not used for {quiet} jobs in {quiet} minutes"
    assert after(quiet, float(quiet), balance=0.9 * found.loss) is None, "the budget is as before"
    hopeless = alternative("draft", 1, posterior, 200.0)
    budget = ExplorationBudget(balance=1e4, unseen={"draft": 5.0}, unseen_s={"draft": 1e5})
    assert trial(hopeless, posterior, budget) is None


def test_an_unused_drafter_is_rechecked_less_and_less_often() -> None:
    def interval(jobs: float) -> int:
        posterior = inferred(0.3, sd=0.02, jobs=jobs)
        rival = alternative("draft", 1, posterior, 42.0)

        def is_due(unseen: float) -> bool:
            budget = ExplorationBudget(balance=1e4, accrued=1e4, unseen={"draft": unseen})
            return trial(rival, posterior, budget) is not None

        return next(n for n in range(1, 10_000) if is_due(float(n)))

    young, old = interval(0.0), interval(4000.0)
    assert 5 < young < 200
    assert old == pytest.approx(3 * young, rel=0.1)  # √((500 + 4000) / 500)


BATCH = st.tuples(st.integers(1, 8), st.floats(1, 400), st.floats(0.3, 3), st.sampled_from(["explore", "obey"]))


@given(batches=st.lists(BATCH, max_size=60), is_cold=st.booleans(), share=st.floats(0, 0.2))
def test_a_budget_is_never_exceeded(batches: list[tuple[int, float, float, str]], is_cold: bool, share: float) -> None:
    budget, decoded, first = ExplorationBudget(explore_share=share), 0.0, 0.0
    for num_jobs, per_job, price, what in batches:
        num_tokens = num_jobs * per_job
        if not decoded and is_cold and share > 0:
            first = FIRST_JOBS * per_job
        decoded += num_tokens
        budget = budget.after(num_jobs, num_tokens, is_cold=is_cold)
        if what == "explore" and price * num_tokens <= budget.balance:
            budget = budget.paid(price * num_tokens).used("draft")
        assert budget.balance >= -1e-6
        assert budget.spent <= budget.accrued + 1e-6
        assert budget.accrued <= share * decoded + first + 1e-6
