"""The table of docs/reference/openai-fields.md has every field of OpenAI's client, and says what becomes of each."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, get_type_hints

import pytest

from alphaloop.batches.advancing import api_source
from alphaloop.batches.lines import BadRequest, BatchReader, BatchRequest
from alphaloop.console.openai_api import _OF_FILES, _BatchAsked, _ExpiresAfter
from alphaloop.messages import Body
from alphaloop.settings import Settings, TaskSettings
from alphaloop.store.api import ApiBatch
from tests.sdk_bodies.fields import (
    CALLED,
    ENTRIES,
    HONOURED,
    KINDS,
    NO_EFFECT,
    PAGE,
    REFUSED,
    SAID,
    TYPES,
    fields_of,
    page,
    typed,
)

PATHS = {"chat.completions.create": "/v1/chat/completions", "completions.create": "/v1/completions"}
#: What has to stand beside a field.
BESIDE: dict[str, dict[str, Any]] = {
    "n": {"temperature": 1.0},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [CALLED]},
    "parallel_tool_calls": {"tools": [CALLED]},
}
NESTED = [
    (request, name)
    for request in ENTRIES
    for name, entry in ENTRIES[request].items()
    if request not in PATHS and entry.value
]
CASES = [(request, name) for request in PATHS for name in sorted(ENTRIES[request])]


@pytest.mark.parametrize("request_name", sorted({*TYPES, *KINDS}))
def test_every_field_of_the_clients_types_is_classified(request_name: str) -> None:
    assert fields_of(request_name) == set(ENTRIES[request_name]), "a field that is new or gone: classify it there"


def test_so_is_every_field_within_a_field_that_is_read() -> None:
    classified = {kind for kinds in TYPES.values() for kind in kinds}
    for request_name, kinds in TYPES.items():
        for name, within in ((name, typed(hint)) for kind in kinds for name, hint in get_type_hints(kind).items()):
            is_read = ENTRIES[request_name][name].verdict == HONOURED
            assert not is_read or set(within) <= classified, f"{request_name}, {name}: classify what it has within"


def test_the_page_is_as_it_is_written_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.sdk_bodies.fields"


def test_files_and_batches_know_no_other_fields() -> None:
    assert set(_BatchAsked.model_fields) == fields_of("batches.create")
    assert set(_ExpiresAfter.model_fields) == fields_of("batches.create, output_expires_after")
    assert {name.partition("[")[0] for name in _OF_FILES} == fields_of("files.create")


def read(line: dict[str, Any]) -> BadRequest | BatchRequest:
    reader = BatchReader(Settings(tasks={"chat": TaskSettings()}), "batch-1", task="chat")
    (found,) = reader.read([json.dumps(line).encode()])
    return found


@pytest.mark.parametrize("name", ["temperature", "metadata", "batch_id", "job_id", "x" * 65])
def test_a_line_has_no_other_fields(name: str) -> None:
    found = read({"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": SAID}, name: 1})
    assert isinstance(found, BadRequest)
    assert found.error.field == (None if len(name) > 64 else name)
    assert "custom_id, method, url, body, task" in found.message


@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        ({"task": "elsewhere"}, "task", "chat, code"),
        ({"task": 5}, "task", "chat, code"),
        ({"body": {"messages": SAID, "foo": 1}}, "body.foo", "'foo'"),
    ],
)
def test_an_error_for_a_key_names_no_setting(line: dict[str, Any], field: str, expected: str) -> None:
    """Neither of a task that is not configured, nor of what an operator could let pass."""
    settings, now = Settings(tasks={"chat": TaskSettings(), "code": TaskSettings()}), datetime.now(UTC)
    url = "/v1/chat/completions"
    batch = ApiBatch("batch_1", "nightly", "", "chat", (), url, "24h", None, "file-1", now, now)
    read_by = api_source(batch, None, settings).reader
    assert read_by is not None
    (found,) = read_by().read([json.dumps({"custom_id": "a", "url": url, "body": {"messages": SAID}, **line}).encode()])
    assert isinstance(found, BadRequest)
    assert found.error.field == field
    assert expected in found.message
    assert not any(word in found.message for word in ("configs", "worker.", "--"))


@pytest.mark.parametrize(("request_name", "name"), NESTED)
def test_so_do_the_parts_of_a_field(request_name: str, name: str) -> None:
    entry = ENTRIES[request_name][name]
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": SAID, **entry.value}}
    found = read(line)
    if entry.verdict == REFUSED:
        assert isinstance(found, BadRequest)
        assert str(found.error.field).startswith("body."), found.error
    else:
        assert isinstance(found, BatchRequest), found
        assert ("prompt_cache" in found.job.model_dump_json()) is False


@pytest.mark.parametrize(("request_name", "name"), CASES)
def test_a_line_of_a_batch_does_what_the_table_says(request_name: str, name: str) -> None:
    entry = ENTRIES[request_name][name]
    needed = {"messages": SAID} if request_name == "chat.completions.create" else {"prompt": "Once"}
    body = {**needed, **BESIDE.get(name, {}), name: entry.value}
    line = {"custom_id": "a", "method": "POST", "url": PATHS[request_name], "body": body}
    found = read(line)
    if entry.verdict == REFUSED:
        assert isinstance(found, BadRequest)
        assert found.error.field == f"body.{name}"
        return
    assert isinstance(found, BatchRequest)
    assert found.job.ignored_fields == ((f"body.{name}",) if entry.verdict == NO_EFFECT else ())
    if entry.verdict == HONOURED:
        kept = "max_tokens" if name == "max_completion_tokens" else name
        assert kept in found.job.body.model_fields_set
        assert getattr(found.job.body, kept) != Body.model_fields[kept].default
