"""An explanation as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from alphaloop.explaining.explanation import Explanation
from alphaloop.explaining.sources import Evidence


def document(found: Explanation) -> dict[str, Any]:
    """Everything that was found. Rates stand beside the counts that they come from."""
    return {
        "task": found.request.task,
        "segment": found.request.segment or None,
        "at": found.request.at,
        "recorded": asdict(found.recorded) if found.recorded else None,
        "engine": asdict(found.engine),
        "workers": None
        if found.fleet is None
        else {
            "num_alike": found.fleet.num_workers,
            "num_others": found.fleet.num_others,
            "drafters_ended": dict(found.fleet.ended),
        },
        "sampling_bucket": found.request.sampling_bucket,
        "prompt_bucket": found.prompt_bucket,
        "batch": found.request.batch,
        "expected_tokens": found.context.expected_tokens,
        "prompt_tokens": found.context.prompt_tokens,
        "objective": {
            "aim": found.context.objective.aim,
            "target_ms": found.context.objective.target_ms if found.context.objective.target_ms < 1e12 else None,
        },
        "drafters": [asdict(drafter) for drafter in found.drafters],
        "posteriors": {name: _posterior(its) for name, its in found.evidence.items()},
        "costs": [asdict(point) for point in found.costs.points],
        "incumbent": asdict(found.incumbent) if found.incumbent else None,
        "decision": {
            **{name: value for name, value in asdict(found.decision).items() if name != "posteriors"},
            "alternatives": [{**way._asdict(), "error": way.error._asdict()} for way in found.decision.alternatives],
        },
        "next_job": asdict(found.next_job),
        "measured": {
            **asdict(found.measured),
            "window_days": found.window.total_seconds() / 86_400,
        },
        "figures": {
            **asdict(found.figures),
            "decoded": None if found.figures.decoded is None else found.figures.decoded.as_json(),
            "num_jobs": found.figures.num_jobs,
            "num_probes": found.figures.num_probes,
            "num_controls": found.figures.num_controls,
        },
        "changes": [asdict(change) for change in found.changes],
    }


def _posterior(its: Evidence) -> dict[str, Any]:
    posterior = its.posterior
    return {
        "jobs": posterior.jobs,
        "jobs_alike": its.jobs_alike,
        "design_effect": posterior.design_effect,
        "kept_of_older": posterior.kept,
        "segments_differ": its.is_split,
        "acceptance": [interval.mean for interval in its.acceptance],
        "acceptance_low": [interval.low for interval in its.acceptance],
        "acceptance_high": [interval.high for interval in its.acceptance],
        "reach": posterior.reach,
        "tokens_per_round": posterior.tokens,
        "tokens_per_round_sd": posterior.tokens_sd,
        "proposed_per_round": posterior.proposed,
        "expectation_error": posterior.error._asdict(),
        "borrowed": asdict(its.borrowed) if its.borrowed else None,
        "seen": asdict(its.seen),
    }
