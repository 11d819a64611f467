"""Putting a worker together from its settings: the only place that knows how the parts are wired."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from alphaloop.claim_check.store import ContentStore
from alphaloop.deciding.draft_lengths import LengthsTogether
from alphaloop.deciding.evidence import HALF_LIFE
from alphaloop.engine import AsksServers, Engine, EngineIdentity
from alphaloop.errors import ConfigError, package_missing
from alphaloop.experiment.assign import RequestDesign, RequestSchedule, RoundDesign, RoundSchedule
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import CONTROL, cluster_id, ensure_topic, topic_ids, topic_lister
from alphaloop.liveness import Liveness, Pulse
from alphaloop.messages import Status
from alphaloop.messages.topics import dlq_topic, jobs_topic
from alphaloop.settings import ModelSettings, PolicySettings, Settings, TaskSettings, TasksFile, settings_of_segment
from alphaloop.start_wait import check_installation
from alphaloop.store.database import Database, DatabaseClock, Listener
from alphaloop.store.installation import InstallationStore
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import Outbox, OutboxMessage, Outcome, OutcomeStore, RefusedResultStore
from alphaloop.store.probes import ProbeStore
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.task_memory import ResultMemoryStore
from alphaloop.store.workers import Capabilities, ServerIdentityStore, WorkerSetup, WorkerStore
from worker.admission import AdmissionQueue
from worker.background import BackgroundThread, BackgroundWrites, BoundedQueue, Retry, Threads
from worker.claims import Claiming, LeaseKeeper
from worker.dead_letters import DeadMessage, Forwarder, JobRetries, letter_of
from worker.deciding.decider import open_deciding, revisions
from worker.deciding.evidence_cache import SegmentsApart
from worker.feed import LEAST_AHEAD, ClaimedAhead, JobFeed, UndecodedJobs
from worker.intake.control import ControlReader
from worker.intake.polling import MAX_BUFFERED, TopicWatch, make_topics, open_intake
from worker.intake.target_tasks import TargetTasks
from worker.intake.validation import Fetching, Validation, no_references
from worker.loop import Worker
from worker.metrics import WorkerMetrics
from worker.presence import Presence, Watch
from worker.publishing import Publication, Publisher, RefusedResults
from worker.recording import Recorder, ended
from worker.running import Suspects
from worker.sending import UnavailableTopics
from worker.steering import RequestSteering, RoundSteering, SliceRecorder, Steering
from worker.task_memory.memory import RememberedTasks

if TYPE_CHECKING:
    from worker.tracing import Tracing


log = logging.getLogger(__name__)

#: Messages that wait to be published before the recorder waits.
PUBLISHING_ITEMS: Final = 8192
#: Between two reads of other workers' evidence without a notice.
EVIDENCE_POLL_S: Final = 5.0


def owner_name() -> str:
    """This process among all workers, past and present."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def assemble(
    settings: Settings,
    tasks_file: TasksFile | None,
    engine: Engine,
    database: Database,
    producer: Producer,
    *,
    owner: str,
    stop: threading.Event,
    hurry: threading.Event,
    rng: random.Random,
    metrics: WorkerMetrics | None = None,
) -> Worker:
    """Build a worker. `producer` sends results; dead letters have a producer of their own.

    Without a `tasks_file` its tasks stay as they are in `settings`. Topics that are missing are created; costs never
    measured here are measured now.
    """
    limits = settings.worker
    cluster = cluster_id(settings.kafka)
    database_id = InstallationStore(database).belong(cluster, settings.kafka.prefix)
    make_topics(settings)
    died = threading.Event()
    retry = Retry(hurry, died)
    background = BackgroundWrites(hurry.wait)
    clock = DatabaseClock(database)
    clock.measure()
    deciding = open_deciding(settings, engine, database, clock, owner=owner, write=background.put)
    metrics = metrics or WorkerMetrics()
    metrics.watch_engine(engine)
    metrics.watch_costs(deciding.costs)
    liveness = Liveness()

    # To the engine.
    jobs = JobStore(database)
    contents = ContentStore.of(settings.claim_check)
    probes = ProbeStore(database)
    open_member = partial(open_intake, settings, database_id, now=clock.now)
    intake = open_member(settings.kafka.group_id, (), "intake")
    bound = TargetTasks(
        engine.identity.target,
        settings.bindings,
        file=tasks_file,
        topics_now=topic_lister(settings.kafka),
        read_topics=intake.read_topics,
    )
    bound.look()
    validation = Validation(
        engine,
        bound,
        limits=limits,
        cluster=cluster,
        keeps_apart=SegmentsApart(deciding.evidence_cache.segments, idle=HALF_LIFE, now=clock.now).keeps,
        is_probe=lambda job_id, digest: retry.until_done("probe", partial(probes.is_recorded, job_id, digest)),
        check_reference=contents.check if contents else no_references,
    )
    control_intake = open_member(f"{settings.kafka.group_id}-control", [CONTROL], "control-intake")
    leases = LeaseKeeper(jobs, owner=owner, lease_s=limits.lease_s, may_renew=lambda: liveness.hung() is None)
    claiming = Claiming(
        jobs, leases, owner=owner, lease_s=limits.lease_s, max_attempts=limits.max_attempts, retry=retry
    )

    # From the engine.
    publishing: BoundedQueue[Publication] = BoundedQueue(
        max_items=PUBLISHING_ITEMS,
        max_bytes=limits.max_buffered_bytes,
        num_bytes_of=lambda publication: publication.num_bytes,
        give_up=retry.gives_up,
    )
    forwarder = Forwarder(
        lambda: Producer(settings.kafka, client_id="alphaloop-forwarding"),
        UnavailableTopics(
            lambda topic: ensure_topic(settings.kafka, topic, validation.tasks), metrics.topic_unavailable
        ),
        metrics,
        letter_of=partial(letter_of, validation=validation, group=settings.kafka.named(settings.kafka.group_id)),
        is_hurried=retry.hurry.is_set,
    )
    publisher = Publisher(
        publishing,
        producer,
        Outbox(database),
        RefusedResults(RefusedResultStore(database), metrics.result_refused, contents),
        forwarder,
        metrics,
        model=engine.identity.target,
        retry=retry,
        relay_after_s=2 * limits.lease_s,
    )
    tracing = open_tracing(settings, engine.identity, owner=owner, now=clock.now)
    outcomes = OutcomeStore(database, changed=deciding.evidence_cache.take)
    memory = open_memory(settings, engine, database, lambda: bound.bindings.tasks)

    def record(ended: Sequence[Outcome]) -> list[OutboxMessage]:
        messages = outcomes.record(ended, owner=owner)
        if memory is not None and any(one.remembered for one in ended):
            memory.remembered()
        return messages

    recorder = Recorder(
        record,
        intake,
        leases,
        publishing,
        metrics,
        retry=retry,
        max_bytes=limits.max_buffered_bytes,
        now=clock.now,
        tracing=tracing,
    )
    retries = JobRetries(
        settings.kafka.retry_delays_s,
        leases,
        forwarder,
        intake,
        count=partial(jobs.fail, owner=owner),
        fail=lambda one: recorder.put([ended(one.claimed, Status.FAILED, one.failure, now=one.failed_at)]),
        ensure_topics=lambda task: ensure_topic(settings.kafka, dlq_topic(jobs_topic(task)), [task]),
        retry=retry,
        rng=rng,
        max_bytes=limits.max_buffered_bytes,
    )

    num_slots = engine.load().num_slots
    feed = JobFeed(
        intake,
        Fetching(contents, validation, retry=retry, wake=intake.wake),
        AdmissionQueue(
            num_slots=num_slots,
            quantum_s=limits.task_quantum_s,
            weight_of=lambda task: validation.tasks[task].weight,
            weight_of_segment=lambda segment: settings_of_segment(settings.segments, segment).weight,
            read_s=deciding.costs.read_s,
        ),
        claiming,
        Suspects(leases, random.Random(rng.random())),
        UndecodedJobs(intake, publishing, forwarder, recorder, now=clock.now),
        ClaimedAhead(
            max(LEAST_AHEAD, num_slots),
            limits.max_buffered_bytes,
            is_ending=lambda: stop.is_set() or died.is_set(),
            wake_engine=engine.wake,
        ),
        max_jobs=MAX_BUFFERED,
        max_bytes=limits.max_buffered_bytes,
        prepare_decisions=deciding.first_reads.prepare,
    )
    control_reader = ControlReader(
        control_intake,
        jobs,
        check_here=leases.check_cancelled,
        refuse=lambda delivery, error: forwarder.put(DeadMessage(delivery, error, control_intake)),
        retry=retry,
    )
    content = settings.claim_check
    can = Capabilities(
        engine.identity.context_length,
        limits.max_job_bytes,
        tuple(sorted(engine.features)),
        (content.url, *content.read_urls) if content.url else (),
    )
    presence = Presence(
        WorkerStore(database),
        background.put,
        engine.identity,
        owner=owner,
        sampling_defaults=engine.sampling_defaults.sentence(),
        num_held=lambda: leases.num_held,
        setup=lambda: WorkerSetup(
            deciding.facts, tuple(engine.drafters), engine.unserved(()), bound.bindings.default_model, can
        ),
        clock=time.monotonic,
    )

    def ask_ids(topics: Collection[str]) -> dict[str, str]:
        try:
            check_installation(settings.kafka, database)
        except ConfigError as error:  # workers of another database came into the group meanwhile
            log.error("%s", error.message, extra={"action": "installations_mixed", "hint": error.hint or ""})
        return topic_ids(settings.kafka, topics)

    topic_watch = TopicWatch([intake, control_intake], ask_ids)

    def refresh() -> None:
        clock.measure()
        deciding.evidence_cache.refresh()
        leases.check_cancelled()
        topic_watch.check()  # last, because it waits for the broker

    def write_in_background() -> None:
        if deciding.journal.is_due:
            background.put("decisions", deciding.journal.write)
        background.turn()

    def on_failure() -> None:
        died.set()
        feed.ready.wake()

    turns: dict[str, Callable[[], object]] = {
        "control": control_reader.turn,
        "feed": feed.turn,
        "retries": retries.turn,
        "recording": recorder.turn,
        "publishing": publisher.turn,
        "forwarding": forwarder.turn,
        "background": write_in_background,
    }
    threads = Threads(
        neighbours=tuple(BackgroundThread(name, turn, on_failure=on_failure) for name, turn in turns.items()),
        keepers=(
            leases.thread,
            Watch(Listener(database), refresh, every_s=EVIDENCE_POLL_S).thread,
            bound.thread,
            *(memory.threads if memory else ()),
        ),
        intakes=(intake, control_intake),
        tracing=tracing,
        liveness=liveness,
        loop_pulse=liveness.watch(Pulse("the engine's step"), limits.max_step_s),
    )
    return Worker(
        engine=engine,
        stop=stop,
        hurry=hurry,
        drain_s=limits.drain_s,
        now=clock.now,
        retry=retry,
        threads=threads,
        intake=intake,
        validation=validation,
        feed=feed,
        leases=leases,
        claiming=claiming,
        decider=deciding.decider,
        costs=deciding.costs,
        steering=open_steering(
            settings.policy,
            engine,
            deciding.decider.session.lengths,
            lambda: presence.num_peers,
            now=clock.now,
            rng=rng,
            num_vanilla_tokens=lambda task: validation.tasks[task].num_vanilla_tokens,
        ),
        recorder=recorder,
        retries=retries,
        publisher=publisher,
        forwarder=forwarder,
        metrics=metrics,
        presence=presence,
        slices=SliceRecorder(SwitchbackStore(database), engine.identity, revisions(engine), owner=owner, now=clock.now),
        store_decisions=deciding.journal.write,
        background=background,
    )


