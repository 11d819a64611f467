"""Lines whose prompts are too large for a message: read, carried by reference, and answered with their texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alphaloop.claim_check.store import ContentStore, text_by_reference
from alphaloop.cli.enqueue import carried
from alphaloop.cli.jobs import texts_of
from alphaloop.job_lines import BadLine, JobLine, JobReader
from alphaloop.messages import encode_job
from alphaloop.settings import Settings
from tests.fixtures.messages import succeeded


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"tasks": {"code": {}}, "claim_check": {"url": str(tmp_path)}})


def lines(settings: Settings) -> list[JobLine | BadLine]:
    large = json.dumps({"prompt": "x" * (2 << 20)}).encode()
    read = JobReader(settings, task="code").read([large, b'{"prompt": "short"}', b"nonsense"], "jobs.jsonl")
    return list(carried(read, settings.worker.max_job_bytes, ContentStore.of(settings.claim_check)))


def test_only_a_large_prompt_travels_by_reference(settings: Settings) -> None:
    large, short, wrong = lines(settings)
    assert isinstance(wrong, BadLine)
    assert len(encode_job(large.job)) < 1000
    assert short.job.body_ref is None


def test_without_a_store_a_large_line_is_wrong(settings: Settings) -> None:
    large, *_ = lines(Settings(tasks=settings.tasks))
    assert "shorten the prompt" in (large.error.hint or "")


def test_a_text_that_lies_elsewhere_is_in_the_row_and_one_that_is_gone_is_told(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ContentStore.of(settings.claim_check)
    whole = succeeded("a", "a long text")
    smaller = text_by_reference(whole, store)
    assert texts_of(smaller, store) == whole
    store.delete(smaller.text_ref.url)
    assert texts_of(smaller, store) is smaller
    assert "a: nothing that can be read" in capsys.readouterr().err
