"""Putting a worker together from its settings: the only place that knows every part's real class."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

from alphaloop.deciding.decision_inputs import SessionFacts
from alphaloop.deciding.lengths_together import LengthsTogether
from alphaloop.errors import BrokerError, BrokerUnavailable, ConfigError
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import CONTROL, cluster_id, ensure_topic, ensure_topics
from alphaloop.liveness import Liveness, Pulse
from alphaloop.messages.topics import JOBS_PATTERN
from alphaloop.settings import Settings, TaskSettings, read_tasks
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.budgets import BudgetStore
from alphaloop.store.clock import DatabaseClock
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.decision_records import DecisionRecordStore
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.history import HistoryStore
from alphaloop.store.jobs import JobStore
from alphaloop.store.notices import Listener
from alphaloop.store.outbox import Outbox
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.probes import ProbeStore
from alphaloop.store.refused_results import RefusedResultStore
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.switchback.block import SwitchbackDesign
from alphaloop.switchback.schedule import SwitchbackSchedule
from worker.background import BackgroundWrites, Write
from worker.components import Components
from worker.costs.live import LiveCosts
from worker.costs.opening import open_costs
from worker.deciding.choice_log import StoredChoices
from worker.deciding.decider import Decider
from worker.deciding.decision_journal import StoredDecisions
from worker.deciding.evidence_cache import EvidenceCache
from worker.deciding.segments import SegmentsApart
from worker.deciding.shared_budgets import SharedBudgets
from worker.deciding.watch import Watch
from worker.engine import Engine
from worker.intake.control_reader import ControlReader
from worker.intake.handing_over import SHARE_OF_POLL_INTERVAL
from worker.intake.polling import Intake
from worker.intake.validation import Validation
from worker.jobs.admission import AdmissionQueue
from worker.jobs.claiming import Claiming
from worker.jobs.decoding_again import DecodingAgain
from worker.jobs.feed import JobFeed
from worker.jobs.forwarding import Forwarder
from worker.jobs.leases import LeaseKeeper
from worker.jobs.letters import DeadMessage, Letters
from worker.jobs.publications import PublishingQueue
from worker.jobs.publishing import Publisher
from worker.jobs.recording import Recorder
from worker.jobs.refusals import RefusedResults
from worker.jobs.releasing import PatientRelease
from worker.jobs.retries import JobRetries
from worker.jobs.slices import SliceRecorder
from worker.jobs.steering import Steering
from worker.jobs.unavailable_topics import UnavailableTopics
from worker.metrics import WorkerMetrics
from worker.neighbour import Neighbour
from worker.retry import Retry

log = logging.getLogger(__name__)

#: Jobs that are claimed before the engine has room for them, at least; as many as it has slots if those are more.
LEAST_AHEAD: Final = 8
#: Outcomes that wait to be recorded, and messages that wait to be published, before the threads before them wait.
RECORDING_ITEMS: Final = 4096
PUBLISHING_ITEMS: Final = 8192


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
    """Build every component of a worker.

    Topics that are missing are created; costs never measured here are measured now.
    """
    limits = settings.worker
    _ensure_topics(settings)
    background = BackgroundWrites(hurry.wait)
    clock = DatabaseClock(database)
    clock.measure()
    deciding = open_deciding(settings, engine, database, clock, owner=owner, write=background.put)
    jobs = JobStore(database)
    retry = Retry(hurry)
    metrics = WorkerMetrics()
    metrics.running_on(engine.identity)
    metrics.watch_costs(deciding.costs)
    probes = ProbeStore(database)
    segments = SegmentsApart(deciding.evidence_cache.segments, idle=_half_life(settings), now=clock.now)
    validation = Validation(
        engine,
        settings.tasks,
        reread_tasks=_reread(configs),
        limits=limits,
        cluster=cluster_id(settings.kafka),
        keeps_apart=segments.keeps,
        is_probe=lambda job_id, digest: retry.until_done("probe", partial(probes.is_recorded, job_id, digest)),
    )
    intake = _consume(settings, settings.kafka.group_id, [JOBS_PATTERN], "intake", clock.now)
    control_intake = _consume(settings, f"{settings.kafka.group_id}-control", [CONTROL], "control-intake", clock.now)
    liveness = Liveness()
    leases = LeaseKeeper(jobs, owner=owner, lease_s=limits.lease_s, may_renew=lambda: liveness.hung() is None)
    died = threading.Event()

    def gives_up() -> bool:
        """Whether to stop waiting for room, because the thread that makes room has ended."""
        return hurry.is_set() or died.is_set()

    publishing = PublishingQueue(max_items=PUBLISHING_ITEMS, max_bytes=limits.max_buffered_bytes, is_hurried=gives_up)
    topics = UnavailableTopics(partial(ensure_topic, settings.kafka), metrics.topic_unavailable)
    forwarder = Forwarder(
        lambda: Producer(settings.kafka, client_id="alphaloop-forwarding"),
        topics,
        metrics,
        letters=Letters(validation, settings.kafka.group_id),
        is_hurried=hurry.is_set,
    )
    publisher = Publisher(
        publishing,
        producer,
        Outbox(database),
        RefusedResults(RefusedResultStore(database), metrics.result_refused),
        topics,
        forwarder,
        metrics,
        model=engine.identity.target,
        retry=retry,
        is_hurried=hurry.is_set,
        relay_after_s=2 * limits.lease_s,
    )
    recorder = Recorder(
        OutcomeStore(database, half_life=_half_life(settings), changed=deciding.evidence_cache.take),
        intake,
        leases,
        publishing,
        metrics,
        owner=owner,
        retry=retry,
        max_items=RECORDING_ITEMS,
        max_bytes=limits.max_buffered_bytes,
        is_hurried=gives_up,
        now=clock.now,
        pause=hurry.wait,
    )
    retries = JobRetries(
        settings.kafka.retry_delays_s,
        jobs,
        leases,
        forwarder,
        recorder,
        intake,
        ensure_topics=lambda task: ensure_topics(settings.kafka, [task]),
        owner=owner,
        retry=retry,
        rng=rng,
        max_bytes=limits.max_buffered_bytes,
        is_hurried=gives_up,
    )
    claiming = Claiming(jobs, owner=owner, lease_s=limits.lease_s, max_attempts=limits.max_attempts)
    feed = JobFeed(
        intake,
        validation,
        AdmissionQueue(
            measured_batch=limits.batch_size,
            quantum_s=limits.task_quantum_s,
            ageing_s=limits.priority_ageing_s,
            normal_share=limits.normal_lane_share,
            weight_of=lambda task: validation.task(task).weight,
            read_s=deciding.costs.read_s,
            most_slack_s=limits.shared_beginning_slack_s,
        ),
        claiming,
        leases,
        publishing,
        forwarder,
        recorder,
        retry=retry,
        is_ending=lambda: stop.is_set() or died.is_set(),
        now=clock.now,
        num_ahead=max(LEAST_AHEAD, limits.batch_size),
        max_waiting=limits.max_buffered,
        max_waiting_bytes=limits.max_buffered_bytes,
    )
    control_reader = ControlReader(
        control_intake,
        jobs,
        cancel_here=leases.cancel,
        refuse=lambda delivery, error: forwarder.put(DeadMessage(delivery, error, control_intake)),
        retry=retry,
    )

    design = SwitchbackDesign(control_share=settings.policy.control_share)
    slices = SliceRecorder(
        SwitchbackStore(database),
        engine.identity,
        _revisions(engine),
        owner=owner,
        now=clock.now,
    )

    def refresh() -> None:
        clock.measure()
        deciding.evidence_cache.refresh()
        leases.check_cancelled()

    def write_in_background() -> None:
        if deciding.journal.is_due:
            background.put("decisions", deciding.journal.write)
        background.turn()

    def tell() -> None:
        died.set()
        feed.ready.wake()

    components = Components(
        owner=owner,
        engine=engine,
        intake=intake,
        control_intake=control_intake,
        validation=validation,
        feed=feed,
        decoding_again=DecodingAgain(claiming, leases, retry),
        decider=deciding.decider,
        evidence_cache=deciding.evidence_cache,
        watch=Watch(Listener(database), refresh, every_s=limits.evidence_poll_s),
        costs=deciding.costs,
        leases=leases,
        steering=Steering(
            SwitchbackSchedule(design, rng),
            LengthsTogether(lambda: deciding.costs.table),
            clock.now,
        ),
        recorder=recorder,
        background=background,
        store_slices=slices.store,
        store_decisions=deciding.journal.write,
        publishing=publishing,
        publisher=publisher,
        topics=topics,
        forwarder=forwarder,
        control_reader=control_reader,
        jobs=PatientRelease(jobs, retry),
        metrics=metrics,
        retry=retry,
        retries=retries,
        feed_thread=Neighbour("feed", feed.turn, on_failure=tell),
        retries_thread=Neighbour("retries", retries.turn, on_failure=tell),
        recording_thread=Neighbour("recording", recorder.turn, on_failure=tell),
        publishing_thread=Neighbour("publishing", publisher.turn, on_failure=tell),
        forwarding_thread=Neighbour("forwarding", forwarder.turn, on_failure=tell),
        control_thread=Neighbour("control", control_reader.turn, on_failure=tell),
        background_thread=Neighbour("background", write_in_background, on_failure=tell),
        stop=stop,
        hurry=hurry,
        liveness=liveness,
        loop_pulse=liveness.watch(Pulse("the engine's step"), limits.max_step_s),
        now=clock.now,
        drain_s=limits.drain_s,
    )
    for pulse in components.thread_pulses:
        liveness.watch(pulse, limits.max_silence_s)
    return components


def _ensure_topics(settings: Settings) -> None:
    """Create missing topics. One that this user may not create does not end the worker; its users say so again."""
    try:
        ensure_topics(settings.kafka, settings.tasks)
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        log.error("topics are missing: %s", error.message, extra={"action": "topics_missing", "hint": error.hint or ""})


def _consume(
    settings: Settings, group_id: str, patterns: Sequence[str], name: str, now: Callable[[], datetime]
) -> Intake:
    limits = settings.worker
    consumer = Consumer(settings.kafka, group_id=group_id)
    return Intake(
        consumer,
        patterns,
        max_buffered=limits.max_buffered,
        max_buffered_bytes=limits.max_buffered_bytes,
        max_distance=limits.max_watermark_distance,
        commit_interval_s=limits.commit_interval_s,
        hand_over_s=SHARE_OF_POLL_INTERVAL * consumer.max_poll_interval_s,
        name=name,
        now=now,
    )


@dataclass(frozen=True, slots=True)
class Deciding:
    """The decider, the costs and evidence that it uses, and the record of its decisions."""

    decider: Decider
    evidence_cache: EvidenceCache
    costs: LiveCosts
    journal: StoredDecisions


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
    half_life = _half_life(settings)
    evidence_cache = _remember(engine, database, half_life)
    identity, limits = engine.identity, settings.policy.limits()
    facts = SessionFacts(
        owner=owner,
        host=identity.host,
        device=identity.device,
        engine=identity.engine,
        target_revision=identity.target_revision,
        num_slots=engine.load().num_slots,
        half_life=half_life,
        limits=limits,
    )
    journal = StoredDecisions(DecisionRecordStore(database), facts, lambda: costs.state)
    decider = Decider(
        engine,
        evidence_cache,
        StoredChoices(DecisionLog(database, half_life=half_life), identity, owner, write=write),
        SharedBudgets(BudgetStore(database), HistoryStore(database), evidence_cache, identity, _revisions(engine)),
        costs=costs,
        limits=limits,
        now=clock.now,
        journal=journal,
    )
    return Deciding(decider, evidence_cache, costs, journal)


def _half_life(settings: Settings) -> timedelta:
    return timedelta(days=settings.worker.history_half_life_days)


def _remember(engine: Engine, database: Database, half_life: timedelta) -> EvidenceCache:
    """Read all stored evidence before the first job, so that a restarted worker decides from it at once."""
    evidence_cache = EvidenceCache(
        AcceptanceStateStore(database),
        DraftRegistry(database),
        target_revision=engine.identity.target_revision,
        engine=engine.identity.engine,
        drafters=_revisions(engine),
        half_life=half_life,
    )
    evidence_cache.refresh()
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
