"""Whether a candidate drafts better than its parent on held-out texts, paired by text.

A greedy text has the same tokens whoever drafts, so the tokens that a candidate yields a round over its parent's are
the parent's rounds over the candidate's. The interval is that of a ratio of sums over texts, linearised (Cochran 1977,
§6.4), with Student's t of one degree of freedom less than there are texts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from alphaloop.acceptance import t95
from alphaloop.wording import how_many

if TYPE_CHECKING:
    from engine.training.rivals import RivalRounds


@dataclass(frozen=True, slots=True)
class RivalFigures:
    """Parent and candidate on the texts of one task, or of all."""

    num_texts: int
    parent: float  #: tokens a round
    candidate: float  #: tokens a round
    ratio: float  #: the candidate's over the parent's
    low: float | None  #: of the 95 % interval of `ratio`; None with fewer than two texts
    high: float | None

    @property
    def is_better(self) -> bool:
        """Whether the interval lies above 1."""
        return self.low is not None and self.low > 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial begins with, or why there is none."""

    total: RivalFigures
    by_task: dict[str, RivalFigures]

    @property
    def is_better(self) -> bool:
        """Whether the candidate is better in a task, or in all together."""
        return self.total.is_better or any(figures.is_better for figures in self.by_task.values())

    def figures(self) -> dict[str, Any]:
        """As a refresh stores them."""
        return {"total": asdict(self.total), "by_task": {task: asdict(its) for task, its in self.by_task.items()}}

    def sentence(self) -> str:
        """For a person."""
        total, better = self.total, [task for task, figures in self.by_task.items() if figures.is_better]
        interval = "" if total.low is None else f" ({total.low:.2f} to {total.high:.2f})"
        where = f"better in {', '.join(better)}" if better else "in no task alone better"
        texts = how_many(total.num_texts, "held-out text")
        return (
            f"{total.candidate:.2f} tokens a round on {texts}, its parent {total.parent:.2f}: "
            f"{total.ratio:.2f} times as many{interval}, {where}"
        )


def verdict_of(rounds: Sequence[RivalRounds]) -> Verdict:
    """The verdict over texts, of which there is one at least."""
    by_task: defaultdict[str, list[RivalRounds]] = defaultdict(list)
    for text in rounds:
        by_task[text.task].append(text)
    return Verdict(_figures(rounds), {task: _figures(texts) for task, texts in sorted(by_task.items())})


def _figures(texts: Sequence[RivalRounds]) -> RivalFigures:
    n, num_tokens = len(texts), sum(text.num_tokens for text in texts)
    parent, candidate = (sum(text.parent_rounds for text in texts), sum(text.candidate_rounds for text in texts))
    ratio = parent / candidate
    low = high = None
    if n > 1:
        residuals = ((text.parent_rounds - ratio * text.candidate_rounds) / candidate for text in texts)
        margin = t95(n - 1) * math.sqrt(n / (n - 1) * sum(residual**2 for residual in residuals))
        low, high = ratio - margin, ratio + margin
    return RivalFigures(n, num_tokens / parent, num_tokens / candidate, ratio, low, high)
