"""The command that waits again can be typed: it has the options that were given, and no thousands of ids."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path

import pytest

from alphaloop.cli.jobs import _job_ids, say_they_go_on, wait_again
from alphaloop.cli.options import GlobalOptions
from alphaloop.errors import ConfigError


@pytest.fixture(autouse=True)
def typed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphaloop.cli.jobs.program", lambda: "alphaloop")


def test_options_are_typed_again_and_those_of_the_environment_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    options = GlobalOptions(configs=Path("configs"), profile="local", data_dir=Path("my data"))
    monkeypatch.setenv("ALPHALOOP_PROFILE", "local")
    command = wait_again(options, ["a job"])
    assert command == "alphaloop --configs configs --data-dir 'my data' wait 'a job'"
    assert wait_again(GlobalOptions(), ["a"], batch_id="monday") == "alphaloop wait --batch-id monday"
    assert wait_again(GlobalOptions(), ["a"], file=Path("out.jsonl")) == "alphaloop wait --file out.jsonl"


def test_the_ids_of_many_jobs_are_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job_ids = [f"job {n}" for n in range(21)]
    *command, name = shlex.split(wait_again(GlobalOptions(), job_ids))
    assert command == ["alphaloop", "wait", "--file"]
    assert [json.loads(line)["job_id"] for line in Path(name).read_text().splitlines()] == job_ids
    assert wait_again(GlobalOptions(), job_ids[1:]).endswith("'job 20'")


@pytest.mark.parametrize("form", ["utf-8", "utf-8-sig", "utf-16"])
def test_ids_are_read_in_every_encoding_from_lines_of_any_kind(tmp_path: Path, form: str) -> None:
    lines = ['{"job_id": "a", "status": "missing"}', "", '{"line": "f:3", "status": "invalid"}', '{"job_id": "b"}']
    (tmp_path / "f").write_text("\r\n".join(lines), encoding=form, newline="")
    assert _job_ids(tmp_path / "f") == ["a", "b"]


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "1" * 5000, '{"job_id": "a"}\r{"job_id": "b"}', "nothing", "[]", "\udce4"]
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "f").write_text(f'{{"job_id": "a"}}\n{line}\n', encoding="utf-8", errors="surrogateescape", newline="")
    with pytest.raises(ConfigError, match="f:2: expected one JSON object a line, found something else"):
        _job_ids(tmp_path / "f")


def test_one_job_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    say_they_go_on(1, "alphaloop wait --batch-id b")
    assert capsys.readouterr().err == "stopped waiting; 1 job goes on. Wait again: alphaloop wait --batch-id b\n"
