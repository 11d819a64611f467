"""The ledger oracle: which promises a run has broken. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from alphaloop.messages import Result, Status
from tests.chaos.ledger import ChunkRecord, Ledger, ResultRecord, Row
from tests.chaos.work import Fate, PlannedJob


class Promise(StrEnum):
    """What may not be broken, whatever happens."""

    NOTHING_LOST = "every job ends, with one terminal row and at least one result"
    RIGHT = "every job but planted poison succeeds with the right text"
    ONE_OUTCOME = "a job has one outcome: all copies are equal, and its counts are recorded once"
    NOTHING_INVENTED = "no row, result, letter or chunk belongs to an unknown job"
    ONLY_POISON = "exactly the planted poison is in the dead-letter topic"
    OFFSETS = "committed offsets never decrease"
    STREAMS = "the chunks of an attempt have no gap, and its text is the job's"
    SETTLED = "at the end nothing is left to read or to publish"
    MEMORY = "no worker needs more memory than it may"
    SECRETS = "no log holds a secret or a job's text"


@dataclass(frozen=True, slots=True)
class Violation:
    """One promise broken once."""

    promise: Promise
    what: str


def judge(planned: Collection[PlannedJob], ledger: Ledger, *, max_bytes: Mapping[str, int]) -> list[Violation]:
    """Every broken promise. `max_bytes` bounds the memory of a worker, by the beginning of its name."""
    jobs = {job.job_id: job for job in planned}
    copies: dict[str, list[bytes]] = defaultdict(list)
    for record in ledger.results:
        copies[record.job_id].append(record.value)
    found: list[Violation] = []
    letters = {letter.job_id for letter in ledger.letters}
    for job in jobs.values():
        row, values = ledger.rows.get(job.job_id), copies.get(job.job_id, [])
        match job.fate:
            case Fate.SUCCEEDS:
                found += _of_a_good_job(job, row, values)
            case Fate.REFUSED:
                found += _of_a_refused_message(job, row, values, letters)
            case Fate.KILLS:
                found += _of_a_killer(job, row, values, letters)
    found += _unknown(jobs, ledger)
    found += [
        Violation(Promise.ONLY_POISON, f"{letter.job_id} is good and is a dead letter: {letter.reason}")
        for letter in ledger.letters
        if letter.job_id in jobs and jobs[letter.job_id].fate is Fate.SUCCEEDS
    ]
    found += _decreases(ledger)
    found += _streams(jobs, ledger.chunks)
    found += _leftovers(ledger, max_bytes)
    return found


def _of_a_good_job(job: PlannedJob, row: Row | None, values: Sequence[bytes]) -> Iterator[Violation]:
    if row is None or row.outcome is None:
        yield Violation(Promise.NOTHING_LOST, f"{job.job_id} has {'no row' if row is None else f'status {row.status}'}")
        return
    yield from _copies(job, row.outcome, values)
    result = Result.decode(row.outcome)
    if result.status is not Status.SUCCEEDED or row.status != Status.SUCCEEDED:
        why = result.error.code if result.error else "no error"
        yield Violation(Promise.RIGHT, f"{job.job_id} is {row.status}, its result {result.status}: {why}")
    elif result.text != job.text:
        yield Violation(Promise.RIGHT, f"{job.job_id} has another text than its prompt asks for")
    elif row.num_decode_runs != 1:
        yield Violation(Promise.ONE_OUTCOME, f"{job.job_id} has {row.num_decode_runs} rows of counts")


def _copies(job: PlannedJob, outcome: bytes, values: Sequence[bytes]) -> Iterator[Violation]:
    if not values:
        yield Violation(Promise.NOTHING_LOST, f"{job.job_id} has an outcome, and no result on the topic")
    if num_others := sum(value != outcome for value in values):
        yield Violation(
            Promise.ONE_OUTCOME, f"{job.job_id}: {num_others} of {len(values)} results differ from its outcome"
        )


def _of_a_refused_message(
    job: PlannedJob, row: Row | None, values: Sequence[bytes], letters: Collection[str]
) -> Iterator[Violation]:
    if job.job_id not in letters:
        yield Violation(Promise.ONLY_POISON, f"{job.job_id} is poison and no dead letter")
    if row is not None or values:
        yield Violation(Promise.RIGHT, f"{job.job_id} is no job, and has a row or a result")


def _of_a_killer(
    job: PlannedJob, row: Row | None, values: Sequence[bytes], letters: Collection[str]
) -> Iterator[Violation]:
    """It has to be reported: as a result that says it failed, as a dead letter, or as both."""
    if row is not None and row.outcome is not None:
        yield from _copies(job, row.outcome, values)
        if row.status != Status.FAILED:
            yield Violation(Promise.RIGHT, f"{job.job_id} kills its worker, and is {row.status}")
    elif job.job_id not in letters:
        yield Violation(Promise.NOTHING_LOST, f"{job.job_id} kills its worker, and nothing reports it")


def _unknown(jobs: Mapping[str, PlannedJob], ledger: Ledger) -> Iterator[Violation]:
    sources: tuple[tuple[str, Iterable[str]], ...] = (
        ("row", ledger.rows),
        ("result", (record.job_id for record in ledger.results)),
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


def _streams(jobs: Mapping[str, PlannedJob], chunks: Iterable[ChunkRecord]) -> Iterator[Violation]:
    attempts: dict[tuple[str, int], list[ChunkRecord]] = defaultdict(list)
    for chunk in chunks:
        attempts[chunk.job_id, chunk.attempt].append(chunk)
    for (job_id, attempt), found in attempts.items():
        name, job = f"attempt {attempt} of {job_id}", jobs.get(job_id)
        by_seq = {chunk.seq: chunk for chunk in found}
        if any(by_seq[chunk.seq] != chunk for chunk in found):
            yield Violation(Promise.STREAMS, f"{name} has two chunks of one number")
        elif sorted(by_seq) != list(range(len(by_seq))):
            yield Violation(Promise.STREAMS, f"{name} has a gap")
        elif [chunk.seq for chunk in found if chunk.seq < max(by_seq) and chunk.is_final]:
            yield Violation(Promise.STREAMS, f"{name} goes on behind its end")
        elif job is not None and job.text is not None:
            text = "".join(by_seq[seq].text for seq in sorted(by_seq))
            is_whole = by_seq[max(by_seq)].is_final
            if not job.text.startswith(text) or (is_whole and text != job.text):
                yield Violation(Promise.STREAMS, f"{name} does not give the job's text")
        if job is not None and not job.is_streamed:
            yield Violation(Promise.STREAMS, f"{job_id} did not ask for chunks")


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


def num_copies(results: Iterable[ResultRecord]) -> int:
    """How many results repeat an earlier one of their job."""
    seen = [record.job_id for record in results]
    return len(seen) - len(set(seen))
