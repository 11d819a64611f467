"""The policy: speculative or vanilla, which drafter, which draft length, and why. Pure: same inputs, same decision.

The choice maximises goodput, not α: tokens a round over the measured milliseconds of such a round. The α at which
speculation breaks even is .20 for a cheap drafter and .62 for an expensive one, and it moves with load.

Guards say which drafters may draft for these jobs at all; every refusal has its own reason.

Groups: jobs of one decision that differ in segment, prompt length or form get a setting each.

Groups share a pass. Its cost follows the mean width of all sequences, so the drafts of one group make the pass more
expensive for all, and the best setting for a group alone need not be the best for all together. Groups with the same
drafter propose together; different drafters propose one after the other.

    tokens a round = Σ_g n_g · tokens_g
    a round's time = T(mean width) + Σ_drafters D(its sequences, its longest draft)

As in goodput.py, prompts are read before, by the target and by the draft models of those that use them. The search
climbs group by group until nothing improves. It begins from the best common setting, so it never ends below that.
Running sequences beyond these jobs are assumed to have the same mix of groups. On servers each alternative has rounds
of its own, so groups do not pay for each other's drafts, and goodputs add up. A trial covers all jobs together: one
group is no comparison for another, because every group pays for the drafts of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, NamedTuple

from alphaloop.costs import CostTable, RoundCosts
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting, Reason
from alphaloop.deciding.draft_lengths import COMPARED
from alphaloop.deciding.exploration import ExplorationBudget, noise_between, worth_trying
from alphaloop.deciding.goodput import (
    MIN_SPEEDUP,
    Alternative,
    DrafterState,
    JobSize,
    Shares,
    shared_round_ms,
    weigh,
)
from alphaloop.deciding.job_facts import Aim
from alphaloop.deciding.posterior import Posterior
from alphaloop.messages import Decoding, Mode, Purpose

#: A rival that is expected to be this much faster is taken, however uncertain that is.
_SWITCH_GAIN: Final = 0.02
#: Jobs of which fewer tokens are expected gain nothing from drafts.
_SHORT_OUTPUT_TOKENS: Final = 20


class Refusal(NamedTuple):
    """Why a drafter, or speculation, is out."""

    reason: Reason
    explanation: str


def refused(context: DecisionContext, drafters: Sequence[DrafterState]) -> Refusal | None:
    """Why no drafter may draft for these jobs; None if the jobs allow drafts."""
    if not drafters:
        return Refusal(Reason.NO_DRAFTER, "no drafter is configured")
    if (pattern := context.subject.switched_off) is not None:
        return Refusal(Reason.SWITCHED_OFF, f"an operator switched speculation off for {pattern!r}")
    if context.expected_tokens < _SHORT_OUTPUT_TOKENS:
        known = f"learned from {context.known_output_jobs:.0f} jobs" if context.known_output_jobs else "the jobs' limit"
        return Refusal(
            Reason.SHORT_OUTPUT,
            f"about {context.expected_tokens:.0f} tokens expected, {known}, fewer than {_SHORT_OUTPUT_TOKENS}",
        )
    return None


def fit(
    context: DecisionContext, drafters: Sequence[DrafterState], costs: CostTable
) -> tuple[list[DrafterState], Refusal]:
    """The drafters that may serve, and why the last refused one may not."""
    able, refusal = [], Refusal(Reason.NO_DRAFTER, "no drafter is configured")
    for drafter in drafters:
        if own := _refused(context, drafter, costs):
            refusal = own
        else:
            able.append(drafter)
    return able, refusal


def _refused(context: DecisionContext, drafter: DrafterState, costs: CostTable) -> Refusal | None:
    if drafter.is_stale:
        return Refusal(Reason.STALE_DRAFT, f"{drafter.name} ({drafter.revision}) is flagged stale")
    if not drafter.revision:
        return Refusal(Reason.UNKNOWN_REVISION, f"the revision of {drafter.name} is not known")
    if setting := context.cannot_serve.get(drafter.name):
        return Refusal(Reason.CANNOT_SERVE, f"{drafter.name} cannot serve {setting}")
    return _no_memory(context, drafter) or _late(context, drafter, costs)


def _no_memory(context: DecisionContext, drafter: DrafterState) -> Refusal | None:
    longest = context.max_sequence_tokens
    free = context.free_elsewhere.get(drafter.name, context.free_cache_bytes)
    if free is None or longest is None or not drafter.cache_bytes_per_token:
        return None
    if context.max_output_tokens is not None:
        longest = min(longest, drafter.num_read(longest) + context.max_output_tokens)
    needed = context.num_running * longest * drafter.cache_bytes_per_token
    if needed <= free:
        return None
    where = "on its device" if drafter.name in context.free_elsewhere else "beside the target"
    return Refusal(
        Reason.NO_MEMORY,
        f"{drafter.name} needs {context.num_running} sequences x {longest:.0f} tokens x "
        f"{drafter.cache_bytes_per_token} bytes = {needed / 2**20:.0f} MiB, "
        f"{free / 2**20:.0f} MiB are free {where}",
    )


def _late(context: DecisionContext, drafter: DrafterState, costs: CostTable) -> Refusal | None:
    if context.objective.aim is not Aim.TIME_TO_FIRST_TOKEN or context.prompt_tokens is None:
        return None
    target_ms = context.num_jobs * costs.prefill_ms(None, context.prompt_tokens)
    draft_ms = context.num_jobs * drafter.reading_ms(costs, context.prompt_tokens)
    if costs.is_served(drafter.name) or draft_ms <= 0 or target_ms + draft_ms <= context.objective.target_ms:
        return None  # on a server the prompt is read once, as it is where nothing drafts
    return Refusal(
        Reason.FIRST_TOKENS,
        f"with {drafter.name} the first token comes after {target_ms:.0f} + {draft_ms:.0f} ms of reading, "
        f"{context.objective.target_ms:.0f} ms are allowed",
    )


def decide(
    posteriors: Mapping[str, Posterior],
    drafters: Sequence[DrafterState],
    costs: CostTable,
    context: DecisionContext,
    *,
    incumbent: DraftSetting | None = None,
    budget: ExplorationBudget | None = None,
) -> Decision:
    """Choose how to decode jobs that are alike.

    `posteriors` are by drafter name, one for each of `drafters`. `incumbent` and `budget` are `kept` and `budget` of
    the task's last decision. Without a budget nothing is explored. The decision keeps one setting however many
    sequences run; `settings_by_running` completes it.
    """
    if fixed := _fixed_by_caller(posteriors, drafters, costs, context):
        return fixed
    if refusal := refused(context, drafters):
        return _vanilla(*refusal)
    able, refusal = fit(context, drafters, costs)
    if not able:
        return _vanilla(*refusal)
    alternatives = _weigh(posteriors, able, costs, context)
    if len(alternatives) < 2:
        return _vanilla(Reason.NO_COSTS, f"no cost was measured for {context.num_running} sequences", alternatives)
    chosen, reason, sentence = _choose(alternatives, posteriors, incumbent)
    decision = _decision(chosen, reason, sentence, able, alternatives)
    if budget is not None:
        decision = _explore(decision, chosen, able, posteriors, budget, context, costs=costs)
    if decision.reason in COMPARED and context.objective.aim is Aim.THROUGHPUT:
        # A request on a server keeps its draft length, so it cannot follow what else runs.
        free = {name: posterior for name, posterior in posteriors.items() if not costs.is_served(name)}
        decision = replace(decision, posteriors=free if costs.is_of_servers else posteriors)
    return decision


def _choose(
    alternatives: Sequence[Alternative],
    posteriors: Mapping[str, Posterior],
    incumbent: DraftSetting | None,
) -> tuple[Alternative, Reason, str]:
    """The best by expectation; the incumbent, while the gain of a change is small and within its noise.

    A gain beyond half a standard deviation of the comparison is followed at once, and so is a gain of `_SWITCH_GAIN`:
    staying may cost that much for good, switching back and forth costs only a line in the log.
    """
    vanilla = next(a for a in alternatives if a.drafter is None)
    best = alternatives[0]
    if best.drafter is not None and best.chance <= vanilla.chance and best.speedup < MIN_SPEEDUP:
        best = vanilla
    running = next((a for a in alternatives if incumbent == DraftSetting(a.drafter, a.num_draft_tokens)), None)
    if running is not None and running is not best and running.chance >= best.chance:
        gain = math.log(best.speedup / running.speedup)
        noise = noise_between(best, running, posteriors)
        is_loss = running.drafter is not None and running.speedup < 1
        if not is_loss and gain <= min(noise / 2, math.log1p(_SWITCH_GAIN)):
            sentence = (
                f"{_named(running)} stays: {_named(best)}, at {_expected(best)}, differs from it by less than this "
                "comparison can tell"
            )
            return running, _reason(running, best, vanilla, posteriors), sentence
    if best.drafter is not None:
        return best, _reason(best, best, vanilla, posteriors), f"{_expected(best)} with {_named(best)}"
    rival = next(a for a in alternatives if a.drafter is not None)
    sentence = f"best alternative {_named(rival)}: {_expected(rival)}"
    return vanilla, _reason(vanilla, rival, vanilla, posteriors), sentence


def _reason(
    chosen: Alternative, best: Alternative, vanilla: Alternative, posteriors: Mapping[str, Posterior]
) -> Reason:
    if chosen.drafter is not None:
        if chosen.chance > vanilla.chance:
            return Reason.ON_TARGET
        return Reason.NO_HISTORY if posteriors[chosen.drafter].is_cold else Reason.FASTER
    if best.chance < chosen.chance and best.speedup >= MIN_SPEEDUP:
        return Reason.ON_TARGET
    if all(posterior.is_cold for posterior in posteriors.values()):
        return Reason.NO_HISTORY
    return Reason.UNCERTAIN if best.speedup >= MIN_SPEEDUP else Reason.NOT_FASTER


def _explore(
    decision: Decision,
    chosen: Alternative,
    able: Sequence[DrafterState],
    posteriors: Mapping[str, Posterior],
    budget: ExplorationBudget,
    context: DecisionContext,
    *,
    costs: CostTable,
) -> Decision:
    """The choice, or a trial of another setting, paid from the budget."""
    num_tokens = context.num_tokens
    is_cold = all(posteriors[drafter.name].is_cold for drafter in able)
    budget = budget.after(context.num_jobs, num_tokens, is_cold=is_cold, now=context.now)
    if budget.unseen is not None and (new := [d.name for d in able if d.name not in budget.unseen]):
        budget = replace(budget, unseen={**budget.unseen, **dict.fromkeys(new, 0.0)})
    scored = {drafter.name for drafter in able if drafter.is_scored}
    unknown = [a for a in decision.alternatives if a.drafter not in scored]
    trial = worth_trying(
        chosen,
        unknown,
        posteriors,
        budget,
        context.num_jobs,
        num_tokens,
        shared_weights={drafter.name: drafter.shared_weights for drafter in able if drafter.shared_weights},
        timed_apart=[drafter.name for drafter in able if costs.is_served(drafter.name)],
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
    subject = context.subject
    if subject.purpose is Purpose.CONTROL:
        return _vanilla(Reason.CONTROL, "a control job is decoded vanilla")
    if subject.purpose is Purpose.PROBE:
        named = [d for d in drafters if subject.probe_drafter in (None, d.name)]
        if not named:
            return _vanilla(Reason.NO_DRAFTER, f"this worker has no drafter {subject.probe_drafter}")
        wanted = subject.probe_num_draft_tokens or named[0].max_draft_tokens
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


def _weigh(
    posteriors: Mapping[str, Posterior], able: Sequence[DrafterState], costs: CostTable, context: DecisionContext
) -> tuple[Alternative, ...]:
    return weigh(
        posteriors,
        able,
        costs,
        context.num_running,
        context.size,
        objective=context.objective,
        num_jobs=context.num_jobs,
    )


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
    return Decision(Mode.VANILLA, None, None, 0, reason, explanation, alternatives=alternatives)


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
        alternatives=alternatives,
        kept=DraftSetting(drafter.name, k),
    )


def _named(alternative: Alternative) -> str:
    return f"{alternative.drafter}, k={alternative.num_draft_tokens}" if alternative.drafter else "vanilla"


def _expected(alternative: Alternative) -> str:
    low, high = alternative.speedup_low, alternative.speedup_high
    return f"{alternative.speedup:.2f}x vanilla expected ({low:.2f} to {high:.2f})"


_MAX_SWEEPS: Final = 4
#: Groups get settings of their own only for this much more goodput of all together.
_WORTH_IT: Final = 1.01


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs with the same posteriors, which are by drafter name."""

    num_jobs: int
    posteriors: Mapping[str, Posterior]
    segment: str = ""
    prompt_bucket: str = ""
    alike: Mapping[str, float] = field(default_factory=dict)  #: by drafter, jobs of the same key in its posterior
    form_bucket: str = ""


