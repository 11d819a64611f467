"""From revisions 0003 and 0004, with their rows, to the key with forms, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey, ProposerCounts
from alphaloop.deciding.evidence import EvidenceSums, KeyEvidence
from alphaloop.errors import StoreError, StoreValueRefused
from alphaloop.measurements import Stream
from alphaloop.store import schema
from alphaloop.store.acceptance_state import AcceptanceStateStore, pack
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftMemoryStore
from alphaloop.store.job_counts import RollupStore
from alphaloop.store.known_jobs import check
from alphaloop.store.outcomes import OutcomeStore
from tests.fixtures.runs import ENGINE, TARGET, claim, decode_run, outcome

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC)
COUNTS = AcceptanceCounts(11, 1, 2, (10, 10), (10, 7), (7, 4))
HALF_LIFE = timedelta(days=3)
KEY = EvidenceKey("code", TARGET, ENGINE, "greedy", "<=256", "", "lookup", "draft-1")
STATE = KeyEvidence.empty(NOW).with_job(EvidenceSums.of_job(COUNTS, 2, NOW, COUNTS.num_tokens, 40), HALF_LIFE)
_KEY = """'code', '', 'target-1', 'lookup', 'draft-1', 'transformers-5.23.0/bfloat16', 'greedy', '<=256'"""
_NAMES = "task, segment, target_revision, drafter, draft_revision, engine, sampling_bucket, prompt_bucket"
#: As a release before 0005 wrote them: one job, its hour, its day, the evidence of its key, a drift memory.
ROWS = (
    f"""INSERT INTO decode_runs (decoded_at, ledger_id, recorded_in, recorded_at, job_id, {_NAMES}, attempt, purpose,
        is_evidence, mode, num_draft_tokens, reason, device, rounds, num_empty_rounds, num_cropped, proposed, trials,
        accepts, chances, num_prompt_tokens, num_tokens, batch_size, queue_s, wall_s, device_s, decode_batch_id)
        VALUES (:now, 1, 1, :now, 'old', {_KEY}, 1, 'traffic', true, 'speculative', 2, 'faster', 'cpu', 11, 1, 2,
        '{{10,10}}', '{{10,7}}', '{{7,4}}', '{{}}', 40, 20, 1, 0, 1, 1, gen_random_uuid())""",
    f"""INSERT INTO evidence_rows (decoded_at, ledger_id, recorded_in, recorded_at, job_id, {_NAMES}, source, is_whole,
        num_draft_tokens, rounds, num_empty_rounds, num_cropped, num_prompt_tokens, num_output_tokens)
        VALUES (:now, 2, 1, :now, 'old', {_KEY}, 'shadow', true, 2, 11, 1, 2, 40, 20)""",
    *(
        f"""INSERT INTO {table} (bucket, {_NAMES}, purpose, mode, num_draft_tokens, num_jobs, rounds, num_tokens,
            trials, accepts, proposed) VALUES (date_trunc('{unit}', :now, 'UTC'), {_KEY}, 'traffic', 'speculative', 2,
            1, 11, 20, '{{10,7}}', '{{7,4}}', '{{10,10}}')"""
        for table, unit in (("acceptance_hourly", "hour"), ("acceptance_daily", "day"))
    ),
    f"""INSERT INTO acceptance_state ({_NAMES}, as_of, num_jobs, last_ledger_id, changed_in, evidence)
        VALUES ({_KEY}, :now, 1, 1, 1, :evidence)""",
    """INSERT INTO drift_memories (task, target_revision, engine, sampling_bucket, drafter, draft_revision, version,
        document, last_decoded_at)
        VALUES ('code', 'target-1', 'transformers-5.23.0/bfloat16', 'greedy', 'lookup', 'draft-1', 1, '{}', :now)""",
    "INSERT INTO drift_positions (task, decoded_at, ledger_id) VALUES ('code', :now, 1)",
    "SELECT setval('ledger_ids', 100)",
)


@pytest.fixture(params=["0003", "0004"])
def upgraded(empty_database_url: SecretStr, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database that was filled at an earlier revision."""
    schema.upgrade(empty_database_url, request.param)
    with Database(empty_database_url) as database:
        with database.begin() as connection:
            for statement in ROWS:
                names = {name: value for name, value in GIVEN.items() if f":{name}" in statement}
                connection.execute(text(statement), names)
        schema.upgrade(empty_database_url)
        yield database


GIVEN = {"now": NOW, "evidence": pack(STATE)}


