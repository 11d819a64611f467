"""A batch by its file and by its name is one batch; its file may be any kind of file, and so may its output."""

from __future__ import annotations

import codecs
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import RedriveStore
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.messages import batch_line as chat
from tests.fixtures.worker import Client, running_worker, until
from tests.integration.test_worker_retries import UnluckyEngine

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.timeout(400)]


def older(custom_id: str, prompt: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}


def encoded(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def both_views(cli: Cli, file: Path, batch_id: str) -> dict[str, Any]:
    """What the batch looks like, which is the same by its file and by its name."""
    by_file, by_name = (
        {
            "status": cli("batch", "status", batch, "--json").json,
            "output": sorted(cli("batch", "output", batch).out.splitlines()),
            "errors": sorted(cli("batch", "errors", batch).out.splitlines()),
        }
        for batch in (file, batch_id)
    )
    assert by_name == by_file
    return by_file


def by_status(cli: Cli, batch: Path | str) -> dict[str, int]:
    return dict(cli("batch", "status", batch, "--json").json["requests_by_status"])


def test_a_redriven_request_has_one_row_in_every_view(
    stack_cli: Cli, worker_settings: Settings, database: Database, tmp_path: Path
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(encoded(chat("good", "tell"), chat("unlucky", "bad one"), older("older", "Once upon a time")))
    client = Client(worker_settings)
    batch_id = stack_cli("batch", "submit", file, "--task", "code").out.strip()
    assert by_status(stack_cli, batch_id) == {"waiting": 3}, "no worker has seen them"
    with running_worker(worker_settings, UnluckyEngine({"bad": 99})):
        failed = stack_cli("batch", "submit", file, "--task", "code", "--wait", "--timeout", "120")
        client.read(["jobs.code.dlq"], lambda found: bool(found))
    assert failed.code == 1
    assert "unlucky: failed, decode_failed: " in failed.err
    found = both_views(stack_cli, file, batch_id)
    assert found["status"]["requests_by_status"] == {"succeeded": 2, "failed": 1}
    for _ in range(2):  # the redriven job fails too, and is redriven
        assert stack_cli("dlq", "redrive", "--task", "code", "--since", "1d").code == 0
        assert by_status(stack_cli, file) == by_status(stack_cli, batch_id) == {"succeeded": 2, "waiting": 1}
        if _ == 0:
            with running_worker(worker_settings, UnluckyEngine({"bad": 99})):
                client.read(["jobs.code.dlq"], lambda found: bool(found))
                waited = stack_cli("batch", "submit", file, "--task", "code", "--wait", "--timeout", "120")
            assert (waited.code, "0 requests sent" in waited.err) == (1, True)
            assert by_status(stack_cli, batch_id)["failed"] == 1
    with running_worker(worker_settings, FakeEngine()):
        done = stack_cli("batch", "submit", file, "--task", "code", "--wait", "--timeout", "120", "--json")
    assert (done.code, done.json["requests_by_status"]) == (0, {"succeeded": 3})
    found = both_views(stack_cli, file, batch_id)
    answers = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, found["output"])}
    kinds = {name: answer["object"] for name, answer in answers.items()}
    assert kinds == {"good": "chat.completion", "unlucky": "chat.completion", "older": "text_completion"}
    assert answers["unlucky"]["id"].endswith("~2")
    assert found["errors"] == []
    assert database.scalar(text("SELECT count(*) FROM jobs")) == 5, "every job stands"


