"""Why acceptance moved: a word for SQL and a sentence for people.

| traffic | probes | on record | cause |
|---|---|---|---|
| moved | steady | | traffic_changed |
| any | down | a new target revision | draft_stale |
| any | down | no new target | unexplained (an engine change is named in the sentence) |
| moved | not measured twice yet | | unexplained |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from alphaloop.measurements import DriftSubject
from scheduler.cusum import Drift
from scheduler.staleness import ProbeComparison


class Cause(StrEnum):
    """Why acceptance moved."""

    TRAFFIC_CHANGED = "traffic_changed"
    DRAFT_STALE = "draft_stale"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Finding:
    """Drift of one subject with its cause; becomes a drift event while it lasts."""

    subject: DriftSubject
    cause: Cause
    verdict: str
    evidence: dict[str, Any]


def explain(
    subject: DriftSubject, traffic: Drift | None, probes: ProbeComparison | None, *, probes_fell: bool
) -> Finding | None:
    """The finding about a subject, or None when neither its traffic nor its probes moved."""
    evidence = {
        "flagged_by": "probes" if probes_fell else "traffic",
        "traffic": _traffic_evidence(traffic),
        "probes": _probe_evidence(probes),
    }
    if probes is not None and probes_fell:
        cause, reason = _why_probes_fell(probes)
        return Finding(subject, cause, f"{_probe_sentence(subject, probes)} {reason}", evidence)
    if traffic is None or not traffic.is_alarm:
        return None
    moved = _traffic_sentence(subject, traffic)
    if probes is None:
        return Finding(
            subject,
            Cause.UNEXPLAINED,
            f"{moved} The probes were not measured twice yet, so whether the prompts or the draft changed is open.",
            evidence,
        )
    return Finding(
        subject,
        Cause.TRAFFIC_CHANGED,
        f"{moved} On the fixed probe prompts it is steady ({probes.alpha_before:.2f} then, {probes.alpha_after:.2f} "
        "now): the jobs have changed, not the draft.",
        evidence,
    )


def _why_probes_fell(probes: ProbeComparison) -> tuple[Cause, str]:
    if probes.target_changed:
        return Cause.DRAFT_STALE, "The target model changed in between: the draft no longer matches it."
    if probes.engine_before != probes.engine_after:
        return Cause.UNEXPLAINED, (
            f"Neither model changed, but the engine did, from {probes.engine_before} to {probes.engine_after}: "
            "look there first."
        )
    return Cause.UNEXPLAINED, "Neither the models nor the engine changed on record: suspect the engine or the machine."


def _probe_sentence(subject: DriftSubject, probes: ProbeComparison) -> str:
    return (
        f"On the same {len(probes.pairs)} probe prompts of {subject.task}, {subject.drafter} now gets "
        f"{probes.alpha_after:.0%} of its first tokens accepted instead of {probes.alpha_before:.0%}."
    )


def _traffic_sentence(subject: DriftSubject, traffic: Drift) -> str:
    verb = "rose" if traffic.direction > 0 else "fell"
    before, after = traffic.alpha_before, traffic.alpha_after
    figures = f" from {before:.0%} to {after:.0%}" if before is not None and after is not None else ""
    return (
        f"Acceptance of {subject.drafter} on {subject.task} {verb}{figures} over the last "
        f"{traffic.num_jobs_since_change} jobs."
    )


def _traffic_evidence(traffic: Drift | None) -> dict[str, Any] | None:
    if traffic is None:
        return None
    return {
        "statistic": round(traffic.statistic, 3),
        "threshold": round(traffic.threshold, 3),
        "num_jobs": traffic.num_jobs,
        "num_jobs_since_change": traffic.num_jobs_since_change,
        "trials_before": traffic.trials_before,
        "accepts_before": traffic.accepts_before,
        "trials_after": traffic.trials_after,
        "accepts_after": traffic.accepts_after,
    }


def _probe_evidence(probes: ProbeComparison | None) -> dict[str, Any] | None:
    if probes is None:
        return None
    return {
        "num_prompts": len(probes.pairs),
        "measured_before": probes.measured_before.isoformat(),
        "measured_after": probes.measured_after.isoformat(),
        "trials_before": sum(p.trials_before for p in probes.pairs),
        "accepts_before": sum(p.accepts_before for p in probes.pairs),
        "trials_after": sum(p.trials_after for p in probes.pairs),
        "accepts_after": sum(p.accepts_after for p in probes.pairs),
        "change_low": round(probes.change.low, 4),
        "change_high": round(probes.change.high, 4),
    }
