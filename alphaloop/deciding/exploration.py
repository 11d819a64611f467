"""Exploration: trying settings that are not expected to be best, within a budget of tokens. Pure.

The budget is counted in tokens that jobs are expected to lose: N tokens at speed-up S_a instead of S_b cost
N · (S_b / S_a - 1). Every job adds `explore_share` of its tokens, so exploration is expected to cost no more than that
share of the throughput, whatever it tries.

Two things are worth a trial:

* **A setting that could turn out better** (knowledge gradient, Frazier, Powell and Dayanik 2008). With Δ the gap of
  ln(speed-up) to the best, σ the uncertainty that only trying can resolve, and σ̃ the part of σ that m more jobs would
  resolve, the expected gain of knowing is σ̃ · (φ(u) - u·Φ(-u)) at u = Δ / σ̃, for `_HORIZON_JOBS`. The uncertainty is
  about acceptance, which a job shows with noise, and about costs, which the rounds of one job show. The gain falls
  exponentially with certainty, so exploration ends by itself. Two draft lengths of one drafter, or of drafters with
  shared weights, share most of their uncertainty; a longer draft is tried for the positions that were never seen.
* **A re-check of an unused drafter.** An unused drafter leaves no evidence when its acceptance or its cost improves.
  With changes every M jobs on average, a gain rate G if a change made the drafter better, a probability p of
  that, and a cost C of a re-check, delay and re-checks together cost least with a re-check every √(2·C·M / (p·G)) jobs
  (the economic lot size, Harris 1913). Changes come with jobs and with time: 1 / M is the sum of a rate that falls with
  the task's age without a change, so re-checks become rarer, and of one change a day over the task's jobs a day. So a
  task with few jobs is re-checked after fewer of them, and one with many is not re-checked more often for the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import hypot, sqrt
from typing import Final, NamedTuple, Protocol

from alphaloop.deciding.goodput import Alternative
from alphaloop.deciding.posterior import Posterior


def noise_between(left: Alternative, right: Alternative, posteriors: Mapping[str, Posterior]) -> float:
    """Standard deviation of ln(speed-up of left / speed-up of right).

    Two draft lengths of one drafter share most of their uncertainty, about acceptance and about costs, which then
    cancels.
    """
    if left.drafter != right.drafter:
        return hypot(
            *(sd for way in (left, right) for sd in (_noise(way, posteriors), way.cost_sd, way.error.sd)),
        )
    if left.drafter is None:
        return 0.0
    posterior = posteriors[left.drafter]
    k, n = left.num_draft_tokens, right.num_draft_tokens
    variance = (posterior.common_sd[k] * left.slope - posterior.common_sd[n] * right.slope) ** 2
    variance += (left.cost_sd - right.cost_sd) ** 2
    for slope_k, slope_n in zip(posterior.slopes[k], posterior.slopes[n], strict=True):
        moved = slope_k * left.slope - slope_n * right.slope
        variance += moved * moved
    return sqrt(variance)


class News(NamedTuple):
    """Standard deviations of ln(speed-up) that trying an alternative would resolve, by the source of uncertainty."""

    tokens_sd: float = 0.0
    cost_sd: float = 0.0

    @property
    def sd(self) -> float:
        """Standard deviation of both together."""
        return hypot(self.tokens_sd, self.cost_sd)


def news_of(
    tried: Alternative,
    chosen: Alternative,
    posteriors: Mapping[str, Posterior],
    shared_weights: Mapping[str, str],
    timed_apart: Collection[str] = (),
) -> News:
    """The uncertainty about ln(speed-up) of `tried` that only trying it can resolve; 0 for vanilla.

    If the chosen alternative uses the same drafter, or one with shared weights, its rounds already time that drafter.
    Then only the positions beyond the chosen length count. `shared_weights` is by drafter.

    Rounds of one draft length do not time another for the drafters in `timed_apart`, those of servers. There the extra
    uncertainty about the time of the tried length counts too.
    """
    if tried.drafter is None:
        return News()
    if chosen.drafter is None or shared_weights.get(tried.drafter, tried.drafter) != shared_weights.get(
        chosen.drafter, chosen.drafter
    ):
        return News(_noise(tried, posteriors), tried.cost_sd)
    unseen = posteriors[tried.drafter].slopes[tried.num_draft_tokens][chosen.num_draft_tokens :]
    is_apart = tried.drafter == chosen.drafter and tried.drafter in timed_apart
    cost_sd = sqrt(max(0.0, tried.cost_sd**2 - chosen.cost_sd**2)) if is_apart else 0.0
    return News(tried.slope * hypot(*unseen), cost_sd)


def _noise(alternative: Alternative, posteriors: Mapping[str, Posterior]) -> float:
    """Standard deviation of ln(speed-up) that comes from tokens a round."""
    if alternative.drafter is None:
        return 0.0
    return posteriors[alternative.drafter].tokens_sd[alternative.num_draft_tokens] * alternative.slope


class Budgets(Protocol):
    """The budgets that a session opens and keeps."""

    def open(self, task: str, sampling_bucket: str) -> ExplorationBudget:
        """The budget at the session's first decision. May raise StoreError."""

    def keep(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """Store the budget after a decision; returns it with what other sessions added or spent in between."""

    def save(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """As `keep`, at the end of the session: writes at once."""


#: First credit of a new task, in jobs.
FIRST_JOBS: Final = 8.0
#: Jobs over which the result of a trial pays back.
_HORIZON_JOBS: Final = 300.0
#: Prior of the jobs between two changes of a task.
CHANGE_JOBS: Final = 500.0
#: Standard deviation over jobs of ln(tokens a round).
_JOB_NOISE: Final = 0.25
#: A trial goes on for one of these numbers of decisions: one may be too few to change the choice.
_NUM_DECISIONS: Final = (1, 4, 16)
#: A change of acceptance for the better, in logits, and the probability of a change for the better given a change.
_BETTER_BY: Final = 1.5
_BETTER: Final = 0.25
#: A change of cost for the better, in standard deviations: the mean of the best quarter of a normal distribution.
_CHEAPER_BY: Final = 1.27
#: Least expected gain, of ln(speed-up), that is worth a trial, even a free one.
_LEAST_GAIN: Final = 0.002
#: Least cost of a re-check, as a share of its tokens, because a loss is possible where the model expects none.
_LEAST_LOSS: Final = 0.01
#: Mean seconds between changes that come with time: a host, its load or its software changes about once a day.
_CHANGE_S: Final = 86_400.0
_DENSITY_AT_0: Final = 1 / math.sqrt(2 * math.pi)
_SQRT_HALF: Final = math.sqrt(0.5)
#: A budget holds at most the tokens of this many jobs, so that a quiet week's credit is not spent in an hour.
_MOST_JOBS: Final = 16.0


@dataclass(frozen=True, slots=True)
class ExplorationBudget:
    """What one task may still lose, in tokens. A value: decisions return the next one."""

    balance: float = 0.0
    accrued: float = 0.0  #: total so far
    spent: float = 0.0  #: total so far; never more than `accrued`
    unseen: Mapping[str, float] | None = None  #: jobs since a drafter was last used; None before the first decision
    unseen_s: Mapping[str, float] = field(default_factory=dict)  #: seconds likewise, of drafters in `unseen`
    decided_at: datetime | None = None  #: the last decision; None where no time was given
    explore_share: float = 0.02  #: `policy.explore_share`: of all tokens, what exploration may be expected to cost

    def after(
        self, num_jobs: int, num_tokens: float, *, is_cold: bool, now: datetime | None = None
    ) -> ExplorationBudget:
        """With the credit of these jobs and tokens; the first jobs of a cold task bring a first credit.

        Without `now`, how long a drafter was not used is counted in jobs alone.
        """
        per_job = num_tokens / num_jobs
        credit = self.explore_share * num_tokens
        if self.unseen is None and is_cold and self.explore_share > 0:
            credit += FIRST_JOBS * per_job
        balance = min(self.balance + credit, max(self.balance, _MOST_JOBS * per_job))
        unseen = {name: n + num_jobs for name, n in (self.unseen or {}).items()}
        seconds = (now - self.decided_at).total_seconds() if now and self.decided_at else 0.0
        unseen_s = {name: self.unseen_s.get(name, 0.0) + max(0.0, seconds) for name in unseen}
        return replace(
            self,
            balance=balance,
            accrued=self.accrued + (balance - self.balance),
            unseen=unseen,
            unseen_s=unseen_s,
            decided_at=now or self.decided_at,
        )

    def used(self, drafter: str | None) -> ExplorationBudget:
        """With that drafter counted as used now."""
        if drafter is None:
            return self
        return replace(self, unseen={**(self.unseen or {}), drafter: 0.0}, unseen_s={**self.unseen_s, drafter: 0.0})

    def paid(self, tokens: float) -> ExplorationBudget:
        """After jobs that are expected to lose this many tokens."""
        return replace(self, balance=self.balance - tokens, spent=self.spent + tokens)


@dataclass(frozen=True, slots=True)
class Trial:
    """An alternative worth trying now."""

    alternative: Alternative
    loss: float  #: expected, in tokens
    why: str


def loss(chosen: Alternative, tried: Alternative, num_tokens: float) -> float:
    """Tokens that are expected to be lost by trying instead of choosing."""
    return num_tokens * max(0.0, chosen.speedup / tried.speedup - 1)


def worth_trying(
    chosen: Alternative,
    alternatives: Sequence[Alternative],
    posteriors: Mapping[str, Posterior],
    budget: ExplorationBudget,
    num_jobs: int,
    num_tokens: float,
    *,
    shared_weights: Mapping[str, str] | None = None,
    timed_apart: Collection[str] = (),
) -> Trial | None:
    """The trial to decode these jobs with instead of the choice; None if no trial is affordable and worth its cost.

    `shared_weights` and `timed_apart` as for `news_of`.
    """
    if budget.explore_share <= 0:
        return None
    if recheck := _recheck(chosen, alternatives, posteriors, budget, num_jobs, num_tokens):
        return recheck
    per_job = num_tokens / num_jobs
    best: tuple[float, Trial] | None = None
    for rival in alternatives:
        if rival is chosen or rival.chance < chosen.chance:
            continue
        lost = loss(chosen, rival, num_tokens)
        if lost > budget.balance:
            continue
        news = news_of(rival, chosen, posteriors, shared_weights or {}, timed_apart)
        gain = _gain(chosen, rival, news, num_jobs) * per_job - lost / num_jobs
        if gain > 0 and (best is None or gain > best[0]):
            explanation = f"could be better: {rival.speedup:.2f}x ({rival.speedup_low:.2f} to {rival.speedup_high:.2f})"
            best = gain, Trial(rival, lost, explanation)
    return best[1] if best else None


def _gain(chosen: Alternative, rival: Alternative, news: News, num_jobs: int) -> float:
    """Expected gain of a job of this trial, in jobs, less what the rest of the trial would lose."""
    gap, noise = math.log(chosen.speedup / rival.speedup), news.sd
    # A rival that is expected to be better is chosen without a trial once its gain is beyond its noise.
    if gap <= 0 or gap > 3.5 * noise or _value_of_knowing(gap, noise) < _LEAST_GAIN:
        return 0.0
    best, tokens_var = 0.0, news.tokens_sd**2
    for decisions in _NUM_DECISIONS:
        jobs = decisions * num_jobs
        # n jobs of noise s resolve σ⁴ / (σ² + s² / n) of a variance σ².
        by_tokens = tokens_var**2 / (tokens_var + _JOB_NOISE**2 / jobs)
        resolved = math.sqrt(by_tokens + news.cost_sd**2)
        value = _value_of_knowing(gap, resolved)
        if value < _LEAST_GAIN:
            continue
        later = (decisions - 1) / decisions * max(0.0, math.expm1(gap))
        best = max(best, _HORIZON_JOBS * value / jobs - later)
    return best


def _value_of_knowing(gap: float, resolved: float) -> float:
    """Expected gain of ln(speed-up) where a gap would be known better by a standard deviation of `resolved` > 0."""
    u = gap / resolved
    return resolved * (math.exp(-u * u / 2) * _DENSITY_AT_0 - u * 0.5 * math.erfc(u * _SQRT_HALF))


def _recheck(
    chosen: Alternative,
    alternatives: Sequence[Alternative],
    posteriors: Mapping[str, Posterior],
    budget: ExplorationBudget,
    num_jobs: int,
    num_tokens: float,
) -> Trial | None:
    """A re-check of the drafter that is most overdue, at the draft length that loses least."""
    between = CHANGE_JOBS + sum(posterior.jobs for posterior in posteriors.values())
    most_overdue: tuple[float, Trial] | None = None
    for name, jobs in (budget.unseen or {}).items():
        lengths = [a for a in alternatives if a.drafter == name and a.chance >= chosen.chance]
        if name == chosen.drafter or not lengths:
            continue
        cheapest = lengths[0]
        lost = loss(chosen, cheapest, num_tokens)
        better = posteriors[name].tokens_moved(_BETTER_BY)
        upside = max(
            max(_gain_if(a, better[a.num_draft_tokens]), _CHEAPER_BY * a.cost_sd) + math.log(a.speedup / chosen.speedup)
            for a in lengths
        )
        if upside <= 0 or lost > budget.balance:
            continue
        cost_jobs = max(lost / num_tokens, _LEAST_LOSS) * max(num_jobs, 2)
        # jobs / interval, with M the jobs over the changes that were to be expected in them.
        seconds = budget.unseen_s.get(name, 0.0)
        by_jobs, by_time = jobs / between, seconds / _CHANGE_S
        overdue = math.sqrt(jobs * (by_jobs + by_time) * _BETTER * upside / (2 * cost_jobs))
        if overdue >= 1 and (most_overdue is None or overdue > most_overdue[0]):
            why = f"{name} was not used for {jobs:.0f} jobs"
            if by_time > by_jobs:
                why += f" in {seconds / 60:.0f} minutes"
            most_overdue = overdue, Trial(cheapest, lost, why)
    return most_overdue[1] if most_overdue else None


def _gain_if(alternative: Alternative, tokens: float) -> float:
    """Change of ln(speed-up) if a round yielded `tokens`; too large a change for the slope alone."""
    elasticity = alternative.slope * alternative.tokens_per_round
    return elasticity * math.log(tokens / alternative.tokens_per_round)
