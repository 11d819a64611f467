"""The worker's decisions: its jobs, its engine and its database, as a decision session takes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from uuid import UUID

from alphaloop.deciding.decision import ChoiceLog
from alphaloop.deciding.evidence import HALF_LIFE
from alphaloop.deciding.exploration import Budgets
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import EngineConditions, JobFacts, PolicyLimits, Subject
from alphaloop.deciding.policy import Decision
from alphaloop.deciding.session import DecisionSession
from alphaloop.deciding.snapshot import SessionFacts, Snapshot
from alphaloop.errors import StoreError
from alphaloop.messages import Decoding, Purpose
from alphaloop.settings import Settings, TaskSettings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.decisions import BudgetStore, DecisionLog, SnapshotStore
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.outcomes import Outcome
from alphaloop.store.switchback import ExpectationStore
from alphaloop.store.traffic import TrafficStore
from worker.admission import LaneKey
from worker.background import Write
from worker.costs.learning import KnownCosts, open_costs
from worker.deciding.evidence_cache import EvidenceCache
from worker.deciding.keeping import SharedBudgets, SnapshotJournal, StoredChoices
from worker.engine import Engine, PreparedJob


def subject_of(key: LaneKey) -> Subject:
    """The key as a session takes it; empty fields are None."""
    return Subject(
        key.task,
        key.sampling_bucket,
        Decoding(key.decoding),
        Purpose(key.purpose),
        key.probe_drafter or None,
        key.probe_num_draft_tokens or None,
        key.switched_off or None,
    )


def num_slots(engine: Engine) -> int:
    """Sequences for which a decision has settings by what runs; 0 where a job is decoded as it was admitted."""
    return engine.load().num_slots if engine.can_redraft else 0


def facts_of(job: PreparedJob) -> JobFacts:
    """What a decision may know of the job."""
    sampling = job.sampling
    return JobFacts(job.num_prompt_tokens, sampling.max_tokens, job.segment, job.job.deadline, sampling.form_bucket)


def conditions_of(engine: Engine, jobs: Sequence[PreparedJob], num_running: int) -> EngineConditions:
    """What `engine` allows for `jobs`, at least one, while `num_running` sequences share a round."""
    longest = max(job.num_prompt_tokens + job.sampling.max_tokens for job in jobs)
    widest = 1 + max((drafter.max_draft_tokens for drafter in engine.drafters), default=0)
    needs_memory = any(drafter.cache_bytes_per_token for drafter in engine.drafters)
    memory = engine.memory() if needs_memory else None
    if memory is None:
        return EngineConditions(None, engine.unserved(jobs))
    free = memory.left_for_drafts(num_running, longest, widest)
    return EngineConditions(free, engine.unserved(jobs), memory.left_elsewhere(num_running, longest, widest))


@dataclass(eq=False)
class Decider:
    """Decides jobs that are admitted together.

    Only the first jobs of a task and sampling bucket read the database. A choice that changes is written there, and so
    is what is left of the task's budget.
    """

    engine: Engine
    evidence_cache: EvidenceCache
    choices: ChoiceLog
    budgets: Budgets
    _: KW_ONLY
    costs: KnownCosts
    limits: PolicyLimits
    now: Callable[[], datetime]
    note: Callable[[Snapshot], None] | None = None

    def __post_init__(self) -> None:
        self.session = DecisionSession(
            self.engine.identity.target_revision,
            self.engine.identity.engine,
            Posteriors(self.evidence_cache, self.limits),
            choices=self.choices,
            budgets=self.budgets,
            costs=lambda: self.costs.table,
            drafters=self._drafters,
            num_slots=num_slots(self.engine),
            note=self.note,
        )

    def decide_each(
        self,
        key: LaneKey,
        jobs: Sequence[PreparedJob],
        task: TaskSettings,
        *,
        num_running: int | None = None,
        decision_id: UUID | None = None,
    ) -> tuple[Decision, ...]:
        """A decision for each of `jobs`, in order: the same for all, or by groups that differ.

        `num_running` sequences will share a round with these jobs, these included; without it, these alone. A decision
        with a `decision_id` is recorded. Raises StoreError only before anything has changed: ask again.
        """
        num_running = len(jobs) if num_running is None else max(num_running, len(jobs))
        return self.session.decide(
            subject_of(key),
            [facts_of(job) for job in jobs],
            task.rules(),
            num_running=num_running,
            now=self.now(),
            conditions=conditions_of(self.engine, jobs, num_running),
            decision_id=decision_id,
        )

    def count_scored(self, outcomes: Iterable[Outcome]) -> None:
        """Count the drafters that were scored on this worker's traffic as used. Probes say nothing about its changes.

        The outcomes' evidence comes from the transaction that recorded them, see `EvidenceCache.take`.
        """
        traffic = (one for one in outcomes if one.run is not None and one.run.purpose == Purpose.TRAFFIC)
        self.session.count_scored(shadow.key for outcome in traffic for shadow in outcome.shadows)

    def _drafters(self) -> list[DrafterState]:
        return [
            replace(drafter, is_stale=self.evidence_cache.is_stale(drafter.name, drafter.revision))
            for drafter in self.engine.drafters
        ]


log = logging.getLogger(__name__)


class FirstReads:
    """Reads once for each task and sampling bucket, so that the thread that decides never waits for it.

    `reads` are called with a task and a sampling bucket. One thread owns it, the one that claims jobs.
    """

    def __init__(self, *reads: Callable[[str, str], object]) -> None:
        self._reads = reads
        self._done: set[tuple[str, str]] = set()

    def prepare(self, keys: Iterable[LaneKey]) -> None:
        """Read for tasks and buckets that are new.

        While the database is away, nothing is read: the first decision reads then, and waits for the database.
        """
        for subject in {(key.task, key.sampling_bucket) for key in keys} - self._done:
            try:
                for read in self._reads:
                    read(*subject)
            except StoreError as error:
                log.warning("not read before it is needed: %s", error.message, extra={"action": "first_read_failed"})
                return
            self._done.add(subject)


@dataclass(frozen=True, slots=True)
class Deciding:
    """The decider, what it uses, and the record of its decisions."""

    decider: Decider
    evidence_cache: EvidenceCache
    costs: KnownCosts
    journal: SnapshotJournal
    first_reads: FirstReads
    facts: SessionFacts


def open_deciding(
    settings: Settings,
    engine: Engine,
    database: Database,
    clock: DatabaseClock,
    *,
    owner: str,
    write: Write = lambda what, act: act(),
) -> Deciding:
    """A decider over the evidence in the database; costs never measured here are measured now.

    `write` is given every write that decoding need not wait for, with a name for the log.
    """
    identity, limits = engine.identity, settings.policy.limits()
    registry, expectations = DraftRegistry(database), ExpectationStore(database)
    served = identity.target_revision, identity.engine
    for one in engine.drafters:
        registry.register(one.name, one.revision, identity.target_revision, is_scorable=one.is_scorable)
    costs = open_costs(settings.worker, engine, CostStore(database), write=write)
    evidence_cache = EvidenceCache(
        AcceptanceStateStore(database),
        registry,
        target_revision=identity.target_revision,
        engine=identity.engine,
        drafters=revisions(engine),
        half_life=HALF_LIFE,
        pairs=lambda since: expectations.newest(*served, identity.device, since=since),
    )
    # All stored evidence is read before the first job, so that a restarted worker decides from it at once.
    evidence_cache.refresh()
    facts = SessionFacts(
        owner=owner,
        host=identity.host,
        device=identity.device,
        engine=identity.engine,
        target_revision=identity.target_revision,
        num_slots=num_slots(engine),
        half_life=HALF_LIFE,
        limits=limits,
    )
    journal = SnapshotJournal(SnapshotStore(database), facts)
    choices = StoredChoices(DecisionLog(database), identity, owner, write=write)
    budgets = SharedBudgets(
        BudgetStore(database), TrafficStore(database), evidence_cache, identity, revisions(engine), write=write
    )
    decider = Decider(
        engine,
        evidence_cache,
        choices,
        budgets,
        costs=costs,
        limits=limits,
        now=clock.now,
        note=journal.note,
    )
    return Deciding(decider, evidence_cache, costs, journal, FirstReads(choices.last_choice, budgets.prepare), facts)


def revisions(engine: Engine) -> dict[str, str]:
    """The revision of each drafter, by name."""
    return {drafter.name: drafter.revision for drafter in engine.drafters}
