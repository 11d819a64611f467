"""The worker's decisions: its jobs, its engine and its database, as a decision session takes them.

What they leave in the database, changes of a choice, exploration budgets and snapshots, keeps no decoding waiting. What
is read for the first decision of a task is read when a job of it is claimed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final, TypeAlias
from uuid import UUID

from alphaloop.deciding.decision import ChoiceLog, Decision, DraftSetting, IncumbentKey
from alphaloop.deciding.evidence import HALF_LIFE, Place
from alphaloop.deciding.exploration import Budgets, ExplorationBudget
from alphaloop.deciding.goodput import DrafterState, marked_stale
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import EngineConditions, JobFacts, Subject
from alphaloop.deciding.session import DecisionSession
from alphaloop.deciding.snapshot import SessionFacts, Snapshot, SnapshotEncoder
from alphaloop.engine import Engine, EngineIdentity, PreparedJob
from alphaloop.errors import StoreError
from alphaloop.messages import Decoding, Purpose
from alphaloop.settings import Settings, TaskSettings
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.decision_inputs import AcceptanceStateStore, CostStore, DraftRegistry
from alphaloop.store.decisions import BudgetStore, BudgetSubject, BudgetSums, DecisionLog, SnapshotRow, SnapshotStore
from alphaloop.store.outcomes import Outcome
from alphaloop.store.switchback import ExpectationStore
from alphaloop.store.traffic import TrafficStore
from worker.admission import LaneKey
from worker.background import Write
from worker.costs.learning import KnownCosts, open_costs
from worker.deciding.evidence_cache import EvidenceCache


def subject_of(key: LaneKey) -> Subject:
    """The key as a session takes it; empty fields are None."""
    return Subject(
        key.task,
        key.sampling_bucket,
        decoding=Decoding(key.decoding),
        purpose=Purpose(key.purpose),
        probe_drafter=key.probe_drafter or None,
        probe_num_draft_tokens=key.probe_num_draft_tokens or None,
        switched_off=key.switched_off or None,
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
    now: Callable[[], datetime]
    note: Callable[[Snapshot], None] | None = None

    def __post_init__(self) -> None:
        self.session = DecisionSession(
            self.engine.identity.target_revision,
            self.engine.identity.engine,
            Posteriors(self.evidence_cache),
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
        self.session.count_scored(
            shadow.key
            for outcome in outcomes
            if outcome.run is not None and outcome.run.purpose == Purpose.TRAFFIC
            for shadow in outcome.shadows
        )

    def _drafters(self) -> list[DrafterState]:
        flagged = self.evidence_cache.is_stale
        return marked_stale(self.engine.drafters, lambda drafter: flagged(drafter.name, drafter.revision))


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
    revisions: dict[str, str]  #: of the drafters, by name; whoever adds a drafter adds it here


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
    identity, explore_share = engine.identity, settings.policy.explore_share
    registry, expectations = DraftRegistry(database), ExpectationStore(database)
    served = identity.target_revision, identity.engine
    drafters = revisions(engine)
    for drafter in engine.drafters:
        registry.register_served(drafter, identity.target_revision)
    costs = open_costs(settings.worker, engine, CostStore(database), revisions=drafters, write=write)
    evidence_cache = EvidenceCache(
        AcceptanceStateStore(database),
        registry,
        target_revision=identity.target_revision,
        engine=identity.engine,
        drafters=drafters,
        half_life=HALF_LIFE,
        pairs=lambda since: expectations.newest(*served, identity.device, since=since),
    )
    # All stored evidence is read before the first job, so that a restarted worker decides from it at once.
    evidence_cache.refresh()
    facts = _facts_of(engine, owner, explore_share)
    journal = SnapshotJournal(SnapshotStore(database), facts)
    choices = StoredChoices(DecisionLog(database), identity, owner, write=write)
    budgets = SharedBudgets(
        BudgetStore(database),
        TrafficStore(database),
        evidence_cache,
        identity,
        drafters,
        explore_share=explore_share,
        write=write,
    )
    decider = Decider(engine, evidence_cache, choices, budgets, costs=costs, now=clock.now, note=journal.note)
    return Deciding(
        decider=decider,
        evidence_cache=evidence_cache,
        costs=costs,
        journal=journal,
        first_reads=FirstReads(choices.last_choice, budgets.prepare),
        facts=facts,
        revisions=drafters,
    )


def _facts_of(engine: Engine, owner: str, explore_share: float) -> SessionFacts:
    """What the snapshots of this worker's decisions say of it."""
    identity = engine.identity
    return SessionFacts(
        owner=owner,
        host=identity.host,
        device=identity.device,
        engine=identity.engine,
        target_revision=identity.target_revision,
        num_slots=num_slots(engine),
        half_life=HALF_LIFE,
        explore_share=explore_share,
    )


