"""Random histories of two workers that claim, die, come back, release and record, against a model in a dictionary."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from alphaloop.messages import Mode
from alphaloop.store.database import Database
from alphaloop.store.jobs import ClaimState, JobStore
from alphaloop.store.outcomes import Outcome, OutcomeStore
from tests.fixtures.runs import claim_request, decode_run, outcome, recorded_results, vanilla_counts

pytestmark = pytest.mark.postgres

#: States in which the caller holds the claim and owes an outcome.
CLAIMS = {ClaimState.CLAIMED, ClaimState.CANCELLED, ClaimState.EXHAUSTED}
MAX_ATTEMPTS = 2
JOBS, OWNERS, PAYLOADS = (
    st.sampled_from("abc"),
    st.sampled_from(["w1", "w2"]),
    st.sampled_from([b"one", b"one", b"two"]),
)
ATTEMPTS = st.integers(1, 4)
STEPS = st.one_of(
    st.tuples(st.just("claim"), OWNERS, st.lists(st.tuples(JOBS, PAYLOADS), min_size=1, max_size=4)),
    st.tuples(st.just("record"), OWNERS, st.lists(st.tuples(JOBS, ATTEMPTS), min_size=1, max_size=4)),
    st.tuples(st.just("record_latest"), OWNERS, JOBS),
    st.tuples(st.just("renew"), OWNERS, st.dictionaries(JOBS, ATTEMPTS)),
    st.tuples(st.just("release"), OWNERS, st.dictionaries(JOBS, ATTEMPTS)),
    st.tuples(st.just("expire"), OWNERS, JOBS),
    st.tuples(st.just("cancel"), OWNERS, JOBS),
)


ENDED = [("claim", "w1", [("a", b"one")]), ("record_latest", "w1", "a")]
#: A lease holds until it is over; who lost it overwrites nothing, and neither does the heir with another text.
TAKEN_OVER = [
    *(("claim", "w1", [("a", b"one")]), ("claim", "w2", [("a", b"one")]), ("expire", "w1", "a")),
    *(("claim", "w2", [("a", b"one")]), ("record", "w1", [("a", 1)]), ("record", "w1", [("a", 2)])),
    *(("record", "w2", [("a", 2)]), ("record", "w1", [("a", 1)]), ("record", "w2", [("b", 1), ("a", 2)])),
]


@dataclass
class Row:
    payload: bytes
    owner: str | None = None
    attempt: int = 0
    num_crashes: int = 0
    is_leased: bool = False
    outcome: bytes | None = None


@dataclass
class Model:
    """What the store promises, in the fewest words."""

    rows: dict[str, Row] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)

    def claim(self, owner: str, requests: list[tuple[str, bytes]]) -> list[tuple[ClaimState, bytes | None]]:
        answers, claimed = [], dict[str, ClaimState]()
        for job, payload in requests:
            row = self.rows.setdefault(job, Row(payload))
            if row.payload != payload:
                answers.append((ClaimState.CONFLICT, None))
            elif row.outcome is not None:
                answers.append((ClaimState.ENDED, row.outcome))
            elif job in claimed or (row.is_leased and row.owner != owner):
                answers.append((ClaimState.HELD, None))
            else:
                row.num_crashes += row.owner not in (None, owner)
                row.owner, row.is_leased, row.attempt = owner, True, row.attempt + 1
                dead = ClaimState.EXHAUSTED if row.num_crashes > MAX_ATTEMPTS else ClaimState.CLAIMED
                claimed[job] = ClaimState.CANCELLED if job in self.cancelled else dead
                answers.append((claimed[job], None))
        return answers

    def held(self, owner: str, attempts: dict[str, int]) -> set[str]:
        def holds(job: str, attempt: int) -> bool:
            row = self.rows.get(job)
            return bool(row and row.owner == owner and row.attempt == attempt and row.outcome is None)

        return {job for job, attempt in attempts.items() if holds(job, attempt)}

    def release(self, owner: str, attempts: dict[str, int]) -> set[str]:
        held = self.held(owner, attempts)
        for job in held:
            self.rows[job].owner, self.rows[job].is_leased = None, False
        return held


@dataclass
class Both:
    """The store and its model, asked the same things."""

    database: Database
    model: Model = field(default_factory=Model)
    made: dict[tuple[str, int, int], Outcome] = field(default_factory=dict)  #: so that some are sent twice

    def __post_init__(self) -> None:
        self.jobs, self.outcomes = JobStore(self.database), OutcomeStore(self.database)

    def claim(self, owner: str, requests: list[tuple[str, bytes]]) -> None:
        asked = [claim_request(job, payload) for job, payload in requests]
        found = self.jobs.claim(asked, owner=owner, lease_s=3600.0, max_attempts=MAX_ATTEMPTS)
        assert [(answer.state, answer.outcome) for answer in found] == self.model.claim(owner, requests)
        for answer in found:
            row = self.model.rows[answer.job_id]
            assert answer.state not in CLAIMS or (answer.attempt, answer.num_crashes) == (row.attempt, row.num_crashes)

    def record(self, owner: str, tokens: list[tuple[str, int]]) -> None:
        sent = [self.outcome(job, attempt, n) for n, (job, attempt) in enumerate(tokens)]
        expected, now = [], set()
        for item in sent:
            if self.model.held(owner, {item.job_id: item.attempt}):
                self.model.rows[item.job_id].outcome = item.result
                self.model.cancelled.discard(item.job_id)
                now.add(item.job_id)
                expected.append((item.job_id.encode(), item.result))
        for item in {item.job_id: item for item in sent if item.job_id not in now}.values():
            row = self.model.rows.get(item.job_id)
            if row and (row.attempt, row.outcome) == (item.attempt, item.result):
                expected.append((item.job_id.encode(), item.result))
        recorded = self.outcomes.record(sent, owner=owner)
        assert [(message.key, message.value) for message in recorded] == expected

    def outcome(self, job: str, attempt: int, number: int) -> Outcome:
        run = decode_run(vanilla_counts(2), mode=Mode.VANILLA)
        made = outcome(job, attempt, text=f"text {number}", run=run)
        return self.made.setdefault((job, attempt, number), made)

    def record_latest(self, owner: str, job: str) -> None:
        if row := self.model.rows.get(job):
            self.record(owner, [(job, row.attempt)])

    def renew(self, owner: str, attempts: dict[str, int]) -> None:
        held = self.model.held(owner, attempts)
        assert self.jobs.renew(attempts, owner=owner, lease_s=3600.0) == held
        for job in held:
            self.model.rows[job].is_leased = True

    def release(self, owner: str, attempts: dict[str, int]) -> None:
        assert self.jobs.release(attempts, owner=owner) == self.model.release(owner, attempts)

    def expire(self, _: str, job: str) -> None:
        past = "UPDATE jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = :job AND status = 'running'"
        self.database.change(text(past), {"job": job})
        if job in self.model.rows:
            self.model.rows[job].is_leased = False

    def cancel(self, _: str, job: str) -> None:
        self.jobs.request_cancel(job)
        self.model.cancelled.add(job)

    def compare(self) -> None:
        rows = self.model.rows
        ended = {job: row.outcome for job, row in rows.items() if row.outcome is not None}
        assert recorded_results(self.database, list("abc")) == ended
        sums = text(
            "SELECT (SELECT count(DISTINCT job_id) FROM outbox, unnest(job_ids) AS job_id),"
            " (SELECT count(*) FROM decode_runs), (SELECT coalesce(sum(num_jobs), 0) FROM acceptance_hourly)"
        )
        with self.database.begin() as connection:
            assert tuple(connection.execute(sums).one()) == (len(ended),) * 3
            published = connection.execute(text("SELECT unnest(job_ids) FROM outbox")).scalars()
            assert set(published) == ended.keys()
            standing = connection.execute(text("SELECT job_id, attempt FROM jobs"))
            assert dict(map(tuple, standing)) == {job: row.attempt for job, row in rows.items()}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=30))
@example(steps=TAKEN_OVER)
@example(steps=[*ENDED, ("record_latest", "w1", "a")])
@example(steps=[("claim", "w1", [("c", b"two")]), ("claim", "w1", [("c", b"one"), ("c", b"two")])])
@example(steps=[*ENDED, ("cancel", "w1", "a"), ("claim", "w1", [("a", b"one")])])
def test_every_history_keeps_exactly_one_outcome_a_job(
    database: Database, steps: list[tuple[str, str, object]]
) -> None:
    database.change(text("TRUNCATE jobs, outbox, cancellations, decode_runs, acceptance_hourly"))
    both = Both(database)
    for kind, owner, argument in steps:
        getattr(both, kind)(owner, argument)
    both.compare()
