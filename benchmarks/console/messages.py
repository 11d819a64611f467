"""What lies in Kafka and in the folder of batches: dead letters, a running job's text, an uploaded batch."""

from __future__ import annotations

import hashlib
import io
import json
import random
from contextlib import closing
from datetime import UTC, datetime
from typing import Final

from alphaloop.batches.lines import BatchReader, BatchRequest, KeptBatches
from alphaloop.batches.progress import send
from alphaloop.errors import InvalidField, MalformedMessage, MessageError, UnknownTask
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import TOKENS, ensure_topics
from alphaloop.messages import Chunk, Failure, Origin, chunk_headers, dead_letter, text_chunk
from alphaloop.messages.headers import encoded
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.jobs import ClaimRequest, JobStore
from alphaloop.store.outcomes import OutcomeStore
from benchmarks.console.jobs import ended_job
from benchmarks.console.plans import TARGET_NAME, WORKERS, TaskPlan

RUNNING_JOB: Final = "order-4711"
_FLUSH_S: Final = 60.0
_TEXT: Final = (
    "def median(values: list[float]) -> float:\n",
    '    """The middle value, or the mean of the two in the middle."""\n',
    "    ordered = sorted(values)\n",
    "    middle = len(ordered) // 2\n",
    "    if len(ordered) % 2:\n",
)
_LETTERS: Final[tuple[tuple[str, MessageError | Failure, str | None], ...]] = (
    ("code", InvalidField("expected at most 2, found 9", field="body.temperature"), "order-4702"),
    ("sql", Failure(code="decode_failed", message="a step of the engine failed three times"), "query-88"),
    ("code", MalformedMessage("expected a JSON object, found something else"), None),
    ("summarization", UnknownTask("no task 'summarisation'", hint="expected one of code, sql"), "mail-17"),
    ("code", InvalidField("no such field", field="body.tempreature", hint="did you mean temperature?"), "order-4705"),
)


def send_messages(settings: Settings, database: Database, plan: TaskPlan) -> None:
    """Write all of it; `plan` is the task of the batch and of the running job."""
    ensure_topics(settings.kafka, {*settings.tasks, *(task for task, *_ in _LETTERS)})
    _letters(settings)
    _stream(settings, database, plan)
    _batch(settings, database, plan)


def _letters(settings: Settings) -> None:
    with closing(Producer(settings.kafka, client_id="benchmark")) as producer:
        for offset, (task, reason, job_id) in enumerate(_LETTERS):
            fields = {"prompt": "Write a haiku about rivers.", **({"job_id": job_id} if job_id else {})}
            letter = dead_letter(
                reason,
                Origin("cluster", f"jobs.{task}", 0, 400 + offset),
                group="alphaloop-workers",
                num_deliveries=1,
                key=job_id.encode() if job_id else None,
                value=json.dumps(fields).encode(),
                headers=(("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),),
                job_id=job_id if isinstance(reason, Failure) else None,
            )
            producer.send(letter.topic, key=letter.key, value=letter.value, headers=letter.headers)
            producer.flush(_FLUSH_S)


def _stream(settings: Settings, database: Database, plan: TaskPlan) -> None:
    """A job that is being decoded, and the chunks of its text so far."""
    JobStore(database).claim([_claim(RUNNING_JOB, plan)], owner=WORKERS[0], lease_s=3600, max_attempts=3)
    with closing(Producer(settings.kafka, client_id="benchmark")) as producer:
        for seq, text in enumerate(_TEXT):
            chunk = Chunk(RUNNING_JOB, 1, seq, text)
            value = text_chunk(chunk, created=int(datetime.now(UTC).timestamp()), model=TARGET_NAME)
            producer.send(TOKENS, key=RUNNING_JOB.encode(), value=value, headers=encoded(chunk_headers(chunk, {})))
        producer.flush(_FLUSH_S)


def _batch(settings: Settings, database: Database, plan: TaskPlan) -> None:
    """Sixty lines: two are wrong, and half of the others have ended."""
    chat = {"messages": [{"role": "user", "content": "Write a haiku about rivers."}], "max_tokens": 64}
    lines = [_line(f"row-{number:02d}", chat) for number in range(58)]
    lines += [_line("row-hot", {**chat, "temperature": 9}), "{half a line"]
    content, now = io.BytesIO("\n".join(lines).encode()), datetime.now(UTC)
    kept = KeptBatches(settings.console_batches).add(
        content, name="haiku.jsonl", task=plan.task, by="alphaloop", at=now
    )
    content.seek(0)
    found = list(BatchReader(settings, kept.batch_id, task=plan.task).read(content))
    send(iter(found), settings, database)
    jobs = [line.job for line in found if isinstance(line, BatchRequest)]
    claims = [_claim(job.job_id, plan, job.custom_id, kept.batch_id) for job in jobs[:34]]
    claimed = JobStore(database).claim(claims, owner=WORKERS[0], lease_s=3600, max_attempts=3)
    rng = random.Random(3)
    ended = [ended_job(one.job_id, plan, one.attempt, now, rng, kept.batch_id) for one in claimed[:29]]
    OutcomeStore(database).record(ended, owner=WORKERS[0])


def _claim(job_id: str, plan: TaskPlan, custom_id: str | None = None, batch_id: str | None = None) -> ClaimRequest:
    payload = hashlib.sha256(job_id.encode()).digest()
    return ClaimRequest(job_id, payload, plan.task, "", custom_id, batch_id, "traffic")


def _line(custom_id: str, body: dict[str, object]) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})
