"""Whether speculative texts are vanilla's, and whether a difference is a near-tie.

A pass of another width rounds differently, so greedy texts may differ where two logits are almost equal
(docs/concepts/exactness.md). The engine's interface returns no logits, but it takes biases. So the target alone decodes
one token behind the common text, twice: each time one of the two tokens has its logit raised by a tolerance. If the
raised token is chosen both times, both lie within the tolerance of the best, and rounding explains the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from alphaloop.near_ties import tolerance_of
from alphaloop.payoff.figures import VANILLA, Exactness
from worker.engine import Generation, PreparedJob
from worker.measuring.running import Interrupted, Runner

#: Asking costs a reading of the prompt twice; a broken engine would differ everywhere.
MAX_EXAMINED: Final = 20


class ExactnessCheck:
    """Compares texts; asks the target about differences. Raises DecodeFailed.

    A runner that is told to stop leaves the differences unexamined.
    """

    def __init__(self, runner: Runner, prepared: Sequence[PreparedJob], dtype: str) -> None:
        self._runner = runner
        self._prepared = prepared
        self._tolerance = tolerance_of(dtype)
        self._num_examined = 0
        self._answers: dict[tuple[int, int, int, int], bool] = {}

    def compare(self, vanilla: Sequence[tuple[int, Generation]], other: Sequence[tuple[int, Generation]]) -> Exactness:
        """Both by number of the prompt; of a prompt's repeats the first counts."""
        truths, found = dict(reversed(vanilla)), dict(reversed(other))
        counted = dict.fromkeys(("num_equal", "num_near_ties", "num_wrong", "num_unexamined", "num_sampled"), 0)
        for number, generation in found.items():
            counted[self._kind(number, truths[number], generation)] += 1
        return Exactness(**counted)

    def _kind(self, number: int, vanilla: Generation, other: Generation) -> str:
        sampling = self._prepared[number].sampling
        if sampling.temperature > 0 and sampling.seed is None:
            return "num_sampled"
        truth, found = vanilla.token_ids, other.token_ids
        if (truth, vanilla.text) == (found, other.text):
            return "num_equal"
        if not self._prepared[number].token_ids:  # a server has the tokens, and takes none to go on from
            return "num_unexamined"
        place = next((i for i, pair in enumerate(zip(truth, found, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            # The same tokens ended one text and not the other.
            return "num_wrong"
        if sampling.temperature > 0 or sampling.is_adjusted or self._num_examined >= MAX_EXAMINED:
            return "num_unexamined"
        try:
            return "num_near_ties" if self._is_near_tie(number, place, truth, found) else "num_wrong"
        except Interrupted:
            return "num_unexamined"

    def _is_near_tie(self, number: int, place: int, truth: Sequence[int], found: Sequence[int]) -> bool:
        key = (number, place, truth[place], found[place])
        if key not in self._answers:
            self._num_examined += 1
            asked = self._prepared[number]
            shared = (*asked.token_ids, *truth[:place])
            jobs = [
                replace(
                    asked,
                    job=asked.job.model_copy(update={"job_id": f"{asked.job.job_id}-tie-{token}"}),
                    token_ids=shared,
                    sampling=replace(asked.sampling, max_tokens=1, logit_bias=((token, self._tolerance),)),
                )
                for token in (truth[place], found[place])
            ]
            chosen = [self._runner.decode([job], VANILLA)[0][0].token_ids[0] for job in jobs]
            self._answers[key] = chosen == [truth[place], found[place]]
        return self._answers[key]