def revisions(engine: Engine) -> dict[str, str]:
    """The revision of each drafter, by name."""
    return {drafter.name: drafter.revision for drafter in engine.drafters}


_Subject: TypeAlias = tuple[str, str]  # task, sampling bucket


@dataclass(eq=False)
class StoredChoices:
    """A `ChoiceLog` for one engine. A log that cannot be written does not stop decoding.

    `write` does the writing or queues it; a queued choice counts as logged, because the queue tries again.
    """

    changes: DecisionLog
    identity: EngineIdentity
    owner: str
    _: KW_ONLY
    write: Write = lambda what, act: act()

    def __post_init__(self) -> None:
        self._begun_with: dict[_Subject, DraftSetting | None] = {}

    def last_choice(self, task: str, sampling_bucket: str) -> DraftSetting | None:
        """The last choice in the log when it was first asked for, from any thread. May raise StoreError."""
        identity, subject = self.identity, (task, sampling_bucket)
        if subject not in self._begun_with:
            wanted = BudgetSubject(task, identity.target_revision, identity.device, sampling_bucket)
            self._begun_with[subject] = self.changes.last_choice(wanted)
        return self._begun_with[subject]

    def record(self, key: IncumbentKey, decision: Decision) -> bool:
        """Log the choice; False if the database is away."""
        identity = self.identity
        subject = BudgetSubject(key.task, identity.target_revision, identity.device, key.sampling_bucket)
        try:
            self.write(
                "change of choice",
                lambda: self.changes.record_change(subject, key.load, decision, self.owner),
            )
        except StoreError as error:
            log.warning("change of choice not logged: %s", error.message, extra={"action": "choice_not_logged"})
            return False
        return True


#: Least seconds between two writes of credit, because every write is a transaction.
ACCRUED_EVERY_S: Final = 60.0
_NOTHING: Final = BudgetSums()


