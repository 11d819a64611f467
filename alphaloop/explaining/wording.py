"""An explanation in two sentences for a reader who knows no term of the field, and as JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.experiment.estimate import Verdict
from alphaloop.experiment.figures import TaskSpeedup
from alphaloop.explaining.explanation import HISTORY, Evidence, Explanation

#: Why a task is decoded as it is, as the end of a sentence.
_WHY: Final = {
    Reason.FASTER: "because a gain over one token at a time is expected",
    Reason.ON_TARGET: "because that is the surest way to meet the task's time target",
    Reason.NOT_FASTER: "because no drafter is expected to make it faster",
    Reason.UNCERTAIN: "because what a drafter is expected to gain is less than the error of that expectation",
    Reason.NO_HISTORY: "because other tasks, or the drafter's usual figures, speak for it; few jobs are known",
    Reason.NO_COSTS: "because what a round costs on this device was not measured yet",
    Reason.NO_DRAFTER: "because no drafter is configured",
    Reason.EXPLORING: "to find out whether it pays",
    Reason.CONTROL: "to compare speculation with it",
    Reason.PROBE: "to measure the drafter again",
    Reason.FORCED: "because the job, or the task's configuration, asks for it",
    Reason.STALE_DRAFT: "because every drafter that could serve is marked as stale",
    Reason.UNKNOWN_REVISION: "because the drafter has no revision under which to keep evidence",
    Reason.CANNOT_SERVE: "because no drafter can serve these jobs",
    Reason.SWITCHED_OFF: "because an operator switched speculation off for such prompts",
    Reason.NO_MEMORY: "because the memory of the device does not hold the draft beside the target",
    Reason.FIRST_TOKENS: "because a draft would delay the first token of a stream too long",
    Reason.SHORT_OUTPUT: "because the answers are too short to gain anything",
    Reason.UNDECIDED: "because deciding failed: please report this",
}


def opening(explanation: Explanation) -> tuple[str, str]:
    """What is done and why; what it brings and how sure that is."""
    decision, task = explanation.decision, explanation.request.task
    is_next = explanation.request.is_now and explanation.recorded is None
    whose = f"The next job of {task}" if is_next else f"A job of {task} at that time"
    return _done(whose, decision), _brought(decision, explanation.own_speedup)


def _done(whose: str, decision: Decision) -> str:
    why = _WHY[decision.reason]
    if decision.drafter is None:
        if decision.reason is Reason.NO_HISTORY:
            why = "because too few jobs of the task are known to expect a gain"
        return f"{whose} is decoded plainly (vanilla), one token at a time, {why}."
    k = decision.num_draft_tokens
    tokens = "1 token" if k == 1 else f"up to {k} tokens"
    return f"{whose} is decoded speculatively: {decision.drafter} proposes {tokens} a round, {why}."


def _brought(decision: Decision, measured: TaskSpeedup | None) -> str:
    if decision.drafter is None:
        return _left_out(decision)
    if measured is not None and measured.speedup is not None:
        bounds, times = measured.speedup, f"{measured.speedup.mean:.2f} times as fast as vanilla"
        sure = f"with 95 % confidence between {bounds.low:.2f} and {bounds.high:.2f} times"
        if measured.verdict == Verdict.FASTER:
            return f"Measured in the last day, this was {times}, {sure}."
        if measured.verdict == Verdict.SLOWER:
            return f"Measured in the last day, this was slower, {times}, {sure}; the choice follows as evidence grows."
        so = "as fast as vanilla within 2 %" if measured.verdict == Verdict.NO_DIFFERENCE else "there is no verdict yet"
        return f"Measured in the last day, this was {sure} as fast as vanilla: {so}."
    chosen = decision.chosen
    if chosen is None:
        return "How fast that is was not measured, and no evidence says what to expect."
    sure = f"between {chosen.speedup_low:.2f} and {chosen.speedup_high:.2f} times, with 95 % confidence"
    slower = ", so it may also be slower" if chosen.speedup_low < 1 else ""
    return f"That is expected to be {chosen.speedup:.2f} times as fast as vanilla ({sure}{slower}), and not shown yet."


def _left_out(decision: Decision) -> str:
    best = next((a for a in decision.alternatives if a.drafter is not None), None)
    if best is None:
        return "Speculation was not weighed."
    k = best.num_draft_tokens
    sure = f"with 95 % confidence between {best.speedup_low:.2f} and {best.speedup_high:.2f} times"
    return f"The best other way, {best.drafter} with k={k}, is expected to be {best.speedup:.2f} times as fast, {sure}."


def document(explanation: Explanation) -> dict[str, Any]:
    """The whole explanation. Rates stand beside the counts that they come from."""
    context, decision = explanation.context, explanation.decision
    return {
        "task": explanation.request.task,
        "segment": explanation.request.segment or None,
        "at": explanation.request.at,
        "recorded": asdict(explanation.recorded) if explanation.recorded else None,
        "engine": {**asdict(explanation.engine), "device": explanation.engine.shown_device},
        "workers": None
        if explanation.fleet is None
        else {
            "num_alike": explanation.fleet.num_workers,
            "num_others": explanation.fleet.num_others,
            "drafters_ended": dict(explanation.fleet.ended),
        },
        "sampling_bucket": explanation.request.sampling_bucket,
        "form_bucket": explanation.request.form_bucket,
        "prompt_bucket": explanation.prompt_bucket,
        "batch": explanation.request.batch,
        "expected_tokens": context.expected_tokens,
        "prompt_tokens": context.prompt_tokens,
        "objective": {
            "aim": context.objective.aim,
            "target_ms": context.objective.target_ms if context.objective.target_ms < 1e12 else None,
        },
        "drafters": [asdict(drafter) for drafter in explanation.drafters],
        "posteriors": {name: _posterior(evidence) for name, evidence in explanation.evidence.items()},
        "costs": [asdict(point) for point in explanation.costs.points],
        "incumbent": asdict(explanation.incumbent) if explanation.incumbent else None,
        "decision": {
            **{name: value for name, value in asdict(decision).items() if name != "posteriors"},
            "reason": explanation.next_job.reason,
            "alternatives": [{**way._asdict(), "error": way.error._asdict()} for way in decision.alternatives],
        },
        "next_job": asdict(explanation.next_job),
        "measured": {**asdict(explanation.measured), "window_days": HISTORY.days},
        "figures": explanation.figures.counts_as_json(),
        "changes": [asdict(change) for change in explanation.changes],
    }


def _posterior(evidence: Evidence) -> dict[str, Any]:
    posterior = evidence.posterior
    return {
        "jobs": posterior.jobs,
        "jobs_alike": evidence.jobs_alike,
        "design_effect": posterior.design_effect,
        "kept_of_older": posterior.kept,
        "segments_differ": evidence.is_split,
        "acceptance": [interval and interval.mean for interval in evidence.acceptance],
        "acceptance_low": [interval and interval.low for interval in evidence.acceptance],
        "acceptance_high": [interval and interval.high for interval in evidence.acceptance],
        "tested": evidence.tested,
        "reach": posterior.reach,
        "tokens_per_round": posterior.tokens,
        "tokens_per_round_sd": posterior.tokens_sd,
        "proposed_per_round": posterior.proposed,
        "expectation_error": posterior.error._asdict(),
        "borrowed": asdict(evidence.borrowed) if evidence.borrowed else None,
        "seen": asdict(evidence.seen),
    }
