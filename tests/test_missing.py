"""What a missing server does to a test, on a laptop, in CI, and in CI on a closed machine."""

from __future__ import annotations

import pytest

from tests.fixtures.missing import missing


@pytest.mark.parametrize(
    ("ci", "cannot_get", "ended", "told"),
    [
        ("", "", pytest.skip.Exception, "Apache Kafka is missing: install it"),
        ("true", "", pytest.fail.Exception, "Apache Kafka is missing in CI"),
        ("true", "Chromium,Apache Kafka", pytest.skip.Exception, "Apache Kafka is missing: install it"),
        ("true", "PostgreSQL", pytest.fail.Exception, "Apache Kafka is missing in CI"),
    ],
    ids=["laptop", "CI", "closed machine", "what a closed machine has"],
)
def test_a_missing_server_ends_the_test(
    monkeypatch: pytest.MonkeyPatch, ci: str, cannot_get: str, ended: type[BaseException], told: str
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("CI_CANNOT_GET", cannot_get)
    with pytest.raises(ended, match=told):
        missing("Apache Kafka", "install it")
