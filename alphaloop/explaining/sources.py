"""The sources of a posterior: α_i with bounds, and the share of each source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from alphaloop.acceptance import Z95, EvidenceKey, Interval
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot
from alphaloop.deciding.evidence_source import Place
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import PairPosterior, infer
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.posterior import Posterior
from alphaloop.deciding.posteriors import Posteriors
from alphaloop.deciding.profile import logistic


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Shares of the precision of α_1, adding up to 1: how much each source narrowed the posterior."""

    same_jobs: float  #: of this task, sampling, prompt length and segment
    same_task: float  #: the task's other jobs
    other_tasks: float
    assumed: float  #: of the prior, `policy.prior_alpha`


@dataclass(frozen=True, slots=True)
class Evidence:
    """The posterior of one drafter, and the counts behind it."""

    posterior: Posterior
    acceptance: tuple[Interval, ...]  #: α_i
    borrowed: Borrowed | None  #: None of a past decision
    seen: EvidenceSums  #: of the whole task, weighted
    jobs_alike: float  #: weighted jobs of those with the same key
    is_split: bool  #: whether segments differ beyond chance


def evidence(
    snapshot: EvidenceSnapshot,
    posteriors: Posteriors,
    wanted: EvidenceKey,
    drafter: DrafterState,
    now: datetime,
    limits: PolicyLimits,
) -> Evidence:
    """The posterior of `drafter` for `wanted` at `now`, and its sources."""
    key = replace(wanted, drafter=drafter.name, draft_revision=drafter.revision)
    leaves = snapshot.leaves(Place(wanted.task, drafter.name, drafter.revision), now)
    found = posteriors.inferred(wanted, drafter, now)
    borrowed = _borrowed(leaves, key, found.posterior, drafter, posteriors.pair(drafter, now), limits)
    is_split = posteriors.splits_by_segment(wanted.task, [drafter], now)
    return Evidence(found.posterior, acceptance(found.posterior), borrowed, found.seen, found.alike, is_split)


def acceptance(posterior: Posterior) -> tuple[Interval, ...]:
    """α_i with 95 % bounds: those of s_i = reach_i · α_i, over reach_i."""
    profile, found = posterior.profile, []
    for m, b, own, reach in zip(profile.mean, profile.loading, profile.own_var, posterior.reach, strict=True):
        wide = Z95 * math.sqrt(b * b * profile.common_var + own)
        mean, low, high = (min(1.0, logistic(m + d) / reach) if reach > 0 else 0.0 for d in (0.0, -wide, wide))
        found.append(Interval(mean, low, high))
    return tuple(found)


def _borrowed(
    leaves: Mapping[EvidenceKey, KeyEvidence],
    key: EvidenceKey,
    posterior: Posterior,
    drafter: DrafterState,
    pair: PairPosterior,
    limits: PolicyLimits,
) -> Borrowed:
    """From the precision of logit s_1 as sources are added: the prior, other tasks, this task, jobs of this key."""
    unknown = PairPosterior.of_drafter(drafter, limits)
    others = {leaf: evidence for leaf, evidence in leaves.items() if leaf != key}
    stages = (unknown.for_a_task(), pair.for_a_task(), infer(others, key, drafter.max_draft_tokens, pair), posterior)
    precisions: list[float] = []
    for stage in stages:
        profile = stage.profile
        precision = 1 / (profile.loading[0] ** 2 * profile.common_var + profile.own_var[0])
        # A source that shows that groups differ more than the prior says narrows nothing.
        precisions.append(max(precision, precisions[-1] if precisions else 0.0))
    nothing, tasks, task, all_of_it = precisions
    return Borrowed(
        (all_of_it - task) / all_of_it, (task - tasks) / all_of_it, (tasks - nothing) / all_of_it, nothing / all_of_it
    )