def decide_groups(
    groups: Sequence[Group],
    drafters: Sequence[DrafterState],
    costs: CostTable,
    context: DecisionContext,
    *,
    incumbent: DraftSetting | None = None,
    budget: ExplorationBudget | None = None,
) -> tuple[Decision, ...]:
    """A decision for each group, in their order. `context.num_jobs` is the sum of the groups' jobs.

    All jobs are decided together first, on the largest group's posteriors. Where that decision is fixed, refused or
    exploring, every group follows it.
    """
    largest = max(groups, key=lambda group: group.num_jobs)
    whole = decide(largest.posteriors, drafters, costs, context, incumbent=incumbent, budget=budget)
    if len(groups) < 2 or whole.reason not in COMPARED:
        return (whole,) * len(groups)
    able, _ = fit(context, drafters, costs)
    together = Together(groups, able, costs, context.size, context.num_running)
    common = together.best_common(whole.kept or DraftSetting())
    apart, gain = together.climb(common)
    if gain < _WORTH_IT:
        apart = (common,) * len(groups)
    return tuple(
        replace(_decision_apart(whole, choice, able, gain), posteriors=whole.posteriors and group.posteriors)
        for group, choice in zip(groups, apart, strict=True)
    )


class Together:
    """Goodput of sequences whose groups are decoded differently. `num_running` sequences share a round."""

    def __init__(
        self,
        groups: Sequence[Group],
        drafters: Sequence[DrafterState],
        costs: CostTable,
        size: JobSize | None,
        num_running: int,
    ) -> None:
        self._groups, self._costs, self._size, self._num_running = groups, costs, size, num_running
        self._num_jobs = sum(group.num_jobs for group in groups)
        #: Sequences that each job stands for.
        self._share = num_running / self._num_jobs
        self._reading_ms: dict[str | None, float] = {None: 0.0}
        if size is not None:
            self._reading_ms = {d.name: d.reading_ms(costs, size.num_prompt_tokens) for d in drafters}
            self._reading_ms[None] = costs.prefill_ms(None, size.num_prompt_tokens)
        self._all_rounds = self._at(num_running)
        self._rounds_of = cache(lambda num_jobs: self._at(self._running(num_jobs)))
        self._shares, self._drafters = Shares(num_running, drafters), {d.name: d for d in drafters}
        self._longest = [
            {
                name: posterior.longest_proposed(self._running(group.num_jobs))
                for name, posterior in group.posteriors.items()
            }
            for group in groups
        ]
        lengths = {
            d.name: range(
                d.least_draft_tokens,
                min(d.max_draft_tokens, *(group.posteriors[d.name].max_draft_tokens for group in groups)) + 1,
            )
            for d in drafters
        }
        choices = [DraftSetting(name, k) for name, able in lengths.items() for k in able]
        timed = (choice for choice in choices if self.rate((choice,) * len(groups)) is not None)
        self._choices = [DraftSetting(), *timed]

    def rate(self, choices: Sequence[DraftSetting]) -> float | None:
        """Tokens a millisecond of all together, with a choice for each group; None where a cost was never measured."""
        if self._costs.is_of_servers:
            return self._rate_apart(choices)
        tokens = num_proposed = 0.0
        reading_ms = self._num_jobs * self._reading_ms[None]
        drafting: dict[str, tuple[int, float]] = {}
        for group, longest_of, choice in zip(self._groups, self._longest, choices, strict=True):
            drafter, k = choice.drafter, choice.num_draft_tokens
            if drafter is None:
                tokens += group.num_jobs
                continue
            posterior = group.posteriors[drafter]
            reading_ms += group.num_jobs * self._reading_ms.get(drafter, 0.0)
            tokens += group.num_jobs * posterior.corrected_tokens[k]
            num_proposed += group.num_jobs * posterior.proposed[k]
            jobs, longest = drafting.get(drafter, (0, 0.0))
            drafting[drafter] = jobs + group.num_jobs, max(longest, longest_of[drafter][k])
        ms = shared_round_ms(self._all_rounds, num_proposed / self._num_jobs, drafting, self._rounds_of)
        if not ms:
            return None
        tokens, reading_ms = self._share * tokens, self._share * reading_ms
        num_tokens = self._num_running * self._size.num_tokens if self._size else tokens
        return num_tokens / (reading_ms + ms * num_tokens / tokens)

    def _rate_apart(self, choices: Sequence[DraftSetting]) -> float | None:
        """The same on servers; each is as full as if all sequences had its setting, as in goodput.py."""
        rate = 0.0
        for group, choice in zip(self._groups, choices, strict=True):
            drafter = self._drafters[choice.drafter] if choice.drafter is not None else None
            load = self._shares.of(drafter) if drafter else self._shares.vanilla
            round_ms = self._at(load).round_ms(choice.drafter, choice.num_draft_tokens)
            if round_ms is None:
                return None
            k = choice.num_draft_tokens
            token_ms = round_ms / (group.posteriors[drafter.name].corrected_tokens[k] if drafter else 1.0)
            num_tokens = self._size.num_tokens if self._size else 1.0
            job_ms = self._reading_ms.get(choice.drafter, 0.0) + num_tokens * token_ms
            rate += self._share * group.num_jobs * num_tokens / job_ms
        return rate

    def best_common(self, first: DraftSetting) -> DraftSetting:
        """The best setting that all groups share; `first` if no other is better."""
        return max([first, *self._choices], key=lambda choice: self.rate((choice,) * len(self._groups)) or 0.0)

    def climb(self, common: DraftSetting) -> tuple[tuple[DraftSetting, ...], float]:
        """Settings by group, and the goodput of all together over that of the common setting."""
        chosen = [common] * len(self._groups)
        start = best = self.rate(chosen) or 0.0
        for _ in range(_MAX_SWEEPS):
            before = best
            for i in range(len(chosen)):
                for choice in self._choices:
                    rate = self.rate([*chosen[:i], choice, *chosen[i + 1 :]])
                    if rate is not None and rate > best:
                        chosen[i], best = choice, rate
            if best <= before:
                break
        return tuple(chosen), best / start if start > 0 else 1.0

    def _running(self, num_jobs: int) -> int:
        """Running sequences that `num_jobs` of the jobs stand for."""
        return max(1, round(self._share * num_jobs))

    def _at(self, num_running: float) -> RoundCosts:
        return self._costs.rounds(num_running, self._size.context if self._size else None)


def _decision_apart(whole: Decision, setting: DraftSetting, able: Sequence[DrafterState], gain: float) -> Decision:
    if setting == whole.setting:
        return whole
    explanation = f"{whole.explanation}; " + (
        f"apart from the other groups, a gain of {gain:.2f}x" if gain >= _WORTH_IT else "this is best for all groups"
    )
    drafter = next((d for d in able if d.name == setting.drafter), None)
    if drafter is None:
        decision = _vanilla(Reason.NOT_FASTER, explanation, whole.alternatives)
    else:
        decision = _speculative(drafter, setting.num_draft_tokens, Reason.FASTER, explanation, whole.alternatives)
    return replace(decision, kept=whole.kept, budget=whole.budget)
