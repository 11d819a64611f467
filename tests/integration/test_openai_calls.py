"""OpenAI's client in one script of more than forty calls: files, batches, models, and what is not served.

The console's server, the broker, the database and the worker are real; the engine is a fake. What differs from
OpenAI's documentation is the table of docs/guides/openai-batches.md.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.messages import batch_line
from tests.fixtures.openai_api import create_key, ended, served, told
from tests.fixtures.worker import WAIT_S, Client, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.usefixtures("looks_often")]

HOUR = {"anchor": "created_at", "seconds": 3600}
NOWHERE = f"file-{'0' * 32}", f"batch_{'0' * 32}"
CHAT = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
#: What an error for a customer of the API never speaks of.
FOREIGN = ("--", "alphaloop ", "pydantic", "Input should", "configs/", "Traceback")


class Calls:
    """Counts calls, and looks at every answer."""

    def __init__(self, url: str, key: str) -> None:
        self.ids: list[str] = []
        hooks = {"response": [self._look]}
        self.api = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=0,
            timeout=WAIT_S,
            http_client=httpx2.Client(event_hooks=hooks),
        )

    def _look(self, answer: httpx2.Response) -> None:
        self.ids.append(answer.headers["x-request-id"])
        if answer.is_error:
            error = json.loads(answer.read())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert not any(word in error["message"] for word in FOREIGN), error

    def refused(self, status: int, param: str | None, call: Callable[[], Any], *words: str) -> None:
        with pytest.raises(openai.APIStatusError) as error:
            call()
        found = told(error.value)
        assert (error.value.status_code, found["param"]) == (status, param), found
        assert all(word in found["message"] for word in words), found
        assert error.value.request_id == self.ids[-1]


def jsonl(*lines: Any) -> tuple[str, bytes]:
    return "requests.jsonl", "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines).encode()


def test_more_than_forty_calls(worker_settings: Settings, database: Database, tmp_path: Path) -> None:
    Client(worker_settings)  # topics
    key = create_key(database, "calls", tasks=["chat", "code"])
    with served(worker_settings, tmp_path) as url, running_worker(worker_settings, FakeEngine(num_slots=16)):
        calls = Calls(url, key)
        with calls.api as api:
            served_models(api, calls)
            file_id = files(api, calls)
            batches(api, calls, file_id)
            not_served(api, calls)
        other = Calls(url, f"al-{'x' * 43}")
        other.refused(401, None, other.api.files.list, "found a key that is unknown")
        other.api.close()
        asyncio.run(from_asyncio(url, key))
    assert len(calls.ids) >= 40
    assert len(set(calls.ids)) == len(calls.ids)


def served_models(api: openai.OpenAI, calls: Calls) -> None:
    name = FakeEngine().identity.target
    deadline = time.monotonic() + WAIT_S
    while [one.id for one in api.models.list()] != [name]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert api.models.retrieve(name).object == "model"
    calls.refused(404, None, lambda: api.models.retrieve("gpt-5"))
    calls.refused(405, None, lambda: api.models.delete(name), "takes no DELETE")


def files(api: openai.OpenAI, calls: Calls) -> str:
    lines = jsonl(batch_line("a", user="u-1", metadata={"x": "y"}), batch_line("b"), batch_line("c", stream=True))
    made = api.files.create(file=lines, purpose="batch")
    assert (made.object, made.bytes, made.status, made.filename) == ("file", len(lines[1]), "processed", lines[0])
    short = api.files.create(file=lines, purpose="batch", expires_after=HOUR)  # type: ignore[arg-type]
    assert short.expires_at == short.created_at + 3600

    def create(**given: Any) -> Callable[[], Any]:
        return lambda: api.files.create(**{"file": lines, "purpose": "batch", **given})

    calls.refused(400, "purpose", create(purpose="vision"), "'vision'")
    calls.refused(400, "ttl", create(extra_query={"ttl": "7"}), "'ttl'", "no parameter")
    calls.refused(400, "ttl", create(extra_body={"ttl": "7"}), "'ttl'", "purpose")
    calls.refused(400, "expires_after", create(expires_after={**HOUR, "seconds": 60}), "60", "3600")
    calls.refused(400, "expires_after", create(expires_after={**HOUR, "anchor": "end"}), "end", "created_at")
    calls.refused(400, "expires_after", create(expires_after={"seconds": 3600}), "created_at")
    assert [one.id for one in api.files.list(limit=1)] == [short.id, made.id], "page by page"
    assert [one.id for one in api.files.list(order="asc")] == [made.id, short.id]
    assert [one.id for one in api.files.list(after=short.id)] == [made.id]
    assert api.files.list(purpose="assistants").data == []
    calls.refused(400, "limit", lambda: api.files.list(limit=0), "'0'", "10000")
    calls.refused(400, "colour", lambda: api.files.list(extra_query={"colour": "red"}), "'colour'", "limit")
    calls.refused(404, None, lambda: api.files.list(after=NOWHERE[0]))
    assert api.files.retrieve(made.id) == made
    assert api.files.wait_for_processing(made.id).id == made.id
    assert api.files.content(made.id).content == lines[1]
    calls.refused(404, None, lambda: api.files.retrieve(NOWHERE[0]), NOWHERE[0])
    calls.refused(404, None, lambda: api.files.content("../../etc/passwd"))
    calls.refused(400, "at", lambda: api.files.content(made.id, extra_query={"at": "7"}), "'at'", "no parameter")
    assert api.files.delete(short.id).deleted
    calls.refused(404, None, lambda: api.files.delete(short.id))
    return made.id


def batches(api: openai.OpenAI, calls: Calls, file_id: str) -> None:
    def create(**given: Any) -> Callable[[], Any]:
        return lambda: api.batches.create(**{"input_file_id": file_id, "metadata": {"task": "chat"}, **CHAT, **given})

    calls.refused(400, "priority", create(extra_body={"priority": 1}), "'priority'", "completion_window")
    calls.refused(400, "priority", create(extra_query={"priority": "1"}), "'priority'", "no parameter")
    calls.refused(400, "endpoint", create(endpoint="/v1/embeddings"), "'/v1/embeddings'", "/v1/completions")
    calls.refused(400, "completion_window", create(completion_window="8d"), "'8d'", "at most 7d")
    calls.refused(400, "input_file_id", create(input_file_id="x"), "'x'")
    calls.refused(404, None, create(input_file_id=NOWHERE[0]))
    calls.refused(400, "metadata", create(metadata={str(n): "" for n in range(17)}), "at most 16", "17 fields")
    calls.refused(400, "metadata.task", create(metadata={"task": "none"}), "'none'", "chat, code")
    calls.refused(400, "metadata", create(metadata={"": "x"}))
    for wrong in ({**HOUR, "seconds": 60}, {**HOUR, "seconds": "3600"}, {**HOUR, "anchor": "end"}, {**HOUR, "x": 1}):
        param = f"output_expires_after.{next(name for name, value in wrong.items() if HOUR.get(name) != value)}"
        calls.refused(400, param, create(output_expires_after=wrong), "3600 to 2592000")
    made = create(output_expires_after=HOUR)()
    assert (made.metadata, made.usage, made.errors) == ({"task": "chat"}, None, None)
    done = ended(api, made.id)
    assert (done.status, done.metadata) == ("completed", {"task": "chat"})
    assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}  # type: ignore[union-attr]
    for name in (done.output_file_id, done.error_file_id):
        assert name is not None
        file = api.files.retrieve(name)
        assert file.expires_at == file.created_at + 3600
    rows = [json.loads(line) for line in api.files.content(done.output_file_id).text.splitlines()]  # type: ignore[arg-type]
    by_id = {row["custom_id"]: row for row in rows}
    assert by_id["a"]["ignored_fields"] == ["body.metadata", "body.user"]
    assert "ignored_fields" not in by_id["b"]
    (streamed,) = (json.loads(line) for line in api.files.content(done.error_file_id).text.splitlines())  # type: ignore[arg-type]
    assert (streamed["custom_id"], streamed["response"]["body"]["error"]["param"]) == ("c", "body.stream")
    used = [row["response"]["body"]["usage"] for row in rows]
    assert done.usage is not None
    assert done.usage.input_tokens == sum(one["prompt_tokens"] for one in used) > 0
    assert done.usage.output_tokens == sum(one["completion_tokens"] for one in used) > 0
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    calls.refused(400, "input_file_id", create(input_file_id=done.output_file_id), "batch_output")
    calls.refused(409, None, lambda: api.batches.cancel(made.id), "'completed'")
    calls.refused(404, None, lambda: api.batches.cancel(NOWHERE[1]))
    calls.refused(404, None, lambda: api.batches.retrieve("batch_x"), "batch_x")
    failing(api, calls)
    assert [one.id for one in api.batches.list(limit=1)][-1] == made.id
    assert api.batches.list(after=made.id).data == []
    calls.refused(400, "limit", lambda: api.batches.list(limit=101), "'101'", "100")
    calls.refused(400, "order", lambda: api.batches.list(extra_query={"order": "asc"}), "'order'")


def failing(api: openai.OpenAI, calls: Calls) -> None:
    """Files of which no line can become a job, and a batch that is cancelled."""
    hot = batch_line("hot", temperature=9)
    nothing_good = jsonl(
        "{half", hot, {**hot, "custom_id": "get", "method": "GET"}, {**hot, "custom_id": "url", "url": "/v1/x"}
    )
    file = api.files.create(file=nothing_good, purpose="batch")
    made = ended(api, api.batches.create(input_file_id=file.id, metadata={"task": "chat"}, **CHAT).id)  # type: ignore[call-overload]
    assert (made.status, made.output_file_id, made.error_file_id) == ("failed", None, None)
    errors = made.errors.data
    assert [(one.line, one.param) for one in errors] == [(1, None), (2, "body.temperature"), (3, "method"), (4, "url")]
    assert [one.message for one in errors] == [
        "expected one JSON object a line, found something else",
        "expected less than or equal to 2, found 9",
        "expected POST, found GET",
        "expected one of /v1/chat/completions, /v1/completions, found /v1/x",
    ]
    # Two tasks, and neither the batch nor a line names one.
    file = api.files.create(file=jsonl(batch_line("a"), batch_line("b")), purpose="batch")
    made = ended(api, api.batches.create(input_file_id=file.id, **CHAT).id)  # type: ignore[call-overload]
    assert (made.status, made.request_counts.total, {one.param for one in made.errors.data}) == ("failed", 2, {"task"})
    assert "metadata.task of the batch" in made.errors.data[0].message
    assert not any(word in made.errors.data[0].message for word in FOREIGN)
    named = api.files.create(file=jsonl(batch_line("a"), {**batch_line("b"), "task": "code"}), purpose="batch")
    made = ended(api, api.batches.create(input_file_id=named.id, **CHAT).id)  # type: ignore[call-overload]
    assert (made.status, made.request_counts.completed, made.request_counts.failed) == ("completed", 1, 1)
    for _ in range(20):  # it may have ended before it is cancelled
        waits = api.batches.create(input_file_id=named.id, metadata={"task": "chat"}, **CHAT)  # type: ignore[call-overload]
        with suppress(openai.ConflictError):
            if api.batches.cancel(waits.id).status == "cancelling":
                assert ended(api, waits.id).status == "cancelled"
                return
        ended(api, waits.id)
    raise AssertionError("none could be cancelled")


def not_served(api: openai.OpenAI, calls: Calls) -> None:
    said: Any = [{"role": "user", "content": "Hello"}]
    calls.refused(404, None, lambda: api.chat.completions.create(model="m", messages=said), "/v1/chat/completions is")
    calls.refused(404, None, lambda: api.completions.create(model="m", prompt="Hello"))
    calls.refused(404, None, lambda: api.embeddings.create(model="m", input="Hello"))
    calls.refused(404, None, lambda: api.responses.create(model="m", input="Hello"))
    calls.refused(404, None, lambda: api.uploads.create(bytes=1, filename="f", mime_type="text/plain", purpose="batch"))
    calls.refused(404, None, lambda: api.moderations.create(input="Hello"))


async def from_asyncio(url: str, key: str) -> None:
    """The other client."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as api:
        found = [one async for one in api.files.list(limit=2)]
        assert (await api.files.with_raw_response.retrieve(found[0].id)).headers["x-request-id"].startswith("req_")
        assert [one.id async for one in api.batches.list()]
