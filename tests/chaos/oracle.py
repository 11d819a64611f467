"""The ledger oracle: which promises a run has broken. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Final

from alphaloop.messages import Result, Status
from tests.chaos.ledger import ChunkRecord, Ledger, Place, Promise, ResultRecord, Row, Violation
from tests.chaos.work import Fate, PlannedJob

#: How a job may end, by what was planted.
_ENDS: Final[Mapping[Fate, frozenset[Status]]] = {
    Fate.SUCCEEDS: frozenset({Status.SUCCEEDED}),
    Fate.FAILS_FIRST: frozenset({Status.SUCCEEDED}),
    Fate.FAILS: frozenset({Status.FAILED}),
    Fate.KILLS: frozenset({Status.FAILED}),
    Fate.EXPIRES: frozenset({Status.EXPIRED}),
    Fate.MAY_EXPIRE: frozenset({Status.EXPIRED, Status.SUCCEEDED}),
    Fate.IS_CANCELLED: frozenset({Status.CANCELLED, Status.SUCCEEDED}),
}


def judge(planned: Collection[PlannedJob], ledger: Ledger, *, max_bytes: Mapping[str, int]) -> list[Violation]:
    """Every broken promise. `max_bytes` bounds the memory of a worker, by the beginning of its name."""
    jobs = {job.job_id: job for job in planned}
    copies: dict[str, list[bytes]] = defaultdict(list)
    answers = refusals(ledger.results)
    for record in ledger.results:
        if not _is_refusal(record):
            copies[record.job_id].append(record.value)
    found: list[Violation] = []
    letters = {letter.job_id for letter in ledger.letters}
    for job in jobs.values():
        row, values = ledger.rows.get(job.job_id), copies.get(job.job_id, [])
        found += (_of_a_refused_message if job.fate is Fate.REFUSED else _of_a_job)(job, row, values)
        if job.is_dead_letter and job.job_id not in letters:
            found.append(Violation(Promise.ONLY_POISON, f"{job.job_id} is poison and no dead letter", job.job_id))
    found += _of_refused_records(ledger, answers)
    found += _unknown(jobs, ledger, answers)
    found += [
        Violation(Promise.ONLY_POISON, f"{letter.job_id} is a dead letter: {letter.reason}", letter.job_id)
        for letter in ledger.letters
        if letter.job_id in jobs and not jobs[letter.job_id].is_dead_letter
    ]
    found += _decreases(ledger)
    found += _of_streams(jobs, ledger.rows, ledger.chunks)
    found += _leftovers(ledger, max_bytes)
    return found


def _of_a_job(job: PlannedJob, row: Row | None, values: Sequence[bytes]) -> Iterator[Violation]:
    if row is None or row.outcome is None:
        state = "no row" if row is None else f"status {row.status}"
        yield Violation(Promise.NOTHING_LOST, f"{job.job_id} has {state}", job.job_id)
        return
    yield from _copies(job, row.outcome, values)
    result = Result.decode(row.outcome)
    if result.status not in _ENDS[job.fate] or row.status != result.status:
        why = result.error.code if result.error else "no error"
        told = f"{job.job_id}, which {job.fate}, is {row.status}, its result {result.status}: {why}"
        yield Violation(Promise.RIGHT, told, job.job_id)
    elif result.status is Status.SUCCEEDED and result.text != job.text:
        yield Violation(Promise.RIGHT, f"{job.job_id} has another text than its prompt asks for", job.job_id)
    elif result.status is Status.EXPIRED and (job.deadline is None or result.recorded_at < job.deadline):
        yield Violation(Promise.RIGHT, f"{job.job_id} expired before its deadline", job.job_id)
    elif row.num_decode_runs != (result.status is Status.SUCCEEDED):
        told = f"{job.job_id} is {row.status} and has {row.num_decode_runs} rows of counts"
        yield Violation(Promise.ONE_OUTCOME, told, job.job_id)
    elif row.num_failures > job.num_failures:
        told = f"{job.job_id} failed {job.num_failures} times, and {row.num_failures} failures are counted"
        yield Violation(Promise.ONE_OUTCOME, told, job.job_id)


def _copies(job: PlannedJob, outcome: bytes, values: Sequence[bytes]) -> Iterator[Violation]:
    if not values:
        yield Violation(Promise.NOTHING_LOST, f"{job.job_id} has an outcome, and no result on the topic", job.job_id)
    if num_others := sum(value != outcome for value in values):
        told = f"{job.job_id}: {num_others} of {len(values)} results differ from its outcome"
        yield Violation(Promise.ONE_OUTCOME, told, job.job_id)


def _of_a_refused_message(job: PlannedJob, row: Row | None, values: Sequence[bytes]) -> Iterator[Violation]:
    if row is not None or values:
        told = f"{job.job_id} is no job, and has a row or a result of another status"
        yield Violation(Promise.ANSWERED, told, job.job_id)


_IS_REFUSED: Final = f'"status":"{Status.REFUSED.value}"'.encode()
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _is_refusal(record: ResultRecord) -> bool:
    return _IS_REFUSED in record.value and Result.decode(record.value).status is Status.REFUSED


def refusals(results: Iterable[ResultRecord]) -> dict[Place, set[bytes]]:
    """The different refused results of each record, which they name by its origin."""
    found: dict[Place, set[bytes]] = defaultdict(set)
    for record in filter(_is_refusal, results):
        result = Result.decode(record.value)
        assert result.origin is not None
        timestamp_ms = (result.recorded_at - _EPOCH) // timedelta(milliseconds=1)
        origin = result.origin
        found[Place(origin.topic, origin.partition, origin.offset, timestamp_ms)].add(record.value)
    return dict(found)


def _of_refused_records(ledger: Ledger, answers: Mapping[Place, set[bytes]]) -> Iterator[Violation]:
    reasons: dict[Place, set[str]] = defaultdict(set)
    for letter in ledger.letters:
        if letter.place is not None:
            reasons[letter.place].add(letter.reason)
    for place, job_id in ledger.refused.items():
        least = 0 if place in ledger.may_be_gone else 1
        for what, found in (("results", answers.get(place, ())), ("dead letters", reasons.get(place, ()))):
            if not least <= len(found) <= 1:
                told = f"the record of {job_id} at {place} has {len(found)} different {what}"
                yield Violation(Promise.ANSWERED, told, job_id)


def _unknown(
    jobs: Mapping[str, PlannedJob], ledger: Ledger, answers: Mapping[Place, set[bytes]]
) -> Iterator[Violation]:
    for place in answers.keys() - ledger.refused.keys():
        yield Violation(Promise.NOTHING_INVENTED, f"a result refuses the record at {place}, which is no poison")
    sources: tuple[tuple[str, Iterable[str]], ...] = (
        ("row", ledger.rows),
        ("result", (record.job_id for record in ledger.results if not _is_refusal(record))),
        ("dead letter", (letter.job_id for letter in ledger.letters)),
        ("chunk", (chunk.job_id for chunk in ledger.chunks)),
    )
    for name, ids in sources:
        for job_id in sorted(set(ids) - jobs.keys()):
            yield Violation(Promise.NOTHING_INVENTED, f"a {name} belongs to {job_id}, which nobody sent")


def _decreases(ledger: Ledger) -> Iterator[Violation]:
    highest: dict[str, int] = {}
    for commit in ledger.commits:
        before = highest.get(commit.partition, -1)
        if commit.offset < before:
            fell = f"{commit.partition} fell from {before} to {commit.offset} after {commit.at_s:.1f} s"
            yield Violation(Promise.OFFSETS, fell)
        highest[commit.partition] = max(before, commit.offset)


def _leftovers(ledger: Ledger, max_bytes: Mapping[str, int]) -> Iterator[Violation]:
    for partition, lag in ledger.lag.items():
        if lag:
            yield Violation(Promise.SETTLED, f"{partition} has {lag} messages that no commit covers")
    if ledger.num_in_outbox:
        yield Violation(Promise.SETTLED, f"{ledger.num_in_outbox} rows are left in the outbox")
    for worker, code in ledger.exit_codes.items():
        yield Violation(Promise.SETTLED, f"{worker} was told to end and ended with {code}")
    for worker, peak in ledger.peak_bytes.items():
        limit = next(limit for name, limit in max_bytes.items() if worker.startswith(name))
        if peak > limit:
            needed, allowed = peak >> 20, limit >> 20
            yield Violation(Promise.MEMORY, f"{worker} needed {needed} MiB, more than {allowed}")
    yield from (Violation(Promise.SECRETS, leak) for leak in ledger.leaks)


def _of_streams(
    jobs: Mapping[str, PlannedJob], rows: Mapping[str, Row], chunks: Iterable[ChunkRecord]
) -> Iterator[Violation]:
    """Every broken promise about the chunks of these jobs."""
    streams: dict[str, list[ChunkRecord]] = defaultdict(list)
    for chunk in chunks:
        streams[chunk.job_id].append(chunk)
    for job_id, found in streams.items():
        job = jobs.get(job_id)
        if job is not None and not job.is_streamed:
            yield Violation(Promise.STREAMS, f"{job_id} did not ask for chunks", job_id)
        attempts: dict[int, list[ChunkRecord]] = defaultdict(list)
        for chunk in found:
            attempts[chunk.attempt].append(chunk)
        row = rows.get(job_id)
        result = Result.decode(row.outcome) if row is not None and row.outcome is not None else None
        tells = result is not None and result.num_unacknowledged_chunks is not None
        for attempt, its in attempts.items():
            # Readers drop an attempt that was given up.
            may_miss = attempt < max(attempts) or tells
            yield from _of_an_attempt(f"attempt {attempt} of {job_id}", job, its, may_miss=may_miss)
    for job in jobs.values():
        row = rows.get(job.job_id)
        if job.is_streamed and row is not None and row.outcome is not None:
            yield from _end(job.job_id, Result.decode(row.outcome), streams[job.job_id])


def _of_an_attempt(
    name: str, job: PlannedJob | None, chunks: Sequence[ChunkRecord], *, may_miss: bool
) -> Iterator[Violation]:
    by_seq = {chunk.seq: chunk for chunk in chunks}
    job_id, last = chunks[0].job_id, by_seq[max(by_seq)]
    certain = list(takewhile(by_seq.__contains__, range(len(by_seq))))
    if any(by_seq[chunk.seq] != chunk for chunk in chunks):
        yield Violation(Promise.STREAMS, f"{name} has two chunks of one number", job_id)
    elif len(certain) < len(by_seq) and not may_miss:
        yield Violation(Promise.STREAMS, f"{name} has a gap", job_id)
    elif [chunk.seq for chunk in chunks if chunk.seq < max(by_seq) and chunk.is_final]:
        yield Violation(Promise.STREAMS, f"{name} goes on behind its end", job_id)
    elif job is not None and job.text is not None:
        text = last.whole_text or "".join(by_seq[seq].text for seq in certain)
        is_whole = last.status == "succeeded"
        if not job.text.startswith(text) or (is_whole and text != job.text):
            yield Violation(Promise.STREAMS, f"{name} does not give the job's text", job_id)


def _end(job_id: str, result: Result, chunks: Iterable[ChunkRecord]) -> Iterator[Violation]:
    """Copies of the final chunk are allowed, because messages may arrive twice."""
    finals = [chunk for chunk in chunks if chunk.is_final]
    ends = {(chunk.attempt, chunk.seq, chunk.status) for chunk in finals}
    if not ends:
        yield Violation(Promise.ENDS, f"{job_id} is {result.status}, and its stream has no end", job_id)
    elif len(ends) > 1:
        yield Violation(Promise.ENDS, f"the stream of {job_id} has {len(ends)} different ends", job_id)
    elif ends != {(result.attempt, result.num_chunks, result.status)}:
        told = "attempt {} at {}, {}".format(*next(iter(ends)))
        wanted = f"attempt {result.attempt} at {result.num_chunks}, {result.status}"
        yield Violation(Promise.ENDS, f"the stream of {job_id} ends with {told}, its outcome with {wanted}", job_id)
    elif {chunk.whole_text for chunk in finals} != {result.text if result.num_unacknowledged_chunks else None}:
        yield Violation(Promise.ENDS, f"the end of the stream of {job_id} has another text than it should", job_id)


def num_copies(results: Iterable[ResultRecord]) -> int:
    """How many results repeat an earlier one of their job."""
    seen = [record.job_id for record in results]
    return len(seen) - len(set(seen))
