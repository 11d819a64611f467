"""Trying what is not expected to be best: a budget, what it may be spent on, and when it is not worth it. Pure.

The budget is counted in tokens that a batch is expected to lose: N tokens at speed-up S_a instead of S_b cost
N · (S_b / S_a - 1). Every batch earns `explore_share` of its tokens, so exploration and control together are expected
to cost no more than that share of the throughput, whatever they try.

Two things are worth trying:

* **What could turn out better** (knowledge gradient, Frazier, Powell and Dayanik 2008). With Δ the gap of ln(speed-up)
  to the best, σ the doubt that only trying can resolve, and σ̃ the part of it that m more jobs would, the expected
  gain of knowing is σ̃ · (φ(u) - u·Φ(-u)) at u = Δ / σ̃, for `horizon_jobs`. It falls exponentially with certainty, so
  exploration ends by itself. Two draft lengths of one drafter, or of its kin, share most of their doubt; a longer draft
  is tried for the positions that were never seen.
* **What may have changed unseen.** A drafter that is not used says nothing of a change for the better. With changes
  every M jobs on average, a gain rate G if one made it better, and C lost in a look, delay and looks together cost
  least when looked at every √(2·C·M / G) jobs (the economic lot size, Harris 1913). M grows with the task's age without
  a change, so looks grow rare too.

Controls, whole batches decoded vanilla beside a speculative task, are drawn at random: what they show is measured, not
modelled. They become rare once `control_jobs` are known, and come back as those fade.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from alphaloop.deciding.goodput import Alternative, news_of
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.posterior import Posterior

#: Standard deviation over jobs of ln(tokens a round): how little one job says.
_JOB_NOISE: Final = 0.25
#: Batches that a look may be thought to take: one may be too few to change a mind, and yet the first of several.
_NUM_BATCHES: Final = (1, 4, 16)
#: A change for the better, in logits, and its probability given a change.
_BETTER_BY: Final = 1.5
_BETTER: Final = 0.25
#: Of ln(speed-up): knowing better by less is not worth a trial, be it free.
_LEAST_GAIN: Final = 0.002
#: A look costs something even where nothing is lost.
_LEAST_LOSS: Final = 0.01
#: A budget holds no more than so many jobs' tokens: what a quiet week earned is not spent in an hour.
_MOST_JOBS: Final = 16.0


@dataclass(frozen=True, slots=True)
class ExplorationBudget:
    """What one task may still lose, in tokens. A value: decisions return the next one."""

    balance: float = 0.0
    control: float = 0.0  #: kept apart for controls
    accrued: float = 0.0  #: ever
    spent: float = 0.0  #: ever; never more than was earned
    unseen: Mapping[str, float] | None = None  #: jobs since a drafter was last used; None before the first batch

    def after(self, num_jobs: int, num_tokens: float, limits: PolicyLimits, *, is_cold: bool) -> ExplorationBudget:
        """With what a batch of so many jobs and tokens earns; the first of a cold task brings its first credit."""
        per_job = num_tokens / num_jobs
        control = min(limits.control_share, limits.explore_share) * num_tokens
        rest = limits.explore_share * num_tokens - control
        if self.unseen is None and is_cold and limits.explore_share > 0:
            rest += limits.first_jobs * per_job
        balance = min(self.balance + rest, max(self.balance, _MOST_JOBS * per_job))
        kept = min(self.control + control, max(self.control, _MOST_JOBS * per_job))
        accrued = self.accrued + (balance - self.balance) + (kept - self.control)
        unseen = {name: n + num_jobs for name, n in (self.unseen or {}).items()}
        return replace(self, balance=balance, control=kept, accrued=accrued, unseen=unseen)

    def used(self, drafter: str | None) -> ExplorationBudget:
        """That drafter decodes this batch."""
        if drafter is None:
            return self
        return replace(self, unseen={**(self.unseen or {}), drafter: 0.0})

    def paid(self, tokens: float) -> ExplorationBudget:
        """After a batch that is expected to lose so many tokens."""
        return replace(self, balance=self.balance - tokens, spent=self.spent + tokens)

    def paid_control(self, tokens: float) -> ExplorationBudget:
        """After a control that is expected to lose so many tokens."""
        return replace(self, control=self.control - tokens, spent=self.spent + tokens)


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
    limits: PolicyLimits,
    num_jobs: int,
    num_tokens: float,
    shared_weights: Mapping[str, str] | None = None,
) -> Trial | None:
    """What to decode this batch with instead of the choice; None where nothing is worth it, or affordable.

    `kin` as for `news_of`.
    """
    if limits.explore_share <= 0:
        return None
    if look := _look(chosen, alternatives, posteriors, budget, limits, num_jobs, num_tokens):
        return look
    per_job = num_tokens / num_jobs
    best: tuple[float, Trial] | None = None
    for rival in alternatives:
        if rival is chosen or rival.chance < chosen.chance:
            continue
        lost = loss(chosen, rival, num_tokens)
        if lost > budget.balance:
            continue
        news = news_of(rival, chosen, posteriors, shared_weights or {})
        gain = _gain(chosen, rival, news, num_jobs, limits.horizon_jobs) * per_job - lost / num_jobs
        if gain > 0 and (best is None or gain > best[0]):
            told = f"could be better: {rival.speedup:.2f}x ({rival.speedup_low:.2f} to {rival.speedup_high:.2f})"
            best = gain, Trial(rival, lost, told)
    return best[1] if best else None


def _gain(chosen: Alternative, rival: Alternative, noise: float, num_jobs: int, horizon: float) -> float:
    """Expected gain of a job of this look, in jobs, less what the rest of the look would lose."""
    gap = math.log(chosen.speedup / rival.speedup)
    # What is expected to be better already only waits until that is beyond its noise.
    if gap <= 0 or gap > 3.5 * noise:
        return 0.0
    known_jobs = (_JOB_NOISE / noise) ** 2
    best = 0.0
    for batches in _NUM_BATCHES:
        jobs = batches * num_jobs
        resolved = noise * math.sqrt(jobs / (jobs + known_jobs))
        u = gap / resolved
        value = resolved * (math.exp(-u * u / 2) / math.sqrt(2 * math.pi) - u * 0.5 * math.erfc(u / math.sqrt(2)))
        if value < _LEAST_GAIN:
            continue
        later = (batches - 1) / batches * max(0.0, math.expm1(gap))
        best = max(best, horizon * value / jobs - later)
    return best


def _look(
    chosen: Alternative,
    alternatives: Sequence[Alternative],
    posteriors: Mapping[str, Posterior],
    budget: ExplorationBudget,
    limits: PolicyLimits,
    num_jobs: int,
    num_tokens: float,
) -> Trial | None:
    """The drafter that was not used for longest beyond its interval, in the way that loses least."""
    between = limits.change_jobs + sum(posterior.jobs for posterior in posteriors.values())
    found: tuple[float, Trial] | None = None
    for name, jobs in (budget.unseen or {}).items():
        its = [a for a in alternatives if a.drafter == name and a.chance >= chosen.chance]
        if name == chosen.drafter or not its or name not in posteriors:
            continue
        cheapest = its[0]
        lost = loss(chosen, cheapest, num_tokens)
        better = posteriors[name].tokens_moved(_BETTER_BY)
        upside = max(_gain_if(a, better[a.num_draft_tokens]) + math.log(a.speedup / chosen.speedup) for a in its)
        if upside <= 0 or lost > budget.balance:
            continue
        cost_jobs = max(lost / num_tokens, _LEAST_LOSS) * max(num_jobs, 2)
        interval = math.sqrt(2 * cost_jobs * between / (_BETTER * upside))
        if jobs >= interval and (found is None or jobs / interval > found[0]):
            found = jobs / interval, Trial(cheapest, lost, f"{name} was not used for {jobs:.0f} jobs")
    return found[1] if found else None


def _gain_if(alternative: Alternative, tokens: float) -> float:
    """Change of ln(speed-up) if a round brought so many tokens; the slope is for small changes, this is not one."""
    elasticity = alternative.slope * alternative.tokens_per_round
    return elasticity * math.log(tokens / alternative.tokens_per_round)


def control_due(
    chosen: Alternative,
    budget: ExplorationBudget,
    limits: PolicyLimits,
    num_tokens: float,
    control_jobs: float,
    draw: float,
) -> float | None:
    """What a control batch is expected to lose, in tokens, if one is due; None if not.

    Due with probability ½ whenever its price is saved up; the price rises with the square of the controls known.
    """
    if limits.control_share <= 0 or draw >= 0.5:
        return None
    lost = num_tokens * max(0.0, chosen.speedup - 1)
    price = lost * max(1.0, control_jobs / limits.control_jobs) ** 2
    return lost if budget.control >= max(price, limits.control_share * num_tokens) else None
