"""What decisions leave in the database: changes of a choice, exploration budgets, and snapshots.

Decoding waits for none of it. What is read for the first decision of a task is read when a job of it is claimed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from alphaloop.deciding.decision import Decision, DraftSetting, IncumbentKey
from alphaloop.deciding.evidence import Place
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.snapshot import SessionFacts, Snapshot, SnapshotEncoder
from alphaloop.errors import StoreError
from alphaloop.store.decisions import BudgetStore, BudgetSubject, BudgetSums, DecisionLog, SnapshotRow, SnapshotStore
from alphaloop.store.traffic import TrafficStore
from worker.background import Write
from worker.deciding.evidence_cache import EvidenceCache
from worker.engine import EngineIdentity

log = logging.getLogger(__name__)

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


#: Credit is written so often at most, because every write is a transaction.
ACCRUED_EVERY_S: Final = 60.0


_NOTHING: Final = BudgetSums()


@dataclass(eq=False)
class SharedBudgets:
    """A session's `BudgetStore`. The session's thread owns it; `prepare` and what `write` is given may run in others.

    All workers of a target and device accrue and spend together, in the database, so a restart goes on with what there
    is. Spending is handed to `write` at once, credit once a minute. Every write brings the changes of the others, which
    the next decision sees. Two workers that spend the same credit in between leave a negative balance, which has to be
    accrued before anybody spends again. How long each drafter was not used is read from history, so that re-checks of
    unused drafters come when they would have. A budget that cannot be written does not stop decoding: it is handed over
    again with the next decision.
    """

    store: BudgetStore
    history: TrafficStore
    evidence_cache: EvidenceCache
    identity: EngineIdentity
    drafters: Mapping[str, str]
    _: KW_ONLY
    write: Write = lambda what, act: act()
    accrued_every_s: float = ACCRUED_EVERY_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._prepared: dict[_Subject, ExplorationBudget] = {}
        self._handed_over: dict[_Subject, BudgetSums] = {}  # of the session's budget, what `write` was given
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
        return ExplorationBudget(*(saved or _NOTHING), unseen=unseen or None if saved is None else unseen)

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


#: Snapshots are written so often at most: many decisions share a transaction.
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

    def _row(self, one: Snapshot) -> SnapshotRow:
        return SnapshotRow(
            one.decided_at,
            one.decision_id,
            one.subject.task,
            one.subject.sampling_bucket,
            one.context.num_running,
            self._encoder.encode(one),
        )
