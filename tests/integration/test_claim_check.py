"""Prompts and texts that are too large for Kafka, end to end: a real broker, a real database, a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from alphaloop.claim_check.store import ContentStore, by_reference, with_text
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Body, Job, Result, Status, encode_job
from alphaloop.messages.topics import dlq_topic, jobs_topic
from alphaloop.settings import ClaimCheckSettings, KafkaSettings, Settings
from alphaloop.store.database import Database
from alphaloop.store.housekeeping import RetentionStore
from tests.fakes import FakeEngine, VerboseEngine
from tests.fixtures.broker import Operator
from tests.fixtures.runs import num_pending
from tests.fixtures.worker import Client, RunningWorker, by_key, changed, headers_of, kafka_extra, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

LIMIT = 2000  #: bytes of a message on `results`
LARGE = 3 << 20  #: bytes of a prompt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "contents"
    found.mkdir()
    return found


@pytest.fixture
def settings(worker_settings: Settings, clean_kafka: KafkaSettings, folder: Path) -> Settings:
    Operator(clean_kafka.bootstrap_servers).create(RESULTS, max_message_bytes=LIMIT)
    # An outcome that waits is tried again soon.
    soon = changed(kafka_extra(worker_settings, compression_type="none"), worker={"lease_s": 2.0})
    return soon.model_copy(update={"claim_check": ClaimCheckSettings(url=str(folder))})


@pytest.fixture
def contents(settings: Settings) -> ContentStore:
    found = ContentStore.of(settings.claim_check)
    assert found is not None
    return found


def job(name: str, prompt: str = "write") -> Job:
    return Job(job_id=name, task="code", body=Body(prompt=prompt, max_tokens=8))


def referring(name: str, content: bytes, contents: ContentStore) -> Job:
    reference = contents.write(f"mine/{name}", content)
    return job(name).model_copy(update={"body_ref": reference})


def path_of(sent: Job | Result, folder: Path) -> Path:
    reference = sent.body_ref if isinstance(sent, Job) else sent.text_ref
    found = Path(reference.url.removeprefix("file://"))
    assert found.is_relative_to(folder)
    return found


def results(client: Client, *names: str) -> dict[str, Result]:
    records = client.read([RESULTS], lambda records: set(names) <= by_key(records).keys())
    return {name: Result.decode(by_key(records)[name][0]) for name in names}


@contextmanager
def away(folder: Path) -> Iterator[None]:
    """The folder is not mounted."""
    hidden = folder.rename(folder.with_name("unmounted"))
    yield
    hidden.rename(folder)


def recorded(database: Database, name: str) -> tuple[str, bytes, int, int]:
    """Status, outcome, claims and crashes of a job."""
    query = "SELECT status, outcome::text, attempt, num_crashes FROM jobs WHERE job_id = :name"
    status, outcome, attempt, num_crashes = database.one(text(query), {"name": name})
    return status, outcome.encode(), attempt, num_crashes


def refused(worker: RunningWorker, done: str) -> float:
    labels = {"code": "result_too_large", "done": done}
    return worker.worker.metrics.registry.get_sample_value("alphaloop_results_refused_total", labels) or 0.0


def test_a_large_prompt_and_a_long_text_travel_by_reference_and_are_the_same_job_again(
    settings: Settings, contents: ContentStore, folder: Path, database: Database
) -> None:
    client = Client(settings)
    large = by_reference(job("long-1", "x" * LARGE), settings.worker.max_job_bytes, contents)
    value = encode_job(large)
    assert len(value) < 1000
    with running_worker(settings, VerboseEngine("long")) as worker:
        client.send("code", [value])
        found = results(client, "long-1")["long-1"]
        assert (found.status, found.text) == (Status.SUCCEEDED, None)
        assert refused(worker, "by_reference") == 1.0
        path_of(large, folder).unlink()  # a job that has ended needs its prompt no more
        client.send("code", [value])
        answers = client.read([RESULTS], lambda records: len(by_key(records).get("long-1", [])) >= 2)
    first, again = by_key(answers)["long-1"]
    assert first == again == recorded(database, "long-1")[1], "recorded and published agree"
    whole = with_text(found, contents)
    assert whole.text is not None
    assert len(whole.text) > LIMIT
    assert num_pending(database) == 0


def test_a_prompt_that_is_missing_or_altered_fails_its_job_and_one_from_elsewhere_is_refused(
    settings: Settings, contents: ContentStore, folder: Path, tmp_path: Path, database: Database
) -> None:
    client = Client(settings)
    good = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    jobs = {name: referring(name, good, contents) for name in ("good", "missing", "altered", "elsewhere")}
    path_of(jobs["missing"], folder).unlink()
    path_of(jobs["altered"], folder).write_bytes(good.replace(b"hello", b"HELLO"))
    secret = tmp_path / "secret"
    secret.write_bytes(good)
    other = jobs["elsewhere"].body_ref.model_copy(update={"url": f"file://{secret}"})
    jobs["elsewhere"] = jobs["elsewhere"].model_copy(update={"body_ref": other})
    with running_worker(settings, FakeEngine()):
        client.send("code", [encode_job(one) for one in jobs.values()])
        found = results(client, "good", "missing", "altered")
        dlq = dlq_topic(jobs_topic("code"))
        letters = client.read([dlq], lambda records: len(records) >= 3)
    codes = {name: result.error.code for name, result in found.items() if result.error}
    assert found["good"].status is Status.SUCCEEDED
    assert codes == {"missing": "content_missing", "altered": "content_altered"}
    assert recorded(database, "missing")[0] == "failed"
    reasons = {headers_of(letter)["__dlq.errors.exception"] for letter in letters}
    assert reasons == {"content_missing", "content_altered", "invalid_field"}
    assert not [letter for letter in letters if b"HELLO" in (letter.value or b"")]


def test_a_store_that_is_away_costs_no_try_and_holds_up_no_other_job(
    settings: Settings, contents: ContentStore, folder: Path, database: Database
) -> None:
    client = Client(settings)
    waiting = referring("waiting", b'{"prompt": "hello"}', contents)
    with running_worker(settings, VerboseEngine("long")) as worker:
        with away(folder):
            client.send("code", [encode_job(one) for one in (waiting, job("long-2"), job("small"))])
            assert results(client, "small")["small"].status is Status.SUCCEEDED
            until(lambda: refused(worker, "postponed") >= 1.0, "the long text waits")
            assert database.row(text("SELECT FROM jobs WHERE job_id = 'waiting'")) is None
        found = results(client, "waiting", "long-2")
        until(lambda: num_pending(database) == 0, "everything is acknowledged")
    assert {one.status for one in found.values()} == {Status.SUCCEEDED}
    assert recorded(database, "waiting")[2:] == (1, 0)
    assert (with_text(found["long-2"], contents).text or "").split()


def test_retention_deletes_texts_after_their_jobs(
    settings: Settings, contents: ContentStore, folder: Path, database: Database
) -> None:
    client = Client(settings)
    with running_worker(settings, VerboseEngine("long")):
        client.send("code", [encode_job(job("long-3"))])
        path = path_of(results(client, "long-3")["long-3"], folder)
    retention, later = RetentionStore(database), datetime.now(UTC) + timedelta(days=1)

    def drop() -> int:
        return retention.drop_texts(later, lambda: False, contents.delete).num_rows

    assert drop() == 0, "the job may be answered again"
    assert path.exists()
    assert retention.drop_jobs(later, lambda: False).num_rows == 1
    assert drop() == 1
    assert not path.exists()
    assert drop() == 0


def test_without_a_store_a_reference_is_refused_with_the_way_out(settings: Settings, contents: ContentStore) -> None:
    client = Client(settings)
    sent = referring("any", b'{"prompt": "hello"}', contents)
    with running_worker(settings.model_copy(update={"claim_check": ClaimCheckSettings()}), FakeEngine()):
        client.send("code", [encode_job(sent)])
        (letter,) = client.read([dlq_topic(jobs_topic("code"))], bool)
    told = headers_of(letter)
    assert (told["__dlq.errors.exception"], told["__dlq.errors.field"]) == ("invalid_field", "body_ref")
