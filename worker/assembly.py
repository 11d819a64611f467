"""Putting a worker together from its settings: the order in which its parts are opened, and which works with which.

Each part is opened beside its class, from the `Foundation` that all of them share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from alphaloop.claim_check.store import ContentStore
from alphaloop.deciding.evidence import HALF_LIFE
from alphaloop.engine import AsksServers, Engine
from alphaloop.errors import ConfigError, package_missing
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import CONTROL, topic_ids
from alphaloop.liveness import Pulse
from alphaloop.probe_plan import DEADLINE
from alphaloop.settings import ModelSettings, TaskSettings, TasksFile
from alphaloop.settings.models import STARTED
from alphaloop.start_wait import check_installation
from alphaloop.store.database import Database, Listener
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.outcomes import OutboxMessage, Outcome, OutcomeStore
from alphaloop.store.task_memory import ResultMemoryStore
from alphaloop.store.workers import ServerIdentityStore
from worker.background import BackgroundThread, Threads
from worker.candidates import open_candidates
from worker.claims import LeaseKeeper, open_claiming
from worker.dead_letters import open_forwarder, open_retries
from worker.deciding.decider import Deciding, open_deciding
from worker.deciding.evidence_cache import EvidenceCache, SegmentsApart
from worker.feed import JobFeed, UndecodedJobs, open_feed
from worker.foundation import Foundation
from worker.intake.control import open_control_reader
from worker.intake.polling import Intake, TopicWatch, open_intake
from worker.intake.target_tasks import open_target_tasks
from worker.intake.validation import Fetching, open_validation
from worker.loop import Worker
from worker.presence import Watch, open_presence
from worker.publishing import open_publisher
from worker.recording import open_recorder
from worker.steering import open_slice_recorder, open_steering
from worker.task_memory.memory import RememberedTasks

if TYPE_CHECKING:
    from worker.tracing import Tracing

log = logging.getLogger(__name__)

#: Between two reads of other workers' evidence without a notice.
EVIDENCE_POLL_S: Final = 5.0


def assemble(
    base: Foundation, tasks_file: TasksFile | None, producer: Producer, configured: ModelSettings | None = None
) -> Worker:
    """Build a worker. `producer` sends results; dead letters have a producer of their own.

    Without a `tasks_file` its tasks stay as they are in the settings. `configured`: the models of the settings with the
    retired drafters, whose successors draft as they did; None: none is retired. Costs never measured here are measured
    now.
    """
    settings = base.settings
    deciding = _open_deciding(base)
    candidates = open_candidates(base, deciding, configured or settings.models)
    segments = SegmentsApart(deciding.evidence_cache.segments, idle=HALF_LIFE, now=base.now)
    contents = ContentStore.of(settings.claim_check)

    # On a job's way to the engine.
    intake = open_intake(base, settings.kafka.group_id, (), "intake")
    control_intake = open_intake(base, f"{settings.kafka.group_id}-control", [CONTROL], "control-intake")
    bound = open_target_tasks(base, tasks_file, intake)
    validation = open_validation(base, bound, contents, segments.keeps)
    claiming = open_claiming(base)
    leases = claiming.leases

    # On its way from there.
    forwarder = open_forwarder(base, validation)
    publisher = open_publisher(base, producer, forwarder, contents)
    memory = open_memory(base, lambda: bound.bindings.tasks)
    record = _recording(base, deciding.evidence_cache, memory)
    recorder = open_recorder(base, record, intake, leases, publisher.queue)
    retries = open_retries(base, leases, forwarder, intake, recorder.fail)

    # Parts that need both sides.
    reader = Fetching(contents, validation, retry=base.retry, wake=intake.wake)
    undecoded = UndecodedJobs(intake, publisher.queue, forwarder, recorder, now=base.now)
    feed = open_feed(base, reader, claiming, undecoded, deciding)
    recorder.decode_instead = feed.decode_instead
    control = open_control_reader(base, control_intake, leases, forwarder)
    presence = open_presence(base, leases, deciding.facts, lambda: bound.bindings.default_model)
    steering = open_steering(base, deciding.decider.session.lengths, presence, validation, candidates.rivals)
    watch = _watch(base, deciding.evidence_cache, leases, [intake, control_intake])
    turns: dict[str, Callable[[], object]] = {"control": control.turn, "feed": feed.turn, "retries": retries.turn}
    turns |= {"recording": recorder.turn, "publishing": publisher.turn, "forwarding": forwarder.turn}
    turns |= {"background": partial(_write_in_background, base, deciding)}
    keepers = (leases.thread, watch.thread, bound.thread, *candidates.threads, *(memory.threads if memory else ()))
    return Worker(
        base=base,
        threads=_threads(base, turns, feed, keepers, (intake, control_intake), recorder.tracing),
        intake=intake,
        validation=validation,
        feed=feed,
        claiming=claiming,
        deciding=deciding,
        steering=steering,
        recorder=recorder,
        retries=retries,
        publisher=publisher,
        forwarder=forwarder,
        presence=presence,
        slices=open_slice_recorder(base, deciding.revisions),
        candidates=candidates,
    )


def _open_deciding(base: Foundation) -> Deciding:
    """What decides for this worker, with its costs in the metrics."""
    deciding = open_deciding(
        base.settings, base.engine, base.database, base.clock, owner=base.owner, write=base.background.put
    )
    base.metrics.watch_costs(deciding.costs)
    return deciding


def _recording(
    base: Foundation, evidence: EvidenceCache, memory: RememberedTasks | None
) -> Callable[[Sequence[Outcome]], list[OutboxMessage]]:
    """What records outcomes as this worker's, and lets the memory of their tasks know."""
    outcomes = OutcomeStore(base.database, changed=evidence.take)

    def record(ended: Sequence[Outcome]) -> list[OutboxMessage]:
        messages = outcomes.record(ended, owner=base.owner)
        if memory is not None and any(outcome.remembered for outcome in ended):
            memory.remembered()
        return messages

    return record


