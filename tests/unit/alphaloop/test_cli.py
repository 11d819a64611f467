"""The command line without servers: help, examples, errors in words, exit codes, the page that is generated."""

from __future__ import annotations

import contextlib
import logging
import shlex
import signal
import sys
from pathlib import Path
from types import ModuleType

import confluent_kafka
import pytest
import typer.main
from typer import Context
from typer.core import TyperGroup

from alphaloop import __version__
from alphaloop.cli.app import app, commands
from alphaloop.cli.children import LogFollower, await_event, child_environment, field_of
from alphaloop.cli.options import GlobalOptions
from alphaloop.embedded.process import ChildProcess
from alphaloop.settings import KafkaSettings, PostgresSettings, load_settings
from tests.fixtures.broker import limit_requests
from tests.fixtures.cli import Cli

LEAVES = [(name, context) for name, context in commands() if not isinstance(context.command, TyperGroup)]


@pytest.mark.parametrize("context", [context for _, context in LEAVES], ids=[name for name, _ in LEAVES])
def test_every_command_has_an_example_that_is_a_valid_command_line(context: Context) -> None:
    lines = [line.strip() for line in (context.command.epilog or "").splitlines()[2:] if line.strip(" \b")]
    assert lines
    for line in lines:
        words = shlex.split(line)
        arguments = words[words.index("alphaloop") + 1 :]
        command, parent = typer.main.get_command(app), None
        while True:  # parses as the command line would, and raises UsageError where it would
            parent = command.make_context("alphaloop", arguments, parent=parent)
            if not isinstance(command, TyperGroup):
                break
            rest = [*parent._protected_args, *parent.args]
            found = command.get_command(parent, rest[0])
            assert found is not None, line
            command, arguments = found, rest[1:]


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"{__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("enqueue",),
        ("enqueue", "--prompt", "p"),
        ("enqueue", "--file", "x", "--prompt", "p", "--task", "code"),
        ("enqueue", "--prompt", "p", "--task", "code", "--max-tokens", "0"),
        ("nonesuch",),
        ("scheduler", "sometimes"),
        ("report", "--json", "--html", "x"),
        ("cancel",),
        ("wait",),
        ("job",),
        ("explain",),
        ("status", "--nonesuch"),
    ],
)
def test_wrong_usage_ends_with_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    ran = cli(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert "Usage: alphaloop" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("explain", "code"),
        ("report",),
        ("migrate",),
        ("cancel", "x"),
        ("dlq", "list"),
        ("probes", "list"),
        ("enqueue", "--task", "code", "--prompt", "p"),
        ("worker",),
        ("scheduler", "once"),
    ],
)
def test_without_servers_the_hint_names_up(cli: Cli, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ran = cli("--data-dir", tmp_path, *arguments)
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err.startswith("error: no ")
    assert "alphaloop up" in ran.err.splitlines()[1]


def test_down_without_anything_up(cli: Cli, tmp_path: Path) -> None:
    ran = cli("--data-dir", tmp_path, "down")
    assert (ran.code, ran.err) == (0, f"nothing runs under {tmp_path}\n")


def test_a_misspelt_setting_is_an_error_with_what_was_meant(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.toml").write_text("[tasks.code]\n")
    (tmp_path / "worker.toml").write_text("[worker]\nbatch_sise = 4\n")
    ran = cli("--configs", tmp_path, "status")
    assert ran.code == 1
    assert ran.err == "error: worker.batch_sise: no such setting\nhint: did you mean batch_size?\n"
    monkeypatch.setenv("ALPHALOOP_WORKR__BATCH_SIZE", "4")
    assert "did you mean WORKER?" in cli("status").err
    assert cli("--configs", tmp_path / "nowhere", "status").code == 1


def test_a_database_that_is_gone(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://someone:secret@127.0.0.1:1/nothing")
    ran = cli("--data-dir", tmp_path, "report")
    assert ran.code == 1
    assert ran.err.startswith("error: no connection to ")
    assert "secret" not in ran.err


def test_a_broker_that_is_gone(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    limit_requests(monkeypatch, 0.5)
    ran = cli("--data-dir", tmp_path, "enqueue", "--task", "code", "--prompt", "p")
    assert ran.code == 1
    assert "error: asking 127.0.0.1:1" in ran.err
    assert "hint: " in ran.err


def test_an_unknown_task_and_a_missing_file_are_told_before_anything_is_sent(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    ran = cli("enqueue", "--task", "nonesuch", "--prompt", "p")
    assert ran.code == 1
    assert ran.err.startswith("--prompt:1: task: no task 'nonesuch'")
    ran = cli("enqueue", "--file", tmp_path / "nowhere.jsonl")
    assert ran.code == 1
    assert ran.err.startswith(f"error: {tmp_path / 'nowhere.jsonl'}: No such file")
    ran = cli("enqueue", "--strict", "--task", "code", "--file", "-", stdin=b'{"prompt": "good"}\n{"prompt": 3}\n')
    assert ran.code == 1
    assert "standard input:2: prompt: " in ran.err
    assert "error: nothing was sent: 1 wrong" in ran.err


def test_a_child_gets_the_parent_s_addresses_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALPHALOOP_KAFKA__BOOTSTRAP_SERVERS", "production:9092")
    monkeypatch.setenv("DATABASE_URL", "postgresql://production/jobs")
    kafka = KafkaSettings(bootstrap_servers="here:1", session_timeout_ms=6000)
    here = {"data_dir": tmp_path, "kafka": kafka, "postgres": PostgresSettings()}
    settings = load_settings().model_copy(update=here)
    environment = child_environment(GlobalOptions(configs=tmp_path, profile="local"), settings)
    assert environment["KAFKA_BOOTSTRAP_SERVERS"] == "here:1"
    assert not any("production" in value for value in environment.values())
    assert environment["ALPHALOOP_CONFIGS"] == environment["ALPHALOOP_DATA_DIR"] == str(tmp_path)
    assert environment["ALPHALOOP_KAFKA__SESSION_TIMEOUT_MS"] == "6000"


def test_log_follower_finds_new_events_only(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_text("10:00:00 info worker_ready consuming metrics=http://old:1\n")
    follower = LogFollower(path)
    assert follower.find("worker_ready") is None
    with path.open("a") as log:
        log.write('10:00:01 info worker_ready consuming owner=x metrics=http://new:2 note="two words"\nhalf a li')
    line = follower.find("worker_ready")
    assert [field_of(line, name) for name in ("metrics", "note", "tric")] == ["http://new:2", "two words", None]
    with path.open("a") as log:
        log.write('ne\n{"action": "scheduler_ready", "metrics": "http://json:3"}\n{broken\n')
    assert field_of(follower.find("scheduler_ready"), "metrics") == "http://json:3"
    assert LogFollower(tmp_path / "none.log").find("worker_ready") is None


def test_what_a_child_loads_is_shown_while_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = """import logging
from alphaloop.logs import START_PROGRESS, configure
configure("INFO", sys.argv[1])
for part in ("the target", "small, 1 of 2", "other, 2 of 2"):
    logging.getLogger("worker").info("loading %s", part, extra={"action": START_PROGRESS})
    time.sleep(0.3)
logging.getLogger("worker").info("consuming", extra={"action": "worker_ready"})
time.sleep(60)
"""
    for form in ("text", "json"):
        command = [sys.executable, "-c", f"import sys, time\n{script}", form]
        child = ChildProcess("worker", command, log=tmp_path / f"{form}.log", grace_s=1.0)
        child.start()
        try:
            assert await_event(child, LogFollower(child.log, from_start=True), "worker_ready") is not None
        finally:
            child.stop()
        shown = capsys.readouterr().err.splitlines()
        assert shown[-1] == "loading other, 2 of 2"
        assert shown == sorted(set(shown), key=shown.index)


def test_ctrl_c_while_commands_are_imported_ends_without_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "alphaloop.cli.app", Interrupted("alphaloop.cli.app"))
    ran = cli("status")
    assert (ran.code, ran.out, ran.err) == (130, "", "")


def test_ctrl_c_in_a_callback_of_the_kafka_client_is_an_interruption(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python's own handler the client's `poll` raises SystemError here."""

    def polling(**_: object) -> None:
        def interrupt(_: str) -> None:
            signal.raise_signal(signal.SIGINT)

        nobody = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "logger": logging.getLogger("quiet")}
        client = confluent_kafka.Consumer({**nobody, "statistics.interval.ms": 1, "stats_cb": interrupt})
        with contextlib.closing(client):
            client.poll(10.0)

    monkeypatch.setattr("alphaloop.cli.app.app", polling)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ran = cli("wait", "job-1")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.code, ran.out, ran.err) == (130, "", "")
