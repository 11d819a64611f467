"""Equal work is done once: a real broker and database, and an engine that counts what it was asked to decode."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import pytest
from sqlalchemy import text

from alphaloop.deciding.decision import Decision
from alphaloop.engine import PreparedJob
from alphaloop.errors import StoreError
from alphaloop.kafka.topics import RESULTS, TOKENS
from alphaloop.messages import (
    Body,
    ChatMessage,
    ContentReference,
    Job,
    Result,
    Status,
    StreamReader,
    encode_job,
    read_chunk,
)
from alphaloop.settings import Settings
from alphaloop.store.api import Deed
from alphaloop.store.database import Database
from alphaloop.store.housekeeping import EraseStore, Erasure
from alphaloop.store.known_jobs import check
from alphaloop.store.reuse import ReuseStore
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.console import Visitor
from tests.fixtures.messages import batch_line
from tests.fixtures.openai_api import client, create_key, ended, served
from tests.fixtures.worker import Client, RunningWorker, by_id, running_worker
from tests.integration.test_openai_batches import create, rows

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

DEED = Deed("command", "ada", "texts_erased", "job a")


class CountingEngine(FakeEngine):
    """Knows which jobs were decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.decoded: list[str] = []

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        self.decoded.append(prepared.job.job_id)
        super().admit(prepared, decision)


def job(
    name: str, prompt: str = "write a poem", *, reuse: bool | None = True, stream: bool = False, **given: object
) -> Job:
    body = Body.model_validate({"prompt": prompt, "max_tokens": 8, "stream": stream})
    return Job(job_id=name, task="code", body=body, reuse=reuse).model_copy(update=given)


class Desk:
    """Sends jobs one after the other, so that each finds what was recorded before."""

    def __init__(self, settings: Settings, engine: CountingEngine, worker: RunningWorker) -> None:
        self.client, self.engine, self.worker = Client(settings), engine, worker
        self._num_sent = 0

    def ask(self, *jobs: Job) -> list[Result]:
        self.client.send("code", [encode_job(one) for one in jobs])
        self._num_sent += len(jobs)
        found = by_id(self.client.read([RESULTS], lambda records: len(by_id(records)) >= self._num_sent))
        return [found[one.job_id] for one in jobs]


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def desk(worker_settings: Settings, engine: CountingEngine) -> Iterator[Desk]:
    with running_worker(worker_settings, engine) as worker:
        yield Desk(worker_settings, engine, worker)


def test_an_equal_job_is_answered_with_the_recorded_text_and_counts_for_nothing(desk: Desk, database: Database) -> None:
    (first,) = desk.ask(job("a"))
    (second,) = desk.ask(job("b", custom_id="mine", batch_id="monday"))
    assert desk.engine.decoded == ["a"]
    assert (second.text, second.finish_reason, second.target_revision) == (
        first.text,
        first.finish_reason,
        first.target_revision,
    )
    assert (first.reused_from, second.reused_from) == (None, "a")
    assert (second.custom_id, second.batch_id, second.status) == ("mine", "monday", Status.SUCCEEDED)
    assert first.usage
    assert second.usage
    assert second.usage.prompt_tokens_details
    assert second.usage.completion_tokens == first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens
    assert second.decoding is None
    assert second.timings
    assert second.timings.device_s == 0
    assert database.scalars(text("SELECT job_id FROM decode_runs")) == ["a"]
    found = check(database)
    assert (found.num_succeeded, found.num_decoded_once, found.num_reused, found.holds) == (2, 1, 1, True)
    registry = desk.worker.worker.metrics.registry
    assert registry.get_sample_value("alphaloop_jobs_reused_total", {"task": "code"}) == 1
    # An answer is no source: the text is as old as its decoding.
    (third,) = desk.ask(job("c"))
    assert third.reused_from == "a"


def test_what_is_not_equal_or_did_not_ask_is_decoded(desk: Desk) -> None:
    desk.ask(job("a"), job("no-consent", "another prompt", reuse=None))
    different = [
        job("segment", segment="acme"),
        job("prompt", "write a poem!"),
        job("opted-out", reuse=False),
        job("not-asked", reuse=None),
        job("of-no-consent", "another prompt"),
        Job(job_id="longer", task="code", body=Body(prompt="write a poem", max_tokens=9), reuse=True),
        Job(job_id="sampled", task="code", body=Body(prompt="write a poem", max_tokens=8, temperature=0.5), reuse=True),
        Job(
            job_id="chat",
            task="code",
            body=Body(messages=(ChatMessage(role="user", content="write a poem"),), max_tokens=8),
            reuse=True,
        ),
    ]
    assert [result.reused_from for result in desk.ask(*different)] == [None] * len(different)
    assert sorted(desk.engine.decoded) == sorted(["a", "no-consent", *(one.job_id for one in different)])


def test_a_streamed_job_has_the_whole_text_in_its_only_chunk(desk: Desk) -> None:
    (first,) = desk.ask(job("a"))
    (second,) = desk.ask(job("b", stream=True))
    (record,) = desk.client.read([TOKENS], lambda records: len(records) >= 1)
    reader = StreamReader()
    reader.take(read_chunk(record.value, record.headers))
    assert second.num_chunks == 0
    assert reader.end is not None
    assert (reader.text, reader.end.status) == (first.text, Status.SUCCEEDED)


def test_equal_jobs_at_the_same_time_are_each_decoded(worker_settings: Settings, engine: CountingEngine) -> None:
    client = Client(worker_settings)
    client.send("code", [encode_job(job("a")), encode_job(job("b"))])
    with running_worker(worker_settings, engine):
        found = client.results(2)
    assert sorted(engine.decoded) == ["a", "b"]
    assert {result.reused_from for result in found} == {None}
    assert len({result.text for result in found}) == 1


