"""OpenAI's own client against the console's server, a real broker, a real database and a worker."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from openai.types.chat import ChatCompletion
from sqlalchemy import text

from alphaloop.batches.advancing import Advancing
from alphaloop.kafka.producer import Producer
from alphaloop.settings import SegmentSettings, Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.messages import batch_line
from tests.fixtures.openai_api import client, create_key, ended, served
from tests.fixtures.postgres import count
from tests.fixtures.worker import WAIT_S, Client, changed, everything, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.usefixtures("looks_often")]

SECRET = "the prompt of a line"
#: Requests of the large batch. API_LINES sets another number.
NUM_LINES = int(os.environ.get("API_LINES", "1200"))
BAD = ("{half a line", json.dumps({**batch_line("get"), "method": "GET"}), json.dumps(batch_line("hot", temperature=9)))


def jsonl(num_lines: int, bad: Sequence[str] = ()) -> bytes:
    """Good lines, and then bad ones."""
    return "\n".join([*(json.dumps(batch_line(f"r-{n}", SECRET)) for n in range(num_lines)), *bad]).encode()


def create(api: openai.OpenAI, content: bytes, **given: Any) -> Batch:
    """Upload it and create a batch of it."""
    file = api.files.create(file=("requests.jsonl", content), purpose="batch")
    asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **given}
    return api.batches.create(input_file_id=file.id, **asked)


def rows(api: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The rows of a file that a batch wrote."""
    assert file_id is not None
    return [json.loads(line) for line in api.files.content(file_id).text.splitlines()]


def test_a_batch_from_upload_to_download(
    worker_settings: Settings,
    database: Database,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="alphaloop")
    key = create_key(database, "nightly", segment="gold", tasks=["chat", "code"])
    with (
        served(worker_settings, tmp_path) as url,
        client(url, key) as api,
        running_worker(worker_settings, FakeEngine(num_slots=16)),
    ):
        foreign_model = json.dumps(batch_line("other", model="gpt-5"))
        other_task = json.dumps({**batch_line("math"), "task": "math"})
        own_task = json.dumps({**batch_line("code"), "task": "code", "segment": "stolen"})
        made = create(
            api, jsonl(20, [*BAD, foreign_model, other_task, own_task]), metadata={"task": "chat", "run": "7"}
        )
        assert (made.status, made.metadata) == ("validating", {"task": "chat", "run": "7"})
        done = ended(api, made.id)
        assert done.status == "completed", done
        assert (done.errors, done.completion_window) == (None, "24h")
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": 26, "completed": 21, "failed": 5}
        assert done.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0) <= (done.completed_at or 0)
        output = rows(api, done.output_file_id)
        assert {row["custom_id"] for row in output} == {*(f"r-{n}" for n in range(20)), "code"}
        for row in output:
            answer = ChatCompletion.model_validate(row["response"]["body"])
            assert answer.choices[0].message.content
        wrong = rows(api, done.error_file_id)
        assert sorted((row["line"], row["error"]["code"]) for row in wrong if "line" in row) == [
            (21, "malformed_message"),
            (22, "invalid_field"),
            (23, "invalid_field"),
            (25, "invalid_field"),
        ]
        assert [row["custom_id"] for row in wrong if "line" not in row] == ["other"]
        jobs = database.rows(text("SELECT DISTINCT segment, batch_id FROM jobs"))
        assert [tuple(row) for row in jobs] == [("gold", made.id)], "whatever a line says"
        file = api.files.retrieve(done.output_file_id or "")
        assert (file.bytes, file.purpose) == (len(api.files.content(file.id).content), "batch_output")
        assert api.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            api.files.content(file.id)
        listed = [one.id for one in api.files.list(limit=1)]
        assert listed == [done.error_file_id, done.input_file_id], "page by page, the newest first"
        assert [one.id for one in api.batches.list(limit=1)] == [made.id]
        model = FakeEngine().identity.target
        assert [one.id for one in api.models.list()] == [model]
        assert api.models.retrieve(model).owned_by == "alphaloop"
    done_by = database.rows(text("SELECT by_kind, by, action, address FROM audit WHERE by_kind = 'key' ORDER BY id"))
    assert [row.action for row in done_by] == ["file_uploaded", "batch_created", "file_deleted"]
    assert {(row.by, row.address) for row in done_by} == {(f"nightly ({key[:9]}…)", "127.0.0.1")}
    assert SECRET not in caplog.text
    assert key not in caplog.text


