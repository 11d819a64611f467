"""What feeds the loop and what publishes after it, put together from the settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from alphaloop.claim_check.store import ContentStore
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.outbox import Outbox, RefusedResultStore
from worker.engine import Engine
from worker.intake.polling import Intake
from worker.intake.validation import ReadyJob, Validation
from worker.jobs.admission import AdmissionQueue
from worker.jobs.claiming import Claiming
from worker.jobs.feed import JobFeed
from worker.jobs.forwarding import Forwarder
from worker.jobs.lanes import LaneKey
from worker.jobs.leases import LeaseKeeper
from worker.jobs.letters import Letters
from worker.jobs.publications import PublishingQueue
from worker.jobs.publishing import Publisher
from worker.jobs.recording import Recorder
from worker.jobs.refusals import RefusedResults
from worker.jobs.unavailable_topics import UnavailableTopics
from worker.metrics import WorkerMetrics
from worker.retry import Retry

#: Jobs that are claimed before the engine has room for them, at least; as many as it has slots if those are more.
LEAST_AHEAD: Final = 8
#: Messages that wait to be published before the recorder waits.
PUBLISHING_ITEMS: Final = 8192


@dataclass(frozen=True, slots=True)
class Publishing:
    """The components that publish; each of publisher and forwarder has a thread and a producer of its own."""

    queue: PublishingQueue
    topics: UnavailableTopics
    forwarder: Forwarder
    publisher: Publisher


def open_publishing(
    settings: Settings,
    engine: Engine,
    database: Database,
    producer: Producer,
    letters: Letters,
    metrics: WorkerMetrics,
    contents: ContentStore | None = None,
    *,
    retry: Retry,
    is_hurried: Callable[[], bool],
    gives_up: Callable[[], bool],
) -> Publishing:
    """Build them. `producer` sends results; `gives_up` says whether to stop waiting for room in the queue."""
    limits = settings.worker
    queue = PublishingQueue(max_items=PUBLISHING_ITEMS, max_bytes=limits.max_buffered_bytes, is_hurried=gives_up)
    topics = UnavailableTopics(partial(ensure_topic, settings.kafka), metrics.topic_unavailable)
    forwarder = Forwarder(
        lambda: Producer(settings.kafka, client_id="alphaloop-forwarding"),
        topics,
        metrics,
        letters=letters,
        is_hurried=is_hurried,
    )
    publisher = Publisher(
        queue,
        producer,
        Outbox(database),
        RefusedResults(RefusedResultStore(database), metrics.result_refused, contents),
        topics,
        forwarder,
        metrics,
        model=engine.identity.target,
        retry=retry,
        is_hurried=is_hurried,
        relay_after_s=2 * limits.lease_s,
    )
    return Publishing(queue, topics, forwarder, publisher)


def open_feed(
    settings: Settings,
    intake: Intake,
    validation: Validation,
    claiming: Claiming,
    leases: LeaseKeeper,
    publishing: Publishing,
    recorder: Recorder,
    contents: ContentStore | None,
    *,
    num_slots: int,
    wake_engine: Callable[[], object],
    read_s: Callable[[int], float],
    prepare_decisions: Callable[[Iterable[LaneKey]], object],
    retry: Retry,
    is_ending: Callable[[], bool],
    now: Callable[[], datetime],
    rng: random.Random,
) -> JobFeed:
    """Build it. `num_slots` and `wake_engine` are the engine's.

    `read_s`: device seconds in which the target reads so many tokens of a prompt, as measured. `prepare_decisions`: as
    `JobFeed` takes it.
    """
    limits = settings.worker
    queue: AdmissionQueue[ReadyJob] = AdmissionQueue(
        measured_batch=num_slots,
        quantum_s=limits.task_quantum_s,
        ageing_s=limits.priority_ageing_s,
        normal_share=limits.normal_lane_share,
        weight_of=lambda task: validation.task(task).weight,
        read_s=read_s,
        most_slack_s=limits.shared_beginning_slack_s,
    )
    return JobFeed(
        intake,
        validation,
        queue,
        claiming,
        leases,
        publishing.queue,
        publishing.forwarder,
        recorder,
        retry=retry,
        is_ending=is_ending,
        now=now,
        rng=rng,
        suspect_delay_s=limits.suspect_delay_s,
        num_ahead=max(LEAST_AHEAD, num_slots),
        max_waiting=limits.max_buffered,
        max_waiting_bytes=limits.max_buffered_bytes,
        contents=contents,
        num_readers=settings.claim_check.num_readers,
        wake_engine=wake_engine,
        prepare_decisions=prepare_decisions,
    )
