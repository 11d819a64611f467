"""Putting a worker together from its settings: the only place that knows every part's real class."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from alphaloop.errors import ConfigError
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import CONTROL, JOBS_PATTERN, cluster_id, ensure_dead_letter_topic, ensure_topics
from alphaloop.settings import Settings, TaskSettings, read_tasks
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.backfill import fill_from_hours
from alphaloop.store.budgets import BudgetStore
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.history import HistoryStore
from alphaloop.store.jobs import JobStore
from alphaloop.store.notices import Listener
from alphaloop.store.outbox import Outbox
from alphaloop.store.outcomes import OutcomeStore
from worker.components import Components
from worker.costs.live import LiveCosts, open_costs
from worker.deciding.choice_log import StoredChoices
from worker.deciding.decider import Decider
from worker.deciding.evidence_cache import EvidenceCache
from worker.deciding.shared_budgets import SharedBudgets
from worker.deciding.watch import Watch
from worker.engine import Engine
from worker.intake.polling import Intake
from worker.intake.validation import Validation
from worker.jobs.batching import Batcher
from worker.jobs.claiming import Claiming
from worker.jobs.leases import LeaseKeeper
from worker.jobs.publishing import Publisher
from worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)


def owner_name() -> str:
    """This process among all workers, past and present."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def assemble(
    settings: Settings,
    configs: Path | None,
    engine: Engine,
    database: Database,
    producer: Producer,
    *,
    owner: str,
    stop: threading.Event,
    hurry: threading.Event,
    rng: random.Random,
) -> Components:
    """Build every part of a worker. Topics that are missing are created; costs never measured here are measured now."""
    limits = settings.worker
    ensure_topics(settings.kafka, settings.tasks)
    deciding = open_deciding(settings, engine, database, owner=owner)
    jobs = JobStore(database)
    source = Consumer(settings.kafka, group_id=settings.kafka.group_id)
    intake = Intake(
        source,
        [JOBS_PATTERN, CONTROL],
        max_buffered=limits.max_buffered,
        max_distance=limits.max_watermark_distance,
        commit_interval_s=limits.commit_interval_s,
    )
    metrics = WorkerMetrics()
    metrics.running_on(engine.identity)
    metrics.watch_costs(deciding.costs)
    return Components(
        owner=owner,
        group=settings.kafka.group_id,
        engine=engine,
        intake=intake,
        validation=Validation(
            engine, settings.tasks, reread_tasks=_reread(configs), limits=limits, cluster=cluster_id(settings.kafka)
        ),
        batcher=Batcher(limits.batch_size, limits.batch_wait_s),
        claiming=Claiming(
            jobs, owner=owner, lease_s=limits.lease_s, max_attempts=limits.max_attempts, now=lambda: datetime.now(UTC)
        ),
        decider=deciding.decider,
        evidence_cache=deciding.evidence_cache,
        watch=Watch(Listener(database), deciding.evidence_cache.look, every_s=limits.evidence_poll_s),
        costs=deciding.costs,
        leases=LeaseKeeper(jobs, owner=owner, lease_s=limits.lease_s),
        recorder=OutcomeStore(database, half_life=_half_life(settings)),
        jobs=jobs,
        outbox=Outbox(database),
        relay_after_s=2 * limits.lease_s,
        publisher=Publisher(
            producer, ensure_dead_letter_topic=lambda topic: ensure_dead_letter_topic(settings.kafka, topic)
        ),
        metrics=metrics,
        max_waiting=limits.max_buffered,
        stop=stop,
        hurry=hurry,
    )


@dataclass(frozen=True, slots=True)
class Deciding:
    """What decides, and what it goes by."""

    decider: Decider
    evidence_cache: EvidenceCache
    costs: LiveCosts


def open_deciding(settings: Settings, engine: Engine, database: Database, *, owner: str) -> Deciding:
    """A decider over the evidence in the database; costs never measured here are measured now."""
    _register_drafters(engine, database)
    costs = open_costs(settings.worker, engine, CostStore(database))
    half_life = _half_life(settings)
    evidence_cache = _remember(engine, database, half_life)
    decider = Decider(
        engine,
        evidence_cache,
        StoredChoices(DecisionLog(database, half_life=half_life), engine.identity, owner),
        SharedBudgets(
            BudgetStore(database), HistoryStore(database), evidence_cache, engine.identity, _revisions(engine)
        ),
        costs=costs,
        limits=settings.policy.limits(),
        now=lambda: datetime.now(UTC),
    )
    return Deciding(decider, evidence_cache, costs)


def _half_life(settings: Settings) -> timedelta:
    return timedelta(days=settings.worker.history_half_life_days)


def _remember(engine: Engine, database: Database, half_life: timedelta) -> EvidenceCache:
    """All that was ever measured here, before the first job comes: a restarted worker decides from it at once."""
    if num_keys := fill_from_hours(database, half_life, datetime.now(UTC)):
        log.info("remembered %d keys of evidence from hourly sums", num_keys, extra={"action": "evidence_filled"})
    evidence_cache = EvidenceCache(
        AcceptanceStateStore(database),
        DraftRegistry(database),
        target_revision=engine.identity.target_revision,
        engine=engine.identity.engine,
        drafters=_revisions(engine),
        half_life=half_life,
    )
    evidence_cache.look()
    return evidence_cache


def _revisions(engine: Engine) -> dict[str, str]:
    return {drafter.name: drafter.revision for drafter in engine.drafters}


def _register_drafters(engine: Engine, database: Database) -> None:
    registry = DraftRegistry(database)
    for drafter in engine.drafters:
        registry.register(drafter.name, drafter.revision, engine.identity.target_revision)


def _reread(configs: Path | None) -> Callable[[], Mapping[str, TaskSettings]]:
    def reread() -> Mapping[str, TaskSettings]:
        try:
            return read_tasks(configs)
        except ConfigError as error:
            # Somebody is editing the file: the tasks known so far stay.
            log.warning("tasks not read again: %s", error.message, extra={"action": "tasks_unreadable"})
            return {}

    return reread
