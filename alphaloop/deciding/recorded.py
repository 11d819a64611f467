"""A recorded decision, taken again: the same session with the inputs of that time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.decision_inputs import DecisionInputs, SessionFacts
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot
from alphaloop.deciding.evidence_source import JobLengths, Place, Standing
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.incumbents import IncumbentKey
from alphaloop.deciding.inference import PairPosterior
from alphaloop.deciding.job_facts import alike
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.deciding.origins import PairOrigin
from alphaloop.deciding.posteriors import Posteriors
from alphaloop.deciding.session import DecisionSession
from alphaloop.errors import AlphaloopError

#: Evidence by position: the key, and its sums when that row was the last one they included.
Positions = Mapping[int, tuple[EvidenceKey, KeyEvidence]]
#: What was restored stays, however old it was when the decision used it.
_ALWAYS: Final = timedelta(days=365)


class NotReproducible(AlphaloopError):
    """Part of what a recorded decision was taken from is not stored any more."""

    code = "not_reproducible"


@dataclass(slots=True)
class Pairs:
    """Posteriors over all tasks that were inferred again; many decisions share one."""

    positions: Positions
    facts: SessionFacts
    _found: dict[tuple[PairOrigin, int], PairPosterior] = field(default_factory=dict)

    def of(self, origin: PairOrigin, drafter: DrafterState) -> PairPosterior:
        """As it was inferred then."""
        name = origin, drafter.max_draft_tokens
        if name not in self._found:
            snapshot = snapshot_of(self.positions, origin.positions, self.facts.half_life)
            tasks = snapshot.of_tasks(drafter, origin.at)
            self._found[name] = PairPosterior.of_drafter(drafter, self.facts.limits, tasks.sums)
        return self._found[name]


class RecordedEvidence(EvidenceSnapshot):
    """The evidence of one decision. The lengths of the task's jobs are as they were then."""

    def __init__(self, half_life: timedelta, found: Mapping[EvidenceKey, KeyEvidence], lengths: JobLengths) -> None:
        super().__init__(half_life, found)
        self._lengths = lengths

    def lengths(
        self,
        task: str,
        drafters: Iterable[DrafterState],
        now: datetime,
        *,
        sampling_bucket: str | None = None,
    ) -> JobLengths:
        """As recorded."""
        return self._lengths


class RecordedState:
    """The incumbent and the budget from before the decision, for one session."""

    def __init__(self, inputs: DecisionInputs) -> None:
        self._inputs = inputs

    def last_choice(self, task: str, sampling_bucket: str) -> DraftSetting | None:
        """The incumbent."""
        return self._inputs.incumbent

    def record(self, key: IncumbentKey, decision: Decision) -> bool:
        """Nothing: it was logged then."""
        return True

    def open(self, task: str, sampling_bucket: str) -> ExplorationBudget:
        """The budget."""
        return self._inputs.budget or ExplorationBudget()

    def keep(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """Nothing: it was kept then."""
        return budget

    def save(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """Nothing."""
        return budget


@dataclass(frozen=True, slots=True)
class Restored:
    """A decision's evidence and posteriors, as they were."""

    evidence: RecordedEvidence
    posteriors: Posteriors


def restore(inputs: DecisionInputs, facts: SessionFacts, pairs: Pairs) -> Restored:
    """Infer the decision's posteriors again. Raises NotReproducible where evidence is missing."""
    wanted = [position for group in inputs.posteriors for origin in group for position in origin.positions]
    found = dict(pairs.positions[position] for position in wanted if position in pairs.positions)
    evidence = RecordedEvidence(facts.half_life, found, inputs.lengths)
    posteriors = Posteriors(evidence, facts.limits, lasts=_ALWAYS, pair_lasts=_ALWAYS)
    drafters = {drafter.name: drafter for drafter in inputs.drafters}

    def standing(positions: tuple[int, ...], at: datetime, task: str, drafter: DrafterState) -> Standing:
        from_ledger = snapshot_of(pairs.positions, positions, facts.half_life)
        return from_ledger.standing(Place(task, drafter.name, drafter.revision), at)

    for origin in (origin for group in inputs.posteriors for origin in group):
        drafter = drafters[origin.key.drafter]
        pair = pairs.of(origin.pair, drafter)
        posteriors.restore(origin, drafter, standing(origin.positions, origin.at, origin.key.task, drafter), pair)
        posteriors.restore_pair(origin.pair, drafter, pair)
    for split in inputs.splits:
        drafter = drafters[split.drafter]
        posteriors.restore_split(split, drafter, standing(split.positions, split.at, split.task, drafter))
    return Restored(evidence, posteriors)


def decide_again(
    inputs: DecisionInputs,
    facts: SessionFacts,
    pairs: Pairs,
    earlier: Mapping[UUID, tuple[Decision, ...]],
) -> tuple[Decision, ...]:
    """The decisions of that time, one for each job.

    `earlier` has the decisions named in `settings_from`, by their ids. Raises NotReproducible where one is missing.
    """
    restored = restore(inputs, facts, pairs)
    decisions = session_of(inputs, facts, restored).decide(
        inputs.subject,
        inputs.jobs,
        inputs.rules,
        num_running=inputs.num_running,
        now=inputs.now,
        conditions=inputs.conditions,
    )
    found = list(decisions)
    for group, origin in zip(groups_of(inputs, restored), inputs.settings_from, strict=True):
        if origin is None:
            continue
        if origin.decision_id not in earlier:
            raise NotReproducible(f"decision {origin.decision_id}, whose settings were taken over, is not stored")
        settings = earlier[origin.decision_id][origin.job_index].settings_by_running
        changed = replace(decisions[group[0]], settings_by_running=settings)
        for index in group:
            found[index] = changed
    return tuple(found)


def groups_of(inputs: DecisionInputs, restored: Restored) -> list[list[int]]:
    """The jobs of each group, by index."""
    is_split = bool(inputs.splits) and restored.posteriors.splits_by_segment(
        inputs.subject.task, inputs.drafters, inputs.now
    )
    return alike(inputs.jobs, by_segment=is_split)


def session_of(inputs: DecisionInputs, facts: SessionFacts, restored: Restored) -> DecisionSession:
    """A session that decides with these inputs, once."""
    state = RecordedState(inputs)
    return DecisionSession(
        facts.target_revision,
        facts.engine,
        restored.evidence,
        posteriors=restored.posteriors,
        choices=state,
        budgets=None if inputs.budget is None else state,
        costs=lambda: inputs.costs,
        drafters=lambda: inputs.drafters,
        limits=facts.limits,
        num_slots=facts.num_slots,
    )


def snapshot_of(positions: Positions, wanted: Iterable[int], half_life: timedelta) -> EvidenceSnapshot:
    """The evidence at these positions, in their order. Raises NotReproducible where one is missing."""
    wanted = tuple(wanted)
    missing = [position for position in wanted if position not in positions]
    if missing:
        raise NotReproducible(f"the ledger does not reach back to its row {missing[0]}")
    return EvidenceSnapshot(half_life, dict(positions[position] for position in wanted))