def test_a_cancelled_batch_keeps_what_is_done(worker_settings: Settings, database: Database, tmp_path: Path) -> None:
    """Of a batch one request has ended, one runs and others wait; of another nothing was ever claimed."""
    goes_on = threading.Event()

    def hold_the_second() -> None:
        if engine.num_steps == 4:
            assert goes_on.wait(WAIT_S)

    engine = FakeEngine(num_slots=1, acceptance=(), before_step=hold_the_second)
    key = create_key(database, "one", tasks=["chat"])
    with served(worker_settings, tmp_path) as url, client(url, key) as api:
        with running_worker(worker_settings, engine) as worker:
            made = create(api, jsonl(4))
            until(lambda: count(database, "jobs WHERE status = 'succeeded'") == 1, "one request has ended")
            until(lambda: count(database, "jobs") == 4, "all are claimed")
            until(lambda: api.batches.retrieve(made.id).request_counts.completed == 1, "it is counted")  # type: ignore[union-attr]
            with pytest.raises(openai.BadRequestError, match="input of a batch that has not ended"):
                api.files.delete(made.input_file_id)
            assert api.batches.cancel(made.id).status == "cancelling"
            until(lambda: len(worker.worker.leases.cancelled()) == 3, "the worker knows")
            goes_on.set()
            done = ended(api, made.id)
        assert done.status == "cancelled"
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": 4, "completed": 1, "failed": 3}
        assert len(rows(api, done.output_file_id)) == 1
        assert {row["error"]["code"] for row in rows(api, done.error_file_id)} == {"batch_cancelled"}
        waiting = create(api, jsonl(3))
        until(lambda: api.batches.retrieve(waiting.id).status == "in_progress", "its lines were counted")
        api.batches.cancel(waiting.id)
        done = ended(api, waiting.id)
        assert (done.status, len(rows(api, done.error_file_id))) == ("cancelled", 3), "no worker lives"
        with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'cancelled'"):
            api.batches.cancel(made.id)


class _Killed(BaseException):
    """As if the process had been killed: nothing is tidied up."""


