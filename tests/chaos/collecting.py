"""The ledger of a run, read from Kafka and Postgres after it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka import Message

from alphaloop.kafka.topics import TOKENS
from alphaloop.messages import read_chunk
from alphaloop.messages.dead_letter import PREFIX
from tests.chaos.ledger import ChunkRecord, Letter, Place, Row
from tests.chaos.reading import TopicReader, key_of

if TYPE_CHECKING:
    from tests.chaos.world import World

_ROWS = """
    SELECT job_id, status, outcome::text, coalesce(num_runs, 0), num_failures
    FROM jobs LEFT JOIN (SELECT job_id, count(*) AS num_runs FROM decode_runs GROUP BY job_id) AS runs USING (job_id)
"""


def letters_of(reader: TopicReader) -> list[Letter]:
    """Every dead letter."""
    return [_letter(message) for topic in reader.topics() if topic.endswith(".dlq") for message in reader.read(topic)]


def _letter(message: Message) -> Letter:
    sent: Any = message.headers() or ()  # the stub allows forms that only sending takes
    reason = {name.removeprefix(PREFIX): value.decode() for name, value in sent if name.startswith(PREFIX)}
    numbers = [reason.get(name, "") for name in ("partition", "offset", "timestamp")]
    place = Place(reason["topic"], *map(int, numbers)) if all(numbers) else None
    return Letter(key_of(message), reason["exception"], place, message.timestamp()[1])


def _ask(database_url: str, query: str, *given: Any) -> list[Any]:
    with psycopg.connect(database_url) as connection:
        return connection.execute(query, given).fetchall()


def read_rows(database_url: str) -> dict[str, Row]:
    """Every job's row."""
    return {
        job_id: Row(status, None if outcome is None else outcome.encode(), num_runs, num_failures)
        for job_id, status, outcome, num_runs, num_failures in _ask(database_url, _ROWS)
    }


def num_in_outbox(database_url: str) -> int:
    """Transactions whose results wait to be published."""
    return int(_ask(database_url, "SELECT count(*) FROM outbox")[0][0])


def num_measured(database_url: str) -> int:
    """Runs that the scheduler finished."""
    return int(_ask(database_url, "SELECT count(*) FROM schedule_runs WHERE finished_at IS NOT NULL")[0][0])


def ended_by(database_url: str, moment: datetime) -> set[str]:
    """Jobs whose outcome had been recorded by then."""
    return {job_id for (job_id,) in _ask(database_url, "SELECT job_id FROM jobs WHERE finished_at <= %s", moment)}


def chunks_of(reader: TopicReader) -> list[ChunkRecord]:
    """Every piece of a streamed text, the ends too."""
    found = []
    for message in reader.read(TOKENS):
        headers: Any = message.headers() or ()
        one = read_chunk(message.value(), headers)
        found.append(ChunkRecord(key_of(message), one.attempt, one.seq, one.text, one.status, one.whole_text))
    return found


def send_lost_again(world: World, reader: TopicReader) -> int:
    """Send those jobs again that have neither outcome nor dead letter, as a client would; returns how many.

    Only what was sent before the topics were made anew may be missing: later messages have to be read of the new ones.
    """
    letters, feeder = letters_of(reader), world.feeder
    feeder.may_be_gone |= feeder.refused_before_anew - {letter.place for letter in letters}
    ended = ended_by(world.servers.database_url, datetime.now(UTC)) | {letter.job_id for letter in letters}
    again = [job for job in feeder.sent[: world.num_sent_before_anew] if job.job_id not in ended]
    feeder.send_again(again)
    return len(again)
