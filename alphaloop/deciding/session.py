"""The decision session: evidence → posteriors → decision context → decision → incumbent and budget. Pure.

The worker, `explain`, `replay` and the simulator decide with this one class. They differ in where evidence comes from,
where choices are logged and where budgets are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from statistics import fmean
from typing import Final
from uuid import UUID

from alphaloop.acceptance import EvidenceKey, prompt_bucket
from alphaloop.cost import CostTable
from alphaloop.deciding.budgets import BudgetStore
from alphaloop.deciding.decision import Decision, DecisionContext
from alphaloop.deciding.decision_inputs import DecisionInputs, DecisionJournal, SettingsOrigin
from alphaloop.deciding.evidence_source import EvidenceSource, JobLengths
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.groups import Group, decide_groups
from alphaloop.deciding.guards import fit
from alphaloop.deciding.incumbents import ChoiceLog, IncumbentKey, Incumbents
from alphaloop.deciding.job_facts import (
    EngineConditions,
    JobFacts,
    Subject,
    TaskRules,
    alike,
    main_segment,
    mean_prompt_tokens,
)
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.objective import Aim, Objective
from alphaloop.deciding.posteriors import Posteriors, Splits
from alphaloop.deciding.settings_tables import SettingsTables
from alphaloop.messages import Decoding

_MILLISECOND: Final = timedelta(milliseconds=1)
_ONE_SEGMENT: Final = Splits(False, ())


class DecisionSession:
    """Decides jobs of one target on one engine. One thread owns it.

    `costs` and `drafters` are asked at every decision. Without `budgets` nothing is explored. `num_slots` is how many
    sequences the engine can run; with 0, every decision keeps one setting. `journal` is told of decisions with a name.
    """

    def __init__(
        self,
        target_revision: str,
        engine: str,
        evidence: EvidenceSource,
        *,
        posteriors: Posteriors,
        choices: ChoiceLog,
        budgets: BudgetStore | None,
        costs: Callable[[], CostTable],
        drafters: Callable[[], Sequence[DrafterState]],
        limits: PolicyLimits,
        num_slots: int,
        journal: DecisionJournal | None = None,
    ) -> None:
        self._target_revision, self._engine = target_revision, engine
        self._evidence, self._posteriors = evidence, posteriors
        self._incumbents = Incumbents(choices)
        self._budget_store = budgets
        self._budgets: dict[tuple[str, str], ExplorationBudget] = {}
        self._costs, self._drafters = costs, drafters
        self._limits, self._journal = limits, journal
        self._tables = SettingsTables(limits, num_slots)

    def decide(
        self,
        subject: Subject,
        jobs: Sequence[JobFacts],
        rules: TaskRules,
        *,
        num_running: int,
        now: datetime,
        conditions: EngineConditions | None = None,
        decision_id: UUID | None = None,
    ) -> tuple[Decision, ...]:
        """A decision for each of `jobs`, in order: the same for all, or by groups that differ.

        `num_running` sequences will share a round with these jobs, these jobs included. `decision_id` names the
        decision for the journal. Raises StoreError only before anything has changed, so the caller may ask again.
        """
        drafters, costs = self._drafters(), self._costs()
        has_segments = len({job.segment for job in jobs}) > 1
        splits = self._posteriors.splits(subject.task, drafters, now) if has_segments else _ONE_SEGMENT
        groups = alike(jobs, by_segment=splits.is_split)
        wanted = [self.evidence_key(subject, [jobs[index] for index in group]) for group in groups]
        largest = max(range(len(groups)), key=lambda number: len(groups[number]))
        key = IncumbentKey.of(subject.task, subject.sampling_bucket, wanted[largest].prompt_bucket, num_running)
        incumbent, budget = self._incumbents.of(key), self.budget(subject)
        lengths = self._evidence.lengths(subject.task, drafters, now)
        context = self._context(subject, jobs, rules, lengths, num_running, now, conditions)
        inferred = [
            {drafter.name: self._posteriors.inferred(one, drafter, now) for drafter in drafters} for one in wanted
        ]
        its_groups = [
            Group(len(group), {name: one.posterior for name, one in its.items()})
            for group, its in zip(groups, inferred, strict=True)
        ]
        decisions = decide_groups(
            its_groups, drafters, costs, context, self._limits, incumbent=incumbent, budget=budget
        )
        self._keep(subject, key, decisions[largest])
        by_job: dict[int, Decision] = {}
        settings_from: list[SettingsOrigin | None] = []
        able, _ = fit(context, drafters, costs)
        for group, its_group, decision in zip(groups, its_groups, decisions, strict=True):
            here = SettingsOrigin(decision_id, group[0]) if decision_id else None
            table = self._tables.of(decision, its_group.posteriors, able, costs, context, now, here)
            settings_from.append(None if table is None or table.origin == here else table.origin)
            decision = replace(decision, settings_by_running=table.settings) if table and table.settings else decision
            by_job |= dict.fromkeys(group, decision)
        decided = tuple(by_job[index] for index in range(len(jobs)))
        if self._journal is not None and decision_id is not None:
            inputs = DecisionInputs(
                decision_id=decision_id,
                subject=subject,
                jobs=tuple(jobs),
                rules=rules,
                num_running=num_running,
                now=now,
                conditions=conditions or EngineConditions(),
                drafters=tuple(drafters),
                costs=costs,
                lengths=lengths,
                splits=splits.origins,
                posteriors=tuple(tuple(one.origin for one in its.values()) for its in inferred),
                incumbent=incumbent,
                budget=budget,
                settings_from=tuple(settings_from),
            )
            self._journal.note(inputs, decided)
        return decided

    def count_scored(self, keys: Iterable[EvidenceKey]) -> None:
        """Drafters were scored on texts that others decoded: a change would have been seen, so they count as used."""
        for key in keys:
            subject = key.task, key.sampling_bucket
            if subject in self._budgets:
                self._budgets[subject] = self._budgets[subject].used(key.drafter)

    def save(self) -> None:
        """Keep the budgets; before the session ends."""
        if self._budget_store is not None:
            for subject, budget in self._budgets.items():
                self._budgets[subject] = self._budget_store.save(*subject, budget)

    def evidence_key(self, subject: Subject, jobs: Sequence[JobFacts]) -> EvidenceKey:
        """The key of the jobs' evidence, without a drafter: the bucket of their mean prompt, the segment of most."""
        return EvidenceKey(
            subject.task,
            self._target_revision,
            self._engine,
            subject.sampling_bucket,
            prompt_bucket(round(mean_prompt_tokens(jobs) or 0)),
            main_segment(jobs),
        )

    def budget(self, subject: Subject) -> ExplorationBudget | None:
        """The budget of the subject's task; None where nothing is explored. The first time, may raise StoreError."""
        name = subject.task, subject.sampling_bucket
        if name not in self._budgets and self._budget_store is not None:
            self._budgets[name] = self._budget_store.open(*name)
        return self._budgets.get(name)

    def context(
        self,
        subject: Subject,
        jobs: Sequence[JobFacts],
        rules: TaskRules,
        *,
        num_running: int,
        now: datetime,
        conditions: EngineConditions | None = None,
    ) -> DecisionContext:
        """The context of one decision for all of `jobs`."""
        lengths = self._evidence.lengths(subject.task, self._drafters(), now)
        return self._context(subject, jobs, rules, lengths, num_running, now, conditions)

    def _context(
        self,
        subject: Subject,
        jobs: Sequence[JobFacts],
        rules: TaskRules,
        lengths: JobLengths,
        num_running: int,
        now: datetime,
        conditions: EngineConditions | None,
    ) -> DecisionContext:
        conditions = conditions or EngineConditions()
        limit, prompts = fmean(job.max_tokens for job in jobs), [job.num_prompt_tokens for job in jobs]
        longest = max((job.num_prompt_tokens or 0) + job.max_tokens for job in jobs)
        return DecisionContext(
            task=subject.task,
            num_running=num_running,
            num_jobs=len(jobs),
            expected_tokens=limit if lengths.output_tokens is None else min(limit, lengths.output_tokens),
            purpose=subject.purpose,
            decoding=rules.decoding if subject.decoding is Decoding.AUTO else subject.decoding,
            probe_drafter=subject.probe_drafter,
            probe_num_draft_tokens=subject.probe_num_draft_tokens,
            prompt_tokens=mean_prompt_tokens(jobs),
            objective=_objective(rules, jobs, now),
            known_output_jobs=lengths.jobs,
            free_cache_bytes=conditions.free_cache_bytes,
            free_elsewhere=conditions.free_elsewhere,
            max_sequence_tokens=None if None in prompts else float(longest),
            max_output_tokens=float(max(job.max_tokens for job in jobs)),
            cannot_serve=conditions.cannot_serve,
            switched_off=subject.switched_off,
            now=now,
        )

    def _keep(self, subject: Subject, key: IncumbentKey, decision: Decision) -> None:
        if decision.budget is not None and self._budget_store is not None:
            name = subject.task, subject.sampling_bucket
            self._budgets[name] = self._budget_store.keep(*name, decision.budget)
        self._incumbents.keep(key, decision)


def _objective(rules: TaskRules, jobs: Sequence[JobFacts], now: datetime) -> Objective:
    """The task's target, else the earliest deadline of the jobs, else throughput.

    The task's target has precedence, because a deadline that is hours away would otherwise disable it.
    """
    if rules.objective.aim is not Aim.THROUGHPUT:
        return rules.objective
    deadlines = [job.deadline for job in jobs if job.deadline is not None]
    return Objective(Aim.DEADLINE, (min(deadlines) - now) / _MILLISECOND) if deadlines else Objective()