def test_a_refused_request_is_in_both_views_also_when_it_was_sent_again(
    stack_cli: Cli, worker_settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(encoded(chat("other", "tell", model="gpt-5"), chat("good", "tell")))
    with running_worker(worker_settings, FakeEngine()):
        submitted = stack_cli("batch", "submit", file, "--task", "code", "--wait", "--timeout", "120")
    assert submitted.code == 1
    assert "other: refused, invalid_field: " in submitted.err
    batch_id = submitted.out.strip()
    found = both_views(stack_cli, file, batch_id)
    assert found["status"]["requests_by_status"] == {"succeeded": 1, "refused": 1}
    assert json.loads(found["errors"][0])["custom_id"] == "other"
    redriven = stack_cli("dlq", "redrive", "--task", "code", "--since", "1d", "--set", "body.model=fake")
    assert redriven.code == 0, redriven.err
    assert by_status(stack_cli, file) == by_status(stack_cli, batch_id) == {"succeeded": 1, "waiting": 1}
    with running_worker(worker_settings, FakeEngine()):
        assert stack_cli("wait", "--batch-id", batch_id, "--timeout", "120").code == 0, "its letter was sent again"
    assert both_views(stack_cli, file, batch_id)["status"]["requests_by_status"] == {"succeeded": 2}


def test_what_was_refused_is_not_sent_again_to_the_workers_that_refused_it(
    stack_cli: Cli, worker_settings: Settings, database: Database, tmp_path: Path
) -> None:
    """Neither by a second submission, which would add a dead letter, nor by a redrive, or by a look at what it does."""
    file = tmp_path / "requests.jsonl"
    file.write_bytes(encoded(chat("wrong", "tell", model="gpt-5"), chat("good", "tell")))
    redrive = ("dlq", "redrive", "--task", "code", "--json")
    with running_worker(worker_settings, FakeEngine()):
        until(lambda: RedriveStore(database).newest_worker() is not None, "the worker is heard of")
        for number in (2, 0):
            ran = stack_cli("batch", "submit", file, "--task", "code", "--wait", "--timeout", "120")
            assert (ran.code, f"{number} requests sent" in ran.err) == (1, True)
        (letter,) = stack_cli("dlq", "list", "--task", "code", "--json").json
        for more in (["--dry-run"], []):
            ran = stack_cli(*redrive, *more)
            assert (ran.code, ran.json["sent"], ran.json["wrong"]) == (1, 0, 1)
            (problem,) = ran.json["problems"]
            assert (problem["at"], problem["code"]) == (letter["at"], "invalid_field")
            assert "no worker has started since" in problem["message"]
        assert stack_cli(*redrive, "--set", "body.model=fake", "--dry-run").json["sent"] == 1
    assert stack_cli(*redrive, "--dry-run").json["sent"] == 1, "the next worker may be another one"


def test_a_job_that_only_looks_redriven_counts_for_itself(stack_cli: Cli, worker_settings: Settings) -> None:
    client = Client(worker_settings)
    jobs = [{"job_id": name, "batch_id": "b", "prompt": p} for name, p in (("a", "bad one"), ("a~1", "tell"))]
    with running_worker(worker_settings, UnluckyEngine({"bad": 99})):
        client.send("code", [json.dumps(job).encode() for job in jobs])
        client.results(2)
    told = stack_cli("batch", "status", "b", "--json").json
    assert told["requests_by_status"] == {"failed": 1, "succeeded": 1}


FORMS = {"utf-8-sig": "UTF-8 with a byte order mark", "utf-16": "UTF-16", "gzip": "gzip"}


def test_a_batch_in_any_form_of_file(stack_cli: Cli, worker_settings: Settings, tmp_path: Path) -> None:
    with running_worker(worker_settings, FakeEngine()):
        for form in ("utf-8", *FORMS, "pipe", "-"):
            plain = encoded(chat(f"ä {form}", "tell"), chat(f"語 {form}", "tell more"))
            content = {
                "utf-8-sig": codecs.BOM_UTF8 + plain,
                "utf-16": codecs.BOM_UTF16_LE + plain.decode().encode("utf-16-le"),
                "gzip": gzip.compress(plain, mtime=0),
            }.get(form, plain)
            file: str | Path = tmp_path / f"{form}.jsonl"
            (tmp_path / f"{form}.jsonl").write_bytes(content)
            if form == "pipe":
                read, write = os.pipe()
                os.write(write, content)
                os.close(write)
                file = f"/dev/fd/{read}"
            elif form == "-":
                file = "-"
            ran = stack_cli("batch", "submit", file, "--task", "code", "--wait", "--timeout", "120", stdin=content)
            assert (ran.code, "2 requests sent" in ran.err, "2 succeeded" in ran.err) == (0, True, True), form
            assert f"is read as {FORMS[form]}" in ran.err if form in FORMS else "is read as" not in ran.err
            if form != "pipe":
                shown = stack_cli("batch", "output", file, stdin=content).out.splitlines()
                assert {json.loads(row)["custom_id"] for row in shown} == {f"ä {form}", f"語 {form}"}
