"""Text from outside through every command, to a terminal and to a pipe: nothing of it acts upon the screen.

Keys, headers, job_ids, labels, task names, texts, errors and notes hold escape sequences, control characters and
characters that turn the direction of text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from alphaloop.console.page import templates
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.measurements import DriftSubject
from alphaloop.messages import Failure, Result, Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore, EventChange, EventState
from alphaloop.store.reports import ReportStore, StoredReport
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli, Ran
from tests.fixtures.drift import content
from tests.fixtures.postgres import count
from tests.fixtures.worker import Client, running_worker, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.postgres, pytest.mark.timeout(400)]

Screen = Callable[..., Ran]

BIDI = "".join(map(chr, (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))
CONTROLS = "".join(map(chr, (*range(1, 9), *range(0x0B, 0x20), *range(0x7F, 0xA0))))
HOSTILE = f"\x1b[2J\x1b]0;X\x07[red]fake[/red] :boom: {CONTROLS}{BIDI}end"
#: What a label may hold today: C0 and DEL are refused.
LABEL = f"\x9b31m[bold]{BIDI}"
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture
def screen(stack_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "dumb")  # the program's own colours are escape sequences, too

    def run(where: str, *arguments: object) -> Ran:
        with monkeypatch.context() as patched:
            for stream in (sys.stdout, sys.stderr):
                patched.setattr(stream, "isatty", lambda: where == "terminal")
            return stack_cli(*arguments)

    return run


def job(job_id: str, **fields: Any) -> bytes:
    plain = {"job_id": job_id, "prompt": "p", "max_tokens": 3, "custom_id": LABEL, "batch_id": LABEL, "segment": LABEL}
    return json.dumps({**plain, **fields}).encode()


@pytest.fixture
def sent(worker_settings: Settings, database: Database) -> None:
    """Jobs with hostile labels, texts and errors, and messages that are no jobs with hostile keys and fields."""
    client = Client(worker_settings)
    no_jobs = [
        HOSTILE.encode(),
        json.dumps({"job_id": HOSTILE, "task": HOSTILE, HOSTILE: HOSTILE, "prompt": "p"}).encode(),
        json.dumps({"prompt": "p", HOSTILE: 1, "body": {HOSTILE: HOSTILE}}).encode(),
        json.dumps({"prompt": "p", "decoding": HOSTILE}).encode(),
    ]
    ensure_topics(worker_settings.kafka, ["code"])
    with running_worker(worker_settings, FakeEngine()), closing(Producer(worker_settings.kafka)) as producer:
        for value in no_jobs:
            headers = ((HOSTILE, HOSTILE.encode()), ("traceparent", HOSTILE.encode()))
            producer.send("jobs.code", key=HOSTILE.encode(), value=value, headers=headers)
        producer.flush(60)
        client.send("code", [job("good"), job("failed")])
        client.results(2)
        until(lambda: count(database, "jobs WHERE status = 'succeeded'") == 2, "the jobs have ended")
        client.read(["jobs.code.dlq"], lambda records: len(records) == len(no_jobs))
    said(database, "good", {"text": HOSTILE})
    failure = Failure(code="decode_failed", message=HOSTILE, field="body.model", hint=HOSTILE)
    said(database, "failed", {"status": Status.FAILED, "text": None, "error": failure})
    told = content(DriftSubject("code", LABEL, "draft-1", "target-1"), "draft_stale")
    DriftEventStore(database).write([EventChange(None, EventState.OPENED, told, HOSTILE)], datetime.now(UTC))
    now = datetime.now(UTC)
    ReportStore(database).save(StoredReport(now, now - timedelta(days=1), now, HOSTILE, {"tasks": []}, HOSTILE, "<p>"))


def said(database: Database, job_id: str, update: dict[str, Any]) -> None:
    """What a model, or a server's error, may have put into a result."""
    with database.begin() as connection:
        query = text("SELECT outcome::text FROM jobs WHERE job_id = :job_id")
        result = Result.decode(connection.execute(query, {"job_id": job_id}).scalar_one().encode())
        changed = result.model_copy(update=update)
        statement = text("UPDATE jobs SET outcome = CAST(:outcome AS json), status = :status WHERE job_id = :job_id")
        found = {"job_id": job_id, "outcome": changed.encode().decode(), "status": changed.status.value}
        connection.execute(statement, found)


