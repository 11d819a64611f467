"""The wait of a starting process: few log lines, one reason, an end on request, no wait for what stays wrong."""

from __future__ import annotations

import logging
import threading

import pytest

from alphaloop.errors import (
    AlphaloopError,
    BrokerLoginRefused,
    BrokerUnavailable,
    SchemaMismatch,
    StoreLoginRefused,
    StoreUnavailable,
)
from alphaloop.start_wait import LOG_EVERY_S, LONGEST_PAUSE_S, StartStopped, StartWait


class Server(threading.Event):
    """Away for some questions, then there. It is the event that stops the wait, too: time passes in waits for it."""

    def __init__(self, num_refusals: int, error: AlphaloopError) -> None:
        super().__init__()
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.reasons: list[str | None] = []
        self._left, self._error = num_refusals, error

    def start(self, limit_s: float | None = None) -> StartWait:
        self.start_wait = StartWait(self, limit_s, clock=lambda: self.now_s)
        return self.start_wait

    def ask(self) -> str:
        if self._left:
            self._left -= 1
            raise self._error
        return "here"

    def wait(self, timeout: float | None = None) -> bool:
        self.reasons.append(self.start_wait.reason)
        self.pauses.append(timeout or 0.0)
        self.now_s += timeout or 0.0
        return self.is_set()


def test_a_server_that_is_away_is_waited_for_with_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(100, StoreUnavailable("connection refused"))
    with caplog.at_level(logging.INFO):
        assert server.start().until_answered("PostgreSQL at db:5432/a", server.ask) == "here"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert set(warnings) == {"waiting for PostgreSQL at db:5432/a: connection refused"}
    assert 2 < len(warnings) <= server.now_s / LOG_EVERY_S + 1
    assert caplog.messages[-1] == "PostgreSQL at db:5432/a answers"
    assert max(server.pauses) == LONGEST_PAUSE_S
    assert server.pauses == sorted(server.pauses)
    assert set(server.reasons) == {"waiting for PostgreSQL at db:5432/a"}
    assert server.start_wait.reason is None


def test_a_server_that_answers_at_once_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(0, StoreUnavailable())
    with caplog.at_level(logging.INFO):
        assert server.start(0.0).until_answered("Kafka at k:9092", server.ask) == "here"
    assert not caplog.messages


@pytest.mark.parametrize("error", [StoreLoginRefused(), BrokerLoginRefused(), SchemaMismatch()])
def test_what_waiting_does_not_mend_ends_the_start_at_once(error: AlphaloopError) -> None:
    server = Server(1, error)
    with pytest.raises(type(error)):
        server.start().until_answered("a server", server.ask)
    assert not server.pauses


def test_the_wait_has_its_limit_and_names_the_setting() -> None:
    server = Server(10_000, BrokerUnavailable("no broker", hint="is it up?"))
    with pytest.raises(BrokerUnavailable, match=r"Kafka at k:9092 .*startup\.server_wait_s, 30 s: no broker") as caught:
        server.start(30.0).until_answered("Kafka at k:9092", server.ask)
    assert caught.value.hint == "is it up?"
    assert 30.0 <= server.now_s < 30.0 + LONGEST_PAUSE_S


def test_a_stop_ends_the_wait() -> None:
    server = Server(10_000, BrokerUnavailable("no broker"))
    wait = server.start()

    def ask() -> str:
        if server.now_s > 60.0:
            server.set()
        return server.ask()

    with pytest.raises(StartStopped):
        wait.until_answered("Kafka at k:9092", ask)
    assert wait.reason is None
