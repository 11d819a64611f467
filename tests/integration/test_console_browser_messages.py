"""What lies in Kafka, in a real Chromium of a phone in the dark: a batch, a growing text, a dead letter."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from pydantic import SecretStr

from alphaloop.errors import InvalidField
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages import Failure, Status
from alphaloop.settings import KafkaSettings
from alphaloop.store.database import Database
from alphaloop.store.outcomes import OutcomeStore
from tests.fixtures.console import PASSWORD, Visitor, astray, console, opened, overhang, read_every_second
from tests.fixtures.messages import batch_line
from tests.fixtures.runs import claim, outcome
from tests.fixtures.worker import Streamed, write_letter

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.slow]


@pytest.fixture
def visitor(
    console_login: SecretStr, kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Visitor]:
    read_every_second(monkeypatch)
    with console(console_login, kafka=kafka_settings, password=SecretStr(PASSWORD), max_batch_mb=1) as found:
        yield found


@pytest.fixture
def page(browser: Browser, visitor: Visitor) -> Iterator[Page]:
    """A phone in the dark, signed in."""
    with opened(browser, is_phone=True, is_dark=True) as found:
        found.goto(f"{visitor.url}/sign-in")
        found.get_by_label("Name").fill("alphaloop")
        found.get_by_label("Password").fill(PASSWORD)
        found.get_by_role("button", name="Sign in").click()
        expect(found.get_by_role("heading", name="Now")).to_be_visible()
        yield found


def claimed(database: Database, job_id: str, batch_id: str | None = None) -> str:
    """A job that a worker holds."""
    claim(database, job_id, batch_id=batch_id, owner="w1")
    return job_id


def test_a_batch_is_uploaded_watched_and_taken(page: Page, database: Database, tmp_path: Path) -> None:
    names = [f"row-{uuid.uuid4().hex}" for _ in range(3)]
    file = tmp_path / "haiku.jsonl"
    file.write_text("\n".join(json.dumps(batch_line(one)) for one in names), encoding="utf-8")
    (tmp_path / "large.jsonl").write_bytes(b"x" * 1_100_000)
    page.get_by_role("link", name="Batches", exact=True).click()
    chooser = page.get_by_label("Batch file in OpenAI's form")
    chooser.set_input_files(tmp_path / "large.jsonl")
    assert chooser.evaluate("it => it.validationMessage") == "Expected a file of at most 1 MB."
    chooser.set_input_files(file)
    page.get_by_label("Task of lines that name none").select_option("code")
    page.get_by_role("button", name="Send its requests").click()
    expect(page.get_by_text("3 requests sent")).to_be_visible()
    batch_id = page.get_by_role("heading", level=1).inner_text()
    job_id = f"{batch_id}.{hashlib.sha256(names[0].encode()).hexdigest()[:24]}"
    claimed(database, job_id, batch_id)
    OutcomeStore(database).record([outcome(job_id, text="an answer", status=Status.SUCCEEDED)], owner="w1")
    failed = claimed(database, f"{batch_id}.{hashlib.sha256(names[1].encode()).hexdigest()[:24]}", batch_id)
    why = Failure(code="decode_failed", message="a step failed", hint="")
    OutcomeStore(database).record([outcome(failed, status=Status.FAILED, error=why)], owner="w1")
    expect(page.locator(".tiles li").filter(has_text=re.compile("^1 ?completed"))).to_be_visible()
    expect(page.get_by_text("a step failed")).to_be_visible()
    assert (overhang(page), astray(page)) == (0, [])
    with page.expect_download() as taken:
        page.get_by_role("link", name="Output file so far").click()
    (row,) = map(json.loads, taken.value.path().read_text(encoding="utf-8").splitlines())
    assert row["custom_id"] == names[0]
    assert row["response"]["body"]["choices"][0]["message"]["content"] == "an answer"
    page.get_by_role("button", name="Cancel what has not ended").click()
    expect(page.get_by_text("The workers were asked to cancel what has not ended.")).to_be_visible()
    page.get_by_role("link", name="Batches", exact=True).first.click()
    expect(page.get_by_role("link", name=batch_id)).to_be_visible()
    assert overhang(page) == 0


def test_a_text_grows_until_its_job_ends(page: Page, database: Database, kafka_settings: KafkaSettings) -> None:
    job_id, streamed = claimed(database, f"grows-{uuid.uuid4().hex}"), Streamed(kafka_settings)
    streamed.text(job_id, 1, 0, "one ")
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.get_by_role("searchbox", name="Id of a job").fill(job_id)
    page.get_by_role("button", name="Find job").click()
    text = page.locator("pre.text")
    expect(text).to_have_text("one ")
    expect(page.get_by_text("It is being decoded.")).to_be_visible()
    streamed.text(job_id, 1, 1, "<b>two</b>")
    expect(text).to_have_text("one <b>two</b>")
    assert overhang(page) == 0
    page.get_by_role("button", name="Cancel this job").click()
    expect(page.get_by_text("The workers were asked to cancel it.")).to_be_visible()
    OutcomeStore(database).record([outcome(job_id, text="one two", status=Status.SUCCEEDED)], owner="w1")
    streamed.end(job_id, 1, 2)
    expect(page.get_by_role("heading", name="Text", exact=True)).to_be_visible()
    expect(text).to_have_text("one two")
    assert overhang(page) == 0


def test_a_dead_letter_is_read_corrected_and_sent_again(page: Page, kafka_settings: KafkaSettings) -> None:
    task, wrong = f"letters_{uuid.uuid4().hex[:12]}", InvalidField("expected at most 2", field="body.temperature")
    ensure_topics(kafka_settings, [task])
    job = {"job_id": f"hot-{uuid.uuid4().hex}", "prompt": "Write a haiku.", "temperature": 9}
    letter = write_letter(kafka_settings, wrong, json.dumps(job).encode(), topic=f"jobs.{task}", offset=7)
    page.get_by_role("link", name="Dead letters", exact=True).click()
    page.get_by_role("searchbox", name="Task").fill(task)
    page.get_by_role("button", name="Find").click()
    page.get_by_role("link", name=letter.topic).click()
    expect(page.get_by_role("heading", name=letter.topic)).to_be_visible()
    assert overhang(page) == 0
    page.get_by_role("link", name="Show the message").click()
    expect(page.get_by_text("Write a haiku.")).to_be_visible()
    page.get_by_role("link", name="Send it again…").click()
    expect(page.get_by_text("1 would be refused again")).to_be_visible()
    assert overhang(page) == 0
    page.get_by_label("Corrections, one FIELD=VALUE a line").fill("temperature=0.5")
    page.get_by_role("button", name="Try, without sending").click()
    page.get_by_role("button", name="Send 1 again").click()
    expect(page.get_by_role("heading", name=letter.topic)).to_be_visible()
    expect(page.locator("dl.facts div").filter(has_text="Sent again").get_by_role("link")).to_be_visible()
