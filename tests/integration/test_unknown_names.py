"""A name that nothing has: every command that takes one says so, fails, and leaves everything as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import typer.main
from sqlalchemy import text

from alphaloop.cli.app import app, commands
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import CONTROL, ensure_topic, list_topics
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.tables import metadata
from tests.fixtures.cli import Cli
from tests.fixtures.messages import batch_line
from tests.fixtures.worker import Client

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.postgres, pytest.mark.timeout(400)]

#: By command, its words with a name that nothing has; FILE is a batch file that was never submitted, TO is no file yet.
UNKNOWN: Mapping[str, tuple[str, ...]] = {
    "job": ("job nosuch",),
    "wait": ("wait nosuch", "wait nosuch --json --output TO", "wait --batch-id nosuch"),
    "tail": ("tail nosuch", "tail nosuch --json"),
    "cancel": ("cancel nosuch", "cancel nosuch --wait --json", "cancel --batch-id nosuch"),
    "erase": ("erase --job nosuch --yes", "erase --segment nosuch --yes", "erase --job nosuch --dry-run --json"),
    "explain": ("explain nosuch", "explain --job nosuch"),
    "replay": ("replay --task nosuch",),
    "advise": ("advise nosuch", "advise nosuch --json"),
    "capacity": ("capacity --deadline 4h --drafter nosuch", "capacity --deadline 4h --drafter nosuch --json"),
    "enqueue": ("enqueue --task nosuch --prompt x", "enqueue --task code --file nosuch"),
    "measure": ("measure --prompts nosuch", "measure --prompts FILE --task nosuch"),
    "check-pair": ("check-pair ./nosuch ./nosuch",),
    "check-server": ("check-server nosuch",),
    "migrate": ("migrate --revision nosuch",),
    "batch submit": ("batch submit nosuch --task code", "batch submit FILE --task nosuch"),
    "batch status": ("batch status nosuch", "batch status FILE", "batch status nosuch --json"),
    "batch cancel": ("batch cancel nosuch", "batch cancel FILE", "batch cancel nosuch --even-if-unknown"),
    "batch output": ("batch output nosuch --to TO", "batch output FILE", "batch output nosuch"),
    "batch errors": ("batch errors nosuch --to TO", "batch errors FILE"),
    "keys create": ("keys create new --segment s --task nosuch",),
    "keys revoke": ("keys revoke nosuch",),
    "dlq list": ("dlq list --task nosuch", "dlq list --job-id nosuch", "dlq list --code nosuch --json"),
    "dlq show": ("dlq show nosuch", "dlq show jobs.nosuch.dlq:0:0"),
    "dlq redrive": (
        *("dlq redrive --task nosuch", "dlq redrive --job-id nosuch", "dlq redrive --code nosuch"),
        *("dlq redrive --at jobs.nosuch.dlq:0:0", "dlq redrive --job-id nosuch --dry-run --json"),
    ),
    "dlq purge": ("dlq purge --task nosuch --before 1d --yes",),
    "topics create": ("topics create nosuch",),
    "draft train": ("draft train TO --prompts nosuch", "draft train TO --prompts FILE --task nosuch"),
    "draft register": ("draft register nosuch",),
    "draft refresh": ("draft refresh nosuch", "draft refresh nosuch --status", "draft refresh nosuch --cancel"),
    **{f"draft {undo}": (f"draft {undo} nosuch",) for undo in ("retire", "restore")},
    "drift show": ("drift show 4711",),
    "drift ack": ("drift ack 4711 --by Ada", "drift ack 4711 --by Ada --new-level"),
    "probes register": ("probes register nosuch --task code", "probes register FILE --task nosuch"),
    "probes draw": ("probes draw --task nosuch",),
    "probes list": ("probes list --task nosuch",),
    "probes show": ("probes show nosuch", "probes show code --version nosuch"),
}
#: Commands that name nothing that may not exist.
NAMELESS = {
    *(
        "demo",
        "up",
        "down",
        "worker",
        "scheduler",
        "trainer",
        "status",
        "env",
        "report",
        "cost",
        "calibrate",
        "keys list",
        "topics list",
    ),
    *("batch list", "draft list", "drift list", "probes plan", "notify test", "notify list", "kafka install"),
}


def test_every_command_is_in_the_table() -> None:
    typer.main.get_command(app)
    names = {
        name.removeprefix("alphaloop ") for name, context in commands() if not hasattr(context.command, "commands")
    }
    assert names == UNKNOWN.keys() | NAMELESS


@pytest.fixture
def everything_kept(worker_settings: Settings, database: Database, tmp_path: Path) -> Iterator[Callable[[], object]]:
    """How many rows each table has, where each topic ends, and which files there are."""
    counts = " UNION ALL ".join(f"SELECT '{name}', count(*) FROM {name}" for name in sorted(metadata.tables))

    def kept() -> object:
        with database.begin() as connection:
            rows = connection.execute(text(counts)).all()
        topics = [name for name in list_topics(worker_settings.kafka) if not name.startswith("__")]
        return rows, consumer.bounds(topics), sorted(str(path) for path in tmp_path.rglob("*"))

    with closing(Consumer(worker_settings.kafka, group_id="unused")) as consumer:
        yield kept


def test_a_name_that_nothing_has_is_said_and_nothing_is_kept(
    stack_cli: Cli, worker_settings: Settings, everything_kept: Callable[[], object], tmp_path: Path
) -> None:
    Client(worker_settings)
    ensure_topic(worker_settings.kafka, CONTROL)
    file = tmp_path / "never-sent.jsonl"
    file.write_text(json.dumps(batch_line("one")) + "\n", encoding="utf-8")
    before = everything_kept()
    wrong = []
    for line in (line for lines in UNKNOWN.values() for line in lines):
        ran = stack_cli(*line.replace("FILE", str(file)).replace("TO", str(tmp_path / "to")).split())
        named = "4711" if "4711" in line else "nosuch" if "nosuch" in line else file.name
        if ran.code == 0 or named not in (ran.out + ran.err).replace("\n", ""):
            wrong.append((line, ran.code, ran.out[:200], ran.err[-300:]))
        if (now := everything_kept()) != before:
            wrong.append((line, "kept", now))
            before = now
    assert not wrong, "\n".join(map(str, wrong))
