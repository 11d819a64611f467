"""Sending the requests of a batch: those that no worker has seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from alphaloop.batches.lines import BatchLine, Request
from alphaloop.batches.progress import latest_jobs, pages
from alphaloop.claim_check.contents import by_reference
from alphaloop.claim_check.store import ContentStore
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages import encode_job
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database

_FLUSH_S: Final = 120.0


@dataclass(slots=True)
class Sent:
    """What came of it."""

    num_lines: int = 0  #: with text, wrong ones among them
    num_sent: int = 0
    waiting: dict[str, None] = field(default_factory=dict)  #: the jobs that have not ended


def send(lines: Iterator[BatchLine], settings: Settings, database: Database) -> Sent:
    """Send what no worker has seen, and wait until the broker has it; wrong lines are left out.

    Creates missing topics. Raises BrokerError, StoreError, ContentStoreUnavailable.
    """
    ensure_topics(settings.kafka, settings.tasks)
    contents = ContentStore.of(settings.claim_check)
    done = Sent()
    with closing(Producer(settings.kafka, client_id="alphaloop-batch")) as producer:
        for page in pages(lines):
            done.num_lines += len(page)
            jobs = [line.job for line in page if isinstance(line, Request)]
            latest = latest_jobs(database, [job.job_id for job in jobs])
            for job in jobs:
                now = latest[job.job_id]
                if now.job_id == job.job_id and not now.is_claimed:
                    producer.send(
                        jobs_topic(job.task),
                        key=job.job_id.encode(),
                        value=encode_job(by_reference(job, settings.worker.max_job_bytes, contents)),
                    )
                    done.num_sent += 1
                if now.result is None:
                    done.waiting[now.job_id] = None
        producer.flush(_FLUSH_S)
    return done
