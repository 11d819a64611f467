"""What those who signed in to the console may do, and nobody else."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import CONTROL, ensure_topics
from alphaloop.measurements import DriftSubject
from alphaloop.settings import KafkaSettings
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore, EventChange, EventState, Incident, IncidentKind, IncidentStore
from tests.fixtures.console import Visitor, console
from tests.fixtures.drift import content
from tests.fixtures.runs import claim
from tests.fixtures.worker import Sender, read, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NOW = datetime(2026, 11, 23, 7, tzinfo=UTC)


@pytest.fixture
def event_id(database: Database) -> int:
    found = content(DriftSubject("code", "lookup", "r", "t"))
    DriftEventStore(database).write([EventChange(None, EventState.OPENED, found, "α_1 fell.")], datetime.now(UTC))
    (event,) = DriftEventStore(database).open_events()
    return event.id


def test_a_drift_event_is_acknowledged(person: Visitor, database: Database, event_id: int) -> None:
    token = person.token(f"/drift/{event_id}")
    form = {"token": token, "by": "Ada", "note": "a new draft is in training"}
    answer = person.post(f"/drift/{event_id}/acknowledge", form)
    assert (answer.status, answer.headers["location"]) == (303, f"/drift/{event_id}")
    event = DriftEventStore(database).find(event_id)
    assert (event.acknowledged_by, event.note) == ("Ada", "a new draft is in training")
    assert "Ada took note of it" in person.get(f"/drift/{event_id}").text
    assert person.post("/drift/99/acknowledge", form).status == 404
    assert person.post(f"/drift/{event_id}/acknowledge", {**form, "by": " "}).status == 400


def test_an_incident_is_acknowledged_and_stays_open(person: Visitor, database: Database) -> None:
    store = IncidentStore(database)
    store.open([Incident(IncidentKind.WRONG_TEXT, "code", "lookup", "r", "t", "e", ("j-1",), "Wrong.", {})], NOW)
    (incident,) = store.open_incidents()
    form = {"token": person.token("/drift"), "by": "Ada", "note": "the kernel is being looked at"}
    address = f"/incidents/{incident.id}/acknowledge"
    assert person.post(address, {**form, "token": "guessed"}).status == 403
    assert person.post(address, {**form, "by": ""}).status == 400
    assert person.post("/incidents/99/acknowledge", form).status == 404
    answer = person.post(address, form)
    assert (answer.status, answer.headers["location"]) == (303, "/drift")
    (found,) = person.get("/drift.json").data["open_incidents"]
    assert (found["acknowledged"]["by"], found["acknowledged"]["note"]) == ("Ada", form["note"])
    assert "Ada took note of it" in person.get("/drift").text
    store.open([incident.found], datetime.now(UTC))
    assert person.get("/drift.json").data["open_incidents"][0]["acknowledged"], "further jobs are the same incident"
    store.close([incident.id], datetime.now(UTC))
    assert person.post(address, form).status == 404, "it is over"
    assert "Ada took note of it" in person.get("/drift").text


def test_a_form_without_the_sessions_token_does_nothing(person: Visitor, database: Database, event_id: int) -> None:
    address, form = f"/drift/{event_id}/acknowledge", {"by": "Eve", "note": ""}
    assert person.post(address, form).status == 403
    assert person.post(address, {**form, "token": "guessed"}).status == 403
    signed_out = Visitor(person.url)
    token = person.token(f"/drift/{event_id}")
    assert signed_out.post(address, {**form, "token": token}).status == 403
    other = Visitor(person.url)
    other.sign_in()
    assert other.post(address, {**form, "token": token}).status == 403, "the token is another session's"
    event = DriftEventStore(database).find(event_id)
    assert event.acknowledged_by is None


def test_a_login_in_the_header_reads_and_does_not_act(person: Visitor, event_id: int) -> None:
    program = Visitor(person.url, headers={"Authorization": "Basic YWxwaGFsb29wOmNvcnJlY3QgaG9yc2U="})
    page = program.get(f"/drift/{event_id}")
    assert page.status == 200
    assert "<button>Acknowledge" not in page.text
    assert program.post(f"/drift/{event_id}/acknowledge", {"token": "", "by": "Eve"}).status == 403


def test_without_a_password_no_form_is_shown_and_none_is_taken(database_url: SecretStr, event_id: int) -> None:
    with console(database_url) as visitor:
        assert "<button>Acknowledge" not in visitor.get(f"/drift/{event_id}").text
        assert visitor.post(f"/drift/{event_id}/acknowledge", {"by": "Eve", "token": ""}).status == 403
        assert visitor.post("/job/cancel", {"id": "a", "token": ""}).status == 403


def test_a_form_that_is_too_large_is_refused(person: Visitor, event_id: int) -> None:
    token = person.token(f"/drift/{event_id}")
    many = {f"field-{number}": "x" for number in range(50)}
    assert person.post(f"/drift/{event_id}/acknowledge", {"token": token, "by": "Ada", **many}).status == 400


def test_a_job_is_cancelled(person: Visitor, database: Database, kafka_settings: KafkaSettings) -> None:
    job_id = f"cancel-{time.time_ns()}"
    claim(database, job_id, owner="w1")
    answer = person.post("/job/cancel", {"token": person.token(f"/job?id={job_id}"), "id": job_id})
    assert answer.status == 303
    assert "The workers were asked to cancel it" in person.get(answer.headers["location"]).text
    assert job_id in cancelled(kafka_settings, {job_id})


def test_what_is_unknown_is_not_cancelled(person: Visitor, database: Database, kafka_settings: KafkaSettings) -> None:
    """A waiting job has a button, because it exists; an unknown one has none, and a form of one's own is refused."""
    waiting, unknown = f"waits-{time.time_ns()}", f"unknown-{time.time_ns()}"
    ensure_topics(kafka_settings, ["code"])
    Sender(kafka_settings).send("jobs.code", [json.dumps({"job_id": waiting, "prompt": "x"}).encode()])
    for job_id, status, told in ((waiting, 200, "Waits in Kafka"), (unknown, 404, "Unknown: no worker has seen it")):
        until(lambda: told in person.get(f"/job?id={job_id}").text, "it was looked for")  # noqa: B023
        page = person.get(f"/job?id={job_id}")
        assert (page.status, "Cancel this job" in page.text) == (status, status == 200)
    token = person.token("/batches")
    for address in ("/job/cancel", "/batch/cancel"):
        assert person.post(address, {"token": token, "id": unknown}).status == 404
    assert person.get(f"/job/stream?id={unknown}").status == 404
    assert person.post("/job/cancel", {"token": token, "id": waiting}).status == 303
    assert unknown not in cancelled(kafka_settings, {waiting})
    assert database.scalar(text("SELECT count(*) FROM audit WHERE subject = :it"), {"it": unknown}) == 0


def cancelled(kafka: KafkaSettings, wanted: set[str]) -> set[str]:
    """The jobs that the control topic asks to cancel, read until all of the wanted ones were found."""

    def asked(records: list[Record]) -> set[str]:
        return {json.loads(record.value or b"{}").get("job_id") for record in records}

    return asked(read(kafka, [CONTROL], lambda records: wanted <= asked(records)))
