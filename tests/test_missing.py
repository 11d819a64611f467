"""What a missing server does to a test, on a laptop, in CI, and in CI on a closed machine."""

from __future__ import annotations

import pytest

from tests.fixtures.missing import missing


def test_on_a_laptop_the_test_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="Apache Kafka is missing: install it"):
        missing("Apache Kafka", "install it")


def test_in_ci_the_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.delenv("CI_CANNOT_GET", raising=False)
    with pytest.raises(pytest.fail.Exception, match="Apache Kafka is missing in CI"):
        missing("Apache Kafka", "install it")


def test_what_a_closed_machine_cannot_fetch_is_skipped_there_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("CI_CANNOT_GET", "Apache Kafka")
    with pytest.raises(pytest.skip.Exception):
        missing("Apache Kafka", "install it")
    with pytest.raises(pytest.fail.Exception):
        missing("PostgreSQL", "install it")
