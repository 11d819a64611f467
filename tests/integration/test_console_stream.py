"""A job's text in the console while it is decoded: on a real broker and database, over HTTP."""

from __future__ import annotations

import threading
import uuid

import pytest
from pydantic import SecretStr

from alphaloop.messages import Status
from alphaloop.settings import KafkaSettings
from alphaloop.store.database import Database
from alphaloop.store.outcomes import OutcomeStore
from tests.fixtures.console import Visitor, console
from tests.fixtures.runs import claim, outcome
from tests.fixtures.worker import Streamed, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


@pytest.fixture
def job_id(database: Database) -> str:
    """A job that a worker has."""
    name = f"stream-{uuid.uuid4().hex}"
    claim(database, name, owner="w1")
    return name


def test_a_text_grows_while_it_is_watched_until_the_job_ends(
    person: Visitor, kafka_settings: KafkaSettings, job_id: str
) -> None:
    streamed = Streamed(kafka_settings)
    streamed.text(job_id, 1, 0, "one ")
    page = person.get(f"/job?id={job_id}&show=text").text
    assert f'data-stream="/job/stream?id={job_id}"' in page
    assert ">one </pre>" in page, "what is there so far, for those without a script"
    assert person.get(f"/job.json?id={job_id}").data["text_so_far"] is None, "nobody asked for it"
    with person.events(f"/job/stream?id={job_id}") as events:
        shown = ""
        while not shown:
            name, data = next(events)
            shown = data["text"] if name == "text" else ""
        assert shown == "one "
        streamed.text(job_id, 1, 1, "two")
        assert next(events) == ("text", {"add": "two"})
        streamed.text(job_id, 2, 0, "another ")
        assert next(events) == ("text", {"text": "another "}), "a new attempt begins anew"
        streamed.text(job_id, 2, 1, "way")
        streamed.end(job_id, 2, 2)
        rest = list(events)
    assert "".join(data["add"] for name, data in rest if name == "text") == "way"
    assert rest[-1] == ("end", {"status": "succeeded", "reason": None})


def test_a_job_that_has_ended_is_told_at_once(person: Visitor, database: Database, job_id: str) -> None:
    OutcomeStore(database).record([outcome(job_id, text="the whole text", status=Status.SUCCEEDED)], owner="w1")
    with person.events(f"/job/stream?id={job_id}") as events:
        assert list(events) == [
            ("text", {"text": "the whole text"}),
            ("end", {"status": "succeeded", "reason": None}),
        ]
    assert "data-stream" not in person.get(f"/job?id={job_id}").text


def test_nobody_else_reads_a_stream(
    person: Visitor, database_url: SecretStr, kafka_settings: KafkaSettings, job_id: str
) -> None:
    assert Visitor(person.url).get(f"/job/stream?id={job_id}").status == 204, "after that no browser asks again"
    assert person.get("/job/stream").status == 404
    with console(database_url, kafka=kafka_settings) as visitor:
        assert visitor.get(f"/job/stream?id={job_id}").status == 400
        assert "data-stream" not in visitor.get(f"/job?id={job_id}&show=text").text


def test_a_stream_that_nobody_watches_any_more_ends_its_reading(person: Visitor, job_id: str) -> None:
    def num_threads() -> int:
        return sum(thread.name == "console-stream" for thread in threading.enumerate())

    until(lambda: num_threads() == 0, "the threads of earlier tests have ended")
    with person.events(f"/job/stream?id={job_id}") as events:
        assert next(events) == ("waits", {"is_claimed": True})
        assert num_threads() == 1
    until(lambda: num_threads() == 0, "the thread has ended")
