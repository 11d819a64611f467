"""One batch has one count: OpenAI's client, the command line, the console and the files that were written agree."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop import client as python_client
from alphaloop.settings import SegmentSettings, Settings
from alphaloop.store.database import Database
from alphaloop.store.promises import PromiseStore
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.console import PASSWORD, Visitor
from tests.fixtures.messages import batch_line
from tests.fixtures.openai_api import client, create_key, ended, served
from tests.fixtures.postgres import count
from tests.fixtures.worker import WAIT_S, running_worker, until
from tests.integration.test_openai_batches import create
from tests.integration.test_worker_retries import UnluckyEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("looks_often"),
]

BAD = ("{half a line", json.dumps(batch_line("hot", temperature=9)))


@dataclass(frozen=True)
class Screens:
    """Everything that shows a batch."""

    api: openai.OpenAI
    cli: Cli
    console: Visitor

    def agree(self, batch: str, by_status: dict[str, int], *, shown: Path | None = None) -> None:
        """Every screen says what became of its requests, once they were counted; `shown` is the batch's file."""
        found: dict[str, Any] = {}

        def are_same() -> bool:
            found.clear()
            found["json"] = self.cli("batch", "status", shown or batch, "--json").json
            del found["json"]["spent"]  # lists have no costs
            for name, path in (("list", "/batches.json"), ("page", f"/batch.json?id={batch}")):
                read = self.console.get(path).data
                page = read["batch"] if name == "page" else next((b for b in read["batches"] if b["id"] == batch), None)
                found[name] = page and {key: page[key] for key in found["json"]}
            listed = [one for one in self.cli("batch", "list", "--json").json if one["id"] == batch]
            found["command"] = listed and {key: listed[0][key] for key in found["json"]}
            if batch.startswith("batch_"):
                told = self.api.batches.retrieve(batch)
                counts = told.request_counts and told.request_counts.model_dump()
                found["api"] = {**found["json"], "status": told.status, "request_counts": counts}
            is_so = found["json"]["requests_by_status"] == by_status
            return is_so and all(one == found["json"] for one in found.values())

        try:
            until(are_same, "every screen says the same")
        except AssertionError:
            pytest.fail(f"the screens differ: {found}")
        words = self.cli("batch", "status", shown or batch).err
        assert {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", words.split(";")[1])} == by_status
        counts = found["json"]["request_counts"]
        assert counts["total"] == sum(by_status.values())
        num_open = by_status.get("waiting", 0) + by_status.get("held", 0)
        assert counts["total"] - num_open == counts["completed"] + counts["failed"]
        for command, part, number in (("output", "output", "completed"), ("errors", "error", "failed")):
            path = f"/batch/file?id={batch}&part={part}"
            lines = [self.cli("batch", command, shown or batch).out, self.console.get(path).text]
            is_written = batch.startswith("batch_") and not num_open
            if is_written and (file_id := getattr(self.api.batches.retrieve(batch), f"{part}_file_id")):
                lines.append(self.api.files.content(file_id).text)
            if batch.startswith("batch_") or part == "output":
                assert {len(one.splitlines()) for one in lines} == {counts[number]}, (part, lines)
            else:  # the wrong lines of a file are known where the file is
                assert len(lines[0].splitlines()) == counts[number] - (not shown) * by_status.get("invalid", 0)


@pytest.fixture
def screens(stack_cli: Cli, worker_settings: Settings, database: Database, tmp_path: Path) -> Iterator[Screens]:
    """The screens of one installation; a segment takes ten requests at a time."""
    limited = worker_settings.model_copy(update={"segments": {"gold": SegmentSettings(max_waiting_jobs=10)}})
    key = create_key(database, "nightly", segment="gold", tasks=["code"])
    with served(limited, tmp_path / "data", password=SecretStr(PASSWORD)) as url, client(url, key) as api:
        visitor = Visitor(url)
        assert visitor.sign_in().status == 303
        yield Screens(api, stack_cli, visitor)


def jsonl(*lines: str) -> bytes:
    return "\n".join(lines).encode()


def good(*names: str) -> list[str]:
    return [json.dumps(batch_line(name, f"tell of {name}")) for name in names]


def test_a_batch_that_is_cancelled_while_it_is_sent(
    screens: Screens, worker_settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 27 lines two are wrong and 17 were never sent: none of them vanishes."""
    monkeypatch.setattr("alphaloop.batches.advancing.PAGE", 8)
    goes_on = threading.Event()

    def hold_the_second() -> None:
        if engine.num_steps == 4:
            assert goes_on.wait(WAIT_S)

    engine = FakeEngine(num_slots=1, acceptance=(), before_step=hold_the_second)
    made = create(screens.api, jsonl(*BAD, *good(*(f"r-{n}" for n in range(25)))))
    until(lambda: database.scalar(text("SELECT num_sent FROM api_batches")) == 10, "as many are sent as may wait")
    screens.agree(made.id, {"invalid": 2, "waiting": 25})
    with running_worker(worker_settings, engine) as worker:
        until(lambda: count(database, "jobs WHERE status = 'succeeded'") == 1, "one request has ended")
        until(lambda: count(database, "jobs") == 8, "all that was sent is claimed")
        screens.agree(made.id, {"succeeded": 1, "held": 7, "waiting": 17, "invalid": 2})
        form = {"token": screens.console.token(f"/batch?id={made.id}"), "id": made.id}
        assert screens.console.post("/batch/cancel", form).status == 303
        until(lambda: bool(worker.worker.leases.cancelled()), "the worker knows")
        goes_on.set()
        assert ended(screens.api, made.id).status == "cancelled"
    screens.agree(made.id, {"succeeded": 1, "cancelled": 24, "invalid": 2})
    assert count(database, "jobs") < 25, "what was not sent stays unsent"
    assert count(database, "cancellations") == 8, "of what was never sent only a page has one, and none of what ended"
    database.change(text("DELETE FROM jobs"))  # which are not kept as long as the batch
    screens.agree(made.id, {"succeeded": 1, "cancelled": 24, "invalid": 2})


def test_requests_that_failed_and_were_sent_again(screens: Screens, worker_settings: Settings) -> None:
    """The batch goes on when its dead letters are sent again, and writes its files anew."""
    refused = json.dumps(batch_line("other", "tell", model="gpt-5"))
    made = create(screens.api, jsonl(BAD[0], *good("fine"), json.dumps(batch_line("unlucky", "bad one")), refused))
    with running_worker(worker_settings, UnluckyEngine({"bad": 99})):
        assert ended(screens.api, made.id).status == "completed"
    screens.agree(made.id, {"succeeded": 1, "failed": 1, "refused": 1, "invalid": 1})
    errors = [json.loads(line) for line in screens.cli("batch", "errors", made.id).out.splitlines()]
    (failed,) = (row["response"]["request_id"] for row in errors if row["custom_id"] == "unlucky")
    for custom_id, field in (("unlucky", None), ("other", "body.model")):
        (job_id,) = (row["response"]["request_id"] for row in errors if row["custom_id"] == custom_id)
        until(lambda: bool(screens.console.get(f"/job.json?id={job_id}").data["letter"]), "its dead letter is read")  # noqa: B023
        told = screens.console.get(f"/job.json?id={job_id}").data["letter"]
        assert (told["field"], told["hint"]) == (field, field and "leave it out")
        letter = screens.console.get(f"/dead-letter.json?at={told['at']}").data
        assert (letter["job_id"], letter["batch_id"]) == (job_id, made.id)
        page, back = (screens.console.get(path).text for path in (f"/job?id={job_id}", f"/dead-letter?at={told['at']}"))
        assert f'href="/dead-letter?at={quote(told["at"])}"' in page
        assert f'href="/batch?id={made.id}"' in back
        assert f'href="/job?id={job_id}"' in back
    files = screens.console.get(f"/batch.json?id={made.id}").data["files"]
    assert {part: files[part]["name"] for part in files} == {
        "input": "requests.jsonl",
        "output": f"{made.id}_output.jsonl",
        "error": f"{made.id}_error.jsonl",
    }
    assert screens.console.get(f"/batch/file?id={made.id}&part=input").text.startswith(BAD[0])
    redriven = screens.cli("dlq", "redrive", "--task", "code", "--since", "1d", "--set", "body.model=fake")
    assert redriven.code == 0, redriven.err
    screens.agree(made.id, {"succeeded": 1, "waiting": 2, "invalid": 1})
    assert screens.api.batches.retrieve(made.id).status == "finalizing"
    assert f"{failed}~1: waits in Kafka" in screens.cli("job", failed).out
    with running_worker(worker_settings, FakeEngine()):
        done = ended(screens.api, made.id)
    assert done.status == "completed"
    screens.agree(made.id, {"succeeded": 3, "invalid": 1})
    for asked in (failed, f"{failed}~1"):
        *_, last = screens.cli("job", asked, "--json").json
        assert (last["job_id"], last["status"]) == (f"{failed}~1", "succeeded")


def test_a_batch_whose_time_is_over(screens: Screens, worker_settings: Settings, database: Database) -> None:
    made = create(screens.api, jsonl(*BAD, *good(*(f"r-{n}" for n in range(12)))))
    screens.agree(made.id, {"invalid": 2, "waiting": 12})
    database.change(text("UPDATE api_batches SET expires_at = now() - interval '2 minutes'"))
    assert ended(screens.api, made.id).status == "expired"
    screens.agree(made.id, {"invalid": 2, "expired": 12})


def test_batches_that_came_through_kafka(
    screens: Screens, worker_settings: Settings, database: Database, tmp_path: Path
) -> None:
    """Those of a command and of the Python client are listed and counted as those of the API are."""
    file = tmp_path / "requests.jsonl"
    file.write_bytes(jsonl(*BAD, *good("a"), json.dumps(batch_line("b", "bad one"))))
    batch_id = screens.cli("batch", "submit", file, "--task", "code").out.strip()
    for shown in (None, file):
        screens.agree(batch_id, {"invalid": 2, "waiting": 2}, shown=shown)
    with python_client.Client(worker_settings) as ours:
        ours.submit([{"task": "code", "prompt": f"tell {n}"} for n in range(3)], batch_id="monday")
    with running_worker(worker_settings, UnluckyEngine({"bad": 99})):
        until(lambda: count(database, "jobs WHERE finished_at IS NOT NULL") == 5, "all have ended")
    screens.agree("monday", {"succeeded": 3})
    for shown in (None, file):
        screens.agree(batch_id, {"succeeded": 1, "failed": 1, "invalid": 2}, shown=shown)
    screens.cli("dlq", "redrive", "--task", "code", "--since", "1d")
    screens.agree(batch_id, {"succeeded": 1, "waiting": 1, "invalid": 2})
    with running_worker(worker_settings, FakeEngine()):
        until(lambda: count(database, "jobs WHERE finished_at IS NOT NULL") == 6, "it has ended")
    screens.agree(batch_id, {"succeeded": 2, "invalid": 2})
    sources = {one["id"]: one["source"] for one in screens.cli("batch", "list", "--json").json}
    assert sources == {batch_id: "command", "monday": "kafka"}
    lines = screens.cli("batch", "list").out.splitlines()
    assert max(map(len, lines)) <= 80, lines


def test_every_screen_promises_the_same_end(
    screens: Screens,
    worker_settings: Settings,
    database: Database,
    stack_cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a job has ended it is not known; then every screen has one end, until the batch ends and it is kept."""
    goes_on = threading.Event()

    def hold_the_second() -> None:
        if engine.num_steps == 4:
            assert goes_on.wait(WAIT_S)

    engine = FakeEngine(num_slots=1, acceptance=(), before_step=hold_the_second)
    made = create(screens.api, jsonl(*good(*(f"r-{n}" for n in range(8)))))
    said = PromiseStore(database)
    until(lambda: [p.why for p in said.of_batch(made.id)][-1:] == ["no worker runs"], "nobody decodes it")
    with running_worker(worker_settings, engine):
        until(lambda: [p.why for p in said.of_batch(made.id)][-1:] == [None], "its end is known")
        monkeypatch.setattr("alphaloop.batches.promising._STANDS_AT_LEAST", timedelta(hours=1))
        screens.agree(made.id, {"succeeded": 1, "held": 7})
        end = stack_cli("batch", "status", made.id, "--json").json["end"]
        assert end["earliest_at"] <= end["ends_at"] <= end["latest_at"]
        retrieved = screens.api.batches.retrieve(made.id)
        own = (retrieved.model_extra or {})["alphaloop"]
        assert own["ends_at"] == int(datetime.fromisoformat(end["ends_at"]).timestamp())
        assert own["why"] is None
        assert retrieved.metadata == made.metadata
        words = f"ends {datetime.fromisoformat(end['ends_at']):%H:%M}, "
        running = database.scalar(text("SELECT job_id FROM jobs WHERE status = 'running' LIMIT 1"))
        assert words in stack_cli("batch", "status", made.id).err
        assert f"batch {made.id}: {words}" in " ".join(stack_cli("job", running).out.split())
        assert words in stack_cli("batch", "list").out
        assert words.capitalize() in screens.console.get(f"/batch?id={made.id}").text
        goes_on.set()
        assert ended(screens.api, made.id).status == "completed"
    until(lambda: said.open() == set(), "what came is kept beside what was said")
    assert stack_cli("batch", "status", made.id, "--json").json["end"] is None
