"""From the observations of one candidate to its figures. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from alphaloop.payoff.bounds import Block, median_bounds, total_bounds
from alphaloop.payoff.figures import VANILLA, Acceptance, Candidate, Exactness, Figures, RoundTimes, Tails
from worker.measuring.observations import Measured, Observation


def figures_of(measured: Measured, candidate: Candidate, exactness: Exactness, num_comparisons: int) -> Figures:
    """Of a candidate, over the turns that were finished; there must be one."""
    observations = measured.of(candidate)
    baseline = measured.of(VANILLA)
    texts = [generation for _, generation in measured.generations(candidate)]
    blocks, vanilla_blocks = blocks_of(observations), blocks_of(baseline)
    ratios = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(blocks, vanilla_blocks, strict=True)]
    token_s = [
        (text.wall_s - text.time_to_first_token_s) / (text.counts.num_tokens - 1)
        for text in texts
        if text.counts.num_tokens > 1
    ]
    return Figures(
        candidate=candidate,
        tokens_per_s=sum(block.num_tokens for block in blocks) / sum(block.wall_s for block in blocks),
        blocks=blocks,
        ratios=tuple(ratios),
        ratio=total_bounds(blocks, vanilla_blocks, num_comparisons),
        median=median_bounds(ratios, num_comparisons),
        first_token_s=Tails.of([text.time_to_first_token_s for text in texts]),
        token_s=Tails.of(token_s) if token_s else None,
        response_s=Tails.of([text.wall_s for text in texts]),
        output_tokens=statistics.median(text.counts.num_tokens for text in texts),
        acceptance=Acceptance.of(
            [(number, text.counts) for number, text in measured.generations(candidate) if text.is_counted]
        ),
        times=sum((observation.times for observation in observations), start=RoundTimes()),
        exactness=exactness,
    )


def blocks_of(observations: Sequence[Observation]) -> tuple[Block, ...]:
    """Of every block, by its number, all repeats added up. Blocks are independent of each other, repeats are not."""
    by_number: dict[int, list[Observation]] = defaultdict(list)
    for one in observations:
        by_number[one.block].append(one)
    return tuple(
        Block(sum(one.num_tokens for one in same), sum(one.wall_s for one in same))
        for _, same in sorted(by_number.items())
    )