def test_no_command_lets_foreign_text_act_and_a_pipe_gets_a_text_as_it_is(
    screen: Screen, sent: None, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"task": HOSTILE, "prompt": "p"}) + "\n" + json.dumps({HOSTILE: HOSTILE}) + "\n")
    batch = tmp_path / "batch.jsonl"
    batch.write_text(json.dumps({"custom_id": HOSTILE, "url": HOSTILE, "method": "POST"}) + "\n")
    probes = tmp_path / "probes.jsonl"
    probes.write_text("".join(json.dumps({"prompt": f"{HOSTILE} {number}"}) + "\n" for number in range(2)))
    version = screen("pipe", "probes", "register", probes, "--task", "code")
    assert version.code == 0, version.err
    places = [letter["at"] for letter in screen("pipe", "dlq", "list", "--json").json]
    assert len(places) == 4
    commands: list[tuple[object, ...]] = [
        ("dlq", "list"),
        ("dlq", "purge", "--before", "2020-01-01", "--dry-run"),
        ("wait", "failed"),
        ("wait", "good", "failed", "--json"),
        ("wait", "--batch-id", LABEL, "--output", "-"),
        ("cancel", "--batch-id", LABEL),
        ("tail", "good", "failed", "--json"),
        ("tail", "failed"),
        ("enqueue", "--file", lines),
        ("enqueue", "--file", lines, "--output", "-"),
        ("batch", "submit", batch, "--task", "code"),
        ("batch", "output", LABEL),
        ("batch", "errors", LABEL),
        ("batch", "errors", batch),
        ("batch", "cancel", LABEL),
        ("drift", "ack", 1, "--by", HOSTILE, "--note", HOSTILE),
        ("probes", "list"),
        ("probes", "show", "code"),
        ("probes", "plan"),
        ("draft", "list"),
        ("notify", "list"),
        ("topics", "create", HOSTILE),
        ("keys", "create", "one", "--segment", LABEL),
        ("keys", "create", HOSTILE, "--segment", HOSTILE),
        ("keys", "revoke", HOSTILE),
        ("erase", "--segment", LABEL),
        ("erase", "--segment", LABEL, "--dry-run"),
        ("erase", "--job", HOSTILE),
        ("notify", "test"),
        ("replay", "--set", f"policy.{HOSTILE}={HOSTILE}"),
        ("check-server", HOSTILE),
        ("enqueue", "--file", f"{HOSTILE}\n"),
        ("report", "--html", f"{HOSTILE}/x"),
        ("--configs", HOSTILE, "status"),
        ("--profile", HOSTILE, "status"),
        (HOSTILE,),
        ("dlq", "list", "--since", HOSTILE),
        ("probes", "draw", "--task", HOSTILE),
        ("wait", HOSTILE, "--timeout", 0),
    ]
    both: list[tuple[object, ...]] = [
        ("dlq", "list", "--show-value"),
        *(("dlq", "show", place) for place in places),
        ("dlq", "redrive", "--task", "code", "--since", "1d", "--dry-run"),
        ("job", "good", "failed", HOSTILE),
        ("cancel", "failed"),
        ("batch", "status", LABEL),
        ("status",),
        ("explain", "code"),
        ("drift", "list"),
        ("drift", "show", 1),
        ("topics", "list"),
        ("keys", "list"),
        ("report",),
        ("replay",),
    ]
    commands += [(*one, *more) for one in both for more in ((), ("--json",))]
    texts: list[tuple[object, ...]] = [
        ("wait", "good"),
        ("tail", "good"),
        *(("dlq", "show", p, "--value") for p in places),
    ]
    for where in ("terminal", "pipe"):
        for command in commands + (texts if where == "terminal" else []):
            ran = screen(where, *command)
            assert not ACTS.search(ran.out), (command, ran.out)
            assert not ACTS.search(ran.err), (command, ran.err)
            assert ran.out or ran.err, command
        shown = screen(where, "dlq", "list").out
        assert "\\x1b[2J\\x1b]0;X\\x07[red]fake[/red] :boom:" in shown, "written out, and nothing of it is markup"
        assert "\\u202e" in screen(where, "dlq", "list", "--json").out
        assert (HOSTILE in screen(where, "wait", "good").out) is (where == "pipe")
        assert screen(where, "wait", "good", "--json").json["text"] == HOSTILE


def test_the_console_writes_it_out() -> None:
    shown = templates().from_string("<p>{{ name }}</p>{{ breaks(name) }}").render(name=f"<b>{HOSTILE}")
    assert not ACTS.search(shown)
    assert "<b>" not in shown
