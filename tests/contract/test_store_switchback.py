"""Slices of the switchback experiment and the speed-ups that follow from them, in a real PostgreSQL."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.acceptance import Interval
from alphaloop.experiment.estimate import Verdict
from alphaloop.experiment.figures import shown_of, task_speedup
from alphaloop.experiment.observe import Phase
from alphaloop.store.database import Database
from alphaloop.store.housekeeping import drop_days_before
from alphaloop.store.switchback import SliceRow, SwitchbackStore
from alphaloop.tables import SUBJECT
from tests.fixtures.runs import block_rows, subject

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def store(database: Database) -> SwitchbackStore:
    return SwitchbackStore(database)


def test_slices_come_back_as_they_were_added_and_twice_is_once(store: SwitchbackStore) -> None:
    code = block_rows(subject("code"), NOW - HOUR, 3)
    chat = block_rows(subject("chat", host="b-host"), NOW - 2 * HOUR, 2, owner="w2")
    store.add([])
    store.add(code[:5])
    store.add(code)
    store.add(chat)
    assert store.read(NOW - 3 * HOUR) == chat + code
    assert store.read(NOW - 3 * HOUR, "code") == code
    assert store.read(NOW - 90 * timedelta(minutes=1)) == code
    assert store.read(NOW - 3 * HOUR, until=NOW - HOUR) == chat
    assert store.read(NOW) == []


def test_slices_of_a_day_without_a_partition_get_one_and_retention_drops_them(
    database: Database, store: SwitchbackStore
) -> None:
    old = block_rows(subject(), NOW - timedelta(days=40), 1)
    store.add(old)
    assert store.read(NOW - timedelta(days=41)) == old
    drop_days_before(database, (NOW - timedelta(days=30)).date())
    assert store.read(NOW - timedelta(days=41)) == []


def test_the_view_shows_what_the_estimator_computes(database: Database, store: SwitchbackStore) -> None:
    """Three tokens for one and a half vanilla rounds are twice as fast."""
    rows = block_rows(subject(), NOW - HOUR, 12)
    rows += block_rows(subject(), NOW - HOUR / 2, 12, num_draft_tokens=7)
    store.add(rows)
    assert store.shown(NOW) == {}, "nothing was computed yet"
    assert store.refresh(NOW) == 1
    shown = store.shown(NOW)["code"]
    assert shown == task_speedup(subject(), [row.slice for row in rows], NOW)
    assert shown.speedup.mean == pytest.approx(2.0, rel=0.01)
    assert shown.speedup.low <= 2.0 <= shown.speedup.high
    assert (shown.verdict, shown.num_blocks) == (Verdict.FASTER, 24)
    assert (shown.min_num_draft_tokens, shown.max_num_draft_tokens, shown.mean_running) == (4, 7, 4.0)
    row = database.one(text("SELECT * FROM task_speedup_now"))
    assert Interval(row.speedup, row.speedup_low, row.speedup_high) == shown.speedup
    assert {name: getattr(row, name) for name in SUBJECT} == asdict(subject())
    assert row.tokens_per_s == pytest.approx(shown.tokens_per_s)
    assert row.vanilla_tokens_per_s == pytest.approx(shown.vanilla_tokens_per_s)
    assert row.vanilla_tokens_per_s == pytest.approx(1 / 0.02, rel=0.01)


def test_of_a_task_the_drafter_with_most_text_is_shown_everywhere(database: Database, store: SwitchbackStore) -> None:
    few, most = subject(drafter="small"), subject(drafter="lookup")
    store.add(block_rows(few, NOW - HOUR, 9, tokens_per_round=4.0) + block_rows(most, NOW - 2 * HOUR, 20))
    assert store.refresh(NOW) == 2
    assert store.shown(NOW)["code"].subject == most
    assert store.at("code", NOW) == store.shown(NOW)["code"]
    assert database.scalars(text("SELECT drafter FROM task_speedup_now")) == ["lookup"]
    assert store.at("sql", NOW) is None
    tie = [replace(store.shown(NOW)["code"], subject=subject(drafter=name)) for name in "ba"]
    chosen = shown_of(tie)
    assert chosen.subject.drafter == "a"


def test_an_earlier_moment_is_computed_from_the_slices_before_it(store: SwitchbackStore) -> None:
    store.add(block_rows(subject(), NOW - 30 * HOUR, 10, cost=3.0))
    store.add(block_rows(subject(), NOW - 2 * HOUR, 10, cost=1.5))
    earlier, later = store.at("code", NOW - 20 * HOUR), store.at("code", NOW)
    assert (earlier.speedup.mean, later.speedup.mean) == (pytest.approx(1.0, rel=0.01), pytest.approx(2.0, rel=0.01))
    assert earlier.verdict is Verdict.NO_DIFFERENCE


def test_what_is_older_than_a_day_is_not_shown_and_is_dropped(database: Database, store: SwitchbackStore) -> None:
    store.add(block_rows(subject("old"), NOW - 26 * HOUR, 10))
    store.add(block_rows(subject("new"), NOW - HOUR, 10))
    store.refresh(NOW - 25 * HOUR)
    assert store.shown(NOW) == {}
    assert store.refresh(NOW, ["new"]) == 1
    assert set(store.shown(NOW)) == {"new"}
    count = text("SELECT count(*) FROM task_speedups")
    assert database.scalar(count) == 2
    assert store.refresh(NOW) == 1
    assert database.scalar(count) == 1


def against(rows: list[SliceRow], rival: str, cost: float) -> list[SliceRow]:
    """The blocks' control slices draft with `rival`: two tokens a round that takes `cost` vanilla rounds."""
    drafted = []
    for row in rows:
        one = row.slice
        if one.phase is not Phase.BETWEEN:
            one = replace(one, against=rival)
        if one.phase is Phase.CONTROL:
            num_tokens = 2 * one.num_sequence_rounds
            one = replace(one, num_tokens=num_tokens, num_proposed=num_tokens, sequence_s=one.sequence_s * cost)
        drafted.append(replace(row, slice=one))
    return drafted


def test_blocks_against_a_rival_say_nothing_of_vanilla_and_vanilla_ones_nothing_of_the_rival(
    database: Database, store: SwitchbackStore
) -> None:
    """Three tokens for one and a half vanilla rounds are 2 times vanilla, and 1.25 times two tokens for 1.25."""
    vanilla = block_rows(subject(), NOW - HOUR, 12)
    rival = against(block_rows(subject(), NOW - HOUR / 2, 12), "heads", 1.25)
    store.add(rival)
    assert store.refresh(NOW) == 1
    assert store.shown(NOW)["code"].speedup is None, "nothing was compared with vanilla"
    (over,) = store.rivals(NOW)
    assert (over.subject, over.against, over.num_blocks) == (subject(), "heads", 12)
    assert over.speedup.mean == pytest.approx(1.25, rel=0.01)
    store.add(vanilla)
    store.refresh(NOW)
    assert store.shown(NOW)["code"].speedup.mean == pytest.approx(2.0, rel=0.01)
    assert store.at("code", NOW) == store.shown(NOW)["code"]
    (both,) = store.rivals(NOW)
    assert both.speedup.mean == pytest.approx(1.25, rel=0.01)
    assert [row.slice for row in store.read(NOW - 2 * HOUR) if row.slice.against] == [
        row.slice for row in rival if row.slice.against
    ]
    assert database.scalar(text("SELECT count(*) FROM expectation_pairs")) == 0
    assert store.rivals(NOW + 26 * HOUR) == []
    store.refresh(NOW + 26 * HOUR)
    assert database.scalar(text("SELECT count(*) FROM rival_speedups")) == 0