def test_a_text_that_is_erased_answers_no_job_and_its_copies_are_erased(desk: Desk, database: Database) -> None:
    desk.ask(job("a"))
    desk.ask(job("b"))
    erased = EraseStore(database).erase(Erasure(("a",)), DEED, None, datetime.now(UTC))
    assert erased.num_jobs == 2
    left = dict(database.rows(text("SELECT job_id, outcome->>'text' FROM jobs")))  # type: ignore[arg-type]
    assert left == {"a": None, "b": None}
    (third,) = desk.ask(job("c"))
    assert third.text
    assert third.reused_from is None
    (fourth,) = desk.ask(job("d"))
    assert fourth.reused_from == "c"


def test_a_text_that_is_erased_between_claim_and_record_is_decoded_instead(
    desk: Desk, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.ask(job("a"))
    recorder, erased = desk.worker.worker.recorder, threading.Event()
    record = recorder.record

    def erase_first(outcomes):  # type: ignore[no-untyped-def]
        if not erased.is_set() and any(outcome.reused for outcome in outcomes):
            EraseStore(database).erase(Erasure(("a",)), DEED, None, datetime.now(UTC))
            erased.set()
        return record(outcomes)

    monkeypatch.setattr(recorder, "record", erase_first)
    (second,) = desk.ask(job("b"))
    assert erased.is_set()
    assert (second.reused_from, second.attempt, bool(second.text)) == (None, 2, True)
    assert desk.engine.decoded == ["a", "b"]
    assert database.scalars(text("SELECT num_crashes + num_failures FROM jobs")) == [0, 0]


def test_a_text_older_than_reuse_days_is_decoded_again(desk: Desk, database: Database) -> None:
    desk.ask(job("a"))
    database.change(text("UPDATE reusable_results SET decoded_at = decoded_at - interval '8 days'"))
    (second,) = desk.ask(job("b"))
    assert second.reused_from is None
    (third,) = desk.ask(job("c"))
    assert third.reused_from == "b"


def test_a_text_whose_job_is_gone_answers_no_job(desk: Desk, database: Database) -> None:
    desk.ask(job("a"))
    database.change(text("DELETE FROM jobs"))
    (second,) = desk.ask(job("b"))
    assert (second.reused_from, bool(second.text)) == (None, True)


def test_a_look_up_that_fails_costs_no_job(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ReuseStore, keys: object) -> NoReturn:
        raise StoreError("refused")

    desk.ask(job("a"))
    monkeypatch.setattr(ReuseStore, "find", fail)
    (second,) = desk.ask(job("b"))
    assert (second.reused_from, bool(second.text)) == (None, True)


def test_a_result_without_its_text_answers_no_job(desk: Desk, database: Database) -> None:
    """Where it lies elsewhere, it may be deleted with its own job; where a release before erased it, it has none."""
    desk.ask(job("a"))
    reference = ContentReference.to("file:///texts/a", b"text").model_dump_json()
    moved = "outcome::jsonb - 'text' || jsonb_build_object('text_ref', CAST(:reference AS jsonb))"
    database.change(text(f"UPDATE jobs SET outcome = CAST({moved} AS json)"), {"reference": reference})
    (second,) = desk.ask(job("b"))
    assert second.reused_from is None
    database.change(text("UPDATE jobs SET outcome = CAST(outcome::jsonb - 'text' AS json) WHERE job_id = 'b'"))
    (third,) = desk.ask(job("c"))
    assert third.reused_from is None


@pytest.mark.usefixtures("looks_often")
def test_every_screen_says_of_whose_text_a_job_is_and_counts_it_apart(
    stack_cli: Cli, worker_settings: Settings, database: Database, tmp_path: Path
) -> None:
    settings = worker_settings.model_copy(update={"data_dir": tmp_path})
    key = create_key(database, "nightly", segment="gold", tasks=["chat"])
    lines = json.dumps({**batch_line("r-0", "say it again"), "task": "chat", "reuse": True})
    with served(settings, tmp_path) as url, client(url, key) as api, running_worker(settings, FakeEngine()):
        first, second = (ended(api, create(api, content.encode()).id) for content in (lines, lines + "\n"))
        assert first.usage
        assert second.usage
        assert (first.usage.input_tokens_details.cached_tokens, second.usage.output_tokens) == (
            0,
            first.usage.output_tokens,
        )
        assert second.usage.input_tokens_details.cached_tokens == second.usage.input_tokens > 0
        source, reused = (rows(api, done.output_file_id)[0]["response"]["request_id"] for done in (first, second))
        visitor = Visitor(url)
        said = f"answered with the text of job {source}"
        assert said in stack_cli("job", reused, "--json").json[0]["sentence"]
        assert stack_cli("job", reused, "--json").json[0]["reused_from"] == source
        page = visitor.get(f"/job.json?id={reused}").data
        assert (page["result"]["reused_from"], page["spent"]) == (source, None)
        assert f'href="/job?id={source}"' in visitor.get(f"/job?id={reused}").text
        (task,) = stack_cli("status", "--json").json["tasks"]
        assert (task["jobs"], task["num_reused"], task["decoded"]["num_jobs"]) == ({"succeeded": 2}, 1, 1)
        assert "reused: 1" in stack_cli("status").out
        assert "reused: 1" in visitor.get("/tasks").text
        assert "reused: 1" in visitor.get("/tasks/chat").text
