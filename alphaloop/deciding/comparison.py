"""How sure it is which of two alternatives is faster, and what trying one of them would resolve. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import hypot, sqrt
from typing import NamedTuple

from alphaloop.deciding.goodput import Alternative
from alphaloop.deciding.posterior import Posterior


def noise_between(one: Alternative, other: Alternative, posteriors: Mapping[str, Posterior]) -> float:
    """Standard deviation of ln(speed-up of one / speed-up of other).

    Two draft lengths of one drafter share most of their uncertainty, about acceptance and about costs, which then
    cancels.
    """
    if one.drafter != other.drafter:
        return hypot(
            *(sd for way in (one, other) for sd in (_noise(way, posteriors), way.cost_sd, way.error.sd)),
        )
    if one.drafter is None:
        return 0.0
    posterior = posteriors[one.drafter]
    k, n = one.num_draft_tokens, other.num_draft_tokens
    variance = (posterior.common_sd[k] * one.slope - posterior.common_sd[n] * other.slope) ** 2
    variance += (one.cost_sd - other.cost_sd) ** 2
    mine, its = posterior.slopes[k], posterior.slopes[n]
    for i in range(max(k, n)):
        moved = (mine[i] * one.slope if i < k else 0.0) - (its[i] * other.slope if i < n else 0.0)
        variance += moved * moved
    return sqrt(variance)


class News(NamedTuple):
    """Standard deviations of ln(speed-up) that trying an alternative would resolve, by the source of uncertainty."""

    tokens_sd: float = 0.0
    cost_sd: float = 0.0

    @property
    def sd(self) -> float:
        """Of both together."""
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

    Of the drafters in `timed_apart`, servers', rounds of one length do not time another, so what the time of the tried
    length is doubted more than that of the chosen one counts too.
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
