"""Dead letters in the console: who sees what of them, and sending them again, on a real broker and database."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import InvalidField, MessageError, UnknownTask
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages import Failure
from alphaloop.settings import KafkaSettings
from alphaloop.store.database import Database
from tests.fixtures.console import Visitor, console
from tests.fixtures.worker import everything, write_letter

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

SECRET = "the prompt that nobody may list"
Write = Callable[..., None]


@pytest.fixture
def task(kafka_settings: KafkaSettings) -> str:
    """A task whose topics no other test uses."""
    name = f"letters_{uuid.uuid4().hex[:12]}"
    ensure_topics(kafka_settings, [name])
    return name


@pytest.fixture
def write(kafka_settings: KafkaSettings, task: str) -> Write:
    """Writes a dead letter of the task."""

    def written(reason: MessageError | Failure, fields: dict[str, Any], job_id: str | None = None) -> None:
        value, headers = json.dumps({"prompt": SECRET, **fields}).encode(), (("tenant", b"a header of the sender"),)
        write_letter(kafka_settings, reason, value, topic=f"jobs.{task}", offset=7, job_id=job_id, headers=headers)

    return written


def test_letters_are_listed_newest_first_chosen_and_shown_without_their_messages(
    person: Visitor, write: Write, task: str
) -> None:
    write(InvalidField("expected at most 2", field="body.temperature"), {"job_id": "hot"})
    write(UnknownTask(), {"job_id": "lost"})
    write(Failure(code="decode_failed", message="no luck", hint="try later"), {"job_id": "bad"}, "bad")
    found = person.read(f"/dead-letters.json?task={task}")["letters"]
    assert [(one["job_id"], one["code"], one["redriven"]) for one in found] == [
        ("bad", "decode_failed", False),
        ("lost", "unknown_task", False),
        ("hot", "invalid_field", False),
    ]
    chosen = person.read(f"/dead-letters.json?task={task}&code=invalid_field&since=1h")["letters"]
    assert [one["job_id"] for one in chosen] == ["hot"]
    page = person.get(f"/dead-letters?task={task}").text
    address = f"/dead-letter?at={quote(found[0]['at'], safe='')}"
    assert address.replace("%3A", ":") in page or address in page
    letter = person.get(address).text
    assert "a job that failed" in letter
    assert "try later" in letter
    assert "a header of the sender" in letter
    assert SECRET not in page + letter + person.get(address.replace("?", ".json?")).text
    assert SECRET in person.get(f"{address}&show=message").text
    assert SECRET in person.get(f"{address.replace('?', '.json?')}&show=message").data["value"]
    for nowhere in (f"jobs.{task}.dlq:0:999", f"jobs.{task}.dlq:99:0", "jobs.nothing.dlq:0:0", "results:0:0", "x", ""):
        assert person.get(f"/dead-letter?at={nowhere}").status == 404, nowhere
    assert person.get("/dead-letters?since=yesterday").status == 400


def test_without_a_password_nobody_sees_a_message_or_sends_one_again(
    database_url: SecretStr, kafka_settings: KafkaSettings, write: Write, task: str
) -> None:
    write(UnknownTask(), {"job_id": "lost"})
    at = f"jobs.{task}.dlq:0:0"
    with console(database_url, kafka=kafka_settings) as visitor:
        for address in (f"/dead-letter?at={at}&show=message", f"/dead-letter.json?at={at}&show=message"):
            shown = visitor.get(address)
            assert shown.status == 200
            assert SECRET not in shown.text
            assert "a header of the sender" not in shown.text
        assert visitor.get(f"/dead-letters/redrive?at={at}").status == 400
        assert visitor.post("/dead-letters/redrive", {"at": at, "token": ""}).status == 403
    assert everything(kafka_settings, f"jobs.{task}") == []


def test_letters_are_sent_again_after_a_look_at_what_that_does(
    person: Visitor, kafka_settings: KafkaSettings, write: Write, task: str
) -> None:
    write(InvalidField("expected at most 2", field="body.temperature"), {"job_id": "hot", "temperature": 9})
    write(Failure(code="decode_failed", message="no luck"), {"job_id": "bad"}, "bad")
    address = f"/dead-letters/redrive?task={task}"
    tried = person.get(address.replace("?", ".json?")).data
    assert (tried["sent"], tried["sent_before"], tried["wrong"]) == (1, 0, 1)
    assert tried["problems"][0]["code"] == "invalid_field"
    corrected = {"task": task, "set": "temperature=0.5"}
    assert person.get(f"/dead-letters/redrive.json?{urlencode(corrected)}").data["sent"] == 2
    assert everything(kafka_settings, f"jobs.{task}") == [], "a look sends nothing"
    form = {**corrected, "token": person.token(f"/dead-letters/redrive?{urlencode(corrected)}")}
    assert person.post("/dead-letters/redrive", {**form, "token": "guessed"}).status == 403
    assert person.post("/dead-letters/redrive", {**form, "set": "temperature"}).status == 400
    assert person.post("/dead-letters/redrive", {"token": form["token"]}).status == 400, "every letter there is"
    done = person.post("/dead-letters/redrive", form)
    assert done.status == 303
    assert "2 sent again" in person.get(done.headers["location"]).text
    messages = [json.loads(record.value or b"") for record in everything(kafka_settings, f"jobs.{task}")]
    sent = {fields["job_id"]: fields for fields in messages}
    assert sent.keys() == {"hot~1", "bad~1"}
    assert (sent["hot~1"]["temperature"], sent["bad~1"]["redrive_of"]) == (0.5, "bad")
    shown = person.get(f"/dead-letter.json?at=jobs.{task}.dlq:0:1").data
    assert shown["redriven_as"] == "bad~1"
    one = {"at": f"jobs.{task}.dlq:0:1", "token": form["token"]}
    person.post("/dead-letters/redrive", one)
    assert len(everything(kafka_settings, f"jobs.{task}")) == 2, "it was sent before"
    person.post("/dead-letters/redrive", {**one, "again": "1"})
    assert len(everything(kafka_settings, f"jobs.{task}")) == 3


def test_letters_that_are_not_there_are_not_sent_again_and_leave_no_deed(
    person: Visitor, write: Write, task: str, database: Database
) -> None:
    write(UnknownTask(), {"job_id": "lost"})
    token = person.token("/batches")
    for named in ({"job": task}, {"code": task}, {"at": f"jobs.{task}.dlq:0:99"}, {"task": f"{task}-not"}):
        answers = (
            person.get(f"/dead-letters/redrive?{urlencode(named)}"),
            person.post("/dead-letters/redrive", {**named, "token": token}),
        )
        for answer in answers:
            assert (answer.status, "No dead letter" in answer.text) == (404, True), named
    written = "SELECT count(*) FROM audit WHERE action = 'letters_redriven' AND subject LIKE :named"
    assert database.scalar(text(written), {"named": f"%{task}%"}) == 0
