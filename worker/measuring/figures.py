"""From the observations of one candidate to its figures. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from alphaloop.payoff.bounds import median_bounds
from alphaloop.payoff.figures import VANILLA, Acceptance, Candidate, Exactness, Figures, RoundTimes, Tails
from worker.measuring.observations import Measured, Observation


def figures_of(measured: Measured, candidate: Candidate, exactness: Exactness, num_comparisons: int) -> Figures:
    """Of a candidate, over the turns that were finished; there must be one."""
    observations = measured.of(candidate)
    baseline = measured.of(VANILLA)
    texts = [generation for _, generation in measured.generations(candidate)]
    ratios = paired_ratios(observations, baseline)
    token_s = [
        (text.wall_s - text.time_to_first_token_s) / (text.counts.num_tokens - 1)
        for text in texts
        if text.counts.num_tokens > 1
    ]
    return Figures(
        candidate=candidate,
        tokens_per_s=statistics.median(observation.tokens_per_s for observation in observations),
        ratios=tuple(ratios),
        ratio=median_bounds(ratios, num_comparisons),
        ratio_of_totals=_total(observations) / _total(baseline),
        first_token_s=Tails.of([text.time_to_first_token_s for text in texts]),
        token_s=Tails.of(token_s) if token_s else None,
        response_s=Tails.of([text.wall_s for text in texts]),
        output_tokens=statistics.median(text.counts.num_tokens for text in texts),
        acceptance=Acceptance.of([(number, text.counts) for number, text in measured.generations(candidate)]),
        times=sum((observation.times for observation in observations), start=RoundTimes()),
        exactness=exactness,
    )


def paired_ratios(ours: Sequence[Observation], theirs: Sequence[Observation]) -> list[float]:
    """Of every block, by its number, the ratio of tokens a second; of its repeats the median.

    Blocks are what is independent of each other, repeats are not.
    """
    by_block: dict[int, list[float]] = defaultdict(list)
    for one, other in zip(ours, theirs, strict=True):
        by_block[one.block].append(one.tokens_per_s / other.tokens_per_s)
    return [statistics.median(by_block[block]) for block in sorted(by_block)]


def _total(observations: Sequence[Observation]) -> float:
    return sum(o.num_tokens for o in observations) / sum(o.wall_s for o in observations)
