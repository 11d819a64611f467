"""Jobs while servers die, hang, refuse, fail and cut their replies: each ends once, with its text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

import pytest
from sqlalchemy import text

from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result, Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import Answer, Connection, ServedEngine, engine_over, head, whole
from tests.fixtures.models import VANILLA, finish, make_job
from tests.fixtures.postgres import count
from tests.fixtures.worker import Client, running_worker, until
from worker.engine import Sampling

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_JOBS: Final = 350
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


@dataclass
class Faults:
    """Spoils one server after the other: each fault lasts for some jobs, and until a request has met it."""

    servers: list[ServedEngine]
    met: set[int] = field(default_factory=set)  #: numbers of the faults that a request met

    def begin(self, number: int) -> None:
        """Spoil a server."""
        self.servers[number % len(self.servers)].answer = self._counted(number)

    def end(self) -> None:
        """Have every server answer well."""
        for server in self.servers:
            server.answer = None

    def _counted(self, number: int) -> Answer:
        async def answer(connection: Connection) -> None:
            self.met.add(number)
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
    servers = {
        "plain-1": ServedEngine(FakeEngine(num_slots=8)),
        "plain-2": ServedEngine(FakeEngine(num_slots=8)),
        "speculative": ServedEngine(FakeEngine(num_slots=8), "lookup", 4),
    }
    client = Client(worker_settings)
    faults = Faults(list(servers.values()))
    jobs = [
        json.dumps(
            {"job_id": f"job-{n}", "prompt": prompt(n), "max_tokens": MAX_TOKENS, "stream": n % 10 == 0}
        ).encode()
        for n in range(NUM_JOBS)
    ]
    portion = -(-NUM_JOBS // len(FAULTS))
    with engine_over(servers, answer_s=5.0, silence_s=5.0) as engine, running_worker(worker_settings, engine):
        for number, first in enumerate(range(0, NUM_JOBS, portion)):
            faults.begin(number)
            client.send("code", jobs[first : first + portion])
            until(
                lambda half=first + portion // 2: count(database, "jobs WHERE outcome IS NOT NULL") >= half,
                "half of these jobs ended",
            )  # type: ignore[misc]
            until(lambda number=number: number in faults.met, f"a request met fault {number}")  # type: ignore[misc]
            faults.end()
        records = client.read([RESULTS], lambda found: len({record.key for record in found}) >= NUM_JOBS)
    results = [Result.decode(record.value or b"") for record in records]
    assert sorted({result.job_id for result in results}) == sorted(f"job-{n}" for n in range(NUM_JOBS))
    assert len(results) == NUM_JOBS, "no result is published twice while no process dies"
    assert faults.met == set(range(len(FAULTS)))
    texts = expected_texts()
    for result in results:
        assert result.status is Status.SUCCEEDED, (result.job_id, result.error)
        assert result.text == texts[int(result.job_id.removeprefix("job-")) % NUM_PROMPTS]
    runs = database.one(text("SELECT count(*), count(DISTINCT job_id) FROM decode_runs"))
    assert tuple(runs) == (NUM_JOBS, NUM_JOBS)
    assert count(database, "jobs WHERE outcome IS NULL") == 0