def open_memory(
    settings: Settings, engine: Engine, database: Database, tasks: Callable[[], Mapping[str, TaskSettings]]
) -> RememberedTasks | None:
    """The memory of the tasks, loaded and ready to be searched; None where servers decode, which have their own."""
    revision = engine.identity.target_revision
    if settings.models.target.engine != "own" or not revision:
        return None
    memory = RememberedTasks(ResultMemoryStore(database), revision, tasks)
    memory.load()
    memory.merge()
    engine.use_memory(memory.view)
    remembering = [name for name, one in tasks().items() if one.memory != "off"]
    if remembering and not any(drafter.searches_memory for drafter in settings.models.drafters.values()):
        log.warning(
            "the memory of %s is on, and no drafter searches it: set memory = true in [models.drafters.NAME]",
            ", ".join(remembering),
            extra={"action": "memory_unused"},
        )
    return memory


def open_steering(
    policy: PolicySettings,
    engine: Engine,
    lengths: LengthsTogether,
    num_peers: Callable[[], int],
    *,
    now: Callable[[], datetime],
    rng: random.Random,
    num_vanilla_tokens: Callable[[str], int],
) -> Steering:
    """What assigns the arms of the experiment; `num_peers`: other workers that ask the same servers.

    `rng` draws what is vanilla: slices of rounds, or requests where the engine cannot change those.
    """
    share = policy.control_share
    if engine.can_redraft:
        schedule = RoundSchedule(RoundDesign(control_share=share), rng)
        return RoundSteering(schedule, lengths, now, num_vanilla_tokens)
    endpoints = engine.endpoints if isinstance(engine, AsksServers) else tuple
    return RequestSteering(
        RequestSchedule(RequestDesign(control_share=share), rng),
        now,
        num_peers,
        lambda: all(one.is_whole_load_known for one in endpoints()),
    )


def open_tracing(
    settings: Settings, identity: EngineIdentity, *, owner: str, now: Callable[[], datetime]
) -> Tracing | None:
    """What takes the traces of jobs; None for no traces, the default.

    Raises ConfigError when traces are wanted and OpenTelemetry is not installed.
    """
    if settings.tracing.endpoint is None:
        return None
    try:
        from worker.tracing import Tracing
    except ImportError as error:
        raise package_missing(error, "tracing.endpoint") from None
    group_id = settings.kafka.named(settings.kafka.group_id)
    return Tracing(settings.tracing, identity, owner=owner, group_id=group_id, now=now)


def open_engine(models: ModelSettings, *, num_slots: int, database: Database | None = None) -> Engine:
    """Open it; `num_slots` are those of an engine that owns a device. `database` has what servers were earlier.

    Raises AlphaloopError; ServerUnavailable where no server answers.
    """
    try:
        if models.target.engine == "server":
            from worker.servers.engine import open_server_engine

            identities = ServerIdentityStore(database) if database is not None else None
            return open_server_engine(models, identities=identities)
        from engine.own import load_engine

        return load_engine(models, num_slots=num_slots)
    except ImportError as error:
        raise package_missing(error, "models.target") from None
