"""Pairs of expected and measured speed-ups in a real PostgreSQL: closed once each, read by workers and by screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.deciding.expectation_error import MOST_PAIRS, ExpectationErrors
from alphaloop.experiment.observe import Expected
from alphaloop.store.database import Database
from alphaloop.store.switchback import ExpectationStore, SliceRow, SwitchbackStore
from tests.fixtures.runs import DEVICE, ENGINE, TARGET, block_rows, subject

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
#: Twice as fast is what `block_rows` measure.
TOO_GOOD = Expected(2.5, 2.3, 2.7, 2.6, 0.03)
RIGHT = Expected(2.0, 1.8, 2.2, 2.0, 0.05)


@pytest.fixture
def slices(database: Database) -> SwitchbackStore:
    return SwitchbackStore(database)


@pytest.fixture
def pairs(database: Database) -> ExpectationStore:
    return ExpectationStore(database)


def test_eight_blocks_close_a_pair_and_its_slices_are_not_counted_twice(
    slices: SwitchbackStore, pairs: ExpectationStore
) -> None:
    rows = block_rows(subject(), NOW - HOUR, 9, expected=TOO_GOOD)
    rows += block_rows(subject(), NOW - HOUR / 2, 8, expected=RIGHT)
    of_blocks = [rows[4 * number : 4 * number + 4] for number in range(17)]

    def after(num_blocks: int) -> list[tuple[bool, int]]:
        """What is known when so many blocks are stored."""
        stored: Sequence[SliceRow] = [row for block in of_blocks[:num_blocks] for row in block]
        slices.add(stored)
        slices.refresh(stored[-1].slice.started_at + MINUTE)
        return [(pair.is_held, pair.num_blocks) for pair in pairs.shown(NOW)]

    assert after(7) == []
    assert after(8) == [(False, 8)]
    assert after(15) == [(False, 8)], "the ninth block and six more are seven"
    assert after(17) == [(False, 8), (True, 9)]
    first, second = pairs.shown(NOW)
    assert (first.expected.mean, first.uncorrected, first.model_sd) == pytest.approx((2.5, 2.6, 0.03))
    assert first.measured.mean == pytest.approx(2.0, rel=0.01)
    assert first.covers_to < second.covers_from
    assert (second.min_num_draft_tokens, second.max_num_draft_tokens, second.mean_running) == (4, 4, 4.0)


def test_rounds_without_an_expectation_give_no_pair(slices: SwitchbackStore, pairs: ExpectationStore) -> None:
    slices.add(block_rows(subject(), NOW - HOUR, 12))
    slices.refresh(NOW)
    assert pairs.shown(NOW) == []


def test_a_worker_reads_the_pairs_of_its_engine_and_device_on_any_host(
    slices: SwitchbackStore, pairs: ExpectationStore
) -> None:
    here, there = subject(), subject(host="b-host")
    slices.add(block_rows(here, NOW - 3 * HOUR, 8, expected=RIGHT))
    slices.refresh(NOW - 2 * HOUR)
    slices.add(block_rows(there, NOW - HOUR, 8, expected=RIGHT))
    slices.add(block_rows(replace(here, device="another"), NOW - HOUR, 8, expected=RIGHT, owner="w2"))
    slices.refresh(NOW)
    assert [pair.subject for pair in pairs.newest(TARGET, ENGINE, DEVICE)] == [here, there]
    assert [pair.subject for pair in pairs.newest(TARGET, ENGINE, DEVICE, since=NOW - HOUR)] == [there]
    assert [pair.subject for pair in pairs.newest(TARGET, ENGINE, DEVICE, until=NOW - HOUR)] == [here]
    assert pairs.newest("another target", ENGINE, DEVICE) == []


def test_the_view_counts_what_screens_count(
    database: Database, slices: SwitchbackStore, pairs: ExpectationStore
) -> None:
    slices.add(block_rows(subject("sql"), NOW - 26 * HOUR, 8, expected=RIGHT))
    slices.refresh(NOW - 25 * HOUR)
    for number in range(MOST_PAIRS + 3):
        begin = NOW - HOUR + number * MINUTE
        slices.add(block_rows(subject(), begin, 8, expected=TOO_GOOD if number % 4 else RIGHT))
        slices.refresh(begin + MINUTE / 2, ["code"])
    shown = pairs.shown(NOW, "code")
    assert len(shown) == MOST_PAIRS
    code, sql = database.rows(text("SELECT * FROM expectation_now ORDER BY task"))
    assert (code.task, code.drafter, code.num_pairs) == ("code", "lookup", MOST_PAIRS)
    assert code.num_held == sum(pair.is_held for pair in shown) == MOST_PAIRS // 4
    assert code.ratio == pytest.approx((2.0 / 2.5) ** 0.75, rel=0.01)
    assert (sql.num_pairs, sql.num_held) == (1, 1)
    errors = ExpectationErrors(timedelta(days=3), pairs.newest(TARGET, ENGINE, DEVICE))
    assert errors.of("code", "lookup", NOW).bias < -0.1
    assert errors.of("sql", "lookup", NOW).bias > -0.1
