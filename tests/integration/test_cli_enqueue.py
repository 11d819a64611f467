"""`alphaloop enqueue` and what belongs to it, against a real Apache Kafka with a responder in the worker's place."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaloop.client import arrivals
from alphaloop.client.arrivals import read_result
from alphaloop.errors import InvalidField
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topic
from alphaloop.messages import Origin, Result, dead_letter
from alphaloop.messages.topics import dlq_topic, jobs_topic
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import settings_for
from tests.fixtures.cli import Cli
from tests.fixtures.responder import REFUSED, SILENT, Responder
from tests.fixtures.worker import until

pytestmark = pytest.mark.kafka


@pytest.fixture
def task(fresh_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kafka_broker: str) -> str:
    """A task of this test's own, and an environment in which the command line knows it."""
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "tasks.toml").write_text(f"[tasks.{fresh_prefix}]\n")
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(configs))
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka_broker)
    monkeypatch.setenv("ALPHALOOP_KAFKA__EXTRA", json.dumps(settings_for(kafka_broker).extra))
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(tmp_path / "data"))
    return fresh_prefix


@pytest.fixture
def responder(kafka_settings: KafkaSettings, task: str) -> Iterator[Responder]:
    started = Responder(kafka_settings, task)
    yield started
    started.close()


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_results_come_back_in_the_order_of_the_input(cli: Cli, task: str, responder: Responder, tmp_path: Path) -> None:
    file = write(
        tmp_path / "jobs.jsonl",
        *({"id": f"line-{i}", "task": task, "prompt": f"prompt {i}", "source": "nowhere"} for i in range(20)),
        "nonsense",
        {
            "custom_id": "batch-line",
            "method": "POST",
            "url": "/v1/chat/completions",
            "task": task,
            "body": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 90},
        },
        {"task": task, "prompt": REFUSED, "job_id": f"{task}-refused"},
    )
    output = tmp_path / "results.jsonl"
    ran = cli(
        "enqueue", "--file", file, "--output", output, "--max-tokens", 7, "--segment", "gold", "--timeout", 60, "--json"
    )
    assert ran.code == 1  # one line was wrong and one job refused
    assert f"{file}:21: expected JSON" in ran.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["custom_id"] for row in rows[:20]] == [f"line-{i}" for i in range(20)]
    assert [row["text"] for row in rows[:20]] == [f"re: prompt {i}" for i in range(20)]
    assert rows[20] == {
        "line": f"{file}:21",
        "status": "invalid",
        "error": {"code": "malformed_message", "message": rows[20]["error"]["message"]},
    }
    assert rows[21]["text"] == "re: hello"
    assert rows[22]["status"] == "refused"
    assert rows[22]["error"] == {
        "code": "invalid_field",
        "message": "expected something else",
        "field": "model",
        "hint": "leave it out",
    }
    assert f"{task}-refused: refused, invalid_field: model: expected something else (hint: leave it out)" in ran.err
    assert {key: ran.json[key] for key in ("sent", "invalid", "succeeded", "refused", "completion_tokens")} == {
        "sent": 22,
        "invalid": 1,
        "succeeded": 21,
        "refused": 1,
        "completion_tokens": 63,
    }
    assert ran.json["tokens_per_s"] > 0
    assert {job.body.max_tokens for job in responder.jobs} == {7}
    assert {job.segment for job in responder.jobs} == {"gold"}


def test_one_prompt_prints_its_text_its_id_or_both(cli: Cli, task: str, responder: Responder, tmp_path: Path) -> None:
    ran = cli("enqueue", "--task", task, "--prompt", "hello", "--wait", "--timeout", 60)
    assert (ran.code, ran.out) == (0, "re: hello\n")
    assert "1 sent; 1 succeeded; 3 tokens" in ran.err
    ran = cli("enqueue", "--task", task, "--prompt", SILENT)
    assert ran.code == 0
    until(lambda: len(responder.jobs) == 2, "the job has arrived")
    assert responder.jobs[-1].job_id == ran.out.strip()
    file = write(tmp_path / "jobs.jsonl", *({"prompt": SILENT, "job_id": f"{task}-{n}"} for n in range(3)))
    ran = cli("enqueue", "--task", task, "--file", file, "--json")
    assert ran.json["job_ids"] == [f"{task}-{n}" for n in range(3)]
    ran = cli("enqueue", "--task", task, "--prompt", "hello", "--wait", "--json", "--timeout", 60)
    assert [row["text"] for row in ran.json["results"]] == ["re: hello"]
    assert [row["job_id"] for row in ran.json["results"]] == ran.json["job_ids"]
    line = json.dumps({"job_id": f"{task}-same", "prompt": "again"}).encode() + b"\n"
    ran = cli("enqueue", "--task", task, "--file", "-", "--output", "-", "--timeout", 60, stdin=line + b"\n" + line)
    assert ran.code == 0, "two lines of one job are two rows"
    assert [json.loads(row)["text"] for row in ran.out.splitlines()] == ["re: again", "re: again"]


