"""The programs of examples/, each run as it stands against a worker, a broker and a database."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import DRIFT_REPORTS, RESULTS, TOKENS
from alphaloop.settings import Settings
from alphaloop.settings.models import ModelSettings
from tests.fakes import FakeEngine
from tests.fixtures.worker import Client, running_worker

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.postgres, pytest.mark.timeout(400)]
EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def installation(worker_settings: Settings) -> Settings:
    """Topics that exist and are led, as those of an installation that runs."""
    Client(worker_settings)
    with closing(Consumer(worker_settings.kafka, group_id="unused")) as consumer:
        consumer.assign_from([TOKENS, RESULTS, DRIFT_REPORTS], at="latest")
    return worker_settings


def run(settings: Settings, *command: str | Path, **environment: str) -> str:
    bound = {
        "KAFKA_BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers or "",
        "DATABASE_URL": settings.postgres.url.get_secret_value(),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ALPHALOOP_KAFKA__BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers or "",
        "ALPHALOOP_POSTGRES__URL": settings.postgres.url.get_secret_value(),
    }
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **bound, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_jobs_are_sent_awaited_and_streamed_and_a_batch_file_comes_back(installation: Settings, tmp_path: Path) -> None:
    with running_worker(installation, FakeEngine()):
        plain, whole = (
            run(installation, sys.executable, EXAMPLES / name, "code", "def add(a, b):")
            for name in ("any_kafka_client.py", "client_submit_and_wait.py")
        )
        streamed = run(installation, sys.executable, EXAMPLES / "client_stream.py", "chat", "Tell me of rivers.")
        refused = run(installation, sys.executable, EXAMPLES / "any_kafka_client.py", "code", " ")
        run(installation, "sh", EXAMPLES / "openai_batch.sh", tmp_path)
        jobs = tmp_path / "jobs.jsonl"
        asked = [{"task": "code", "prompt": f"def f{n}():", "max_tokens": 4} for n in range(20)]
        jobs.write_text("".join(json.dumps(one) + "\n" for one in [*asked, {**asked[0], "model": "another"}]))
        many = run(installation, sys.executable, EXAMPLES / "client_many_jobs.py", jobs)
        guide = (EXAMPLES.parent / "docs" / "guides" / "python-client.md").read_text(encoding="utf-8")
        program = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0]
        address = str(installation.kafka.bootstrap_servers)
        shown = run(installation, sys.executable, "-c", program.replace("localhost:9092", address))
    assert shown.count(" succeeded ") == 2
    statuses = [json.loads(line)["status"] for line in many.splitlines()]
    assert (len(statuses), statuses.count("succeeded"), statuses.count("refused")) == (21, 20, 1)
    status, *text = plain.splitlines()
    assert status == "succeeded"
    assert "".join(text)
    assert whole == plain, "the same text"
    assert refused == "refused\nexpected at least one message with text, found only empty ones\n"
    so_far, end = streamed.rsplit("\n-- ", 1)
    assert end == "succeeded --\n"
    assert so_far
    lines = [json.loads(line) for line in (tmp_path / "output.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["custom_id"] for line in lines] == ["request-1", "request-2", "request-3"]
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in lines)


def test_a_query_of_ones_own_answers_before_anything_was_measured(installation: Settings) -> None:
    assert run(installation, sys.executable, EXAMPLES / "own_query.py") == "no task has been measured yet\n"


def test_a_drift_alert_of_ones_own_tells_of_each_event_once(installation: Settings) -> None:
    event = {"task": "code", "drafter": "lookup", "cause": "draft_stale", "action": "Train a new draft."}
    report = {"opened": [event], "closed": [], "headline": "12 jobs of one task"}
    producer = Producer(installation.kafka)
    producer.send(DRIFT_REPORTS, key=b"measure", value=json.dumps(report).encode())
    producer.flush(30)
    command = (sys.executable, EXAMPLES / "own_drift_alert.py", "--once")
    group = {"GROUP_ID": f"alert-{installation.kafka.group_id}"}
    assert run(installation, *command, **group) == "opened: code, lookup: draft_stale. Train a new draft.\n"
    producer.send(
        DRIFT_REPORTS,
        key=b"measure",
        value=json.dumps({"opened": [], "closed": [], "headline": "12 jobs of one task; no drift is open"}).encode(),
    )
    producer.flush(30)
    producer.close()
    assert run(installation, *command, **group).startswith("nothing opened or closed: 12 jobs")


def test_the_settings_for_two_servers_are_settings() -> None:
    models = ModelSettings.model_validate(
        tomllib.loads((EXAMPLES / "vllm_pair" / "models.toml").read_text(encoding="utf-8"))["models"]
    )
    assert {name: endpoint.drafter for name, endpoint in models.endpoints.items()} == {
        "plain": None,
        "speculative": "ngram",
    }
    assert models.target.engine == "server"


@pytest.mark.model
def test_the_engine_alone_decodes_a_text_with_fewer_rounds_than_tokens(smollm2_source: str, tmp_path: Path) -> None:
    decoding = [sys.executable, EXAMPLES / "engine_alone.py", "def fibonacci(n):"]
    done = subprocess.run(decoding, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=True)
    num_tokens, num_rounds = re.findall(r"\d+", done.stderr.splitlines()[-1])
    assert "fibonacci" in done.stdout
    assert int(num_tokens) == 64 > int(num_rounds)


def test_every_example_is_named_and_run() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    here = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.rglob("*"):
        if path.is_file() and path.name != "README.md":
            name = path.relative_to(EXAMPLES).as_posix()
            assert f"({name})" in page, name
            assert path.name in here, name
