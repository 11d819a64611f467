"""What publishes after the loop, put together from the settings."""

from __future__ import annotations
from alphaloop.claim_check.store import ContentStore
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.outbox import Outbox
from alphaloop.store.outbox import RefusedResultStore
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final
from worker.engine import Engine
from worker.jobs.forwarding import Forwarder
from worker.jobs.letters import Letters
from worker.jobs.publications import PublishingQueue
from worker.jobs.publishing import Publisher
from worker.jobs.refusals import RefusedResults
from worker.jobs.unavailable_topics import UnavailableTopics
from worker.metrics import WorkerMetrics
from worker.retry import Retry


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
