"""The programs of docs/guides/clients, each run as it is printed against a worker, where its tools are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from alphaloop.embedded.install import find_java
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import RESULTS, TOKENS
from alphaloop.settings import Settings
from tests.fakes import FakeEngine
from tests.fixtures.worker import Client, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.slow]
PAGES: Final = Path(__file__).resolve().parents[2] / "docs" / "guides" / "clients"
#: Folders: `node_modules` with kafkajs and lz4js, in node's own variable; and one whose go.mod requires franz-go.
NODE_MODULES, GO_MODULE = "NODE_PATH", "CLIENTS_GO_MODULE"


def program(language: str, folder: Path) -> Path:
    """The program of a page, as a file of its name."""
    page = (PAGES / f"{language}.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- client: (\S+) -->\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    file = folder / found[1]
    file.write_text(found[2], encoding="utf-8")
    return file


def command_of(language: str, file: Path, kafka_home: Path) -> list[str]:
    """How the page says that the program is run; skips the test without its tools."""
    match language:
        case "python":
            return [sys.executable, str(file)]
        case "java":
            java = find_java()
            if java is None or not java.with_name("javac").exists():
                pytest.skip("no JDK: a Java that only runs classes cannot run a source file")
            return [str(java), "-cp", f"{kafka_home}/libs/*", str(file)]
        case "node":
            node, modules = shutil.which("node"), os.environ.get(NODE_MODULES)
            if node is None or modules is None or not Path(modules, "lz4js").is_dir():
                pytest.skip(f"needs node, and kafkajs and lz4js in {NODE_MODULES}")
            return [node, str(file)]
    go, module = shutil.which("go"), os.environ.get(GO_MODULE)
    if go is None or module is None:
        pytest.skip(f"needs go, and a module with franz-go in {GO_MODULE}")
    shutil.copytree(module, file.parent, dirs_exist_ok=True)
    return [go, "run", str(file)]


@pytest.mark.parametrize("language", ["python", "java", "node", "go"])
def test_the_program_of_a_page_prints_chunks_and_the_result(
    language: str, worker_settings: Settings, kafka_home: Path, tmp_path: Path
) -> None:
    file = program(language, tmp_path)
    command = command_of(language, file, kafka_home)
    Client(worker_settings)  # makes the topics
    with closing(Consumer(worker_settings.kafka, group_id="unused")) as consumer:
        consumer.assign_from([TOKENS, RESULTS], at="latest")  # waits until the broker answers for new ones
    environment = {**os.environ, "KAFKA_BOOTSTRAP_SERVERS": worker_settings.kafka.bootstrap_servers or ""}
    with running_worker(worker_settings, FakeEngine()):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=150, env=environment, cwd=tmp_path, check=False
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any("final=1" in line for line in lines), done.stdout + done.stderr
    chunks = [re.fullmatch(r'chunk \S+ attempt=1 seq=(\d+) final=0 "(.*)"', line) for line in lines]
    texts = {int(chunk[1]): chunk[2] for chunk in chunks if chunk is not None}
    (final,) = (
        re.fullmatch(r"chunk \S+ attempt=1 seq=(\d+) final=1 status=succeeded", line)
        for line in lines
        if "final=1" in line
    )
    assert final is not None, lines
    assert sorted(texts) == list(range(int(final[1]))), lines
    (result,) = (line for line in lines if line.startswith("result "))
    assert result.split('"', 1)[1].removesuffix('"') == "".join(texts[seq] for seq in sorted(texts))


def test_every_page_is_run() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} - {"README"} == {"python", "java", "node", "go"}
