"""Sinks behind apprise, with a real HTTP service; what is told of which row."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from pydantic import SecretStr

from alphaloop.errors import ConfigError, NotificationFailed
from alphaloop.measurements import DriftSubject
from alphaloop.notifying import Gravity, NotificationText, drift_news, open_sinks, report_news
from alphaloop.store.drift import EventState, PastState
from tests.fixtures.hook import running_hook

AT = datetime(2026, 11, 23, 6, tzinfo=UTC)
TOLD = NotificationText(
    "alphaloop: code, tiny: drift opened (fault)", "α_1 fell.\n<b>Look</b> at $HOME.", Gravity.WARNING
)
SECRETS = ("PASSWORD", "TOKEN", "ada")


@pytest.mark.parametrize("gravity", Gravity)
def test_a_service_takes_a_message_as_it_is(gravity: Gravity) -> None:
    with running_hook() as hook:
        (sink,) = open_sinks([hook.url])
        sink.send(replace(TOLD, gravity=gravity))
    (taken,) = hook.taken
    assert (taken["title"], taken["message"], taken["type"]) == (TOLD.title, TOLD.body, gravity.value)


class Kept(logging.Handler):
    """What alphaloop.logs would write. pytest's own handler also hears loggers that do not speak to the root."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def test_a_refusal_names_its_status_and_no_secret_is_logged_at_any_level() -> None:
    root, kept = logging.getLogger(), Kept()
    root.addHandler(kept)
    root.setLevel(logging.DEBUG)
    with running_hook() as hook:
        (sink,) = open_sinks([hook.url])
        sink.send(TOLD)
        hook.status = 401
        with pytest.raises(NotificationFailed, match=r"JSON [0-9a-f]{8}: HTTP status 401") as refused:
            sink.send(TOLD)
    assert refused.value.__cause__ is None
    told = [str(refused.value), sink.name, *kept.told]
    assert not [text for text in told for secret in SECRETS if secret in text]


def test_a_refusal_names_its_status_where_only_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), running_hook() as hook:
        (sink,) = open_sinks([hook.url])
        hook.status = 503
        with pytest.raises(NotificationFailed, match="HTTP status 503"):
            sink.send(TOLD)


def test_a_service_that_is_away_is_a_failure() -> None:
    with running_hook() as hook:
        (sink,) = open_sinks([hook.url])
    with pytest.raises(NotificationFailed, match="refused, or not reachable"):
        sink.send(TOLD)


def test_a_name_tells_addresses_apart_and_is_the_same_everywhere() -> None:
    urls = [SecretStr(f"json://ada:{password}@localhost/hook") for password in ("one", "two", "one")]
    first, second, again = (sink.name for sink in open_sinks(urls))
    assert first == again != second
    assert first == "JSON cb4f91ce"


@pytest.mark.parametrize("url", ["nonsense://TOKEN", "json://", "TOKEN", "http://user:PASSWORD@host/TOKEN:port:0"])
def test_an_address_that_is_none_is_refused_by_its_place(url: str) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.notify_urls\[1\]: expected an address") as refused:
        open_sinks([SecretStr("json://localhost"), SecretStr(url)])
    assert not [secret for secret in SECRETS if secret in str(refused.value)]


def test_without_addresses_apprise_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert open_sinks([]) == ()
    with pytest.raises(ConfigError, match="needs the package apprise, which is not installed") as refused:
        open_sinks([SecretStr("json://localhost")])
    assert "alphaloop[notify]" in str(refused.value.hint)


def test_the_end_of_drift_proposes_nothing() -> None:
    subject = DriftSubject("code", "tiny", "draft-1", "target-1")

    def told(state: EventState) -> NotificationText:
        past = PastState(7, AT, state, "draft_stale", "It is so.", "scheduler", None)
        return drift_news(3, subject, past, "Train it.").message

    assert told(EventState.OPENED) == NotificationText(
        "alphaloop: code, tiny: drift opened (draft stale)",
        "It is so.\nTrain it.\nalphaloop drift show 7",
        Gravity.WARNING,
    )
    closed = told(EventState.CLOSED)
    assert (closed.body, closed.gravity) == ("It is so.\nalphaloop drift show 7", Gravity.SUCCESS)


def test_a_report_lists_a_limited_number_of_changes() -> None:
    quiet = report_news(1, AT, "All is well.", [])
    assert (quiet.message.body, quiet.is_change) == ("All is well.", False)
    busy = report_news(1, AT, "Much changed.", [f"change {i}" for i in range(25)])
    assert busy.is_change
    assert busy.message.body.splitlines()[-2:] == ["- change 19", "and 5 more changes"]
