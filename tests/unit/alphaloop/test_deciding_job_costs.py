"""What a whole job costs: its prompt, its context, and drafts that end early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alphaloop.costs import CostPoint, CostTable
from alphaloop.deciding.goodput import JobSize, weigh
from alphaloop.deciding.policy import Reason
from alphaloop.messages import Mode
from tests.fixtures.deciding import LOOKUP, choose, costs, find, inferred, with_prompts


def test_a_job_gains_less_than_its_rounds_the_longer_its_prompt_is_read() -> None:
    history, table = {"lookup": inferred(0.9)}, with_prompts(costs(), target_ms=300.0)
    rounds = choose(history, costs=table).alternatives[0]
    short, long = (choose(history, costs=table, prompt_tokens=n).alternatives[0] for n in (100.0, 10_000.0))
    assert 1 < long.speedup < short.speedup < rounds.speedup
    # 200 tokens of 30 ms behind a prompt of 300 ms, against as many at the speed of the rounds.
    assert short.speedup == pytest.approx((300 + 200 * 30) / (300 + 200 * 30 / rounds.speedup), rel=1e-6)
    assert long.speedup_low <= long.speedup <= long.speedup_high


def test_a_draft_model_that_has_to_read_a_long_prompt_may_not_pay() -> None:
    history, table = {"lookup": inferred(0.5)}, with_prompts(costs(), target_ms=300.0, draft_ms=60.0)
    assert choose(history, costs=table, prompt_tokens=100.0).mode is Mode.SPECULATIVE
    decision = choose(history, costs=table, prompt_tokens=10_000.0)
    assert (decision.mode, decision.reason) == (Mode.VANILLA, Reason.NOT_FASTER)
    hasty = replace(LOOKUP, max_prompt_tokens=100)
    assert choose(history, costs=table, prompt_tokens=10_000.0, drafters=(hasty,)).mode is Mode.SPECULATIVE


def test_costs_are_taken_at_the_context_of_the_job() -> None:
    # Verification grows dear with the context here: what pays behind a short prompt does not behind a long one.
    far = [
        CostPoint(p.drafter, p.batch, p.width, p.median_ms * (9 if p.width > 1 else 1), 5, 4096) for p in costs().points
    ]
    table, history = CostTable([*costs().points, *far]), {"lookup": inferred(0.7)}
    size = JobSize(4000.0, 200.0)
    assert size.context == 4100.0
    assert choose(history, costs=table, prompt_tokens=10.0).mode is Mode.SPECULATIVE
    assert choose(history, costs=table, prompt_tokens=size.num_prompt_tokens).mode is Mode.VANILLA


def test_a_drafter_that_ends_its_drafts_early_is_charged_for_what_it_proposes() -> None:
    # The same acceptance where anything is proposed; one drafter goes on to eight tokens, the other ends after two.
    full, ended = inferred(0.9), inferred(0.9, reach=(1.0, 1.0, *(0.1,) * 6))
    dear = costs(wide_ms=90.0)
    for posterior, low, high in ((full, 80.0, 92.0), (ended, 40.0, 70.0)):
        assert low < find(weigh({"lookup": posterior}, [LOOKUP], dear, 1), 8).round_ms < high