@pytest.mark.timeout(400)
def test_another_scheduler_goes_on_where_one_was_killed(
    worker_settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two schedulers with data folders of their own; the files lie in the claim-check store."""
    store = tmp_path / "store"
    store.mkdir()
    settings = changed(worker_settings, claim_check={"url": f"file://{store}"})
    key = create_key(database, "two", tasks=["chat"])
    Client(settings)
    send, num_sent = Producer.send, 0

    def send_some(producer: Producer, *args: Any, **given: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 700:
            producer.flush(WAIT_S)
            raise _Killed
        send(producer, *args, **given)

    with served(settings, tmp_path / "away") as url, client(url, key) as api:
        made = api.files.create(file=("requests.jsonl", jsonl(1000)), purpose="batch").id
    with monkeypatch.context() as idle:
        idle.setattr(Advancing, "run_once", lambda self: 0)
        with served(settings, tmp_path / "first") as url, client(url, key) as api:
            batch = api.batches.create(input_file_id=made, endpoint="/v1/chat/completions", completion_window="24h")
    first = Advancing(settings, database, owner="first", lease_s=600.0)
    with monkeypatch.context() as cut:
        cut.setattr(Producer, "send", send_some)
        with pytest.raises(_Killed):
            first.run_once()
    row = database.one(text("SELECT status, num_sent FROM api_batches"))
    assert tuple(row) == ("in_progress", 500), "the first page is surely sent"
    second = Advancing(settings, database, owner="second")
    assert second.run_once() == 1
    assert tuple(database.one(text("SELECT status, num_sent FROM api_batches"))) == tuple(row), (
        "the lease is the first's"
    )
    database.change(text("UPDATE leader_leases SET expires_at = now()"))
    with served(settings, tmp_path / "second") as url, client(url, key) as api:
        with running_worker(worker_settings, FakeEngine(num_slots=32)):
            done = ended(api, batch.id, 170.0)
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": 1000, "completed": 1000, "failed": 0}
        assert len({row["custom_id"] for row in rows(api, done.output_file_id)}) == 1000
    assert count(database, "jobs") == 1000
    assert count(database, "decode_runs") == 1000, "each was decoded once"
    num_messages = len(everything(settings.kafka, "jobs.chat"))
    assert 1000 <= num_messages <= 1000 + 500, "at most one page was sent twice"
    assert not (tmp_path / "second" / "console" / "api").exists(), "no file lies in a data folder"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_large_batch_over_a_restart_of_the_scheduler(
    worker_settings: Settings, database: Database, tmp_path: Path
) -> None:
    key = create_key(database, "large", tasks=["chat"])
    with running_worker(worker_settings, FakeEngine(num_slots=64)):
        with served(worker_settings, tmp_path) as url, client(url, key) as api:
            made = create(api, jsonl(NUM_LINES))
            until(lambda: count(database, "jobs") > 0, "some requests are claimed")
        with served(worker_settings, tmp_path) as url, client(url, key) as api:
            done = ended(api, made.id, 1100.0)
            assert done.status == "completed"
            assert len(rows(api, done.output_file_id)) == NUM_LINES
    assert count(database, "decode_runs") == NUM_LINES


def test_files_that_are_no_batch_fail_with_a_reason(
    worker_settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = create_key(database, "wrong", tasks=["chat"])
    monkeypatch.setattr("alphaloop.batches.advancing.MOST_LINES", 3)
    with served(worker_settings, tmp_path) as url, client(url, key) as api:
        for content, code in (
            (b"\n\n", "empty_file"),
            (jsonl(4), "too_many_requests"),
            (b"\x1f\x8b no gzip", "invalid_file"),
        ):
            done = ended(api, create(api, content).id)
            assert done.status == "failed"
            assert done.errors is not None
            assert [error.code for error in done.errors.data or ()] == [code]
            assert str(tmp_path) not in done.errors.model_dump_json()


def test_a_segment_fills_no_topic_and_is_told_when_to_come_again(
    worker_settings: Settings, database: Database, tmp_path: Path
) -> None:
    """Of a file of 25 requests no more than 10 are in Kafka before some end."""
    limited = {"gold": SegmentSettings(max_waiting_jobs=10)}
    settings = worker_settings.model_copy(update={"segments": limited})
    gold, other = (
        create_key(database, "gold", segment="gold", tasks=["chat"]),
        create_key(database, "other", segment="free", tasks=["chat"]),
    )
    with served(settings, tmp_path) as url, client(url, gold) as api, client(url, other) as others:
        made = create(api, jsonl(25))
        sent = text("SELECT num_sent FROM api_batches")
        until(lambda: database.scalar(sent) == 10, "as many are sent as may wait")
        with pytest.raises(openai.RateLimitError, match="25 requests of this segment wait") as full:
            create(api, jsonl(1))
        assert full.value.response.headers["retry-after"] == "60"
        create(others, jsonl(1))
        free = text("SELECT num_sent FROM api_batches WHERE segment = 'free'")
        until(lambda: database.scalar(free) == 1, "the other segment's request is sent")
        assert len(everything(settings.kafka, "jobs.chat")) == 10 + 1
        with running_worker(settings, FakeEngine(num_slots=4)):
            assert ended(api, made.id).status == "completed"
        create(api, jsonl(1))
