"""The oracle reports each kind of violation when it is planted, and nothing when nothing is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from alphaloop.messages import Failure, Result, Status
from tests.chaos.ledger import ChunkRecord, Commit, Ledger, Letter, ResultRecord, Row
from tests.chaos.oracle import Promise, judge
from tests.chaos.work import Fate, PlannedJob, null_jobs

MAX_BYTES = {"worker": 400 << 20}
JOBS = [
    replace(job, is_streamed=job.job_id == "null-000000")
    for job in null_jobs(40, num_refused=2, num_killers=1, rng=random.Random(4))
]
GOOD = [job for job in JOBS if job.fate is Fate.SUCCEEDS]
FIRST, SECOND, STREAMED = GOOD[1].job_id, GOOD[2].job_id, GOOD[0]
POISON = next(job.job_id for job in JOBS if job.fate is Fate.REFUSED)
KILLER = next(job.job_id for job in JOBS if job.fate is Fate.KILLS)


def outcome(job: PlannedJob, text: str | None = None, attempt: int = 1) -> bytes:
    failed = job.fate is Fate.KILLS
    return Result(
        job_id=job.job_id,
        status=Status.FAILED if failed else Status.SUCCEEDED,
        task="chat",
        text=None if failed else text or job.text,
        error=Failure(code="attempts_exhausted", message="its worker died") if failed else None,
        attempt=attempt,
        recorded_at=datetime(2026, 11, 22, tzinfo=UTC),
    ).encode()


def sound() -> Ledger:
    """A ledger of JOBS in which nothing is wrong, the permitted repetitions among it."""
    rows, results = {}, []
    for job in JOBS:
        if job.fate is not Fate.REFUSED:
            value = outcome(job)
            rows[job.job_id] = Row("failed" if job.fate is Fate.KILLS else "succeeded", value, 1)
            results += [ResultRecord(job.job_id, value)] * (2 if job.job_id == SECOND else 1)
    words = (STREAMED.text or "").split(" ")
    whole = [chunk(2, seq, word if seq == 0 else f" {word}") for seq, word in enumerate(words)]
    return Ledger(
        rows=rows,
        results=results,
        letters=[Letter(job.job_id, "malformed_message") for job in JOBS if job.fate is Fate.REFUSED],
        chunks=[chunk(1, 0, words[0]), *whole, whole[-1], replace(chunk(2, len(words), ""), is_final=True)],
        commits=[Commit(1.0, "g t[0]", 5), Commit(1.0, "g t[1]", 3), Commit(2.0, "g t[0]", 9), Commit(3, "g t[0]", 9)],
        lag={"t[0]": 0, "t[1]": 0},
        peak_bytes={"worker 0": 400 << 20},
    )


def chunk(attempt: int, seq: int, text: str) -> ChunkRecord:
    return ChunkRecord(STREAMED.job_id, attempt, seq, False, text)


def with_row(ledger: Ledger, job_id: str, row: Row | None) -> Ledger:
    rows = {name: found for name, found in ledger.rows.items() if name != job_id}
    return replace(ledger, rows=rows if row is None else {**rows, job_id: row})


def with_result(ledger: Ledger, job_id: str, value: bytes) -> Ledger:
    return replace(ledger, results=[*ledger.results, ResultRecord(job_id, value)])


def with_outcome(ledger: Ledger, value: bytes, status: str) -> Ledger:
    """FIRST has this outcome, and the topic agrees with its row."""
    kept = [record for record in ledger.results if record.job_id != FIRST]
    changed = with_row(ledger, FIRST, Row(status, value, 1))
    return replace(changed, results=[*kept, ResultRecord(FIRST, value)])


def without_results(ledger: Ledger, job_id: str) -> Ledger:
    return replace(ledger, results=[record for record in ledger.results if record.job_id != job_id])


def failed() -> bytes:
    job = next(job for job in JOBS if job.job_id == FIRST)
    return outcome(replace(job, fate=Fate.KILLS))


def test_nothing_is_reported_of_a_sound_ledger() -> None:
    assert judge(JOBS, sound(), max_bytes=MAX_BYTES) == []


PLANTED: dict[str, tuple[Promise, str, Callable[[Ledger], Ledger]]] = {
    "a lost job": (Promise.NOTHING_LOST, FIRST, lambda it: with_row(without_results(it, FIRST), FIRST, None)),
    "a job that never ends": (Promise.NOTHING_LOST, FIRST, lambda it: with_row(it, FIRST, Row("running", None, 0))),
    "a result never published": (Promise.NOTHING_LOST, FIRST, lambda it: without_results(it, FIRST)),
    "a killer without a trace": (
        Promise.NOTHING_LOST,
        KILLER,
        lambda it: with_row(without_results(it, KILLER), KILLER, None),
    ),
    "a good job that failed": (Promise.RIGHT, FIRST, lambda it: with_outcome(it, failed(), "failed")),
    "a wrong text": (Promise.RIGHT, FIRST, lambda it: with_outcome(it, outcome(GOOD[1], "wrong"), "succeeded")),
    "poison that was answered": (Promise.RIGHT, POISON, lambda it: with_result(it, POISON, b"{}")),
    "two different results": (
        Promise.ONE_OUTCOME,
        FIRST,
        lambda it: with_result(it, FIRST, outcome(GOOD[1], attempt=2)),
    ),
    "counts recorded twice": (
        Promise.ONE_OUTCOME,
        FIRST,
        lambda it: with_row(it, FIRST, replace(it.rows[FIRST], num_decode_runs=2)),
    ),
    "a row nobody asked for": (Promise.NOTHING_INVENTED, "ghost", lambda it: with_row(it, "ghost", it.rows[FIRST])),
    "a result nobody asked for": (Promise.NOTHING_INVENTED, "ghost", lambda it: with_result(it, "ghost", b"{}")),
    "a letter nobody sent": (
        Promise.NOTHING_INVENTED,
        "ghost",
        lambda it: replace(it, letters=[*it.letters, Letter("ghost", "malformed_message")]),
    ),
    "a good job as a dead letter": (
        Promise.ONLY_POISON,
        FIRST,
        lambda it: replace(it, letters=[*it.letters, Letter(FIRST, "malformed_message")]),
    ),
    "poison that vanished": (Promise.ONLY_POISON, POISON, lambda it: replace(it, letters=[])),
    "a decreasing offset": (
        Promise.OFFSETS,
        "g t[1] fell from 3 to 2",
        lambda it: replace(it, commits=[*it.commits, Commit(4.0, "g t[1]", 2)]),
    ),
    "a gap in a stream": (
        Promise.STREAMS,
        "attempt 2 of null-000000 has a gap",
        lambda it: replace(it, chunks=[one for one in it.chunks if (one.attempt, one.seq) != (2, 1)]),
    ),
    "two texts in one stream": (
        Promise.STREAMS,
        "two chunks of one number",
        lambda it: replace(it, chunks=[*it.chunks, chunk(2, 1, "spliced")]),
    ),
    "a stream of another text": (
        Promise.STREAMS,
        "does not give the job's text",
        lambda it: replace(it, chunks=[*it.chunks, chunk(3, 0, "other")]),
    ),
    "a stream that goes on": (
        Promise.STREAMS,
        "behind its end",
        lambda it: replace(it, chunks=[*it.chunks, chunk(2, 5, "")]),
    ),
    "a stream cut short": (
        Promise.STREAMS,
        "does not give the job's text",
        lambda it: replace(it, chunks=[replace(chunk(3, 0, ""), is_final=True)]),
    ),
    "a stream nobody asked for": (
        Promise.STREAMS,
        f"{FIRST} did not ask",
        lambda it: replace(it, chunks=[*it.chunks, ChunkRecord(FIRST, 1, 0, False, "")]),
    ),
    "unread messages": (Promise.SETTLED, "t[1] has 7", lambda it: replace(it, lag={"t[0]": 0, "t[1]": 7})),
    "an outbox that is not empty": (Promise.SETTLED, "3 rows", lambda it: replace(it, num_in_outbox=3)),
    "a worker that does not drain": (
        Promise.SETTLED,
        "worker 0 was told to end and ended with 1",
        lambda it: replace(it, exit_codes={"worker 0": 1}),
    ),
    "a worker that grows": (
        Promise.MEMORY,
        "worker 0 needed 401 MiB",
        lambda it: replace(it, peak_bytes={"worker 0": 401 << 20}),
    ),
    "a leak": (Promise.SECRETS, "worker.log", lambda it: replace(it, leaks=["worker.log holds a password"])),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_reported(name: str) -> None:
    promise, told, plant = PLANTED[name]
    found = judge(JOBS, plant(sound()), max_bytes=MAX_BYTES)
    assert {violation.promise for violation in found} == {promise}
    assert any(told in violation.what for violation in found), found


def test_every_promise_has_a_planted_violation() -> None:
    assert {promise for promise, _, _ in PLANTED.values()} == set(Promise)
