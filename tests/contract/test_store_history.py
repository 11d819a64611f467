"""Evidence out of a real PostgreSQL: what is added up, what is kept apart, how it ages, and that an index finds it."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.dialects import postgresql

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.messages import Mode, Purpose
from alphaloop.store.database import Database
from alphaloop.store.history import Evidence, HistoryStore, evidence_query
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import DecodeRun, OutcomeStore
from tests.fixtures.runs import ENGINE, TARGET, claim_request, decode_run, outcome, simulated_counts, vanilla_counts

pytestmark = pytest.mark.postgres

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
COUNTS = AcceptanceCounts(rounds=11, num_empty_rounds=1, proposed=(10, 10), trials=(10, 8), accepts=(8, 4))
#: Of COUNTS at k = 2: the rounds behind the prefill, then those whose first draft was accepted.
CHANCES = (10, 8)


@pytest.fixture
def history(database: Database) -> HistoryStore:
    return HistoryStore(database)


def record(database: Database, *runs: DecodeRun) -> None:
    ids = [f"{next(_NUMBERS)}" for _ in runs]
    JobStore(database).claim([claim_request(i) for i in ids], owner="w", lease_s=60, max_attempts=3)
    recorded = [outcome(i, run=run) for i, run in zip(ids, runs, strict=True)]
    assert len(OutcomeStore(database).record(recorded, owner="w")) == len(runs)


_NUMBERS = count()


def evidence(history: HistoryStore, **changes: Any) -> dict[str, Evidence]:
    asked = {
        "task": "code", "target_revision": TARGET, "engine": ENGINE, "sampling_bucket": "greedy",
        "drafters": {"lookup": "draft-1"}, "now": NOW, "window_days": 14.0, "half_life_days": 1e9,
    }  # fmt: skip
    return history.evidence(**(asked | changes))


def test_segments_prompt_lengths_draft_lengths_and_probes_are_added_up(
    history: HistoryStore, database: Database, rng: random.Random
) -> None:
    runs = [
        decode_run(simulated_counts(rng, [0.7] * k, 8), purpose=purpose, segment=segment, prompt_bucket=prompt, at=NOW)
        for k in (1, 3)
        for purpose in (Purpose.TRAFFIC, Purpose.PROBE)
        for segment in ("", "gold")
        for prompt in ("<=256", ">4096")
    ]
    record(database, *runs)
    found = evidence(history)["lookup"]
    assert found.counts == sum((run.counts for run in runs), AcceptanceCounts())
    assert found.num_jobs == len(runs)
    assert found.tokens_per_round_se is not None
    long = [run.counts for run in runs if run.num_draft_tokens == 3]
    behind_prefills = sum(run.counts.rounds - 1 for run in runs)
    assert found.chances == (behind_prefills, *(sum(c.accepts[i] for c in long if i < len(c.accepts)) for i in (0, 1)))


def test_other_keys_are_kept_apart(history: HistoryStore, database: Database) -> None:
    mine = decode_run(COUNTS, at=NOW)
    others = [
        decode_run(COUNTS, at=NOW, task="sql"),
        decode_run(COUNTS, at=NOW, target="target-2"),
        decode_run(COUNTS, at=NOW, engine="other"),
        decode_run(COUNTS, at=NOW, sampling_bucket="t<=1.0"),
        decode_run(COUNTS, at=NOW, revision="draft-2"),
        decode_run(COUNTS, at=NOW, drafter="eagle"),
        decode_run(COUNTS, at=NOW, purpose=Purpose.CONTROL),
        decode_run(vanilla_counts(9), at=NOW, mode=Mode.VANILLA),
        replace(mine, key=replace(mine.key, gate="p>0.4")),
    ]
    record(database, *others)
    assert evidence(history) == {}
    record(database, mine)
    assert evidence(history) == {"lookup": Evidence(COUNTS, 1, None, CHANCES)}
    both = evidence(history, drafters={"lookup": "draft-2", "eagle": "draft-1", "medusa": "draft-1"})
    assert both == {"lookup": Evidence(COUNTS, 1, None, CHANCES), "eagle": Evidence(COUNTS, 1, None, CHANCES)}
    assert evidence(history, drafters={"lookup": "draft-1", "eagle": "draft-2"}).keys() == {"lookup"}
    assert evidence(history, drafters={}) == {}


def test_evidence_halves_with_every_half_life(history: HistoryStore, database: Database) -> None:
    for age_days in (0, 2, 4):
        record(database, *[decode_run(COUNTS, at=NOW - timedelta(days=age_days))] * 8)
    found = evidence(history, half_life_days=2.0)["lookup"]
    weight = 8 * (1 + 1 / 2 + 1 / 4)
    assert found.num_jobs == weight == 14
    assert found.counts == sum([COUNTS] * 14, AcceptanceCounts())


def test_what_is_older_than_the_window_or_from_the_future_does_not_count(
    history: HistoryStore, database: Database
) -> None:
    for days in (-1, 3, 20):
        record(database, decode_run(COUNTS, at=NOW - timedelta(days=days)))
    assert evidence(history)["lookup"].num_jobs == 1
    assert evidence(history, window_days=30.0)["lookup"].num_jobs == 2
    assert evidence(history, window_days=1.0) == {}


def test_expected_tokens_is_the_mean_of_traffic(history: HistoryStore, database: Database) -> None:
    def asked(window_days: float = 14.0) -> float | None:
        return history.expected_tokens("code", now=NOW, window_days=window_days)

    record(database, decode_run(vanilla_counts(500), mode=Mode.VANILLA, purpose=Purpose.CONTROL, at=NOW))
    assert asked() is None
    record(database, decode_run(COUNTS, at=NOW - timedelta(days=5)))
    assert asked() == COUNTS.num_tokens
    record(database, decode_run(vanilla_counts(4), mode=Mode.VANILLA, at=NOW))
    assert asked() == (COUNTS.num_tokens + 4) / 2
    assert asked(window_days=1.0) == 4


def test_an_index_finds_the_evidence(database: Database) -> None:
    fill = """
        INSERT INTO acceptance_hourly (
            bucket, task, segment, target_revision, drafter, draft_revision, gate, engine, sampling_bucket,
            prompt_bucket, purpose, mode, num_draft_tokens, num_jobs
        )
        SELECT timestamptz '2026-03-01 12:00Z' - hour * interval '1 h', 'task-' || task, '', :target, 'lookup',
               'draft-1', '', :engine, 'greedy', '<=256', 'traffic', 'speculative', k, 5
        FROM generate_series(1, 24 * 60) AS hour, generate_series(1, 10) AS task, generate_series(1, 3) AS k
    """
    query = evidence_query(
        "task-3", TARGET, ENGINE, "greedy", {"lookup": "draft-1"}, since=NOW - timedelta(days=2), until=NOW
    )
    literal = query.compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True})
    with database.begin() as connection:
        connection.execute(text(fill), {"target": TARGET, "engine": ENGINE})
        connection.execute(text("ANALYZE acceptance_hourly"))
        assert len(connection.execute(query).all()) == 3 * 47
        plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {literal}").scalars())
    assert "ix_acceptance_hourly_task_bucket" in plan
    assert "Seq Scan" not in plan
