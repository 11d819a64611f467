"""The log: one line an event, machine-readable, never with prompt text."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from alphaloop.errors import ConfigError
from alphaloop.logs import MAX_FIELD_CHARS, configure


def test_text_is_one_line_with_action_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", "text")
    logging.getLogger("worker.loop").info(
        "consuming", extra={"action": "worker_ready", "topic": "jobs.code", "share": 0.123456, "note": "two\nlines"}
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.removesuffix("\n")
    assert line[8:] == r" info worker_ready consuming topic=jobs.code share=0.1235 note=two\nlines"
    assert line[2] == line[5] == ":"


def test_json_holds_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", "json")
    logging.getLogger("scheduler.loop").warning(
        "late", extra={"action": "probe_late", "seconds": 3.5, "level": "ours", "task": None}
    )
    entry = json.loads(capsys.readouterr().err)
    assert entry["action"] == "probe_late"
    assert entry["seconds"] == 3.5
    assert entry["task"] is None
    assert entry["level"] == "warning"
    assert entry["time"].endswith("+00:00")


@pytest.mark.parametrize("format", ["text", "json"])
def test_prompt_text_is_withheld_and_long_values_cut(capsys: pytest.CaptureFixture[str], format: str) -> None:
    configure("INFO", format)  # type: ignore[arg-type]
    logging.getLogger("worker").info("x", extra={"prompt": "my secret prompt", "reason": "r" * 1000})
    line = capsys.readouterr().err
    assert "secret" not in line
    assert "r" * MAX_FIELD_CHARS in line
    assert "r" * (MAX_FIELD_CHARS + 1) not in line


def test_traceback_follows_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", "text")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("worker").exception("step failed", extra={"action": "step_failed"})
    lines = capsys.readouterr().err.splitlines()
    assert "error step_failed step failed" in lines[0]
    assert lines[1] == "ValueError"
    assert "test_logs.py" in lines[2]


PROMPT = "the secret of the prompt"


@pytest.mark.parametrize("format", ["text", "json"])
def test_the_text_of_a_foreign_exception_is_withheld(capsys: pytest.CaptureFixture[str], format: str) -> None:
    configure("INFO", format)  # type: ignore[arg-type]
    try:
        try:
            raise KeyError(PROMPT)
        except KeyError as cause:
            raise ConfigError("three slots, expected two") from cause
    except ConfigError:
        logging.getLogger("worker").exception("failed", extra={"action": "failed"})
    told = capsys.readouterr().err
    assert PROMPT not in told
    assert "ConfigError: three slots, expected two" in told
    assert "caused by KeyError" in told


def test_what_ends_a_process_is_logged_without_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", "json")
    error = ValueError(PROMPT)
    sys.excepthook(ValueError, error, error.__traceback__)
    told = capsys.readouterr().err
    assert json.loads(told)["action"] == "process_failed"
    assert PROMPT not in told


def test_other_libraries_are_heard_from_warning_up(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", "text")
    logging.getLogger("alembic.runtime").info("chatter")
    logging.getLogger("alembic.runtime").warning("grave")
    assert "chatter" not in (err := capsys.readouterr().err)
    assert "grave" in err
    configure("DEBUG", "text")
    logging.getLogger("alembic.runtime").info("chatter")
    assert "chatter" in capsys.readouterr().err


def test_configuring_twice_does_not_log_twice(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", "text")
    configure("INFO", "text")
    logging.getLogger("worker").info("once")
    assert capsys.readouterr().err.count("once") == 1


@pytest.mark.parametrize("format", ["text", "json"])
def test_nothing_of_a_line_acts_upon_a_terminal(capsys: pytest.CaptureFixture[str], format: str) -> None:
    configure("INFO", format)  # type: ignore[arg-type]
    hostile = "\x1b[2J\x9b31m\r\x08\u202e\u2066\x7f"
    try:
        raise ConfigError(hostile)
    except ConfigError:
        logging.getLogger("worker").exception(hostile, extra={"action": "failed", "topic": hostile})
    line = capsys.readouterr().err
    assert not set(hostile) & set(line) - set("[2J31m")
    assert line.count("u202e") == 3
