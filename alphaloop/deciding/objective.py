"""The objective of a decision: most tokens a second, or a time target.

Alternatives that meet the target with a probability of 90 % or more come first, ranked by goodput. The others follow,
ranked by their probability. So a task with a target drafts only if the lower end of the posterior meets the target
too; a task without a target drafts on the mean alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: A target counts as met from this probability on.
SURE_ENOUGH: Final = 0.9


class Aim(StrEnum):
    """What is optimised."""

    THROUGHPUT = "throughput"
    TIME_PER_TOKEN = "time_per_token"  # noqa: S105  #: behind the first token
    TIME_TO_FIRST_TOKEN = "time_to_first_token"  # noqa: S105
    DEADLINE = "deadline"  #: the whole job, its prompt included


@dataclass(frozen=True, slots=True)
class Objective:
    """An aim and, except for throughput, its target in milliseconds."""

    aim: Aim = Aim.THROUGHPUT
    target_ms: float = math.inf

    def chance(
        self, *, reading_ms: float, round_ms: float, num_tokens: float, tokens_per_round: float, tokens_sd: float
    ) -> float:
        """Probability that a usual job meets the target, 1 where it is at least `SURE_ENOUGH`.

        `reading_ms` pass before the first round; then `num_tokens` come in rounds of `round_ms`.
        """
        if self.aim is Aim.THROUGHPUT:
            return 1.0
        if self.aim is Aim.TIME_TO_FIRST_TOKEN:
            return 1.0 if reading_ms <= self.target_ms else 0.0
        left_ms = self.target_ms if self.aim is Aim.TIME_PER_TOKEN else self.target_ms - reading_ms
        num_tokens = 1.0 if self.aim is Aim.TIME_PER_TOKEN else num_tokens
        if left_ms <= 0:
            return 0.0
        needed = round_ms * num_tokens / left_ms
        if tokens_sd <= 0:
            return 1.0 if tokens_per_round >= needed else 0.0
        met = 0.5 * math.erfc((needed - tokens_per_round) / tokens_sd / math.sqrt(2))
        return 1.0 if met >= SURE_ENOUGH else met
