"""`alphaloop batch` against real servers and a worker: wrong lines, kill -9, cancellation, batches without a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types import BatchError, BatchRequestCounts, Completion, ErrorObject
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice as ChatChoice

from alphaloop.errors import DeliveryFailed
from alphaloop.kafka.producer import Producer
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.messages import batch_line
from tests.fixtures.postgres import count
from tests.fixtures.worker import WAIT_S, Client, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.timeout(400)]

NUM_GOOD = 180
CHECKOUT = Path(__file__).resolve().parents[2]
CHAT = batch_line("")["body"]


def line(custom_id: str, **fields: Any) -> str:
    given = {**batch_line(custom_id), **fields}
    return json.dumps({name: value for name, value in given.items() if value is not None})


#: Twenty ways to be wrong: the last four are only known to the worker, which refuses them.
BAD = (
    "{half a line",
    "[1, 2]",
    '"text"',
    "\x00",
    "[" * 5000,
    line("no-body", body=None),
    line("a text as body", body="Hello"),
    line("", body=CHAT),
    line("no url", url=None),
    line("embeddings", url="/v1/embeddings"),
    line("GET", method="GET"),
    line("hot", body={**CHAT, "temperature": 9}),
    line("seventeen", body={**CHAT, "n": 17}),
    line("robot", body={"messages": [{"role": "robot", "content": "x"}]}),
    line("request-7"),
    line("x" * 101),
    line("other model", body={**CHAT, "model": "gpt-5"}),
    line("long", body={"messages": [{"role": "user", "content": "word " * 5000}]}),
    line("model and more", body={**CHAT, "model": "gpt-5", "seed": 3}),
    line("long text", url="/v1/completions", body={"prompt": "word " * 6000}),
)


def write_batch(path: Path, num_good: int, bad: Sequence[str]) -> Path:
    """Good lines, every tenth for the older endpoint, and bad ones evenly among them."""
    lines, left, every = [], iter(bad), num_good // len(bad)
    for number in range(num_good):
        older = {"url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 3}} if is_older(number) else {}
        lines.append(line(f"request-{number}", **older))
        if number % every == every - 1:
            lines.append(next(left))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def is_older(number: int) -> bool:
    return number % 10 == 0


def as_openai_reads(body: dict[str, Any]) -> ChatCompletion | Completion:
    """An answer in the type of OpenAI's own client, which knows every field of it."""
    kind = Completion if body["object"] == "text_completion" else ChatCompletion
    answer = kind.model_validate(body)
    assert not answer.model_extra
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return answer


def text_in(answer: ChatCompletion | Completion) -> str | None:
    (choice,) = answer.choices
    return choice.message.content if isinstance(choice, ChatChoice) else choice.text


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_batch_with_twenty_bad_lines_survives_kill_9(
    stack_cli: Cli, worker_settings: Settings, database: Database, tmp_path: Path
) -> None:
    batch_file = write_batch(tmp_path / "requests.jsonl", NUM_GOOD, BAD)
    Client(worker_settings)
    command = [sys.executable, "-m", "alphaloop.cli", "batch", "submit", str(batch_file), "--task", "chat", "--wait"]
    with running_worker(worker_settings, FakeEngine(num_slots=32)):
        submission = subprocess.Popen(
            command, cwd=CHECKOUT, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: count(database, "jobs") > 0, "a worker has seen the first requests")
        submission.kill()
        submission.wait(30)
        resumed = stack_cli("batch", "submit", batch_file, "--task", "chat", "--wait", "--timeout", "300", "--json")
        told = stack_cli("batch", "status", batch_file, "--json")
    assert resumed.json == told.json
    assert told.json["status"] == "completed"
    assert BatchRequestCounts.model_validate(told.json["request_counts"]).failed == len(BAD)
    assert told.json["request_counts"] == {"total": NUM_GOOD + len(BAD), "completed": NUM_GOOD, "failed": len(BAD)}
    assert told.json["requests_by_status"] == {"succeeded": NUM_GOOD, "invalid": 16, "refused": 4}
    output, errors = tmp_path / "output.jsonl", tmp_path / "errors.jsonl"
    assert stack_cli("batch", "output", batch_file, "--to", output).code == 0
    assert stack_cli("batch", "errors", batch_file, "--to", errors).code == 0
    done = rows(output)
    assert {row["custom_id"] for row in done} == {f"request-{number}" for number in range(NUM_GOOD)}
    assert len(done) == NUM_GOOD
    answers = {row["custom_id"]: as_openai_reads(row["response"]["body"]) for row in done}
    assert all(text_in(answer) for answer in answers.values())
    older = {name for name, answer in answers.items() if isinstance(answer, Completion)}
    assert older == {f"request-{number}" for number in range(NUM_GOOD) if is_older(number)}
    wrong = rows(errors)
    assert len(wrong) == len(BAD)
    for row in wrong:
        told_why = ErrorObject.model_validate(row["response"]["body"]["error"])
        assert (told_why.type, told_why.code) == ("invalid_request_error", row["error"]["code"])
        assert BatchError.model_validate(row["error"]).message == told_why.message
    assert sorted(row["line"] for row in wrong if "line" in row) == [10 * number + 10 for number in range(16)]
    codes = {row["custom_id"]: row["error"]["code"] for row in wrong if "line" not in row}
    assert codes == {
        "other model": "invalid_field",
        "model and more": "invalid_field",
        "long": "prompt_too_long",
        "long text": "prompt_too_long",
    }
    assert count(database, "jobs") == NUM_GOOD


