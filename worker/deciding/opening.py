"""The decider with which a worker starts: evidence and costs are read before the first job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from alphaloop.deciding.snapshot import SessionFacts
from alphaloop.settings import Settings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.budgets import BudgetStore
from alphaloop.store.clock import DatabaseClock
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.expectations import ExpectationStore
from alphaloop.store.history import HistoryStore
from alphaloop.store.snapshots import SnapshotStore
from worker.background import Write
from worker.costs.known import KnownCosts
from worker.costs.opening import open_costs
from worker.deciding.context import num_slots
from worker.deciding.decider import Decider
from worker.deciding.evidence_cache import EvidenceCache
from worker.deciding.first_reads import FirstReads
from worker.deciding.keeping import SharedBudgets, SnapshotJournal, StoredChoices
from worker.engine import Engine


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
    _register_drafters(engine, database)
    costs = open_costs(settings.worker, engine, CostStore(database), write=write)
    fading = half_life(settings)
    evidence_cache = _filled_cache(engine, database, fading)
    identity, limits = engine.identity, settings.policy.limits()
    facts = SessionFacts(
        owner=owner,
        host=identity.host,
        device=identity.device,
        engine=identity.engine,
        target_revision=identity.target_revision,
        num_slots=num_slots(engine),
        half_life=fading,
        limits=limits,
    )
    journal = SnapshotJournal(SnapshotStore(database), facts)
    choices = StoredChoices(DecisionLog(database, half_life=fading), identity, owner, write=write)
    budgets = SharedBudgets(
        BudgetStore(database), HistoryStore(database), evidence_cache, identity, revisions(engine), write=write
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
    return Deciding(decider, evidence_cache, costs, journal, FirstReads(choices.prepare, budgets.prepare), facts)


def half_life(settings: Settings) -> timedelta:
    """After so long, evidence counts half."""
    return timedelta(days=settings.worker.history_half_life_days)


def _filled_cache(engine: Engine, database: Database, half_life: timedelta) -> EvidenceCache:
    """Read all stored evidence before the first job, so that a restarted worker decides from it at once."""
    evidence_cache = EvidenceCache(
        AcceptanceStateStore(database),
        DraftRegistry(database),
        target_revision=engine.identity.target_revision,
        engine=engine.identity.engine,
        drafters=revisions(engine),
        half_life=half_life,
        pairs=partial(
            ExpectationStore(database).newest,
            engine.identity.target_revision,
            engine.identity.engine,
            engine.identity.device,
        ),
    )
    evidence_cache.refresh()
    return evidence_cache


def revisions(engine: Engine) -> dict[str, str]:
    """The revision of each drafter, by name."""
    return {drafter.name: drafter.revision for drafter in engine.drafters}


def _register_drafters(engine: Engine, database: Database) -> None:
    registry = DraftRegistry(database)
    for drafter in engine.drafters:
        target = engine.identity.target_revision
        registry.register(drafter.name, drafter.revision, target, is_scorable=drafter.is_scorable)
