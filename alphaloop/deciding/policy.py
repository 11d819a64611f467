"""The policy: speculative or vanilla, which drafter, which draft length, and why. Pure: same inputs, same decision.

The choice maximises goodput, not α: tokens a round over the measured milliseconds of such a round. The α at which
speculation breaks even is .20 for a cheap drafter and .62 for an expensive one, and it moves with load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from alphaloop.cost import CostTable
from alphaloop.deciding.comparison import noise_between
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting, Reason
from alphaloop.deciding.exploration import ExplorationBudget, worth_trying
from alphaloop.deciding.goodput import Alternative, DrafterState, weigh
from alphaloop.deciding.guards import fit, refused
from alphaloop.deciding.inference import PairPosterior
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.objective import Aim
from alphaloop.deciding.posterior import Posterior
from alphaloop.deciding.settings_by_running import COMPARED
from alphaloop.messages import Decoding, Mode, Purpose

__all__ = ["Decision", "DecisionContext", "DraftSetting", "ExplorationBudget", "Reason", "decide"]


def decide(
    posteriors: Mapping[str, Posterior],
    drafters: Sequence[DrafterState],
    costs: CostTable,
    context: DecisionContext,
    limits: PolicyLimits,
    *,
    incumbent: DraftSetting | None = None,
    budget: ExplorationBudget | None = None,
) -> Decision:
    """Choose how to decode jobs that are alike.

    `posteriors` are by drafter name; a drafter without one has the prior that `limits` give an unknown pair.
    `incumbent` and `budget` are `kept` and `budget` of the task's last decision. Without a budget nothing is explored.
    The decision keeps one setting however many sequences run; `settings_by_running` completes it.
    """
    posteriors = _with_unknown(posteriors, drafters, limits)
    if fixed := _fixed_by_caller(posteriors, drafters, costs, context):
        return fixed
    if refusal := refused(context, drafters, limits):
        return _vanilla(refusal.reason, refusal.explanation)
    able, refusal = fit(context, drafters, costs)
    if not able:
        return _vanilla(refusal.reason, refusal.explanation)
    alternatives = _weigh(posteriors, able, costs, context)
    if len(alternatives) < 2:
        return _vanilla(Reason.NO_COSTS, f"no cost was measured for {context.num_running} sequences", alternatives)
    chosen, reason, sentence = _choose(alternatives, posteriors, limits, incumbent)
    decision = _decision(chosen, reason, sentence, able, alternatives)
    if budget is not None:
        served = [drafter.name for drafter in able if costs.is_served(drafter.name)]
        decision = _explore(decision, chosen, able, posteriors, budget, context, limits, served)
    if decision.reason in COMPARED and context.objective.aim is Aim.THROUGHPUT:
        # A request on a server keeps its draft length, so it cannot follow what else runs.
        free = {name: its for name, its in posteriors.items() if not costs.is_served(name)}
        decision = replace(decision, posteriors=free if costs.is_of_servers else posteriors)
    return decision


def _choose(
    alternatives: Sequence[Alternative],
    posteriors: Mapping[str, Posterior],
    limits: PolicyLimits,
    incumbent: DraftSetting | None,
) -> tuple[Alternative, Reason, str]:
    """The best by expectation; the incumbent, while the gain of a change is small and within its noise.

    A gain beyond half a standard deviation of the comparison is followed at once, and so is one of `switch_gain`:
    staying may cost that much for good, switching back and forth costs only a line in the log.
    """
    vanilla = next(a for a in alternatives if a.drafter is None)
    best = alternatives[0]
    if best.drafter is not None and best.chance <= vanilla.chance and best.speedup < limits.min_speedup:
        best = vanilla
    running = next((a for a in alternatives if incumbent == DraftSetting(a.drafter, a.num_draft_tokens)), None)
    if running is not None and running is not best and running.chance >= best.chance:
        gain = math.log(best.speedup / running.speedup)
        noise = noise_between(best, running, posteriors)
        if gain <= min(noise / 2, math.log1p(limits.switch_gain)):
            sentence = (
                f"{_named(running)} stays: {_named(best)}, at {_expected(best)}, differs from it by less than this "
                "comparison can tell"
            )
            is_loss = running.drafter is not None and running.speedup < 1
            if not is_loss:
                return running, _reason(running, best, vanilla, posteriors, limits), sentence
    if best.drafter is not None:
        return best, _reason(best, best, vanilla, posteriors, limits), f"{_expected(best)} with {_named(best)}"
    rival = next(a for a in alternatives if a.drafter is not None)
    sentence = f"best alternative {_named(rival)}: {_expected(rival)}"
    return vanilla, _reason(vanilla, rival, vanilla, posteriors, limits), sentence


def _reason(
    chosen: Alternative,
    best: Alternative,
    vanilla: Alternative,
    posteriors: Mapping[str, Posterior],
    limits: PolicyLimits,
) -> Reason:
    if chosen.drafter is not None:
        if chosen.chance > vanilla.chance:
            return Reason.ON_TARGET
        return Reason.FASTER if posteriors[chosen.drafter].jobs >= limits.min_jobs else Reason.NO_HISTORY
    if best.chance < chosen.chance and best.speedup >= limits.min_speedup:
        return Reason.ON_TARGET
    if all(posterior.jobs < limits.min_jobs for posterior in posteriors.values()):
        return Reason.NO_HISTORY
    return Reason.UNCERTAIN if best.speedup >= limits.min_speedup else Reason.NOT_FASTER


def _explore(
    decision: Decision,
    chosen: Alternative,
    able: Sequence[DrafterState],
    posteriors: Mapping[str, Posterior],
    budget: ExplorationBudget,
    context: DecisionContext,
    limits: PolicyLimits,
    served: Sequence[str],
) -> Decision:
    """The choice, or a trial of another setting, paid from the budget."""
    num_tokens = context.num_tokens
    is_cold = all(posteriors[drafter.name].jobs < limits.min_jobs for drafter in able)
    budget = budget.after(context.num_jobs, num_tokens, limits, is_cold=is_cold, now=context.now)
    if budget.unseen is not None and (new := [d.name for d in able if d.name not in budget.unseen]):
        budget = replace(budget, unseen={**budget.unseen, **dict.fromkeys(new, 0.0)})
    scored = {drafter.name for drafter in able if drafter.is_scored}
    unknown = [a for a in decision.alternatives if a.drafter not in scored]
    shared_weights = {drafter.name: drafter.shared_weights for drafter in able if drafter.shared_weights}
    trial = worth_trying(
        chosen, unknown, posteriors, budget, limits, context.num_jobs, num_tokens, shared_weights, served
    )
    if trial is None:
        return replace(decision, budget=budget.used(chosen.drafter))
    tried = trial.alternative
    sentence = f"{_named(tried)} {trial.why}; {_named(chosen)} is expected at {chosen.speedup:.2f}x"
    return replace(
        _decision(tried, Reason.EXPLORING, sentence, able, decision.alternatives),
        kept=decision.kept,
        budget=budget.paid(trial.loss).used(tried.drafter),
    )


def _fixed_by_caller(
    posteriors: Mapping[str, Posterior], drafters: Sequence[DrafterState], costs: CostTable, context: DecisionContext
) -> Decision | None:
    """Probes, controls and forced modes; None when the policy is free to choose. A probe may use a stale drafter."""
    if context.purpose is Purpose.CONTROL:
        return _vanilla(Reason.CONTROL, "a control job is decoded vanilla")
    if context.purpose is Purpose.PROBE:
        named = [d for d in drafters if context.probe_drafter in (None, d.name)]
        if not named:
            return _vanilla(Reason.NO_DRAFTER, f"this worker has no drafter {context.probe_drafter}")
        wanted = context.probe_num_draft_tokens or named[0].max_draft_tokens
        k = named[0].within(wanted)
        sentence = f"a probe measures {named[0].name} at k={k}"
        if k > wanted:
            sentence += f", not at k={wanted}: its server drafts no fewer"
        return _speculative(named[0], k, Reason.PROBE, sentence)
    if context.decoding is Decoding.VANILLA:
        return _vanilla(Reason.FORCED, "vanilla was asked for")
    if context.decoding is not Decoding.SPECULATIVE:
        return None
    able, _ = fit(context, drafters, costs)
    if not able:
        return None
    weighed = _weigh(posteriors, able, costs, context)
    best = next((a for a in weighed if a.drafter is not None), None)
    drafter = next((d for d in able if best and d.name == best.drafter), able[0])
    k = best.num_draft_tokens if best else _usual_length(posteriors[drafter.name], drafter)
    return _speculative(drafter, k, Reason.FORCED, "speculative was asked for", weighed)


def _usual_length(posterior: Posterior, drafter: DrafterState) -> int:
    """The k to use without costs: the longest draft that is accepted whole with a probability of one half or more."""
    through = 1.0
    for i, s in enumerate(posterior.through[: drafter.max_draft_tokens]):
        through *= s
        if through < 0.5:
            return drafter.within(i)
    return drafter.max_draft_tokens


def _with_unknown(
    posteriors: Mapping[str, Posterior], drafters: Sequence[DrafterState], limits: PolicyLimits
) -> Mapping[str, Posterior]:
    unknown = [drafter for drafter in drafters if drafter.name not in posteriors]
    if not unknown:
        return posteriors
    return {
        **posteriors,
        **{drafter.name: PairPosterior.of_drafter(drafter, limits).for_a_task() for drafter in unknown},
    }


def _weigh(
    posteriors: Mapping[str, Posterior], able: Sequence[DrafterState], costs: CostTable, context: DecisionContext
) -> tuple[Alternative, ...]:
    return weigh(posteriors, able, costs, context.num_running, context.size, context.objective, context.num_jobs)


def _decision(
    chosen: Alternative,
    reason: Reason,
    sentence: str,
    able: Sequence[DrafterState],
    alternatives: tuple[Alternative, ...],
) -> Decision:
    if chosen.drafter is None:
        return replace(_vanilla(reason, sentence, alternatives), kept=DraftSetting())
    drafter = next(d for d in able if d.name == chosen.drafter)
    return _speculative(drafter, chosen.num_draft_tokens, reason, sentence, alternatives)


def _vanilla(reason: Reason, explanation: str, alternatives: tuple[Alternative, ...] = ()) -> Decision:
    return Decision(Mode.VANILLA, None, None, 0, reason, explanation, alternatives)


def _speculative(
    drafter: DrafterState, k: int, reason: Reason, explanation: str, alternatives: tuple[Alternative, ...] = ()
) -> Decision:
    return Decision(
        Mode.SPECULATIVE,
        drafter.name,
        drafter.revision,
        k,
        reason,
        explanation,
        alternatives,
        kept=DraftSetting(drafter.name, k),
    )


def _named(alternative: Alternative) -> str:
    return f"{alternative.drafter}, k={alternative.num_draft_tokens}" if alternative.drafter else "vanilla"


def _expected(alternative: Alternative) -> str:
    low, high = alternative.speedup_low, alternative.speedup_high
    return f"{alternative.speedup:.2f}x vanilla expected ({low:.2f} to {high:.2f})"
