"""Every reason speaks where the figures bear it out, with their numbers, and is silent elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.payoff.figures import VANILLA, Acceptance, Candidate, RoundTimes
from tests.fixtures.costs import NUM_PROMPTS, acceptance, evidence, figures
from worker.measuring import report as why
from worker.measuring.observing import Observation
from worker.measuring.report import REASONS, CandidateEvidence, GreedySample, HeldOut, reasons


def test_a_candidate_with_nothing_wrong_has_an_account_and_no_excuse() -> None:
    fine = evidence((0.9, 0.9, 0.9, 0.9), draft=0.05, verify=0.95, ratio=1.9)
    assert [name for name, _ in reasons(fine)] == ["account"]
    assert len({reason.__name__ for reason in REASONS}) == len(REASONS)


FALLING = [1.0 + 0.02 * i for i in range(NUM_PROMPTS)]
FLAT = evidence((0.9,) * 4, draft=0.0, verify=0.9, ratio=[1.0] * NUM_PROMPTS)
STEEP = evidence((0.9, 0.2, 0.2, 0.2), draft=0.8, verify=1.2)
#: The same prompts decoded greedy were accepted more often.
COSTLY = replace(evidence(), temperature=0.8, greedy=GreedySample(acceptance([0.9], 8), acceptance([0.6], 8)))
QUIET = AcceptanceCounts(101, 61, 0, (40, 40), (40, 30), (30, 20))
#: By reason: where it speaks, parts of what it says, and where it is silent.
CASES: Final = [
    (
        why.account,
        evidence((0.5,), draft=0.3, verify=1.0, reading=1.0),
        [
            "1.50 tokens a round",
            "takes 1.40 vanilla rounds (drafting 0.30, the target's pass 1.00, the rest 0.10)",
            "50 % of vanilla's time: 1.03x",
        ],
        [replace(evidence(), costs=None)],
    ),
    (  # a round of 1.4 at k = 1 needs 1 + α = 1.4 · 1.3
        why.low_acceptance,
        evidence((0.5,), draft=0.3, verify=1.0),
        ["α is 0.50 [", "1.30x needs 0.82, and 0.40 to lose nothing"],
        [evidence((0.95,), draft=0.3, verify=1.0), evidence(accepted=acceptance([]))],
    ),
    (why.low_acceptance, evidence((0.5,), draft=0.9, verify=1.0), ["needs more than every token accepted."], []),
    (
        why.k_too_high,
        evidence(
            (0.9, 0.5, 0.3, 0.2),
            ratio=FALLING,
            siblings=[figures(Candidate("small", 2), [1.2 * ratio for ratio in FALLING])],
        ),
        [
            "k=4 is too long: on the same prompts k=2 is 1.20 [1.20 1.20] times as fast",
            "from 0.90 at position 1 to 0.2",
        ],
        [
            # Faster on seven prompts of twelve, slower on five: the medians differ, the prompts do not say so.
            replace(FLAT, siblings=[figures(Candidate("small", 2), [1.1] * 7 + [0.9] * 5)]),
            replace(FLAT, siblings=[figures(Candidate("small", 8), [2.0] * NUM_PROMPTS)]),
        ],
    ),
    (  # a shorter draft that was not tried is modelled
        why.k_too_high,
        STEEP,
        ["k=1 would be", "measure it with --k 1"],
        [
            # It was measured, and was no faster on these prompts: the model is not believed.
            replace(STEEP, siblings=[figures(Candidate("small", 1), 1.0)]),
            evidence((0.9,) * 4, draft=0.1, verify=1.0),
        ],
    ),
    (
        why.temperature,
        COSTLY,
        ["Temperature 0.8 costs acceptance: on 8 of the prompts α is 0.60 [", "and 0.90 ["],
        [
            replace(COSTLY, greedy=GreedySample(acceptance([0.6], 8), acceptance([0.6], 8))),
            replace(COSTLY, greedy=GreedySample(acceptance([], 8), acceptance([0.6], 8))),
            evidence(),
        ],
    ),
    (
        why.tokenizer,
        replace(evidence(), findings=[("size", "It is large."), ("chat template", "The draft has none.")]),
        ["do not fit in full. chat template: The draft has none."],
        [replace(evidence(), findings=[("size", "It is large.")])],
    ),
    (
        why.domain,
        replace(evidence((0.6,)), held_out=HeldOut(0.75, "its 64 held-out texts")),
        ["α_1 is 0.60 [", " 0.75 on its 64 held-out texts"],
        [replace(evidence((0.6,)), held_out=HeldOut(0.6, "its texts")), evidence((0.6,))],
    ),
    (
        why.draft_cost,
        evidence((0.7, 0.7), draft=0.8, verify=0.9, ratio=1.2),
        ["costs 0.40 of a target pass (c), 0.80 a round", "this would be 2.19x"],
        [
            evidence((0.2, 0.2), draft=0.8, verify=0.9, ratio=0.7),
            evidence((0.7, 0.7), draft=0.8, verify=0.9, ratio=1.35),
        ],
    ),
    (
        why.wide_pass,
        evidence((0.7, 0.7), draft=0.1, verify=1.8, ratio=1.05, batch=16),
        ["on this device at batch 16: a pass over 3.0 positions takes 2.00 times one over 1"],
        [
            evidence((0.7, 0.7), draft=0.1, verify=0.91, ratio=1.05),
            evidence((0.1, 0.1), draft=0.1, verify=1.8, ratio=0.6),
        ],
    ),
    (
        why.prompt_dominated,
        evidence((0.9, 0.9), draft=0.1, verify=1.0, reading=3.0, ratio=1.15),
        ["75 % of vanilla's time", "could gain more than 1.33x"],
        [
            evidence((0.9, 0.9), draft=0.1, verify=1.0, reading=3.0, ratio=1.4),
            evidence((0.2, 0.2), draft=0.1, verify=1.0, reading=3.0),
        ],
    ),
    (why.short_outputs, evidence(output_tokens=19.0), ["19 tokens in the median"], [evidence(output_tokens=20.0)]),
    (
        why.nothing_proposed,
        evidence(accepted=Acceptance((QUIET,) * NUM_PROMPTS, NUM_PROMPTS)),
        ["small proposes nothing in 60 % of the rounds"],
        [evidence()],
    ),
    (
        why.long_tail,
        evidence(ratio=[1.4] * 16 + [0.75] * 4, seconds=[1.0] * 16 + [20.0] * 4),
        ["The median is 1.40x", "all tokens over all seconds are 0.81x: prompts that gain less"],
        [evidence(ratio=[1.3, 1.4, 1.5] * 6), evidence(ratio=[1.4] * 3)],
    ),
]


@pytest.mark.parametrize(("reason", "speaks", "parts", "silent"), CASES, ids=[case[0].__name__ for case in CASES])
def test_it_speaks_where_the_figures_bear_it_out(
    reason: Callable[[CandidateEvidence], str | None],
    speaks: CandidateEvidence,
    parts: Sequence[str],
    silent: Sequence[CandidateEvidence],
) -> None:
    told = reason(speaks)
    assert [part for part in parts if part not in told] == []
    assert [reason(other) for other in silent] == [None] * len(silent)


def test_what_ships_shows_the_texts_that_it_slows_down() -> None:
    told = dict(reasons(evidence(ratio=[2.0] * 18 + [0.9, 0.8]), ships=True))
    assert told.keys() == {"long_tail", "slower_texts"}
    slower = "2 of 20 prompts were slower than vanilla, the slowest 0.80x; they took 21 % of its time."
    assert told["slower_texts"] == slower
    assert not list(reasons(evidence(ratio=2.0), ships=True))


def observations(ms: list[float]) -> list[Observation]:
    times = [RoundTimes(num_rounds=20, num_steps=20, round_s=20 * one / 1000) for one in ms]
    return [Observation(VANILLA, number, 0, (), one, 1.0) for number, one in enumerate(times)]


def test_a_busy_machine_is_remarked_with_its_figures(rng: random.Random) -> None:
    assert why.busy_note(observations([rng.gauss(20.0, 1.0) for _ in range(40)])) is None, "it is quiet"
    told = why.busy_note(observations([rng.choice([20.0, 40.0]) for _ in range(40)]))
    assert "vanilla's own rounds took 20.0 to 40.0 ms" in told
    assert why.busy_note(observations([1.0, 100.0])) is None, "of few prompts nothing is said"
