"""Putting a worker together from its settings: the only place that knows every part's real class."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Final

from alphaloop.claim_check.store import ContentStore
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topic_ids import TopicIds
from alphaloop.kafka.topics import CONTROL, ensure_topics
from alphaloop.liveness import Liveness, Pulse
from alphaloop.messages.topics import JOBS_PATTERN
from alphaloop.settings import Settings
from alphaloop.store.clock import DatabaseClock
from alphaloop.store.database import Database
from alphaloop.store.jobs import JobStore
from alphaloop.store.notices import Listener
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.probes import ProbeStore
from alphaloop.store.workers import WorkerSetup, WorkerStore
from worker.background import BackgroundWrites
from worker.components import Components
from worker.deciding.decider import half_life, open_deciding
from worker.deciding.evidence_cache import SegmentsApart
from worker.deciding.watch import Watch
from worker.endpoint_metrics import EndpointMetrics
from worker.engine import Engine
from worker.intake.control_reader import ControlReader
from worker.intake.opening import make_topics, open_intake, open_validation
from worker.intake.topic_watch import TopicWatch
from worker.jobs.claiming import Claiming
from worker.jobs.decoding_again import DecodingAgain
from worker.jobs.leases import LeaseKeeper
from worker.jobs.letters import DeadMessage, Letters
from worker.jobs.opening import open_feed, open_publishing
from worker.jobs.recording import Recorder
from worker.jobs.releasing import PatientRelease
from worker.jobs.retries import JobRetries
from worker.jobs.switchback import open_switchback
from worker.metrics import WorkerMetrics
from worker.neighbour import Neighbour
from worker.presence import Presence
from worker.retry import Retry
from worker.tracing import open_tracing

log = logging.getLogger(__name__)

#: Outcomes that wait to be recorded before the loop waits.
RECORDING_ITEMS: Final = 4096


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
    metrics: WorkerMetrics | None = None,
) -> Components:
    """Build every component of a worker.

    Topics that are missing are created; costs never measured here are measured now.
    """
    limits = settings.worker
    make_topics(settings)
    background = BackgroundWrites(hurry.wait)
    clock = DatabaseClock(database)
    clock.measure()
    deciding = open_deciding(settings, engine, database, clock, owner=owner, write=background.put)
    jobs = JobStore(database)
    retry = Retry(hurry)
    metrics = metrics or WorkerMetrics()
    metrics.running_on(engine.identity)
    metrics.watch_costs(deciding.costs)
    EndpointMetrics.register(metrics.registry, engine)
    contents = ContentStore.of(settings.claim_check)
    validation = open_validation(
        settings,
        configs,
        engine,
        contents,
        ProbeStore(database),
        keeps_apart=SegmentsApart(deciding.evidence_cache.segments, idle=half_life(settings), now=clock.now).keeps,
        retry=retry,
    )
    intake = open_intake(settings, settings.kafka.group_id, [JOBS_PATTERN], "intake", clock.now)
    control_intake = open_intake(settings, f"{settings.kafka.group_id}-control", [CONTROL], "control-intake", clock.now)
    liveness = Liveness()
    leases = LeaseKeeper(jobs, owner=owner, lease_s=limits.lease_s, may_renew=lambda: liveness.hung() is None)
    died = threading.Event()

    def gives_up() -> bool:
        """Whether to stop waiting for room, because the thread that makes room has ended."""
        return hurry.is_set() or died.is_set()

    publishing = open_publishing(
        settings,
        engine,
        database,
        producer,
        Letters(validation, settings.kafka.group_id),
        metrics,
        contents,
        retry=retry,
        is_hurried=hurry.is_set,
        gives_up=gives_up,
    )
    tracing = open_tracing(settings, engine.identity, owner=owner, now=clock.now)
    recorder = Recorder(
        OutcomeStore(database, half_life=half_life(settings), changed=deciding.evidence_cache.take),
        intake,
        leases,
        publishing.queue,
        metrics,
        owner=owner,
        retry=retry,
        max_items=RECORDING_ITEMS,
        max_bytes=limits.max_buffered_bytes,
        is_hurried=gives_up,
        now=clock.now,
        pause=hurry.wait,
        tracing=tracing,
    )
    retries = JobRetries(
        settings.kafka.retry_delays_s,
        jobs,
        leases,
        publishing.forwarder,
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
    feed = open_feed(
        settings,
        intake,
        validation,
        claiming,
        leases,
        publishing,
        recorder,
        contents,
        num_slots=engine.load().num_slots,
        wake_engine=engine.wake,
        read_s=deciding.costs.read_s,
        prepare_decisions=deciding.first_reads.prepare,
        retry=retry,
        is_ending=lambda: stop.is_set() or died.is_set(),
        now=clock.now,
        rng=random.Random(rng.random()),
    )
    control_reader = ControlReader(
        control_intake,
        jobs,
        cancel_here=leases.cancel,
        refuse=lambda delivery, error: publishing.forwarder.put(DeadMessage(delivery, error, control_intake)),
        retry=retry,
    )
    presence = Presence(
        WorkerStore(database),
        background.put,
        engine.identity,
        owner=owner,
        sampling_defaults=engine.sampling_defaults.sentence(),
        num_held=lambda: leases.num_held,
        setup=lambda: WorkerSetup(deciding.facts, tuple(engine.drafters), engine.unserved(())),
        clock=time.monotonic,
    )
    lengths = deciding.decider.session.lengths
    steering, slices = open_switchback(
        settings.policy, engine, database, lengths, lambda: presence.num_peers, owner=owner, now=clock.now, rng=rng
    )
    topic_watch = TopicWatch(
        [intake, control_intake], TopicIds(settings.kafka).ask, every_s=settings.kafka.topic_check_s
    )

    def refresh() -> None:
        clock.measure()
        deciding.evidence_cache.refresh()
        leases.check_cancelled()
        topic_watch.check()  # last, because it waits for the broker

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
        steering=steering,
        presence=presence,
        recorder=recorder,
        background=background,
        store_slices=slices.store,
        store_decisions=deciding.journal.write,
        publishing=publishing.queue,
        publisher=publishing.publisher,
        topics=publishing.topics,
        forwarder=publishing.forwarder,
        control_reader=control_reader,
        jobs=PatientRelease(jobs, retry),
        metrics=metrics,
        retry=retry,
        retries=retries,
        feed_thread=Neighbour("feed", feed.turn, on_failure=tell),
        retries_thread=Neighbour("retries", retries.turn, on_failure=tell),
        recording_thread=Neighbour("recording", recorder.turn, on_failure=tell),
        publishing_thread=Neighbour("publishing", publishing.publisher.turn, on_failure=tell),
        forwarding_thread=Neighbour("forwarding", publishing.forwarder.turn, on_failure=tell),
        control_thread=Neighbour("control", control_reader.turn, on_failure=tell),
        background_thread=Neighbour("background", write_in_background, on_failure=tell),
        stop=stop,
        hurry=hurry,
        liveness=liveness,
        loop_pulse=liveness.watch(Pulse("the engine's step"), limits.max_step_s),
        now=clock.now,
        tracing=tracing,
        drain_s=limits.drain_s,
    )
    for pulse in components.thread_pulses:
        liveness.watch(pulse, limits.max_silence_s)
    return components
