"""Prompts and texts above Kafka's limit through an S3 store, from `alphaloop batch submit` to the output file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from pydantic import SecretStr

from alphaloop.claim_check.store import ContentStore
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result
from alphaloop.settings import ClaimCheckSettings, KafkaSettings, Settings
from tests.chaos.proxy import Proxy
from tests.fakes import VerboseEngine
from tests.fixtures.broker import Operator
from tests.fixtures.cli import Cli
from tests.fixtures.messages import batch_line
from tests.fixtures.object_store import BUCKET, ObjectStore
from tests.fixtures.worker import Client, changed, kafka_extra, running_worker, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.postgres]

LIMIT = 2000  #: bytes of a message on `results`
LARGE = 3 << 20  #: bytes of a prompt
URL = f"s3://{BUCKET}/batch-tests"


@pytest.fixture
def proxy(object_store: ObjectStore) -> Iterator[Proxy]:
    found = Proxy(object_store.port)
    yield found
    found.close()


@pytest.fixture
def settings(
    worker_settings: Settings,
    clean_kafka: KafkaSettings,
    object_store: ObjectStore,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> Settings:
    """The worker's settings and the command line's. Both have their credentials from the environment, as AWS's own."""
    options = object_store.options(port=proxy.port)
    environment = {
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
        "ALPHALOOP_CLAIM_CHECK__URL": URL,
        "ALPHALOOP_CLAIM_CHECK__OPTIONS": json.dumps({"endpoint_url": options["endpoint_url"]}),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Operator(clean_kafka.bootstrap_servers).create(RESULTS, max_message_bytes=LIMIT)
    soon = changed(kafka_extra(worker_settings, compression_type="none"), worker={"lease_s": 2.0})
    store = ClaimCheckSettings(url=URL, options={"endpoint_url": SecretStr(options["endpoint_url"])})
    return soon.model_copy(update={"claim_check": store})


@pytest.fixture
def batch_file(tmp_path: Path) -> Path:
    """Three lines above the limit of a message, one of them with a prompt that another has too, and a small one."""
    path = tmp_path / "requests.jsonl"
    prompts = {"large-1": "x" * LARGE, "large-2": "y" * LARGE, "large-3": "x" * LARGE, "small": "z"}
    lines = [json.dumps(batch_line(name, prompt, max_tokens=8)) for name, prompt in prompts.items()]
    path.write_text("\n".join([*lines, "nonsense"]) + "\n", encoding="utf-8")
    return path


def rows(text: str) -> dict[str, dict[str, Any]]:
    return {row["custom_id"]: row for row in map(json.loads, text.splitlines())}


def text_of(row: dict[str, Any]) -> str:
    return ChatCompletion.model_validate(row["response"]["body"]).choices[0].message.content or ""


def test_lines_and_texts_above_the_limit_go_through_the_store_and_come_back_in_the_files(
    settings: Settings, batch_file: Path, stack_cli: Cli, tmp_path: Path, proxy: Proxy
) -> None:
    client = Client(settings)
    with running_worker(settings, VerboseEngine()):
        told = stack_cli("batch", "submit", batch_file, "--task", "chat", "--wait", "--timeout", "120", "--json")
        # A slow machine may publish a result twice, because an outcome that waits is tried again soon.
        records = client.read([RESULTS], lambda found: len({record.key for record in found}) >= 4)
        results = [Result.decode(record.value or b"") for record in records]
        again = stack_cli("batch", "submit", batch_file, "--task", "chat", "--wait", "--timeout", "120", "--json")
    assert told.code == again.code == 1, "a line has no text"
    assert told.json["requests_by_status"] == {"succeeded": 4, "invalid": 1}
    assert again.json == told.json
    assert "0 requests sent" in again.err
    assert all(result.text is None and result.text_ref for result in results), "no text fitted into its message"
    output = tmp_path / "output.jsonl"
    assert stack_cli("batch", "output", batch_file, "--to", output).code == 0
    done = rows(output.read_text(encoding="utf-8"))
    assert done.keys() == {"large-1", "large-2", "large-3", "small"}
    assert all(len(text_of(row)) > LIMIT for row in done.values())
    contents = ContentStore.of(settings.claim_check)

    # The store is away: the file that was written stays, and the same command works later.
    before = output.read_bytes()
    proxy.cut_answers(after_bytes=0)
    failed = stack_cli("batch", "output", batch_file, "--to", output)
    assert (failed.code, output.read_bytes()) == (1, before)
    assert "is the store up" in failed.err
    proxy.cut_answers(after_bytes=None)

    # A text that somebody deleted costs its own line, and no other.
    gone = next(result for result in results if result.custom_id == "large-2")
    contents.delete(gone.text_ref.url)
    assert rows(stack_cli("batch", "output", batch_file).out).keys() == {"large-1", "large-3", "small"}
    errors = [json.loads(one) for one in stack_cli("batch", "errors", batch_file).out.splitlines()]
    assert {row["error"]["code"] for row in errors if row["custom_id"] == "large-2"} == {"content_missing"}


def test_a_store_that_is_away_stops_a_submission_which_goes_on_later(
    settings: Settings, batch_file: Path, stack_cli: Cli, proxy: Proxy
) -> None:
    Client(settings)
    proxy.cut_answers(after_bytes=0)
    failed = stack_cli("batch", "submit", batch_file, "--task", "chat")
    assert failed.code == 1
    assert "is the store up" in failed.err
    proxy.cut_answers(after_bytes=None)
    with running_worker(settings, VerboseEngine()) as worker:
        proxy.cut()
        proxy.hold()
        assert stack_cli("batch", "status", batch_file, "--json").json["requests_by_status"]["waiting"] == 4
        proxy.release()
        told = stack_cli("batch", "submit", batch_file, "--task", "chat", "--wait", "--timeout", "120", "--json")
        until(lambda: not worker.worker.num_unpublished, "everything is acknowledged")
    assert told.code == 1, "a line has no text"
    assert told.json["requests_by_status"] == {"succeeded": 4, "invalid": 1}
