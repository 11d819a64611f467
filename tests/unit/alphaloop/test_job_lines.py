"""Lines of a file become jobs with ids, or errors that name the field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.claim_check.store import ContentStore, by_reference, text_by_reference
from alphaloop.cli.jobs import texts_of
from alphaloop.errors import MessageError
from alphaloop.job_lines import BadLine, JobLine, JobReader, Overrides
from alphaloop.messages import (
    Decoding,
    Job,
    Origin,
    derived_job_id,
    encode_job,
    parse_job,
    payload_digest,
)
from alphaloop.settings import Settings, load_settings
from tests.fixtures.messages import read, succeeded

SETTINGS = load_settings()


def read_line(*lines: bytes | dict[str, Any], settings: Settings = SETTINGS, **kwargs: Any) -> list[JobLine | BadLine]:
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return list(JobReader(settings, **kwargs).read(encoded, "jobs.jsonl"))


def job(*args: Any, **kwargs: Any) -> Job:
    (line,) = read_line(*args, **kwargs)
    assert isinstance(line, JobLine), line
    return line.job


def error(*args: Any, **kwargs: Any) -> MessageError:
    (line,) = read_line(*args, **kwargs)
    assert isinstance(line, BadLine), line
    return line.error


def test_minimal_job_gets_an_id() -> None:
    made = job({"task": "code", "prompt": "def f():"})
    assert len(made.job_id) == 32
    assert made.body.messages[0].content == "def f():"
    assert job({"task": "code", "prompt": "def f():", "job_id": "mine"}).job_id == "mine"


def test_fields_of_a_data_set_are_passed_over_and_its_id_kept() -> None:
    made = job({"id": "HumanEval-0", "task": "code", "prompt": "p", "source": "somewhere", "licence": "MIT"})
    assert made.custom_id == "HumanEval-0"
    assert job({"id": 17, "task": "code", "prompt": "p"}).custom_id == "17"
    assert job({"id": "a", "custom_id": "b", "task": "code", "prompt": "p"}).custom_id == "b"


def test_openai_batch_line() -> None:
    line = {
        "custom_id": "request-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 9},
    }
    made = job(line, task="chat")
    assert (made.task, made.custom_id, made.body.max_tokens) == ("chat", "request-1", 9)
    assert error(line).field == "task"


@pytest.mark.parametrize(
    "line",
    [
        {"task": "code", "prompt": "p", "max_completion_tokens": 100},
        {"task": "code", "body": {"prompt": "p", "max_completion_tokens": 100, "temperature": 2}},
    ],
)
def test_flags_win_over_the_line(line: dict[str, Any]) -> None:
    overrides = Overrides(
        body={"max_tokens": 5, "temperature": 0.0}, top={"decoding": "vanilla", "segment": "gold", "batch_id": "b"}
    )
    made = job(line, overrides=overrides)
    assert (made.body.max_tokens, made.body.temperature) == (5, 0.0)
    assert (made.decoding, made.segment, made.batch_id) == (Decoding.VANILLA, "gold", "b")


def test_the_line_s_task_wins_over_the_default() -> None:
    assert job({"task": "sql", "prompt": "p"}, task="code").task == "sql"
    assert job({"prompt": "p"}, task="code").task == "code"


@pytest.mark.parametrize(
    ("line", "code", "field"),
    [
        (b"not json", "malformed_message", None),
        (b"[1, 2]", "malformed_message", None),
        (b'{"task": "code", "prompt": "\xff"}', "malformed_message", None),
        (b'{"task": "code", "prompt": NaN}', "malformed_message", None),
        (b"[" * 100_000, "malformed_message", None),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "invalid_field", "task"),
        (b'{"task": "code", "prompt": "p", "x": ' + b"[" * 40 + b"]" * 40 + b"}", "malformed_message", None),
        (b'{"task": "code", "prompt": "' + b"a" * (1 << 20) + b'"}', "malformed_message", None),
        (b'{"task": "code", "prompt": "\\ud800"}', "invalid_field", "prompt"),
        (b'{"task": "code", "prompt": ""}', "invalid_field", "prompt"),
        (b'{"task": "code", "prompt": "p", "temperature": 3}', "invalid_field", "temperature"),
        (b'{"task": 3, "prompt": "p"}', "invalid_field", "task"),
        (b'{"task": "Code!", "prompt": "p"}', "invalid_field", "task"),
        (b'{"task": "nonesuch", "prompt": "p"}', "unknown_task", "task"),
        (b'{"task": "code"}', "invalid_field", "prompt"),
    ],
)
def test_bad_lines_name_their_field(line: bytes, code: str, field: str | None) -> None:
    found = error(line)
    assert (found.code, found.field) == (code, field)


def test_places_count_from_one_and_blank_lines_are_passed_over() -> None:
    lines = read_line(b'{"task": "code", "prompt": "p"}\r\n', b"\n", b"nonsense\n", b'{"task":"sql","prompt":"q"}')
    assert [line.where for line in lines] == ["jobs.jsonl:1", "jobs.jsonl:3", "jobs.jsonl:4"]
    assert [type(line) for line in lines] == [JobLine, BadLine, JobLine]


def test_one_job_id_with_two_payloads_is_found_here() -> None:
    same = {"job_id": "x", "task": "code", "prompt": "p"}
    lines = read_line(same, same, {**same, "prompt": "another"})
    assert [type(line) for line in lines] == [JobLine, JobLine, BadLine]
    assert lines[2].error.code == "job_conflict"  # type: ignore[union-attr]


def test_without_configured_tasks_every_task_goes() -> None:
    assert job({"task": "anything", "prompt": "p"}, settings=Settings(tasks={})).task == "anything"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        **{name: json_values for name in ("id", "custom_id", "job_id", "body", "stop", "priority", "source", "url")},
        "task": st.sampled_from(["code", "sql"]) | json_values,
        "prompt": st.text(min_size=1) | json_values,
        "max_tokens": st.integers(1, 99) | json_values,
    },
)


@given(st.one_of(fields.map(lambda value: json.dumps(value).encode()), st.binary(max_size=80)))
def test_every_line_is_a_job_the_worker_reads_back_or_an_error_in_words(line: bytes) -> None:
    for item in read_line(*line.splitlines(), task="code"):
        if isinstance(item, BadLine):
            assert item.error.message
        else:
            topic = Origin("c", f"jobs.{item.job.task}", 0, 0)
            assert parse_job(encode_job(item.job), topic, task=item.job.task) == item.job


@pytest.fixture
def with_store(tmp_path: Path) -> Settings:
    return Settings.model_validate({"tasks": {"code": {}}, "claim_check": {"url": str(tmp_path)}})


def test_only_a_large_prompt_travels_by_reference(with_store: Settings) -> None:
    store = ContentStore.of(with_store.claim_check)
    lines = read_line({"prompt": "x" * (2 << 20)}, {"prompt": "short"}, settings=with_store, task="code")
    large, short = (by_reference(line.job, with_store.worker.max_job_bytes, store) for line in lines)
    assert len(encode_job(large)) < 1000
    assert short.body_ref is None


def test_without_a_store_a_large_line_is_wrong(with_store: Settings) -> None:
    (large,) = read_line({"prompt": "x" * (2 << 20)}, settings=Settings(tasks=with_store.tasks), task="code")
    assert "shorten the prompt" in (large.error.hint or "")


def test_a_text_that_lies_elsewhere_is_in_the_row_and_one_that_is_gone_is_named(
    with_store: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ContentStore.of(with_store.claim_check)
    whole = succeeded("a", "a long text")
    smaller = text_by_reference(whole, store)
    assert texts_of(smaller, store) == whole
    store.delete(smaller.text_ref.url)
    assert texts_of(smaller, store) is smaller
    assert "a: nothing that can be read" in capsys.readouterr().err


def test_a_derived_id_names_the_record_and_nothing_else() -> None:
    record = Origin("cluster", "jobs.code", 2, 41, 1_700_000_000_000)
    others = {
        derived_job_id(replace(record, **change), b"{}")
        for change in (
            {"cluster": "other"},
            {"topic": "jobs.sql"},
            {"partition": 1},
            {"offset": 42},
            {"timestamp_ms": 1_700_000_000_001},
            {"timestamp_ms": None},
        )
    }
    same = derived_job_id(record, b"{}")
    assert derived_job_id(replace(record), b"{}") == same, "a redelivery is the same job"
    assert same not in others
    assert len(others) == 6


def test_offsets_that_begin_again_give_other_ids() -> None:
    first = Origin("cluster", "jobs.code", 0, 0, 1_700_000_000_000)
    after_a_restart = replace(first, timestamp_ms=1_700_000_060_000)
    assert derived_job_id(first, b"{}") != derived_job_id(after_a_restart, b"{}")


def test_another_payload_is_never_a_conflict_of_derived_ids() -> None:
    # A sender may set the timestamps of its records, to 0 for example.
    replayed = Origin("cluster", "jobs.code", 0, 0, 0)
    one, other = (parse_job(b'{"prompt": "' + text + b'"}', replayed, task="code") for text in (b"first", b"second"))
    assert one.job_id != other.job_id


def test_the_digest_tells_a_redelivery_from_a_conflict() -> None:
    job = read({"job_id": "a", "prompt": "x", "temperature": 1})
    chat = [{"role": "user", "content": "x"}]
    again = read({"temperature": 1.0, "priority": 0, "job_id": "a", "messages": chat} | {"stream": None})
    assert payload_digest(job) == payload_digest(again)
    for other in [{"prompt": "y"}, {"temperature": 0.5}, {"segment": "s"}, {"decoding": "vanilla"}, {"max_tokens": 5}]:
        assert payload_digest(read({"job_id": "a", "prompt": "x", "temperature": 1} | other)) != payload_digest(job)
    assert payload_digest(read({"job_id": "b", "prompt": "x", "temperature": 1})) == payload_digest(job)


def test_a_later_releases_new_field_does_not_turn_old_jobs_into_conflicts() -> None:
    class LaterJob(Job):
        lane: str = "normal"

    old = read({"prompt": "x"})
    assert payload_digest(LaterJob.model_validate(old.model_dump())) == payload_digest(old)
