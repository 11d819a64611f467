"""Jobs while servers die, hang, refuse, fail and cut their replies: each ends once, with its text."""

from __future__ import annotations

import json
from typing import Final

import pytest
from sqlalchemy import text

from alphaloop.engine import Sampling
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result, Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import Answer, Connection, ServedEngine, engine_over, head, whole
from tests.fixtures.models import VANILLA, finish, make_job
from tests.fixtures.postgres import count
from tests.fixtures.worker import Client, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_JOBS: Final = 210
NUM_PROMPTS: Final = 20
MAX_TOKENS: Final = 24


async def dies(connection: Connection) -> None:
    """As a process that is killed: the connection breaks."""
    connection.reset()


async def hangs(connection: Connection) -> None:
    """As a process that is stopped: nothing comes, and the connection stays."""
    await connection.left()


async def cuts(connection: Connection) -> None:
    """The reply ends in its middle."""
    content = b'{"model": "fake", "choices": [{"index": 0, "te'
    await connection.send(head(Content_Length="400") + content)
    connection.reset()


async def answers_nonsense(connection: Connection) -> None:
    """Another program listens there."""
    await whole({"greeting": "hello"})(connection)


FAULTS: Final[tuple[Answer, ...]] = (
    dies,
    whole({"error": {"message": "later", "type": "rate_limit_exceeded", "code": 429}}, 429, Retry_After="1"),
    hangs,
    whole({"error": {"message": "oops", "type": "InternalServerError", "code": 500}}, 500),
    cuts,
    answers_nonsense,
    whole({"error": {"message": "gone", "type": "ServiceUnavailable", "code": 503}}, 503),
)


def noting(number: int, met: set[int]) -> Answer:
    """A fault whose number is among those that were met once a request has met it."""

    async def answer(connection: Connection) -> None:
        met.add(number)
        await FAULTS[number](connection)

    return answer


def prompt(number: int) -> str:
    return f"complete function number {number % NUM_PROMPTS} of them"


def expected_texts() -> dict[int, str]:
    """What the servers' engine says to each prompt."""
    jobs, sampling = [make_job(prompt(n), n) for n in range(NUM_PROMPTS)], Sampling(MAX_TOKENS, temperature=0.0)
    texts = finish(FakeEngine(), ((job, sampling, VANILLA) for job in jobs))
    return {number: texts[job.job_id].text for number, job in enumerate(jobs)}


def test_every_job_ends_once_with_its_text_while_servers_fail(worker_settings: Settings, database: Database) -> None:
    """One server after the other is spoilt: each fault lasts for some jobs, and until a request has met it."""
    servers = {
        "plain-1": ServedEngine(FakeEngine(num_slots=8)),
        "plain-2": ServedEngine(FakeEngine(num_slots=8)),
        "speculative": ServedEngine(FakeEngine(num_slots=8), "lookup", 4),
    }
    client, met = Client(worker_settings), set[int]()
    jobs = [
        json.dumps(
            {"job_id": f"job-{n}", "prompt": prompt(n), "max_tokens": MAX_TOKENS, "stream": n % 10 == 0}
        ).encode()
        for n in range(NUM_JOBS)
    ]
    portion = -(-NUM_JOBS // len(FAULTS))
    with engine_over(servers, answer_s=2.5) as engine, running_worker(worker_settings, engine):
        for number, first in enumerate(range(0, NUM_JOBS, portion)):
            spoilt = [*servers.values()][number % len(servers)]
            spoilt.answer = noting(number, met)
            client.send("code", jobs[first : first + portion])
            until(
                lambda half=first + portion // 2: count(database, "jobs WHERE outcome IS NOT NULL") >= half,
                "half of these jobs ended",
            )  # type: ignore[misc]
            until(lambda number=number: number in met, f"a request met fault {number}")  # type: ignore[misc]
            spoilt.answer = None
        records = client.read([RESULTS], lambda found: len({record.key for record in found}) >= NUM_JOBS)
    results = [Result.decode(record.value or b"") for record in records]
    assert sorted({result.job_id for result in results}) == sorted(f"job-{n}" for n in range(NUM_JOBS))
    assert len(results) == NUM_JOBS, "no result is published twice while no process dies"
    assert met == set(range(len(FAULTS)))
    texts = expected_texts()
    for result in results:
        assert result.status is Status.SUCCEEDED, (result.job_id, result.error)
        assert result.text == texts[int(result.job_id.removeprefix("job-")) % NUM_PROMPTS]
    runs = database.one(text("SELECT count(*), count(DISTINCT job_id) FROM decode_runs"))
    assert tuple(runs) == (NUM_JOBS, NUM_JOBS)
    assert count(database, "jobs WHERE outcome IS NULL") == 0