def _threads(
    base: Foundation,
    turns: Mapping[str, Callable[[], object]],
    feed: JobFeed,
    keepers: tuple[BackgroundThread, ...],
    intakes: tuple[Intake, ...],
    tracing: Tracing | None,
) -> Threads:
    """A thread for each part that works on jobs, beside the others. When one ends by itself, the loop is woken."""

    def on_failure() -> None:
        base.died.set()
        feed.ready.wake()

    return Threads(
        neighbours=tuple(BackgroundThread(name, turn, on_failure=on_failure) for name, turn in turns.items()),
        keepers=keepers,
        intakes=intakes,
        tracing=tracing,
        liveness=base.liveness,
        loop_pulse=base.liveness.watch(Pulse("the engine's step"), base.settings.worker.max_step_s),
    )


def _write_in_background(base: Foundation, deciding: Deciding) -> None:
    if deciding.journal.is_due:
        base.background.put("decisions", deciding.journal.write)
    base.background.turn()


def _watch(base: Foundation, evidence: EvidenceCache, leases: LeaseKeeper, intakes: Sequence[Intake]) -> Watch:
    """What reads the changes of other processes: evidence, cancellations, re-created topics."""
    kafka = base.settings.kafka

    def ask_ids(topics: Collection[str]) -> dict[str, str]:
        try:
            check_installation(kafka, base.database)
        except ConfigError as error:  # workers of another database came into the group meanwhile
            log.error("%s", error.message, extra={"action": "installations_mixed", "hint": error.hint or ""})
        return topic_ids(kafka, topics)

    topics = TopicWatch(intakes, ask_ids)

    alarms = DriftEventStore(base.database)

    def refresh() -> None:
        base.clock.measure()
        evidence.refresh()
        if isinstance(base.engine, AsksServers):
            base.engine.doubt(alarms.unanswered(evidence.target_revision, DEADLINE))
        leases.check_cancelled()
        topics.check()  # last, because it waits for the broker

    return Watch(Listener(base.database), refresh, every_s=EVIDENCE_POLL_S)


def open_memory(base: Foundation, tasks: Callable[[], Mapping[str, TaskSettings]]) -> RememberedTasks | None:
    """The memory of the tasks, loaded and ready to be searched; None where servers decode, which have their own."""
    models, revision = base.settings.models, base.engine.identity.target_revision
    if models.target.engine != "own" or not revision:
        return None
    memory = RememberedTasks(ResultMemoryStore(base.database), revision, tasks)
    memory.load()
    memory.merge()
    base.engine.use_memory(memory.view)
    remembering = [name for name, task in tasks().items() if task.memory != "off"]
    if remembering and not any(drafter.searches_memory for drafter in models.drafters.values()):
        log.warning(
            "the memory of %s is on, and no drafter searches it: set memory = true in [models.drafters.NAME]",
            ", ".join(remembering),
            extra={"action": "memory_unused"},
        )
    return memory


def open_engine(
    models: ModelSettings, *, num_slots: int, database: Database | None = None, control_share: float | None = None
) -> Engine:
    """Open it; `num_slots` are those of an engine that owns a device.

    `database`: where the identities of servers are remembered; `control_share`: of the time of servers that measure
    their own rounds, for the experiment.

    Raises AlphaloopError; ServerUnavailable where no server answers.
    """
    if models.target.engine == "vllm" and models.endpoints[STARTED].api_key is None:
        raise ConfigError(
            "models.target.engine: expected own or server here, found vllm, which workers start for themselves",
            hint='start a vLLM and name it in [models.endpoints.NAME] with engine = "server"',
        )
    try:
        if models.target.engine != "own":
            from worker.servers.engine import open_server_engine

            identities = ServerIdentityStore(database) if database is not None else None
            return open_server_engine(models, identities=identities, control_share=control_share)
        from engine.own import load_engine

        return load_engine(models, num_slots=num_slots)
    except ImportError as error:
        raise package_missing(error, "models.target") from None
