"""A consumer of `results` alone hears of every record. `make accounting` sends 200,000."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.accounting import account, shown

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_results_alone_account_for_every_record(
    kafka_home: Path, tmp_path: Path, postgres_server: str, seed: int
) -> None:
    """`postgres_server` is asked for because it skips where there is no PostgreSQL; the run starts its own."""
    found = account(400, 1, seed, kafka_home, tmp_path, print)
    print(found.told())
    assert not found.wrong, shown(found.wrong)
    assert found.num_kills > 0
    assert found.num_redriven > 0
