"""Groups: jobs of one decision that differ in segment or prompt length get a setting each. Pure.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from alphaloop.cost import CostTable, RoundCosts
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting, Reason
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState, JobSize, Shares
from alphaloop.deciding.guards import fit
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.policy import decide
from alphaloop.deciding.posterior import Posterior
from alphaloop.messages import Mode

#: Reasons of decisions that compared speeds. Only then may groups get other settings.
_FREE: Final = frozenset({Reason.FASTER, Reason.NOT_FASTER, Reason.UNCERTAIN, Reason.NO_HISTORY})
_MAX_SWEEPS: Final = 4
#: Groups get settings of their own only for so much more goodput of all together.
_WORTH_IT: Final = 1.01


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs with the same posteriors, which are by drafter name."""

    num_jobs: int
    posteriors: Mapping[str, Posterior]
    segment: str = ""
    prompt_bucket: str = ""
    alike: Mapping[str, float] = field(default_factory=dict)  #: by drafter, jobs of the same key behind the posterior


def decide_groups(
    groups: Sequence[Group],
    drafters: Sequence[DrafterState],
    costs: CostTable,
    context: DecisionContext,
    limits: PolicyLimits,
    *,
    incumbent: DraftSetting | None = None,
    budget: ExplorationBudget | None = None,
) -> tuple[Decision, ...]:
    """One decision a group, in their order. `context.num_jobs` is the sum of the groups' jobs.

    All jobs are decided together first, on the largest group's posteriors. Where that decision is fixed, refused or
    exploring, every group follows it.
    """
    largest = max(groups, key=lambda group: group.num_jobs)
    whole = decide(largest.posteriors, drafters, costs, context, limits, incumbent=incumbent, budget=budget)
    if len(groups) < 2 or whole.reason not in _FREE:
        return (whole,) * len(groups)
    able, _ = fit(context, drafters, costs)
    together = Together(groups, able, costs, context.size, context.num_running)
    common = together.best_common(whole.kept or DraftSetting())
    apart, gain = together.climb(common)
    if gain < _WORTH_IT:
        apart = (common,) * len(groups)
    return tuple(
        replace(_decision(whole, choice, able, gain), posteriors=whole.posteriors and group.posteriors)
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
        self._here: dict[float, RoundCosts] = {}
        self._shares, self._drafters = Shares(num_running, drafters), {d.name: d for d in drafters}
        self._longest = [
            {
                name: posterior.longest_proposed(self._running(group.num_jobs))
                for name, posterior in group.posteriors.items()
            }
            for group in groups
        ]
        known = [d for d in drafters if all(d.name in group.posteriors for group in groups)]
        self._choices = [
            DraftSetting(),
            *(
                choice
                for d in known
                for k in range(
                    d.least_draft_tokens,
                    min(d.max_draft_tokens, *(g.posteriors[d.name].max_draft_tokens for g in groups)) + 1,
                )
                if self.rate((choice := DraftSetting(d.name, k),) * len(groups)) is not None
            ),
        ]

    def rate(self, choices: Sequence[DraftSetting]) -> float | None:
        """Tokens a millisecond of all together, one choice a group; None where a cost was never measured."""
        if self._costs.is_of_servers:
            return self._rate_apart(choices)
        tokens, positions = 0.0, 0.0
        reading_ms = self._num_jobs * self._reading_ms[None]
        drafting: dict[str, tuple[int, float]] = {}
        for group, longest_of, choice in zip(self._groups, self._longest, choices, strict=True):
            k = choice.num_draft_tokens
            if choice.drafter is None:
                tokens += group.num_jobs
                positions += group.num_jobs
                continue
            posterior = group.posteriors[choice.drafter]
            reading_ms += group.num_jobs * self._reading_ms.get(choice.drafter, 0.0)
            tokens += group.num_jobs * posterior.corrected_tokens[k]
            positions += group.num_jobs * (1 + posterior.proposed[k])
            jobs, longest = drafting.get(choice.drafter, (0, 0.0))
            drafting[choice.drafter] = (jobs + group.num_jobs, max(longest, longest_of[choice.drafter][k]))
        ms = self._at(self._num_running).part_ms(None, positions / self._num_jobs)
        for drafter, (jobs, longest) in drafting.items():
            draft_ms = self._at(self._running(jobs)).part_ms(drafter, longest + 1)
            ms = None if ms is None or draft_ms is None else ms + draft_ms
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

    def best_common(self, given: DraftSetting) -> DraftSetting:
        """The best setting that all groups share; `given` if no other is better."""
        return max([given, *self._choices], key=lambda choice: self.rate((choice,) * len(self._groups)) or 0.0)

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
        """Running sequences that so many of the jobs stand for."""
        return max(1, round(self._share * num_jobs))

    def _at(self, num_running: float) -> RoundCosts:
        if num_running not in self._here:
            self._here[num_running] = self._costs.rounds(num_running, self._size.context if self._size else None)
        return self._here[num_running]


def _decision(whole: Decision, setting: DraftSetting, able: Sequence[DrafterState], gain: float) -> Decision:
    if setting == whole.setting:
        return whole
    explanation = f"{whole.explanation}; " + (
        f"apart from the other groups, a gain of {gain:.2f}x" if gain >= _WORTH_IT else "this is best for all groups"
    )
    drafter = next((d for d in able if d.name == setting.drafter), None)
    return replace(
        whole,
        mode=Mode.SPECULATIVE if drafter else Mode.VANILLA,
        drafter=drafter.name if drafter else None,
        draft_revision=drafter.revision if drafter else None,
        num_draft_tokens=setting.num_draft_tokens,
        reason=Reason.FASTER if drafter else Reason.NOT_FASTER,
        explanation=explanation,
    )
