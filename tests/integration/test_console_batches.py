"""Batches in the console: uploaded, watched, cancelled, their files taken; on a real broker and database."""

from __future__ import annotations

import hashlib
import html
import http.client
import json
import re
import uuid
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.messages import Status
from alphaloop.settings import KafkaSettings
from alphaloop.store.database import Database
from alphaloop.store.outcomes import OutcomeStore
from benchmarks.console.filling import list_batches
from tests.fixtures.console import WAIT_S, Visitor, console
from tests.fixtures.messages import batch_line
from tests.fixtures.runs import claim, outcome
from tests.integration.test_console_actions import cancelled

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

SECRET = "the prompt of a line"


@pytest.fixture
def content() -> bytes:
    """Three good lines and three wrong ones, which no other test has sent."""
    unique = uuid.uuid4().hex
    good = [json.dumps(batch_line(f"{name}-{unique}", SECRET)) for name in ("a", "b", "c")]
    hot = json.dumps(batch_line("hot", SECRET, temperature=9))
    return "\n".join([*good, "{half a line", good[0], hot, ""]).encode()


def test_a_file_is_uploaded_watched_taken_and_cancelled(
    person: Visitor,
    content: bytes,
    database: Database,
    kafka_settings: KafkaSettings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="alphaloop")
    form = {"token": person.token("/batches"), "task": "code"}
    answer = person.upload(content, form)
    assert answer.status == 303
    assert "3 requests sent" in person.get(answer.headers["location"]).text
    (kept,) = person.get("/batches.json").data["batches"]
    batch_id = kept["id"]
    assert "1 request sent" in person.get(f"/batch?id={batch_id}&sent=1").text
    assert (kept["name"], kept["task"], kept["by"], kept["num_bytes"]) == (
        "requests.jsonl",
        "code",
        "alphaloop",
        len(content),
    )
    found = person.read(f"/batch.json?id={batch_id}")
    assert found["batch"]["request_counts"] == {"total": 6, "completed": 0, "failed": 3}
    assert [(one["line"], one["error"]["code"]) for one in found["wrong"]] == [
        (4, "malformed_message"),
        (5, "invalid_field"),
        (6, "invalid_field"),
    ]
    assert found["wrong"][2]["field"] == "body.temperature"
    page = person.get(f"/batch?id={batch_id}").text
    assert "an earlier line has this custom_id" in page
    assert SECRET not in page
    open_rows = _open_jobs(content, batch_id)
    claim(database, *open_rows[:2], owner="w1", batch_id=batch_id)
    OutcomeStore(database).record([outcome(open_rows[0], text="an answer", status=Status.SUCCEEDED)], owner="w1")
    (row,) = map(json.loads, person.get(f"/batch/file?id={batch_id}&part=output").text.splitlines())
    assert row["response"]["body"]["choices"][0]["message"]["content"] == "an answer"
    errors = person.get(f"/batch/file?id={batch_id}&part=error")
    assert len(errors.text.splitlines()) == 3
    assert errors.headers["content-disposition"] == f'attachment; filename="{batch_id}.error.jsonl"'
    assert person.get(f"/batch/file?id={batch_id}&part=open").status == 400
    assert person.get(f"/batch/file?id={quote('語 é')}&part=output").status == 404
    claim(database, f"named-{batch_id}", owner="w1", batch_id="語 é")
    named = person.get(f"/batch/file?id={quote('語 é')}&part=output")
    assert (named.status, named.headers["content-disposition"]) == (200, 'attachment; filename="___.output.jsonl"')
    answer = person.post("/batch/cancel", {"token": form["token"], "id": batch_id})
    assert "asked to cancel" in person.get(answer.headers["location"]).text
    asked = cancelled(kafka_settings, set(open_rows[1:]))
    assert asked & set(open_rows) == set(open_rows[1:]), "what has ended is not cancelled"
    again = person.upload(content, form)
    assert again.headers["location"].endswith("sent=1"), "two were seen by a worker"
    assert f"batch {batch_id}, 3 requests, by alphaloop in the console" in caplog.text
    written = database.rows(text("SELECT by_kind, by, action, subject, address FROM audit ORDER BY id"))
    actions = (("signed_in", ""), *((f"batch_{one}", batch_id) for one in ("submitted", "cancelled", "submitted")))
    assert [tuple(row) for row in written] == [("login", "alphaloop", *one, "127.0.0.1") for one in actions]
    assert SECRET not in caplog.text


def _open_jobs(content: bytes, batch_id: str) -> list[str]:
    """The job ids of the good lines, as every submission of the file makes them."""
    names = [json.loads(one)["custom_id"] for one in content.splitlines()[:3]]
    return [f"{batch_id}.{hashlib.sha256(name.encode()).hexdigest()[:24]}" for name in names]


def test_the_newest_of_many_batches_come_first_page_by_page(person: Visitor, database: Database) -> None:
    list_batches(database, 120, datetime.now(UTC))
    path, found = "/batches", list[dict[str, Any]]()
    for number in range(3):
        found += person.get(path.replace("/batches", "/batches.json")).data["batches"]
        following = re.search(r'rel="next" href="([^"]+)"', person.get(path).text)
        assert (following is None) == (number == 2)
        path = html.unescape(following[1]) if following else path
    assert len({one["id"] for one in found}) == len(found) == 120
    assert [one["created_at"] for one in found] == sorted((one["created_at"] for one in found), reverse=True)
    assert {one["source"] for one in found} == {"api", "command"}
    assert all(sum(one["requests_by_status"].values()) == one["request_counts"]["total"] for one in found)


def test_files_that_cannot_be_a_batch_are_refused_in_words(person: Visitor, content: bytes) -> None:
    form = {"token": person.token("/batches"), "task": "code"}
    assert person.upload(content, {**form, "token": "guessed"}).status == 403
    assert person.upload(content, {**form, "task": "nothing"}).status == 400
    empty = person.upload(b"\n\n", form)
    assert (empty.status, "found no line with text" in empty.text) == (400, True)
    large = person.upload(b"x" * 1_200_000, form)
    assert (large.status, "at most 1\xa0MB" in large.text) == (400, True)
    assert person.get("/batches.json").data["batches"] == []


def test_a_body_in_chunks_is_refused(person: Visitor) -> None:
    connection = http.client.HTTPConnection(urlsplit(person.url).netloc, timeout=WAIT_S)
    headers = {"Cookie": person.cookie or "", "Transfer-Encoding": "chunked"}
    with closing(connection):
        connection.request("POST", "/batches", iter([b"x" * 1000] * 10), headers, encode_chunked=True)
        answer = connection.getresponse()
        assert (answer.status, "the length of the file" in answer.read().decode()) == (400, True)


def test_without_a_password_nobody_uploads_and_nobody_takes_texts(
    database_url: SecretStr, kafka_settings: KafkaSettings, content: bytes
) -> None:
    with console(database_url, kafka=kafka_settings) as visitor:
        assert 'type="file"' not in visitor.get("/batches").text
        assert visitor.upload(content, {"token": "", "task": "code"}).status == 403
        assert visitor.get("/batch/file?id=x&part=output").status == 400
        assert visitor.post("/batch/cancel", {"id": "x", "token": ""}).status == 403
