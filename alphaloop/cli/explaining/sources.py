"""What a belief rests on: α_i with bounds, and how much of it comes from where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from alphaloop.acceptance import Z95, EvidenceKey, Interval
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot, Place
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import PairPosterior, infer
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.posterior import Posterior
from alphaloop.deciding.profile import logistic


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Shares of what is known of α_1, adding up to 1: by how much each source narrowed what was assumed before it."""

    same_jobs: float  #: of this task, sampling, prompt length and segment
    same_task: float  #: the task's other jobs
    other_tasks: float
    assumed: float  #: `policy.prior_alpha`: nobody has seen it


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is believed of one drafter, and what was seen of it."""

    posterior: Posterior
    acceptance: tuple[Interval, ...]  #: α_i
    borrowed: Borrowed
    seen: EvidenceSums  #: of the whole task, as it weighs
    jobs_alike: float  #: of those, under the very key
    is_split: bool  #: whether segments are believed to differ


def evidence(
    snapshot: EvidenceSnapshot,
    wanted: EvidenceKey,
    drafter: DrafterState,
    now: datetime,
    limits: PolicyLimits,
    *,
    is_split: bool,
) -> Evidence:
    """What is remembered and believed of `drafter` for `wanted` at `now`."""
    key = replace(wanted, drafter=drafter.name, draft_revision=drafter.revision)
    leaves = snapshot.leaves(Place(wanted.task, drafter.name, drafter.revision), now)
    posterior = snapshot.posterior(wanted, drafter, now, limits)
    until = max((evidence.all.as_of for evidence in leaves.values()), default=now)
    seen = sum(
        (evidence.all.faded(until, snapshot.half_life) for evidence in leaves.values()), start=EvidenceSums(until)
    )
    alike = leaves[key].all.jobs if key in leaves else 0.0
    borrowed = _borrowed(snapshot, leaves, key, posterior, drafter, now, limits)
    return Evidence(posterior, acceptance(posterior), borrowed, seen, alike, is_split)


def acceptance(posterior: Posterior) -> tuple[Interval, ...]:
    """α_i with 95 % bounds: those of s_i = reach_i · α_i, over reach_i."""
    profile, found = posterior.profile, []
    for m, b, own, reach in zip(profile.mean, profile.loading, profile.own_var, posterior.reach, strict=True):
        wide = Z95 * math.sqrt(b * b * profile.common_var + own)
        mean, low, high = (min(1.0, logistic(m + d) / reach) if reach > 0 else 0.0 for d in (0.0, -wide, wide))
        found.append(Interval(mean, low, high))
    return tuple(found)


def _borrowed(
    snapshot: EvidenceSnapshot,
    leaves: Mapping[EvidenceKey, KeyEvidence],
    key: EvidenceKey,
    posterior: Posterior,
    drafter: DrafterState,
    now: datetime,
    limits: PolicyLimits,
) -> Borrowed:
    """From the precision of logit s_1 as the sources come in: nothing, other tasks, this task, the very jobs."""
    unknown = PairPosterior.of_drafter(drafter, limits)
    pair = snapshot.pair(drafter, now, limits)
    others = {leaf: evidence for leaf, evidence in leaves.items() if leaf != key}
    stages = (unknown.for_a_task(), pair.for_a_task(), infer(others, key, drafter.max_draft_tokens, pair), posterior)
    precisions: list[float] = []
    for stage in stages:
        profile = stage.profile
        precision = 1 / (profile.loading[0] ** 2 * profile.common_var + profile.own_var[0])
        # What is seen may also show that groups differ more than was thought; then it narrowed nothing.
        precisions.append(max(precision, precisions[-1] if precisions else 0.0))
    nothing, tasks, task, all_of_it = precisions
    return Borrowed(
        (all_of_it - task) / all_of_it, (task - tasks) / all_of_it, (tasks - nothing) / all_of_it, nothing / all_of_it
    )
