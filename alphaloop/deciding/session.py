"""The decision session: evidence → posteriors → decision context → decision → incumbent and budget. Pure.

The worker, `explain`, `replay` and the simulator decide with this one class. They differ in where evidence comes from,
where choices are logged and where budgets are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from statistics import fmean
from typing import Final
from uuid import UUID

from alphaloop.acceptance import EvidenceKey, prompt_bucket
from alphaloop.costs import CostTable
from alphaloop.deciding.decision import ChoiceLog, Decision, DecisionContext, IncumbentKey, Incumbents, Reason
from alphaloop.deciding.draft_lengths import LengthsTogether, SettingsTables
from alphaloop.deciding.exploration import Budgets, ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import Inferred, Posteriors
from alphaloop.deciding.job_facts import (
    EngineConditions,
    JobFacts,
    Subject,
    TaskRules,
    alike,
    main_segment,
    mean_prompt_tokens,
)
from alphaloop.deciding.policy import Group, decide_groups, fit
from alphaloop.deciding.snapshot import Snapshot, objective_of
from alphaloop.messages import Decoding

_MILLISECOND: Final = timedelta(milliseconds=1)


@dataclass(eq=False)
class DecisionSession:
    """Decides jobs of one target on one engine, and how they draft while they run. One thread owns it.

    `costs` and `drafters` are asked at every decision. Without `budgets` nothing is explored. `num_slots` is how many
    sequences the engine can run; with 0, every decision keeps one setting. `note` is given a snapshot of every decision
    that has a name; it must neither wait nor raise.
    """

    target_revision: str
    engine: str
    posteriors: Posteriors
    _: KW_ONLY
    choices: ChoiceLog
    budgets: Budgets | None
    costs: Callable[[], CostTable]
    drafters: Callable[[], Sequence[DrafterState]]
    num_slots: int
    note: Callable[[Snapshot], None] | None = None
    _open: dict[tuple[str, str], ExplorationBudget] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        #: How sequences that were decided apart draft while they run together.
        self.lengths = LengthsTogether(self.costs)
        self._incumbents = Incumbents(self.choices)
        self._tables = SettingsTables(self.num_slots)

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
        decision in its snapshot. Raises StoreError only before anything has changed, so the caller may ask again.
        """
        drafters, costs = self.drafters(), self.costs()
        has_segments = len({job.segment for job in jobs}) > 1
        is_split = has_segments and self.posteriors.splits_by_segment(subject.task, drafters, now)
        members = alike(jobs, by_segment=is_split)
        keys = [self.evidence_key(subject, [jobs[index] for index in indices]) for indices in members]
        largest = max(range(len(members)), key=lambda number: len(members[number]))
        incumbent_key = _incumbent_key(keys[largest], num_running)
        incumbent, budget = self._incumbents.of(incumbent_key), self.budget(subject)
        context = self.context(subject, jobs, rules, num_running=num_running, now=now, conditions=conditions)
        inferred = [{d.name: self.posteriors.inferred(key, d, now) for d in drafters} for key in keys]
        groups = tuple(map(_group, map(len, members), keys, inferred))
        decisions = decide_groups(groups, drafters, costs, context, incumbent=incumbent, budget=budget)
        # That a job's own limit is short says nothing of the task's others.
        if decisions[largest].reason is not Reason.SHORT_OUTPUT or context.known_output_jobs:
            self._keep(subject, incumbent_key, decisions[largest])
        able, _ = fit(context, drafters, costs)
        decisions = tuple(
            self._tables.completed(decision, group.posteriors, able, costs, context)
            for group, decision in zip(groups, decisions, strict=True)
        )
        if self.note is not None and decision_id is not None:
            snapshot = Snapshot(
                decision_id=decision_id,
                decided_at=now,
                context=context,
                deadline_ms=_deadline_ms(jobs, now),
                groups=groups,
                drafters=tuple(drafters),
                costs=costs,
                seen={name: posterior.seen for name, posterior in inferred[largest].items()},
                is_split=is_split,
                incumbent=incumbent,
                budget=budget,
                decisions=decisions,
            )
            self.note(snapshot)
        by_job = {index: decision for indices, decision in zip(members, decisions, strict=True) for index in indices}
        return tuple(by_job[index] for index in range(len(jobs)))

    def count_scored(self, keys: Iterable[EvidenceKey]) -> None:
        """Drafters were scored on texts that others decoded: a change would have been seen, so they count as used."""
        for key in keys:
            subject = key.task, key.sampling_bucket
            if subject in self._open:
                self._open[subject] = self._open[subject].used(key.drafter)

    def save(self) -> None:
        """Keep the budgets; before the session ends."""
        if self.budgets is not None:
            for subject, budget in self._open.items():
                self._open[subject] = self.budgets.save(*subject, budget)

    def evidence_key(self, subject: Subject, jobs: Sequence[JobFacts]) -> EvidenceKey:
        """The key of the jobs' evidence, without a drafter: their form, the bucket of their mean prompt, the segment of
        most."""
        return EvidenceKey(
            subject.task,
            self.target_revision,
            self.engine,
            subject.sampling_bucket,
            prompt_bucket=prompt_bucket(round(mean_prompt_tokens(jobs) or 0)),
            segment=main_segment(jobs),
            form_bucket=jobs[0].form_bucket,
        )

    def budget(self, subject: Subject) -> ExplorationBudget | None:
        """The budget of the subject's task; None where nothing is explored. The first time, may raise StoreError."""
        name = subject.task, subject.sampling_bucket
        if name not in self._open and self.budgets is not None:
            self._open[name] = self.budgets.open(*name)
        return self._open.get(name)

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
        lengths = self.posteriors.evidence.lengths(subject.task, self.drafters(), now)
        conditions = conditions or EngineConditions()
        limit, prompts = fmean(job.max_tokens for job in jobs), [job.num_prompt_tokens for job in jobs]
        longest = max((job.num_prompt_tokens or 0) + job.max_tokens for job in jobs)
        usual = lengths.output_tokens
        return DecisionContext(
            subject=subject,
            num_running=num_running,
            num_jobs=len(jobs),
            expected_tokens=limit if usual is None else min(limit, usual),
            decoding=rules.decoding if subject.decoding is Decoding.AUTO else subject.decoding,
            prompt_tokens=mean_prompt_tokens(jobs),
            objective=objective_of(rules, _deadline_ms(jobs, now)),
            known_output_jobs=0.0 if usual is None or limit < usual else lengths.jobs,
            free_cache_bytes=conditions.free_cache_bytes,
            free_elsewhere=conditions.free_elsewhere,
            max_sequence_tokens=None if None in prompts else float(longest),
            max_output_tokens=float(max(job.max_tokens for job in jobs)),
            cannot_serve=conditions.cannot_serve,
            now=now,
        )

    def _keep(self, subject: Subject, key: IncumbentKey, decision: Decision) -> None:
        if decision.budget is not None and self.budgets is not None:
            name = subject.task, subject.sampling_bucket
            self._open[name] = self.budgets.keep(*name, decision.budget)
        self._incumbents.keep(key, decision)


def _incumbent_key(key: EvidenceKey, num_running: int) -> IncumbentKey:
    return IncumbentKey.of(key.task, key.sampling_bucket, key.prompt_bucket, num_running, key.form_bucket)


def _group(num_jobs: int, key: EvidenceKey, inferred: Mapping[str, Inferred]) -> Group:
    return Group(
        num_jobs,
        {name: of_drafter.posterior for name, of_drafter in inferred.items()},
        segment=key.segment,
        prompt_bucket=key.prompt_bucket,
        alike={name: of_drafter.alike for name, of_drafter in inferred.items()},
        form_bucket=key.form_bucket,
    )


def _deadline_ms(jobs: Sequence[JobFacts], now: datetime) -> float | None:
    """Until the earliest deadline of the jobs; None without one."""
    deadlines = [job.deadline for job in jobs if job.deadline is not None]
    return (min(deadlines) - now) / _MILLISECOND if deadlines else None