@dataclass(eq=False)
class SharedBudgets:
    """A session's `BudgetStore`. The session's thread owns it; `prepare` and what `write` is given may run in others.

    All workers of a target and device accrue and spend together, in the database, so a restart continues with what is
    there. Spending is handed to `write` at once, credit once a minute. Every write brings the changes of the others,
    which the next decision sees. Two workers that spend the same credit in between leave a negative balance, which has
    to be accrued before any worker spends again. How long each drafter was not used is read from history, so that
    re-checks of unused drafters come when they would have. A budget that cannot be written does not stop decoding: it
    is handed over again with the next decision.
    """

    store: BudgetStore
    history: TrafficStore
    evidence_cache: EvidenceCache
    identity: EngineIdentity
    drafters: Mapping[str, str]
    _: KW_ONLY
    explore_share: float
    write: Write = lambda what, act: act()
    accrued_every_s: float = ACCRUED_EVERY_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._prepared: dict[_Subject, ExplorationBudget] = {}
        self._handed_over: dict[_Subject, BudgetSums] = {}  # the part of the session's budget that `write` has
        self._due: dict[_Subject, float] = {}
        self._one_write = threading.Lock()  # a worker that ends writes, too, while a write may still be under way
        self._lock = threading.Lock()  # for what follows
        self._unwritten: dict[_Subject, BudgetSums] = {}  # what is being written among it
        self._stored: dict[_Subject, BudgetSums] = {}  # as a write left them, until the session has seen them
        self._failed: set[_Subject] = set()

    def prepare(self, task: str, sampling_bucket: str) -> None:
        """Read what `open` will be asked for. May raise StoreError."""
        self._prepared[task, sampling_bucket] = self._read(task, sampling_bucket)

    def open(self, task: str, sampling_bucket: str) -> ExplorationBudget:
        """The task's budget. Without `prepare` it is read now, which may raise StoreError."""
        subject = task, sampling_bucket
        budget = self._prepared.pop(subject, None) or self._read(*subject)
        self._handed_over[subject] = BudgetSums.of(budget)
        return budget

    def keep(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """The budget after a decision, with the changes of other workers that a write has brought since the last."""
        subject = task, sampling_bucket
        has_spent = budget.spent != self._handed_over[subject].spent
        if has_spent or subject in self._failed or self.clock() >= self._due.get(subject, 0.0):
            return self.save(*subject, budget)
        return self._with_others(subject, budget)

    def save(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """As `keep`, but what changed is handed over in any case."""
        subject, sums = (task, sampling_bucket), BudgetSums.of(budget)
        change = sums.minus(self._handed_over[subject])
        with self._lock:
            self._unwritten[subject] = self._unwritten.get(subject, _NOTHING).plus(change)
            is_to_write = self._unwritten[subject] != _NOTHING
            self._failed.discard(subject)
        self._handed_over[subject] = sums
        self._due[subject] = self.clock() + self.accrued_every_s
        if is_to_write:
            self.write("exploration budget", partial(self._add, subject))
        return self._with_others(subject, budget)

    def _read(self, task: str, sampling_bucket: str) -> ExplorationBudget:
        last_used = {
            name: self.evidence_cache.last_used(Place(task, name, revision)) for name, revision in self.drafters.items()
        }
        unseen = {
            name: float(self.history.num_jobs_since(task, sampling_bucket, moment))
            for name, moment in last_used.items()
            if moment is not None
        }
        saved = self.store.read(self._row_of((task, sampling_bucket)))
        # A budget that was stored has had its first credit.
        return ExplorationBudget(
            *(saved or _NOTHING),
            unseen=unseen or None if saved is None else unseen,
            explore_share=self.explore_share,
        )

    def _add(self, subject: _Subject) -> None:
        """Add what is unwritten to the database. A failure leaves it for the next decision."""
        with self._one_write:
            change = self._unwritten[subject]
            if change == _NOTHING:  # the write before took it along
                return
            try:
                sums = self.store.add(self._row_of(subject), change)
            except StoreError as error:
                log.warning("budget not stored: %s", error.message, extra={"action": "budget_not_stored"})
                with self._lock:
                    self._failed.add(subject)
            else:
                with self._lock:
                    self._unwritten[subject] = self._unwritten[subject].minus(change)
                    self._stored[subject] = sums

    def _with_others(self, subject: _Subject, budget: ExplorationBudget) -> ExplorationBudget:
        """`budget` as the last write found it in the database, and what this session has changed since."""
        with self._lock:
            if (stored := self._stored.pop(subject, None)) is None:
                return budget
            handed_over = stored.plus(self._unwritten[subject])
        sums = BudgetSums.of(budget).minus(self._handed_over[subject]).plus(handed_over)
        self._handed_over[subject] = handed_over
        return replace(budget, **sums._asdict())

    def _row_of(self, subject: _Subject) -> BudgetSubject:
        task, sampling_bucket = subject
        return BudgetSubject(task, self.identity.target_revision, self.identity.device, sampling_bucket)


#: Least seconds between two writes of snapshots: many decisions share a transaction.
WRITE_EVERY_S: Final = 1.0
#: Snapshots that wait while the database is away. The oldest are dropped first.
MOST_WAITING: Final = 10_000


class SnapshotJournal:
    """Snapshots that wait to be written, and those in the database.

    `note` is called by the thread that decides, and `write` by one other thread at a time. A snapshot may be lost: when
    the process is killed, those of the last second; and while the database is away, the oldest.
    """

    def __init__(
        self, store: SnapshotStore, facts: SessionFacts, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._encoder, self._clock = store, SnapshotEncoder(facts), clock
        self._noted: deque[Snapshot] = deque()
        self._rows: list[SnapshotRow] = []
        self._due = clock()

    def note(self, snapshot: Snapshot) -> None:
        """Take down a decision that was just taken."""
        self._noted.append(snapshot)

    @property
    def is_due(self) -> bool:
        """Whether snapshots wait to be written, and the last write is a second ago."""
        return bool(self._noted or self._rows) and self._clock() >= self._due

    def write(self) -> None:
        """Write the snapshots that wait. Raises StoreError, and then writes them next time."""
        self._due = self._clock() + WRITE_EVERY_S
        # Encoded at once, because what was noted holds whole cost tables.
        while self._noted:
            self._rows.append(self._row(self._noted.popleft()))
        if (num_dropped := len(self._rows) - MOST_WAITING) > 0:
            log.warning("%d decisions not recorded", num_dropped, extra={"action": "decisions_not_recorded"})
            del self._rows[:num_dropped]
        if self._rows:
            self._store.add(self._rows)
            self._rows = []

    def _row(self, snapshot: Snapshot) -> SnapshotRow:
        return SnapshotRow(
            snapshot.decided_at,
            snapshot.decision_id,
            snapshot.subject.task,
            snapshot.subject.sampling_bucket,
            snapshot.context.num_running,
            self._encoder.encode(snapshot),
        )
