"""Mixed batches: groups of one batch, by segment or prompt length, each with its own drafter and k, or none. Pure.

Groups share a pass. Its cost follows the mean width of all sequences, so what one group drafts makes the pass dearer
for all, and what is best for a group alone need not be best for the batch. Groups that use the same drafter propose
together; different drafters propose one after the other.

    tokens a round = Σ_g n_g · E[tokens_g]
    a round's time = T(mean width) + Σ_drafters D(its sequences, its longest draft)

and, as in goodput.py, prompts are read before, by the target and by the draft models of those that use them. It is
climbed group by group until nothing improves; beginning from the whole batch's best common choice, it never ends below
it. Exploration and control stay matters of whole batches: a group is no control for its neighbour, whose drafts it pays
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from alphaloop.cost import CostTable, RoundCosts
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting, Reason
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState, JobSize
from alphaloop.deciding.guards import fit
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.policy import decide
from alphaloop.deciding.posterior import Posterior
from alphaloop.messages import Mode

#: Reasons of a choice that the policy was free to make.
_FREE: Final = frozenset({Reason.FASTER, Reason.NOT_FASTER, Reason.UNCERTAIN, Reason.NO_HISTORY})
_MAX_SWEEPS: Final = 4
#: A group departs from the others only for so much more goodput of the batch.
_WORTH_IT: Final = 1.01


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of a batch about which the same is believed; `beliefs` by drafter name."""

    num_jobs: int
    posteriors: Mapping[str, Posterior]


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
    """One decision a group, in their order. `context.batch` is the sum of the groups' jobs.

    The whole batch is decided first, on the largest group's beliefs; where that is fixed, refused, exploring or a
    control, every group follows it.
    """
    largest = max(groups, key=lambda group: group.num_jobs)
    whole = decide(largest.posteriors, drafters, costs, context, limits, incumbent=incumbent, budget=budget)
    if len(groups) < 2 or whole.reason not in _FREE:
        return (whole,) * len(groups)
    able, _ = fit(context, drafters, costs)
    together = Together(groups, able, costs, context.size)
    common = together.best_common(whole.kept or DraftSetting())
    apart, gain = together.climb(common)
    if gain < _WORTH_IT:
        apart = (common,) * len(groups)
    return tuple(_decision(whole, choice, able, gain) for choice in apart)


class Together:
    """Goodput of a batch whose groups are decoded differently."""

    def __init__(
        self, groups: Sequence[Group], drafters: Sequence[DrafterState], costs: CostTable, size: JobSize | None
    ) -> None:
        self._groups, self._costs, self._size = groups, costs, size
        self._batch = sum(group.num_jobs for group in groups)
        self._reading_ms: dict[str | None, float] = {None: 0.0}
        if size is not None:
            self._reading_ms = {d.name: d.reading_ms(costs, size.num_prompt_tokens) for d in drafters}
            self._reading_ms[None] = costs.prefill_ms(None, size.num_prompt_tokens)
        self._here: dict[int, RoundCosts] = {}
        self._longest = [
            {name: posterior.longest_proposed(group.num_jobs) for name, posterior in group.posteriors.items()}
            for group in groups
        ]
        known = [d for d in drafters if all(d.name in group.posteriors for group in groups)]
        self._choices = [
            DraftSetting(),
            *(
                choice
                for d in known
                for k in range(1, min(d.max_draft_tokens, *(g.posteriors[d.name].max_draft_tokens for g in groups)) + 1)
                if self.rate((choice := DraftSetting(d.name, k),) * len(groups)) is not None
            ),
        ]

    def rate(self, choices: Sequence[DraftSetting]) -> float | None:
        """Tokens a millisecond of the batch, one choice a group; None where a cost was never measured."""
        tokens, positions = 0.0, 0.0
        reading_ms = self._batch * self._reading_ms[None]
        drafting: dict[str, tuple[int, float]] = {}
        for group, longest_of, choice in zip(self._groups, self._longest, choices, strict=True):
            k = choice.num_draft_tokens
            if choice.drafter is None:
                tokens += group.num_jobs
                positions += group.num_jobs
                continue
            posterior = group.posteriors[choice.drafter]
            reading_ms += group.num_jobs * self._reading_ms.get(choice.drafter, 0.0)
            tokens += group.num_jobs * posterior.tokens[k]
            positions += group.num_jobs * (1 + posterior.proposed[k])
            jobs, longest = drafting.get(choice.drafter, (0, 0.0))
            drafting[choice.drafter] = (jobs + group.num_jobs, max(longest, longest_of[choice.drafter][k]))
        ms = self._at(self._batch).part_ms(None, positions / self._batch)
        for drafter, (jobs, longest) in drafting.items():
            draft_ms = self._at(jobs).part_ms(drafter, longest + 1)
            ms = None if ms is None or draft_ms is None else ms + draft_ms
        if not ms:
            return None
        num_tokens = self._batch * self._size.num_tokens if self._size else tokens
        return num_tokens / (reading_ms + ms * num_tokens / tokens)

    def best_common(self, given: DraftSetting) -> DraftSetting:
        """The best choice for all groups alike; `given` if no other is better."""
        return max([given, *self._choices], key=lambda choice: self.rate((choice,) * len(self._groups)) or 0.0)

    def climb(self, common: DraftSetting) -> tuple[tuple[DraftSetting, ...], float]:
        """Choices by group, and the batch's goodput over that of the common choice."""
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

    def _at(self, batch: int) -> RoundCosts:
        if batch not in self._here:
            self._here[batch] = self._costs.rounds(batch, self._size.context if self._size else None)
        return self._here[batch]


def _decision(whole: Decision, choice: DraftSetting, able: Sequence[DrafterState], gain: float) -> Decision:
    if choice == DraftSetting(whole.drafter, whole.num_draft_tokens):
        return whole
    told = f"{whole.explanation}; " + (
        f"apart from its batch, which gains {gain:.2f}x by that" if gain >= _WORTH_IT else "this is best for all groups"
    )
    drafter = next((d for d in able if d.name == choice.drafter), None)
    return replace(
        whole,
        mode=Mode.SPECULATIVE if drafter else Mode.VANILLA,
        drafter=drafter.name if drafter else None,
        draft_revision=drafter.revision if drafter else None,
        num_draft_tokens=choice.num_draft_tokens,
        reason=Reason.FASTER if drafter else Reason.NOT_FASTER,
        explanation=told,
        num_draft_tokens_by_batch=(),
    )
