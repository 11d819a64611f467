"""Reading the user's prompts: every form, and every mistake with its line and field."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from alphaloop.errors import ConfigError
from alphaloop.job_lines import JobLine
from alphaloop.messages import Purpose
from alphaloop.settings import Settings, load_settings
from tests.fakes import FakeEngine
from tests.fixtures.cli import measure_order
from worker.measuring import session
from worker.measuring.session import draw, prepare, read_lines


@pytest.fixture(scope="module")
def settings() -> Settings:
    """As they are shipped."""
    return load_settings(Path(__file__).resolve().parents[4] / "configs")


def written(folder: Path, lines: Sequence[Any]) -> Path:
    file = folder / "mine.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def read(file: Path, settings: Settings, **options: Any) -> list[JobLine]:
    return read_lines(measure_order(file, **options), settings)


def test_all_forms_are_read_and_are_no_traffic(tmp_path: Path, settings: Settings) -> None:
    turn = [{"role": "user", "content": "c"}]
    file = written(
        tmp_path,
        [
            {"prompt": "a"},
            {"task": "unheard-of", "body": {"messages": turn, "max_tokens": 7, "model": "another"}},
            {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "d", "temperature": 0.5}},
            {"messages": turn, "deadline": "2020-01-01T00:00:00Z", "purpose": "control", "decoding": "speculative"},
            "",
            {"prompt": "e", "model": "gpt"},
        ],
    )
    jobs = [line.job for line in read(file, settings, max_tokens=9)]
    assert {job.purpose for job in jobs} == {Purpose.PROBE}
    assert {job.body.max_tokens for job in jobs} == {9}
    assert {job.body.model for job in jobs} == {None}
    assert {job.deadline for job in jobs} == {None}
    assert [job.task for job in jobs] == ["prompts", "unheard-of", "prompts", "prompts", "prompts"]
    assert jobs[2].body.temperature == 0.5


def test_wrong_lines_are_told_with_place_and_field_and_never_quoted(tmp_path: Path, settings: Settings) -> None:
    file = written(tmp_path, [{"prompt": "fine"}, {"prompt": "secret", "temperature": 9}, "{secret", {"n": 3}])
    with pytest.raises(ConfigError) as raised:
        read(file, settings)
    told = str(raised.value)
    assert "3 of 4 prompts" in told
    assert "mine.jsonl:2: temperature: " in told
    assert "mine.jsonl:3: " in told
    assert "mine.jsonl:4: " in told
    assert "secret" not in told


def test_many_wrong_lines_are_counted(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"mine.jsonl:10: .*\n  and 15 more"):
        read(written(tmp_path, ["x"] * 25), settings)


def test_a_file_must_be_there_and_be_a_sample(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "missing", settings)
    with pytest.raises(ConfigError, match="Is a directory"):
        read(tmp_path, settings)
    monkeypatch.setattr(session, "MAX_FILE_BYTES", 8)
    with pytest.raises(ConfigError, match="expected at most"):
        read(written(tmp_path, [{"prompt": "a"}]), settings)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "long enough"}')))
    with pytest.raises(ConfigError, match="expected at most"):
        read(Path("-"), settings)


def test_standard_input(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}')))
    assert [line.where for line in read(Path("-"), settings)] == ["standard input:1", "standard input:2"]


def lines_of(tmp_path: Path, settings: Settings, texts: Sequence[str]) -> list[JobLine]:
    return read(written(tmp_path, [{"prompt": text} for text in texts]), settings)


def test_fewer_than_ten_different_prompts_are_refused(tmp_path: Path, settings: Settings, rng: random.Random) -> None:
    lines = lines_of(tmp_path, settings, ["same"] * 30 + [str(i) for i in range(8)])
    with pytest.raises(ConfigError, match="at least 10 different prompts, found 9"):
        draw(lines, 100, rng)


def test_repeated_prompts_count_once_and_too_many_are_drawn_from(
    tmp_path: Path, settings: Settings, rng: random.Random
) -> None:
    lines = lines_of(tmp_path, settings, [str(i) for i in range(40)] * 2)
    kept, notes = draw(lines, 100, rng)
    assert kept == lines[:40]
    assert notes == ["lines that repeat an earlier prompt, left out: 40"]
    drawn, notes = draw(lines, 12, rng)
    assert len({line.where for line in drawn}) == 12
    assert "12 of 40 prompts" in notes[1]
    few, notes = draw(lines[:11], 100, rng)
    assert (len(few), len(notes)) == (11, 1)


def test_a_prompt_that_does_not_fit_names_its_line(tmp_path: Path, settings: Settings) -> None:
    lines = lines_of(tmp_path, settings, ["one two", "one two three four five"])
    with pytest.raises(ConfigError, match=r"1 of 2 prompts.*\n.*mine.jsonl:2: prompt: expected fewer than 5"):
        prepare(lines, FakeEngine(context_length=5), settings.tasks)


def test_a_task_fills_in_what_a_prompt_leaves_open(tmp_path: Path, settings: Settings) -> None:
    tasks = {"code": settings.tasks["code"].model_copy(update={"max_tokens": 33, "temperature": 0.7})}
    lines = read(written(tmp_path, [{"prompt": "a", "temperature": 0.1}]), settings, task="code")
    (prepared,) = prepare(lines, FakeEngine(), tasks)
    assert (prepared.sampling.max_tokens, prepared.sampling.temperature) == (33, 0.1)
    assert prepared.job.job_id == "measured-0"
