"""Data folders with names that mean something in other programs' files: both servers start twice and keep their data.

`make odd-paths` tries them all. The locale is C, in which Java reads names as ASCII.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.fixtures.cli import Cli

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(400)]

NAMES: Final = (
    "dät, a\\u0062 50% #1 'q\" $HOME `x`",
    "-dash=!:;&|<>?*[]()",
    " 日本語 🦜 ",
    "~",
    "${env:HOME} {{x}} a=b, ends\\",
)
JOB: Final = '{"job_id": "one-that-waits", "task": "code", "prompt": "x"}\n'
ROOT: Final = Path(__file__).resolve().parents[2]


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "alphaloop.cli", f"--data-dir={folder}", *arguments]


def run(arguments: list[str], cwd: Path, environment: dict[str, str], stdin: str = "") -> str:
    done = subprocess.run(
        arguments, cwd=cwd, env=environment, input=stdin, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif("ODD_PATHS" not in os.environ, reason="make odd-paths")
@pytest.mark.parametrize("name", NAMES)
def test_both_servers_start_twice_and_keep_their_data(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kafka_home: Path
) -> None:
    home = tmp_path_factory.mktemp("home") / "a:ä"
    home.symlink_to(kafka_home)
    environment = {**os.environ, "KAFKA_HOME": str(home), "LC_ALL": "C", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    folder = Path(name)
    for start in (1, 2):
        with subprocess.Popen(
            command(folder, "up", "--no-worker", "--no-scheduler"),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                shown = ""
                while "Ctrl-C stops it" not in shown and (line := process.stdout.readline()):
                    shown += line
                assert "Ctrl-C stops it" in shown, shown
                if start == 1:
                    run(command(folder, "enqueue", "--file", "-"), tmp_path, environment, JOB)
                assert "one-that-waits" in run(command(folder, "job", "one-that-waits"), tmp_path, environment)
                # What a person is to type is understood by a shell.
                typed = re.search(r'^in a shell\s+(eval ".*)$', shown, re.MULTILINE)
                assert typed, shown
                addresses = run(["bash", "-c", f"{typed[1]}; echo $DATABASE_URL"], Path("/"), environment)
                assert addresses.startswith("postgresql://alphaloop:")
                run(command(folder, "down"), tmp_path, environment)
            finally:
                process.terminate()
    assert [found.name for found in tmp_path.iterdir()] == [name], "nothing is kept in another folder"


@pytest.mark.parametrize("name", ["red\x1b[31m", os.fsdecode(b"latin-\xe4")])
def test_a_name_that_a_server_cannot_have_is_refused_before_anything_is_made(
    name: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = cli(f"--data-dir={name}", "up", "--no-worker", "--no-scheduler")
    assert refused.code == 1
    assert "data_dir: expected a folder whose name is UTF-8 without control characters, found" in refused.err
    assert "hint: " in refused.err
    assert list(tmp_path.iterdir()) == []
