"""How much of each draft is worth verifying, step by step, after vLLM's adaptive verification.

Written for this comparison from what its documentation and source say: always draft K tokens; predict from the draft's
own log-odds f of each token whether it will be accepted, logistic with one slope and an intercept a position; a token
survives with the product of its predictions so far; of all sequences' tokens the b likeliest go into the pass, b the
argmax of (sequences + Σ survival) / (drafting + verifying ms), from times profiled at the start. Accepted tokens and
each first refused one correct the prediction, by a damped Newton step every 100 steps.

More than its engine has: predictions of this step choose b (there, those of an earlier one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.policy.play import Batch
from benchmarks.policy.rounds import Costs, Round
from benchmarks.policy.stream import Drafts, Floats

FIRST_SLOPE: Final = 0.5
FIRST_INTERCEPT: Final = -0.2
STEPS_A_FIT: Final = 100
DAMPING: Final = 50.0
RIDGE: Final = 1e-3


class Survival:
    """One drafter, a length of its own for each sequence of a step; predictions for all tasks, in the process."""

    def __init__(self, drafter: str, num_draft_tokens: int, inferred: Costs) -> None:
        self.drafter = drafter
        self._k = num_draft_tokens
        self._inferred = inferred
        self._ms: dict[tuple[int, int], list[float]] = {}
        self.restart()

    def restart(self) -> None:
        """All is forgotten."""
        self._slope = FIRST_SLOPE
        self._intercepts = np.full(self._k, FIRST_INTERCEPT)
        self._forget_steps()

    def begin(self, batch: Batch, drafts: Drafts, index: int) -> None:
        """The batch's log-odds, and how much is offered."""
        self._features: NDArray[np.float32] = drafts.confidence[index][..., : self._k]
        self._offered: list[list[int]] = drafts.offered[index].tolist()
        self._numbers: Sequence[int] = ()
        self._load = batch.num_jobs
        self._predict()

    def lengths(self, jobs: Sequence[int], numbers: Sequence[int]) -> tuple[int, Sequence[int]]:
        """K tokens drafted; of them the likeliest into the pass, as many as pay."""
        self._numbers = [numbers[j] for j in jobs]
        slots: list[tuple[float, int]] = []
        for place, j in enumerate(jobs):
            number = numbers[j]
            slots += [(s, place) for s in self._survival[j, number, : self._offered[j][number]].tolist()]
        slots.sort(reverse=True)
        ms = self._costs_of(len(jobs))
        best, most = 0, len(jobs) / ms[0]
        expected = float(len(jobs))
        for b, (survival, _) in enumerate(slots, 1):
            expected += survival
            if expected / ms[b] > most:
                best, most = b, expected / ms[b]
        admitted = [0] * len(jobs)
        for _, place in slots[:best]:
            admitted[place] += 1
        return self._k, admitted

    def follow(self, done: Round) -> None:
        """Labels: accepted tokens, and the first refused one."""
        for place, j in enumerate(done.jobs):
            number, accepted = self._numbers[place], done.num_accepted[place]
            num_labels = min(accepted + 1, done.num_verified[place])
            features = self._features[j, number, :num_labels].tolist()
            predicted = self._predicted[j, number, :num_labels].tolist()
            for i, (f, p) in enumerate(zip(features, predicted, strict=True)):
                weight, residual = p * (1 - p), (1.0 if i < accepted else 0.0) - p
                sums = self._sums[i]
                sums[0] += weight * f * f
                sums[1] += weight * f
                sums[2] += weight
                sums[3] += residual * f
                sums[4] += residual
                sums[5] += 1
        self._num_steps += 1
        if self._num_steps == STEPS_A_FIT:
            self._fit()

    def _forget_steps(self) -> None:
        self._sums = [[0.0] * 6 for _ in range(self._k)]
        self._num_steps = 0

    def _fit(self) -> None:
        """One Newton step of ridge logistic regression; the matrix is an arrow, so it is solved by hand."""
        a, b, c, g0, g1, n = np.array(self._sums).T
        c = c + RIDGE
        of_slope = (g0.sum() - (b * g1 / c).sum()) / (a.sum() + RIDGE - (b * b / c).sum())
        of_slope *= n.sum() / (n.sum() + DAMPING)
        if not math.isfinite(of_slope) or self._slope + of_slope < 0:
            of_slope = 0.0
        self._slope += float(of_slope)
        self._intercepts = self._intercepts + (g1 - b * of_slope) / c * n / (n + DAMPING)
        self._forget_steps()
        self._predict()

    def _predict(self) -> None:
        self._predicted: Floats = 1 / (1 + np.exp(-(self._slope * self._features + self._intercepts)))
        self._survival = np.cumprod(self._predicted, axis=-1)

    def _costs_of(self, num_running: int) -> list[float]:
        """Milliseconds of a step at the load by tokens admitted, if other sequences get as many as these."""
        key = (self._load, num_running)
        if key not in self._ms:
            passes: Floats = self._inferred.passes[self._load]
            widths = np.arange(num_running * self._k + 1) / num_running
            drafting = self._inferred.drafts[self.drafter][self._load, self._k]
            self._ms[key] = (drafting + np.interp(widths, np.arange(len(passes)), passes)).tolist()
        return self._ms[key]
