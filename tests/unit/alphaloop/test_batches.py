"""Batches of requests: their lines, rows and files."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.batches.contents import FileContents
from alphaloop.batches.lines import BadRequest, BatchReader, BatchRequest, LineRules, batch_id_of
from alphaloop.batches.progress import bad_line_row, failed_row, output_row, refused_row
from alphaloop.errors import ContentAltered, ContentMissing
from alphaloop.messages import Failure, Result, Status, Usage
from alphaloop.settings import ClaimCheckSettings, Settings, load_settings

SETTINGS = load_settings()
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def line(**fields: Any) -> dict[str, Any]:
    plain = {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    return {name: value for name, value in {**plain, **fields}.items() if value is not None}


def read(*lines: bytes | dict[str, Any], **given: Any) -> list[BatchRequest | BadRequest]:
    encoded = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
    return list(BatchReader(SETTINGS, "batch-1", task="chat", **given).read(encoded))


def test_a_request_is_a_job_of_its_batch_with_an_id_of_its_own() -> None:
    first, again, other = (read(line(custom_id=name))[0] for name in ("a", "a", "b"))
    assert first == again, "the same line is the same job"
    assert first.job.job_id != other.job.job_id
    assert (first.job.batch_id, first.job.custom_id, first.job.task) == ("batch-1", "a", "chat")


def test_completions_take_a_prompt_and_a_model_may_be_left_out() -> None:
    body = {"model": "gpt-5", "prompt": "Once", "max_tokens": 3}
    (kept,) = read(line(url="/v1/completions", body=body))
    (dropped,) = read(line(url="/v1/completions", body=body), ignores_model=True)
    assert (kept.job.body.model, dropped.job.body.model, dropped.job.body.prompt) == ("gpt-5", None, "Once")


BAD: dict[str, bytes | dict[str, Any]] = {
    "": b"{half a line",
    " ": b"[]",
    "  ": b"\xff\xfe",
    "   ": b"[" * 100_000,
    "custom_id": line(custom_id=None),
    "custom_id ": line(custom_id=7),
    "custom_id  ": line(custom_id=""),
    "custom_id   ": line(custom_id="x" * 101),
    "custom_id    ": line(custom_id="\ud800"),
    "method": line(method="GET"),
    "url": line(url="/v1/embeddings"),
    "url ": line(url=None),
    "url  ": line(url=[]),
    "body": line(body=None),
    "body ": line(body="Hello"),
    "body  ": line(body={"prompt": "of the other endpoint"}),
    "body.temperature": line(body={**CHAT, "temperature": 9}),
    "body.messages.0.role": line(body={"messages": [{"role": "robot", "content": "x"}]}),
    "task": line(task="nobody-knows"),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_line_is_named_and_its_neighbours_go_on(field: str) -> None:
    before, bad, after = read(line(custom_id="before"), BAD[field], line(custom_id="after"))
    assert [type(one) for one in (before, bad, after)] == [BatchRequest, BadRequest, BatchRequest]
    assert (bad.number, bad.error.field or "") == (2, field.strip())
    json.dumps(bad_line_row(bad))


def test_a_line_cannot_ask_for_more_than_its_rules_allow() -> None:
    fixed = {"segment": "gold", "deadline": "2026-11-27T00:00:00+00:00"}
    rules = LineRules("/v1/chat/completions", ("chat", "code"), fixed)
    own = {"segment": "stolen", "deadline": "2036-11-27T00:00:00Z", "task": "code"}
    asked = [line(custom_id="a", **own), line(custom_id="b", task="sql")]
    older = line(custom_id="c", url="/v1/completions", body={"prompt": "Once"})
    good, other_task, other_endpoint = read(*asked, older, rules=rules)
    assert isinstance(good, BatchRequest)
    assert (good.job.task, good.job.segment) == ("code", "gold")
    assert good.job.deadline == datetime(2026, 11, 27, tzinfo=UTC)
    assert isinstance(other_task, BadRequest)
    assert isinstance(other_endpoint, BadRequest)
    assert (other_task.error.field, other_endpoint.error.field) == ("task", "url")
    lines = [json.dumps(one).encode() for one in (line(), line(custom_id="b", task="code"))]
    nameless, named = BatchReader(SETTINGS, "batch-1", task=None).read(lines)
    assert isinstance(nameless, BadRequest)
    assert (nameless.error.field, nameless.error.message) == ("task", "expected a task, found none")
    assert isinstance(named, BatchRequest)


def test_a_custom_id_names_one_request() -> None:
    first, second = read(line(), line())
    assert isinstance(first, BatchRequest)
    assert (second.number, second.custom_id, second.error.field) == (2, "request-1", "custom_id")


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_whatever_the_lines_are_each_gets_an_answer(lines: list[bytes]) -> None:
    assert len(read(*lines)) == sum(bool(one.strip()) for one in lines)


def test_a_batch_is_named_by_its_content(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path, content in zip(paths, (b"one", b"one", b"two"), strict=True):
        path.write_bytes(content)
    names = [batch_id_of(path) for path in paths]
    assert names[0] == names[1] != names[2]


def result(status: Status, **fields: Any) -> Result:
    return Result(
        job_id="j", status=status, task="chat", attempt=1, recorded_at=datetime(2026, 11, 22, tzinfo=UTC), **fields
    )


def test_rows_have_openais_form() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    done = result(Status.SUCCEEDED, text="Hi", finish_reason="stop", usage=usage)
    chat = output_row(done, custom_id="a")
    assert (chat["custom_id"], chat["error"], chat["response"]["status_code"]) == ("a", None, 200)
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "Hi"
    raw = done.model_copy(update={"endpoint": "/v1/completions"})
    plain = output_row(raw, custom_id="a")["response"]["body"]
    assert (plain["object"], plain["choices"][0]["text"]) == ("text_completion", "Hi")
    failed = failed_row(result(Status.FAILED, error=Failure(code="why", message="because")), custom_id="a")
    assert (failed["response"]["status_code"], failed["response"]["body"]["error"]["code"]) == (500, "why")
    cancelled = failed_row(result(Status.CANCELLED, error=Failure(code="cancelled", message="asked")), custom_id="a")
    assert (cancelled["response"], cancelled["error"]["code"]) == (None, "batch_cancelled")
    refused = refused_row("j", "prompt_too_long", "too long", "body", custom_id="a")
    assert (refused["response"]["status_code"], refused["error"]["code"]) == (400, "prompt_too_long")


MB = 1 << 20


@pytest.fixture(params=["folder", "store"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    (tmp_path / "store").mkdir()
    check = ClaimCheckSettings(url=str(tmp_path / "store") if request.param == "store" else None, max_bytes=3 * MB)
    return Settings(data_dir=tmp_path / "my data, ü", claim_check=check)


def files(settings: Settings) -> list[Path]:
    """Everything that lies anywhere."""
    return [path for path in settings.data_dir.parent.rglob("*") if path.is_file()]


@pytest.mark.parametrize("num_bytes", [0, 1, 3 * MB, 7 * MB + 5])
def test_content_comes_back_and_goes(settings: Settings, num_bytes: int) -> None:
    contents = FileContents(settings)
    content = bytes(range(256)) * (num_bytes // 256 + 1)
    content = content[:num_bytes]
    pieces = (content[start : start + 100_000] for start in range(0, num_bytes, 100_000))
    found, parts = contents.write("file-1", pieces)
    assert found == num_bytes
    if parts is not None:
        assert [part["num_bytes"] for part in parts] == [3 * MB] * (num_bytes // (3 * MB)) + [num_bytes % (3 * MB)] * (
            num_bytes % (3 * MB) > 0
        )
    assert b"".join(contents.read("file-1", parts)) == content
    with contents.as_file("file-1", parts) as path:
        assert path.read_bytes() == content
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(settings) if parts is None)
    contents.delete("file-1", parts)
    contents.delete("file-1", parts)
    assert files(settings) == []


def test_what_breaks_off_leaves_nothing(settings: Settings) -> None:
    def half() -> Iterator[bytes]:
        yield b"x" * 4 * MB
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        FileContents(settings).write("file-1", half())
    assert files(settings) == []


def test_content_that_is_gone_or_altered_is_named(settings: Settings) -> None:
    contents = FileContents(settings)
    _, parts = contents.write("file-1", [b"content"])
    (path,) = files(settings)
    if parts is not None:
        path.write_bytes(b"changed")
        with pytest.raises(ContentAltered):
            list(contents.read("file-1", parts))
    path.unlink()
    with pytest.raises(ContentMissing):
        list(contents.read("file-1", parts))
