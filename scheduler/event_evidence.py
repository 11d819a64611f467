"""The evidence of a finding as it is stored with its event: counts, intervals, times. No texts."""

from __future__ import annotations

from typing import Any

from alphaloop.acceptance import Interval
from scheduler.causes import Finding
from scheduler.drift.watching import TrafficVerdict
from scheduler.probe_history import ProbeVerdict


def evidence_of(finding: Finding) -> dict[str, Any]:
    """`flagged_by` says which test must show that the event is over."""
    return {
        "flagged_by": "probes" if finding.left is not None else "traffic",
        "traffic": None if finding.traffic is None else _traffic(finding.traffic),
        "probes": None if finding.probes is None else _probes(finding.probes),
        "left": None if finding.left is None else _probes(finding.left),
    }


def _traffic(verdict: TrafficVerdict) -> dict[str, Any]:
    return {
        "segment": verdict.segment,
        "num_jobs_before": verdict.num_jobs_before,
        "num_jobs_after": verdict.num_jobs_after,
        "trials_before": verdict.trials_before,
        "accepts_before": verdict.accepts_before,
        "trials_after": verdict.trials_after,
        "accepts_after": verdict.accepts_after,
        "change": _interval(verdict.change),
    }


def _probes(verdict: ProbeVerdict) -> dict[str, Any]:
    return {
        "num_prompts": verdict.num_prompts,
        "measured_before": verdict.measured_before.isoformat(),
        "measured_after": verdict.measured_after.isoformat(),
        "trials_before": verdict.trials_before,
        "accepts_before": verdict.accepts_before,
        "trials_after": verdict.trials_after,
        "accepts_after": verdict.accepts_after,
        "change": _interval(verdict.change),
    }


def _interval(change: Interval | None) -> list[float] | None:
    return None if change is None else [round(change.mean, 4), round(change.low, 4), round(change.high, 4)]
