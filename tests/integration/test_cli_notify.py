"""`alphaloop notify` with a real HTTP service and a real Postgres."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import SecretStr

from alphaloop.measurements import DriftSubject
from alphaloop.notifying import open_sinks
from alphaloop.settings import SchedulerSettings
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore, EventChange, EventState
from scheduler.metrics import SchedulerMetrics
from scheduler.notifying import Notifier
from tests.fixtures.cli import Cli
from tests.fixtures.drift import content
from tests.fixtures.hook import running_hook

NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration but this test's."""
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def configure(monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
    monkeypatch.setenv("ALPHALOOP_SCHEDULER__NOTIFY_URLS", json.dumps(urls))


def test_an_owner_tries_the_addresses(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hook() as hook, running_hook() as broken:
        broken.status = 403
        configure(monkeypatch, hook.url.get_secret_value(), broken.url.get_secret_value())
        tried = cli("notify", "test")
        assert tried.code != 0
        assert hook.titles == ["alphaloop: a test"]
        first, second = (sink.name for sink in open_sinks([hook.url, broken.url]))
        assert f"{first}: taken" in tried.err
        assert f"{second}: HTTP status 403" in tried.err
        assert "1 of 2 addresses did not take the message" in tried.err
        assert not [word for word in ("PASSWORD", "TOKEN") if word in tried.err + tried.out]
        configure(monkeypatch, hook.url.get_secret_value())
        assert cli("notify", "test").code == 0


def test_without_an_address_there_is_nothing_to_try(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = cli("notify", "test")
    assert tried.code != 0
    assert "scheduler.notify_urls: expected at least one address" in tried.err
    configure(monkeypatch, "nonsense://TOKEN")
    tried = cli("notify", "test")
    assert "scheduler.notify_urls[0]" in tried.err
    assert "TOKEN" not in tried.err


@pytest.mark.postgres
def test_what_was_sent_is_listed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, database: Database, database_url: SecretStr
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url.get_secret_value())
    assert "nothing was sent yet" in cli("notify", "list").err
    with running_hook() as hook:
        notifier = Notifier(database, open_sinks([hook.url]), SchedulerSettings(), SchedulerMetrics())
        notifier.add_sinks(NOW)
        said = content(DriftSubject("code", "tiny", "d", "t"), "fault")
        DriftEventStore(database).write([EventChange(None, EventState.OPENED, said, "It fell.")], NOW)
        notifier.send_due(NOW)
        hook.status = 500
        DriftEventStore(database).write([EventChange(1, EventState.CONFIRMED, said, "It did.")], NOW)
        notifier.send_due(NOW)
    listed = cli("notify", "list").out
    assert "taken" in listed
    assert "HTTP status 500" in listed
    found = cli("notify", "list", "--json").json
    assert [(one["kind"], one["num_attempts"], one["sent_at"] is not None) for one in found] == [
        ("drift", 1, False),
        ("drift", 1, True),
    ]
