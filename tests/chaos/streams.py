"""What the oracle says of streams: the job's text, no gap that is not told of, one end as the outcome says. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from alphaloop.messages import Result
from tests.chaos.ledger import ChunkRecord, Promise, Row, Violation
from tests.chaos.work import PlannedJob


def judge_streams(
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