def test_a_submission_that_was_cut_off_goes_on_where_it_was(
    stack_cli: Cli, worker_settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batch_file = write_batch(tmp_path / "requests.jsonl", 98, (*BAD[:1], BAD[-1]))
    Client(worker_settings)
    send, num_sent = Producer.send, 0

    def send_thirty(producer: Producer, *args: Any, **given: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 30:
            producer.flush(60.0)
            raise DeliveryFailed("cut off")
        send(producer, *args, **given)

    with monkeypatch.context() as cut:
        cut.setattr(Producer, "send", send_thirty)
        assert stack_cli("batch", "submit", batch_file, "--task", "chat").code == 1
    (listed,) = stack_cli("batch", "list", "--json").json
    for told in (listed, *(stack_cli("batch", "status", one, "--json").json for one in (batch_file, listed["id"]))):
        assert told["request_counts"] == {"total": 100, "completed": 0, "failed": 1}, "what was not sent waits"
    with running_worker(worker_settings, FakeEngine(num_slots=32)):
        until(lambda: count(database, "jobs") == 29, "the worker has seen what was sent")
        resumed = stack_cli("batch", "submit", batch_file, "--task", "chat", "--wait", "--timeout", "300", "--json")
    assert f"{98 + 1 - 29} requests sent" in resumed.err, "the other bad line is refused by the worker"
    assert resumed.json["request_counts"] == {"total": 100, "completed": 98, "failed": 2}


def test_a_cancelled_batch_keeps_what_is_done(
    stack_cli: Cli, worker_settings: Settings, database: Database, tmp_path: Path
) -> None:
    """One request has ended, one runs, and others wait when the batch is cancelled."""
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(line(f"request-{number}") for number in range(4)), encoding="utf-8")
    is_cancelled = threading.Event()

    def hold_the_second() -> None:
        if engine.num_steps == 4:
            assert is_cancelled.wait(WAIT_S)

    engine = FakeEngine(num_slots=1, acceptance=(), before_step=hold_the_second)
    stack_cli("batch", "submit", path, "--task", "chat")
    with running_worker(worker_settings, engine) as worker:
        until(lambda: count(database, "jobs WHERE status = 'succeeded'") == 1, "one request has ended")
        until(lambda: count(database, "jobs") == 4, "all are claimed")
        told = stack_cli("batch", "status", path, "--json").json
        assert told["requests_by_status"] == {"succeeded": 1, "held": 3}
        assert told["status"] == "in_progress"
        assert "asked to cancel 3 requests" in stack_cli("batch", "cancel", path).err
        until(lambda: len(worker.worker.leases.cancelled()) == 3, "the worker knows")
        is_cancelled.set()
        until(lambda: count(database, "jobs WHERE status = 'cancelled'") == 3, "the batch is cancelled")
    told = stack_cli("batch", "status", path, "--json").json
    assert (told["status"], told["request_counts"]) == ("cancelled", {"total": 4, "completed": 1, "failed": 3})
    errors = [json.loads(one) for one in stack_cli("batch", "errors", path).out.splitlines()]
    assert {BatchError.model_validate(row["error"]).code for row in errors} == {"batch_cancelled"}
    assert len(stack_cli("batch", "output", path).out.splitlines()) == 1
    assert "nothing to cancel" in stack_cli("batch", "cancel", path).err


def test_a_batch_through_kafka_alone_is_known_by_its_name(stack_cli: Cli, worker_settings: Settings) -> None:
    client = Client(worker_settings)
    jobs = [
        {"job_id": f"j{number}", "custom_id": f"c{number}", "batch_id": "monday", "body": CHAT} for number in range(3)
    ]
    jobs.append({**jobs[0], "job_id": "late", "custom_id": "late", "deadline": "2020-01-01T00:00:00Z"})
    with running_worker(worker_settings, FakeEngine()):
        client.send("chat", [json.dumps(job).encode() for job in jobs])
        client.results(4)
    told = stack_cli("batch", "status", "monday", "--json").json
    assert told["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    output = [json.loads(one) for one in stack_cli("batch", "output", "monday").out.splitlines()]
    errors = [json.loads(one) for one in stack_cli("batch", "errors", "monday").out.splitlines()]
    assert sorted(row["custom_id"] for row in output) == ["c0", "c1", "c2"]
    assert [(row["custom_id"], row["error"]["code"]) for row in errors] == [("late", "batch_expired")]


def test_what_cannot_be_submitted_is_said(stack_cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text("\n\n")
    assert "No such file" in stack_cli("batch", "submit", "nothing.jsonl", "--task", "chat").err
    assert "no task 'nobody'" in stack_cli("batch", "submit", file, "--task", "nobody").err
    ran = stack_cli("batch", "submit", file, "--task", "chat")
    assert (ran.code, f"{file}: expected one request a line" in ran.err) == (1, True)
    file.write_text(json.dumps(batch_line("hot", temperature=9)) + "\n{}\n")
    ran = stack_cli("batch", "submit", file, "--task", "chat", "--wait")
    hot, nameless, *_ = (line for line in ran.err.splitlines() if line.startswith("line "))
    assert hot.startswith("line 1, hot: invalid, invalid_field: body.temperature: expected less than")
    assert (
        nameless == "line 2: invalid, invalid_field: custom_id: expected a text that names the request, found nothing"
    )
    assert ran.code == 1
    assert ran.err.splitlines()[-1].endswith(": failed; 2 invalid"), "no line of it is a job"
    assert stack_cli("batch", "submit", file, "--task", "chat").code == 1
