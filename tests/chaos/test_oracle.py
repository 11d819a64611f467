"""The oracle reports each kind of violation when it is planted, and nothing when nothing is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from alphaloop.errors import MalformedMessage
from alphaloop.messages import Failure, Origin, Result, Status, refused_result
from tests.chaos.ledger import ChunkRecord, Commit, Ledger, Letter, Place, Promise, ResultRecord, Row
from tests.chaos.oracle import judge, refusals
from tests.chaos.work import Fate, PlannedJob, null_jobs

MAX_BYTES = {"worker": 400 << 20}
PLANTED_JOBS = {
    Fate.REFUSED: 2,
    Fate.KILLS: 1,
    Fate.FAILS: 1,
    Fate.FAILS_FIRST: 2,
    Fate.EXPIRES: 1,
    Fate.MAY_EXPIRE: 1,
    Fate.IS_CANCELLED: 1,
}
JOBS = [
    replace(job, is_streamed=job.job_id == "null-000000" or job.fate is Fate.IS_CANCELLED)
    for job in null_jobs(40, PLANTED_JOBS, rng=random.Random(4), sending_s=1.0)
]
GOOD = [job for job in JOBS if job.fate is Fate.SUCCEEDS]
FIRST, SECOND, STREAMED = GOOD[1].job_id, GOOD[2].job_id, GOOD[0]
STATUSES = {
    Fate.SUCCEEDS: Status.SUCCEEDED,
    Fate.FAILS_FIRST: Status.SUCCEEDED,
    Fate.MAY_EXPIRE: Status.SUCCEEDED,
    Fate.KILLS: Status.FAILED,
    Fate.FAILS: Status.FAILED,
    Fate.EXPIRES: Status.EXPIRED,
    Fate.IS_CANCELLED: Status.CANCELLED,
}
NUM_WORDS = 4


def planted(fate: Fate) -> PlannedJob:
    return next(job for job in JOBS if job.fate is fate)


POISON, KILLER, FAILING = (planted(fate).job_id for fate in (Fate.REFUSED, Fate.KILLS, Fate.FAILS))
RETRIED, EXPIRED, HURRIED = planted(Fate.FAILS_FIRST), planted(Fate.EXPIRES), planted(Fate.MAY_EXPIRE)
CANCELLED = planted(Fate.IS_CANCELLED)


def outcome(
    job: PlannedJob,
    text: str | None = None,
    attempt: int = 2,
    status: Status | None = None,
    recorded_at: datetime | None = None,
) -> bytes:
    ended = status or STATUSES[job.fate]
    has_text = ended is Status.SUCCEEDED
    chunks = NUM_WORDS if has_text else 0
    return Result(
        job_id=job.job_id,
        status=ended,
        task="chat",
        text=text or job.text if has_text else None,
        error=None if has_text else Failure(code=f"job_{ended}", message="told by a test"),
        attempt=attempt,
        num_chunks=chunks if job.is_streamed else None,
        recorded_at=recorded_at or datetime.now(UTC),
    ).encode()


#: The records of the poison as its sender knows them; the first poison was sent twice.
RECORDS = {
    Place(job.topic, 0, offset, 1_700_000_000_000 + offset): job
    for offset, job in enumerate([planted(Fate.REFUSED), *(job for job in JOBS if job.fate is Fate.REFUSED)])
}
FIRST_RECORD = next(iter(RECORDS))


def refusal(place: Place, why: str = "no JSON") -> ResultRecord:
    result = refused_result(MalformedMessage(why), Origin("cluster", *place), RECORDS[place].value)
    return ResultRecord(result.job_id, result.encode())


def before_deadline(job: PlannedJob) -> datetime:
    assert job.deadline is not None
    return job.deadline - timedelta(milliseconds=1)


def sound() -> Ledger:
    """A ledger of JOBS in which nothing is wrong, the permitted repetitions among it."""
    rows, results, chunks = {}, [], []
    for job in JOBS:
        if job.fate is not Fate.REFUSED:
            status, value = STATUSES[job.fate], outcome(job)
            rows[job.job_id] = Row(status, value, int(status is Status.SUCCEEDED), job.num_failures)
            results += [ResultRecord(job.job_id, value)] * (2 if job.job_id == SECOND else 1)
            if job.is_streamed and job is not STREAMED:
                chunks.append(ChunkRecord(job.job_id, 2, 0, "", status))
    results += [refusal(place) for place in RECORDS] + [refusal(FIRST_RECORD)]
    poison = [Letter(job.job_id, "malformed_message", place) for place, job in RECORDS.items()]
    words = (STREAMED.text or "").split(" ")
    whole = [chunk(2, seq, word if seq == 0 else f" {word}") for seq, word in enumerate(words)]
    end = chunk(2, NUM_WORDS, "", "succeeded")
    return Ledger(
        rows=rows,
        results=results,
        letters=[*poison, poison[0], Letter(KILLER, "a reason"), Letter(FAILING, "a reason")],
        refused={place: job.job_id for place, job in RECORDS.items()},
        chunks=[*chunks, chunk(1, 0, words[0]), chunk(1, 2, f" {words[2]}"), *whole, whole[-1], end, end],
        commits=[Commit(1.0, "g t[0]", 5), Commit(1.0, "g t[1]", 3), Commit(2.0, "g t[0]", 9), Commit(3, "g t[0]", 9)],
        lag={"t[0]": 0, "t[1]": 0},
        peak_bytes={"worker 0": 400 << 20},
    )


def chunk(attempt: int, seq: int, text: str, status: str | None = None) -> ChunkRecord:
    return ChunkRecord(STREAMED.job_id, attempt, seq, text, status)


def with_chunk(ledger: Ledger, one: ChunkRecord) -> Ledger:
    return replace(ledger, chunks=[*ledger.chunks, one])


def without_chunks(ledger: Ledger, job_id: str) -> Ledger:
    return replace(ledger, chunks=[one for one in ledger.chunks if one.job_id != job_id])


def with_end(ledger: Ledger, attempt: int, seq: int, status: str) -> Ledger:
    """The stream of CANCELLED ends like this and in no other way."""
    others = without_chunks(ledger, CANCELLED.job_id)
    return with_chunk(others, ChunkRecord(CANCELLED.job_id, attempt, seq, "", status))


def with_row(ledger: Ledger, job_id: str, row: Row | None) -> Ledger:
    rows = {name: found for name, found in ledger.rows.items() if name != job_id}
    return replace(ledger, rows=rows if row is None else {**rows, job_id: row})


def with_result(ledger: Ledger, job_id: str, value: bytes) -> Ledger:
    return replace(ledger, results=[*ledger.results, ResultRecord(job_id, value)])


def with_letter(ledger: Ledger, job_id: str) -> Ledger:
    return replace(ledger, letters=[*ledger.letters, Letter(job_id, "malformed_message")])


def with_outcome(ledger: Ledger, job: PlannedJob, value: bytes) -> Ledger:
    """The job has this outcome, and the topic agrees with its row."""
    status = Result.decode(value).status
    changed = with_row(ledger, job.job_id, Row(status, value, int(status is Status.SUCCEEDED)))
    return with_result(without_results(changed, job.job_id), job.job_id, value)


def with_status(ledger: Ledger, job: PlannedJob, status: Status) -> Ledger:
    """So it ended, a moment before its deadline if it has one."""
    at = None if job.deadline is None else job.deadline - timedelta(milliseconds=1)
    return with_outcome(ledger, job, outcome(job, status=status, recorded_at=at))


def with_facts(ledger: Ledger, job_id: str, **facts: Any) -> Ledger:
    """Its row says so."""
    return with_row(ledger, job_id, replace(ledger.rows[job_id], **facts))


def without_a_trace(ledger: Ledger, job_id: str) -> Ledger:
    return with_row(without_results(ledger, job_id), job_id, None)


def without_last_word(ledger: Ledger) -> Ledger:
    """STREAMED ends a word early, and its row says so too."""
    value = Result.decode(outcome(STREAMED)).model_copy(update={"num_chunks": NUM_WORDS - 1}).encode()
    kept = [one for one in ledger.chunks if one.job_id != STREAMED.job_id or one.seq < NUM_WORDS - 1]
    shortened = with_outcome(ledger, STREAMED, value)
    return replace(shortened, chunks=[*kept, chunk(2, NUM_WORDS - 1, "", "succeeded")])


def with_a_lost_chunk(ledger: Ledger, whole_text: str | None) -> Ledger:
    """The outcome of STREAMED tells that a chunk may be missing; it is, and the end has this text."""
    value = Result.decode(outcome(STREAMED)).model_copy(update={"num_unacknowledged_chunks": 1}).encode()
    end = replace(chunk(2, NUM_WORDS, "", "succeeded"), whole_text=whole_text)
    kept = [one for one in ledger.chunks if not (one.job_id == STREAMED.job_id and (one.is_final or one.seq == 1))]
    return replace(with_outcome(ledger, STREAMED, value), chunks=[*kept, end])


def without_refusal(ledger: Ledger) -> Ledger:
    """The record at FIRST_RECORD has no answer."""
    return replace(ledger, results=[one for one in ledger.results if one != refusal(FIRST_RECORD)])


def without_results(ledger: Ledger, job_id: str) -> Ledger:
    return replace(ledger, results=[record for record in ledger.results if record.job_id != job_id])


def test_nothing_is_reported_of_a_sound_ledger() -> None:
    assert judge(JOBS, sound(), max_bytes=MAX_BYTES) == []


def test_a_lost_chunk_is_none_to_a_reader_whose_end_has_the_whole_text() -> None:
    assert judge(JOBS, with_a_lost_chunk(sound(), STREAMED.text), max_bytes=MAX_BYTES) == []
    for text in (None, "another text"):
        found = judge(JOBS, with_a_lost_chunk(sound(), text), max_bytes=MAX_BYTES)
        assert {violation.promise for violation in found} == {Promise.STREAMS, Promise.ENDS}


def test_a_record_that_went_with_a_topic_needs_no_answer() -> None:
    gone = replace(without_refusal(sound()), may_be_gone={FIRST_RECORD})
    assert FIRST_RECORD not in refusals(gone.results)
    assert judge(JOBS, gone, max_bytes=MAX_BYTES) == []


PLANTED: dict[str, tuple[Promise, str, Callable[[Ledger], Ledger]]] = {
    "a lost job": (Promise.NOTHING_LOST, FIRST, lambda it: without_a_trace(it, FIRST)),
    "a job that never ends": (Promise.NOTHING_LOST, FIRST, lambda it: with_row(it, FIRST, Row("running", None, 0))),
    "a result never published": (Promise.NOTHING_LOST, FIRST, lambda it: without_results(it, FIRST)),
    "a killer without a trace": (Promise.NOTHING_LOST, KILLER, lambda it: without_a_trace(it, KILLER)),
    "a good job that failed": (Promise.RIGHT, FIRST, lambda it: with_status(it, GOOD[1], Status.FAILED)),
    "a wrong text": (Promise.RIGHT, FIRST, lambda it: with_outcome(it, GOOD[1], outcome(GOOD[1], "wrong"))),
    "a job that was to be tried again and failed": (
        Promise.RIGHT,
        "which fails, then succeeds, is failed",
        lambda it: with_status(it, RETRIED, Status.FAILED),
    ),
    "a job that expired before its deadline": (
        Promise.RIGHT,
        "expired before its deadline",
        lambda it: with_status(it, HURRIED, Status.EXPIRED),
    ),
    "a job that was decoded behind its deadline": (
        Promise.RIGHT,
        "which expires, is succeeded",
        lambda it: with_status(it, EXPIRED, Status.SUCCEEDED),
    ),
    "poison that was answered with another status": (
        Promise.ANSWERED,
        f"{POISON} is no job",
        lambda it: with_result(it, POISON, outcome(GOOD[1], status=Status.FAILED)),
    ),
    "poison with a row": (
        Promise.ANSWERED,
        f"{POISON} is no job",
        lambda it: with_row(it, POISON, Row("failed", outcome(GOOD[1], status=Status.FAILED), 0)),
    ),
    "poison that was not answered": (
        Promise.ANSWERED,
        f"the record of {POISON} at {FIRST_RECORD} has 0 different results",
        without_refusal,
    ),
    "poison with two different answers": (
        Promise.ANSWERED,
        "has 2 different results",
        lambda it: replace(it, results=[*it.results, refusal(FIRST_RECORD, "another reason")]),
    ),
    "one record of two without a dead letter": (
        Promise.ANSWERED,
        "has 0 different dead letters",
        lambda it: replace(it, letters=[one for one in it.letters if one.place != FIRST_RECORD]),
    ),
    "poison with two different dead letters": (
        Promise.ANSWERED,
        "has 2 different dead letters",
        lambda it: replace(it, letters=[*it.letters, Letter(POISON, "another reason", FIRST_RECORD)]),
    ),
    "a good record that was refused": (
        Promise.NOTHING_INVENTED,
        "which is no poison",
        lambda it: replace(it, refused={place: job for place, job in it.refused.items() if place != FIRST_RECORD}),
    ),
    "two different results": (
        Promise.ONE_OUTCOME,
        FIRST,
        lambda it: with_result(it, FIRST, outcome(GOOD[1], attempt=3)),
    ),
    "a failure counted twice": (
        Promise.ONE_OUTCOME,
        "failures are counted",
        lambda it: with_facts(it, RETRIED.job_id, num_failures=3),
    ),
    "counts of a job that expired": (
        Promise.ONE_OUTCOME,
        "is expired and has 1 rows of counts",
        lambda it: with_facts(it, EXPIRED.job_id, num_decode_runs=1),
    ),
    "counts recorded twice": (Promise.ONE_OUTCOME, FIRST, lambda it: with_facts(it, FIRST, num_decode_runs=2)),
    "a row nobody asked for": (Promise.NOTHING_INVENTED, "ghost", lambda it: with_row(it, "ghost", it.rows[FIRST])),
    "a result nobody asked for": (Promise.NOTHING_INVENTED, "ghost", lambda it: with_result(it, "ghost", b"{}")),
    "a letter nobody sent": (Promise.NOTHING_INVENTED, "ghost", lambda it: with_letter(it, "ghost")),
    "a good job as a dead letter": (Promise.ONLY_POISON, FIRST, lambda it: with_letter(it, FIRST)),
    "poison that vanished": (
        Promise.ONLY_POISON,
        KILLER,
        lambda it: replace(it, letters=[one for one in it.letters if one.job_id != KILLER]),
    ),
    "a failed job without a dead letter": (
        Promise.ONLY_POISON,
        FAILING,
        lambda it: replace(it, letters=[one for one in it.letters if one.job_id != FAILING]),
    ),
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
        lambda it: with_chunk(it, chunk(2, 1, "spliced")),
    ),
    "a stream of another text": (
        Promise.STREAMS,
        "does not give the job's text",
        lambda it: with_chunk(it, chunk(3, 0, "other")),
    ),
    "a stream that goes on": (Promise.STREAMS, "behind its end", lambda it: with_chunk(it, chunk(2, 5, ""))),
    "a stream cut short": (Promise.STREAMS, "does not give the job's text", without_last_word),
    "a stream nobody asked for": (
        Promise.STREAMS,
        f"{FIRST} did not ask",
        lambda it: with_chunk(it, ChunkRecord(FIRST, 1, 0, "")),
    ),
    "a stream without an end": (
        Promise.ENDS,
        f"{CANCELLED.job_id} is cancelled, and its stream has no end",
        lambda it: without_chunks(it, CANCELLED.job_id),
    ),
    "a stream with two ends": (
        Promise.ENDS,
        "2 different ends",
        lambda it: with_chunk(it, chunk(3, 0, "", "cancelled")),
    ),
    "an end that says something else": (
        Promise.ENDS,
        "ends with attempt 2 at 0, expired, its outcome with attempt 2 at 0, cancelled",
        lambda it: with_end(it, 2, 0, "expired"),
    ),
    "an end of an attempt that did not count": (
        Promise.ENDS,
        "attempt 1 at 0",
        lambda it: with_end(it, 1, 0, "cancelled"),
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
