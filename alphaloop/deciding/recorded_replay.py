"""Recorded decisions taken under other rules, each with the evidence, costs and conditions of its own moment. Pure.

Under the rules of that time the decision is the recorded one. Under other rules the incumbents and the exploration
budgets are those that the other rules lead to, so they are carried from decision to decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.decision_inputs import DecisionInputs, SessionFacts
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.incumbents import IncumbentKey
from alphaloop.deciding.recorded import Pairs, Positions, groups_of, restore, session_of
from alphaloop.deciding.replay import Rules


@dataclass(frozen=True, slots=True)
class OtherRules:
    """Another configuration: its rules, and how its drafters differ from those that decided."""

    rules: Rules
    longest_drafts: Mapping[str, int] = field(default_factory=dict)  #: of drafters whose setting changed
    removed: frozenset[str] = frozenset()  #: drafters that it does not have

    def drafters(self, inputs: DecisionInputs) -> tuple[DrafterState, ...]:
        """The decision's drafters under this configuration."""
        return tuple(
            replace(drafter, max_draft_tokens=self.longest_drafts.get(drafter.name, drafter.max_draft_tokens))
            for drafter in inputs.drafters
            if drafter.name not in self.removed
        )

    def are_those_of(self, inputs: DecisionInputs, facts: SessionFacts) -> bool:
        """Whether the decision was taken under these rules."""
        rules = self.rules.of(inputs.subject.task)
        return (facts.limits, inputs.rules, inputs.drafters) == (self.rules.limits, rules, self.drafters(inputs))


class ReplaySession:
    """The decisions of one recorded session, in their order, under other rules. They keep one setting for any load."""

    def __init__(self, facts: SessionFacts, rules: OtherRules) -> None:
        self._rules = rules
        # Settings by running sequences are left out: what other rules would have cost is computed at one load.
        self._facts = replace(facts, limits=rules.rules.limits, num_slots=0)
        self._incumbents: dict[IncumbentKey, DraftSetting] = {}
        self._budgets: dict[tuple[str, str], ExplorationBudget] = {}

    def decide(self, recorded: DecisionInputs, positions: Positions) -> tuple[Decision, ...]:
        """A decision for each job. Raises NotReproducible where evidence is missing."""
        inputs = self._under_the_rules(recorded)
        restored = restore(inputs, self._facts, Pairs(positions, self._facts))
        session = session_of(inputs, self._facts, restored)
        largest = max(groups_of(inputs, restored), key=len)
        wanted = session.evidence_key(inputs.subject, [inputs.jobs[index] for index in largest])
        subject = inputs.subject.task, inputs.subject.sampling_bucket
        key = IncumbentKey.of(*subject, wanted.prompt_bucket, inputs.num_running)
        carried = replace(
            inputs,
            incumbent=self._incumbents.get(key, inputs.incumbent),
            budget=self._budgets.get(subject, inputs.budget),
        )
        decisions = session_of(carried, self._facts, restored).decide(
            carried.subject,
            carried.jobs,
            carried.rules,
            num_running=carried.num_running,
            now=carried.now,
            conditions=carried.conditions,
        )
        whole = decisions[largest[0]]
        if whole.kept is not None:
            self._incumbents[key] = whole.kept
        if whole.budget is not None:
            self._budgets[subject] = whole.budget
        return decisions

    def _under_the_rules(self, inputs: DecisionInputs) -> DecisionInputs:
        drafters = self._rules.drafters(inputs)
        names = {drafter.name for drafter in drafters}
        return replace(
            inputs,
            rules=self._rules.rules.of(inputs.subject.task),
            drafters=drafters,
            posteriors=tuple(
                tuple(origin for origin in group if origin.key.drafter in names) for group in inputs.posteriors
            ),
            splits=tuple(origin for origin in inputs.splits if origin.drafter in names),
            settings_from=(None,) * len(inputs.settings_from),
        )