def test_stored_rows_are_of_plain_text_without_forced_tokens(upgraded: Database) -> None:
    for table in ("decode_runs", "evidence_rows", "acceptance_hourly", "acceptance_daily"):
        assert upgraded.rows(text(f"SELECT form_bucket, num_forced FROM {table}")) == [("", 0)], table
    (state,) = AcceptanceStateStore(upgraded).read(TARGET, ENGINE, {"lookup": "draft-1"}).rows
    assert (state.key, state.evidence) == (KEY, STATE)
    assert list(DriftMemoryStore(upgraded).load("code").memories) == [
        Stream("code", TARGET, ENGINE, "greedy", "lookup", "draft-1")
    ]
    assert upgraded.scalar(text("SELECT proposers FROM decode_runs")) is None
    assert list(upgraded.one(text("SELECT form_bucket, alpha FROM task_alpha_now"))) == ["", 11 / 17]
    assert list(upgraded.one(text("SELECT form_bucket, num_jobs, trials FROM evidence_now"))) == ["", 1, [10.0, 7.0]]
    served = upgraded.scalars(text("SELECT revision FROM code_revisions ORDER BY revision"))
    assert served == ["0005", "0006", "0007", "0008", "0009", "0010"], "earlier code cannot add to rows"


def test_new_jobs_stand_beside_old_ones_under_their_own_keys(upgraded: Database) -> None:
    store = OutcomeStore(upgraded, half_life=HALF_LIFE)
    claim(upgraded, "plain", "json", "tools")
    forced = replace(COUNTS, num_forced=6)
    mixed = ProposerCounts("grammar", (0, 7), (0, 4)), ProposerCounts('odd "one"\t\\', (10,), (7,))
    runs = [
        decode_run(COUNTS),
        replace(decode_run(forced, form_bucket="json"), proposers=mixed),
        decode_run(forced, form_bucket="json,tools"),
    ]
    store.record(
        [outcome(name, run=run) for name, run in zip(("plain", "json", "tools"), runs, strict=True)], owner="w"
    )
    forms = upgraded.rows(
        text("SELECT form_bucket, num_jobs, num_forced, num_tokens FROM acceptance_hourly ORDER BY 1")
    )
    assert sum(row.num_jobs for row in forms if not row.form_bucket) == 2
    assert [tuple(row) for row in forms if row.form_bucket] == [("json", 1, 6, 26), ("json,tools", 1, 6, 26)]
    state = AcceptanceStateStore(upgraded).read(TARGET, ENGINE, {"lookup": "draft-1"}).rows
    assert {row.form_bucket: row.num_jobs for row in state} == {"": 2, "json": 1, "json,tools": 1}
    (json_state,) = (row.evidence for row in state if row.form_bucket == "json")
    assert json_state.all.output_tokens == COUNTS.num_tokens, "what rounds had to yield"
    stored = upgraded.scalar(text("SELECT proposers FROM decode_runs WHERE job_id = 'json'"))
    assert stored == {one.proposer: {"trials": [*one.trials], "accepts": [*one.accepts]} for one in mixed}
    shown = upgraded.rows(text("SELECT form_bucket, alpha FROM task_alpha_now ORDER BY form_bucket"))
    assert [tuple(row) for row in shown] == [(form, 11 / 17) for form in ("", "json", "json,tools")]
    assert not check(upgraded).num_wrong_counts
    RollupStore(upgraded).roll_up(datetime.now(UTC))
    assert upgraded.scalar(text("SELECT sum(num_forced)::int FROM acceptance_daily")) == 12


def test_tokens_that_do_not_add_up_are_refused(upgraded: Database) -> None:
    claim(upgraded, "wrong")
    run = replace(decode_run(replace(COUNTS, num_forced=6)), num_tokens=COUNTS.num_tokens)
    with pytest.raises((StoreError, StoreValueRefused), match="tokens_add_up"):
        OutcomeStore(upgraded).record([outcome("wrong", run=run)], owner="w")


def test_the_way_back_keeps_plain_text_and_drops_what_it_cannot_tell_apart(
    upgraded: Database, empty_database_url: SecretStr
) -> None:
    claim(upgraded, "json", "plain")
    runs = decode_run(replace(COUNTS, num_forced=6), form_bucket="json"), decode_run(COUNTS, segment="another")
    jobs = [outcome(name, run=run) for name, run in zip(("json", "plain"), runs, strict=True)]
    OutcomeStore(upgraded).record(jobs, owner="w")
    schema.downgrade(empty_database_url, "0004")
    assert upgraded.scalars(text("SELECT job_id FROM decode_runs ORDER BY 1")) == ["old", "plain"]
    assert upgraded.scalars(text("SELECT segment FROM acceptance_state ORDER BY 1")) == ["", "another"]
    assert upgraded.scalars(text("SELECT segment FROM evidence_now ORDER BY 1")) == ["", "another"]
    assert sorted(upgraded.scalars(text("SELECT revision FROM code_revisions"))) == ["0003", "0004"]
    schema.upgrade(empty_database_url)
    assert {row.form_bucket for row in upgraded.rows(text("SELECT form_bucket FROM decode_runs"))} == {""}
