"""The articles' rule: a task's α under .5 is off, over .6 is on, between them it is measured again; k fixed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from benchmarks.policy.play import Batch, Choice, Decoded

OFF_BELOW: Final = 0.5
ON_ABOVE: Final = 0.6
#: Above so many sequences the articles switch off; they name 8 to 32.
MOST_SEQUENCES: Final = 8
FEWEST_TOKENS: Final = 20
#: Jobs that a measurement rests on, and jobs after which one that came out as off is repeated.
MEASURED_JOBS: Final = 10
AGAIN_AFTER_JOBS: Final = 100


@dataclass(slots=True)
class _Task:
    is_on: bool = True
    jobs_left: int = MEASURED_JOBS  #: until the next verdict
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=2 * MEASURED_JOBS))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=50))


class AlphaThresholds:
    """One drafter, one k, a switch for each task. It stands in the process."""

    def __init__(self, drafter: str, num_draft_tokens: int) -> None:
        self._on = Choice(drafter, num_draft_tokens)
        self._tasks: dict[str, _Task] = {}

    def choose(self, batch: Batch) -> Choice:
        """On while α was found high, or is being found."""
        task = self._tasks.setdefault(batch.cell.task, _Task())
        is_short = bool(task.lengths) and sum(task.lengths) < FEWEST_TOKENS * len(task.lengths)
        return self._on if task.is_on and batch.num_running <= MOST_SEQUENCES and not is_short else Choice()

    def observe(self, batch: Batch, choice: Choice, decoded: Decoded) -> None:
        """Accepted over tested tokens, pooled over positions; a verdict after every measurement."""
        task = self._tasks[batch.cell.task]
        task.lengths.extend(decoded.num_tokens)
        if choice.drafter is not None:
            i, out = decoded.index, decoded.outcomes.counts
            task.recent.extend(zip(out.accepts[i].sum(1).tolist(), out.trials[i].sum(1).tolist(), strict=True))
        task.jobs_left -= batch.num_jobs
        if task.jobs_left > 0:
            return
        if not task.is_on:
            task.is_on, task.jobs_left = True, MEASURED_JOBS
            task.recent.clear()
            return
        trials = sum(n for _, n in task.recent)
        alpha = sum(a for a, _ in task.recent) / trials if trials else 0.0
        task.is_on = alpha >= OFF_BELOW
        task.jobs_left = MEASURED_JOBS if task.is_on else AGAIN_AFTER_JOBS
        if OFF_BELOW <= alpha <= ON_ABOVE:
            task.recent.clear()

    def restart(self) -> None:
        """All is forgotten."""
        self._tasks = {}