def test_what_is_wrong_is_told_before_anything_is_sent(
    cli: Cli, task: str, responder: Responder, tmp_path: Path
) -> None:
    empty = write(tmp_path / "empty.jsonl", "", "")
    for wait in ((), ("--wait",), ("--strict",)):
        ran = cli("enqueue", "--task", task, "--file", empty, *wait)
        assert ran.code == 1
        assert f"{empty}: expected one JSON object a line, found no line with text" in ran.err
    good, bad = json.dumps({"prompt": "good"}).encode(), b'{"prompt": "p", "temperature": 9}'
    ran = cli("enqueue", "--strict", "--task", task, "--file", "-", stdin=good + b"\n" + bad)
    assert (ran.code, "standard input:2: temperature:" in ran.err) == (1, True)
    ran = cli("enqueue", "--task", task, "--prompt", "hello", "--output", tmp_path / "none" / "results.jsonl")
    assert (ran.code, "No such file" in ran.err) == (1, True)
    file = write(tmp_path / "jobs.jsonl", {"prompt": "p"})
    ran = cli("enqueue", "--file", file, "--task", task, "--output", file)
    assert (ran.code, "sent" in ran.err) == (1, False), "the output is never the input"
    assert json.loads(file.read_text()) == {"prompt": "p"}
    assert cli("enqueue", "--task", task, "--prompt", "hello", "--wait", "--timeout", 60).code == 0
    assert len(responder.jobs) == 1


def test_a_job_without_an_answer_ends_with_the_time(
    cli: Cli, task: str, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_answered = threading.Event()

    def noting(record: Record) -> Result | None:
        result = read_result(record)
        if result is not None and result.task == task:
            is_answered.set()
        return result

    # The time stands still until the answer is read, however slow the machine is, and is over then.
    monkeypatch.setattr(arrivals, "read_result", noting)
    monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=lambda: 10.0 if is_answered.is_set() else 0.0))
    lines = "\n".join(json.dumps({"prompt": prompt}) for prompt in ("hello", SILENT)).encode()
    ran = cli("enqueue", "--task", task, "--file", "-", "--output", "-", "--timeout", 3, stdin=lines)
    assert ran.code == 1
    assert [json.loads(row)["status"] for row in ran.out.splitlines()] == ["succeeded", "missing"]
    assert "error: 1 job had no result within the timeout" in ran.err
    assert re.search(r"wait again: \S*alphaloop wait ", ran.err)


def test_of_many_dead_letters_only_the_newest_are_read(
    cli: Cli, task: str, kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_topic(kafka_settings, dlq_topic(jobs_topic(task)))
    error = InvalidField("expected something else", field="body.model")
    with closing(Producer(kafka_settings)) as producer:
        for number in range(300):
            origin = Origin("c", jobs_topic(task), 0, number)
            letter = dead_letter(error, origin, group="g", num_deliveries=1, key=None, value=b"x" * 10_000, headers=())
            producer.send(letter.topic, key=b"k%d" % number, value=letter.value, headers=letter.headers)
            if number == 296:
                producer.flush(60)  # so that the last three are newer than all others
        producer.flush(60)
    read, poll = [], Consumer.poll

    def counting(consumer: Consumer, timeout_s: float) -> Any:
        record = poll(consumer, timeout_s)
        read.append(record is not None)
        return record

    monkeypatch.setattr(Consumer, "poll", counting)
    ran = cli("dlq", "list", "--task", task, "--limit", 3, "--json")
    assert ran.code == 0
    assert sorted(letter["offset"] for letter in ran.json) == ["297", "298", "299"]
    assert sum(read) <= 3 * kafka_settings.num_partitions, "what is not shown is not read"
