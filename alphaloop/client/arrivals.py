"""Jobs that were sent together, and what Kafka has of them: results, once each, and texts while they grow."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from alphaloop.errors import AlphaloopError, MalformedMessage
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.kafka.topics import RESULTS, TOKENS
from alphaloop.messages import AnswerSoFar, Chunk, RecordPlace, Result, StreamReader, read_chunk
from alphaloop.messages.stream import AnswerPlace, SaidSoFar
from alphaloop.settings import KafkaSettings
from alphaloop.wording import how_many


class Batch(BaseModel):
    """What `submit` returns: the jobs, and the ends of the topics just before they were sent. About 100 bytes a job.

    Another process goes on with it: `Batch.from_json(batch.to_json())`.
    """

    model_config = ConfigDict(frozen=True)

    job_ids: tuple[str, ...]  #: in the order of the jobs
    batch_id: str | None = None  #: the label that their results repeat
    begins: tuple[RecordPlace, ...]  #: partitions of `results`, and of `tokens` if the jobs were sent to be streamed

    def __len__(self) -> int:
        return len(self.job_ids)

    def only(self, job_ids: tuple[str, ...]) -> Self:
        """The same place to read from, for these jobs."""
        return self.model_copy(update={"job_ids": job_ids})

    def offsets(self) -> dict[TopicPartition, int]:
        """The first offset of each partition that may hold something about the jobs."""
        return {TopicPartition(place.topic, place.partition): place.offset for place in self.begins}

    def to_json(self) -> str:
        """The batch as JSON, to keep."""
        return self.model_dump_json(exclude_none=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The batch that `to_json` wrote. Raises MalformedMessage for anything else."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            raise MalformedMessage("expected a batch as Batch.to_json writes it, found something else") from None


class SubmissionStopped(AlphaloopError):
    """Some jobs of a submission were sent, and others not.

    `batch` has those that were handed to Kafka. They may be sent again under the same job_ids: each is decoded once.
    """

    def __init__(self, message: str | None = None, *, hint: str | None = None, batch: Batch | None = None) -> None:
        super().__init__(message, hint=hint)
        self.batch = batch or Batch(job_ids=(), begins=())


#: Called between two polls. What it raises ends the reading.
Alive = Callable[[], None]
_POLL_S: Final = 0.2
_READ_AT_ONCE: Final = 256
#: In the results of refused messages whose job_id is another job's; these have a key of their own.
_CLAIMED: Final = b'"claimed_job_id"'


class ResultsMissing(AlphaloopError):
    """Jobs have no result yet. They go on, and can be waited for again. `job_ids` names them."""

    def __init__(
        self, message: str | None = None, *, hint: str | None = None, job_ids: Collection[str] = frozenset()
    ) -> None:
        super().__init__(message, hint=hint)
        self.job_ids = frozenset(job_ids)


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """The next piece of a call of a tool: of the arguments, which are JSON as text."""

    index: int  #: among the calls of its text
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a job's answer: of `text`, `reasoning` and `tool_call` one says something.

    With `begins_again` it is the beginning of another answer: the job is decoded again, and all its earlier pieces
    are void.
    """

    job_id: str
    text: str
    begins_again: bool = False
    choice: int = 0  #: which of the job's texts it belongs to
    reasoning: str = ""
    tool_call: ToolCallPiece | None = None


class GrowingAnswer:
    """One job's answer as its reader has it. That stays, so a new attempt goes on where it says the same."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._given: dict[AnswerPlace, SaidSoFar] = {}
        self._reader = StreamReader()

    def take(self, chunk: Chunk) -> list[Piece]:
        """What this chunk adds."""
        is_new = self._reader.take(chunk) or self._reader.news
        return self.grown_to(self._reader.answer) if is_new else []

    def grown_to(self, answer: AnswerSoFar, *, is_end: bool = False) -> list[Piece]:
        """What is new in the answer of the latest attempt; with `is_end` it is complete."""
        begins_again = not self._goes_on(answer.said, is_end)
        if begins_again:
            self._given.clear()
        pieces = list[Piece]()
        for place, said in answer.in_order():
            before = self._given.get(place)
            if before is None or len(said.text) > len(before.text):
                self._given[place] = said
                if new := self._piece(place, said, said.text[len(before.text) if before else 0 :], begins_again):
                    pieces.append(new)
                    begins_again = False
        return [Piece(self._job_id, "", begins_again=True)] if begins_again else pieces

    def _goes_on(self, said: Mapping[AnswerPlace, SaidSoFar], is_end: bool) -> bool:
        """Whether nothing that the reader has is contradicted. A new attempt may not have come so far yet."""
        nothing = SaidSoFar("")
        for place, before in self._given.items():
            now = said.get(place)
            if now is not None and (now.id, now.name) != (before.id, before.name):
                return False
            if now is None and is_end and before.name is not None:
                return False
            new = (now or nothing).text
            if not new.startswith(before.text) and (is_end or not before.text.startswith(new)):
                return False
        return True

    def _piece(self, place: AnswerPlace, said: SaidSoFar, new: str, begins_again: bool) -> Piece | None:
        choice = place.choice
        match place.part:
            case "tool_calls":
                call = ToolCallPiece(place.call, said.id or "", said.name or "", new)
                return Piece(self._job_id, "", begins_again, choice, tool_call=call)
            case "reasoning" if new:
                return Piece(self._job_id, "", begins_again, choice, new)
            case "content" if new:
                return Piece(self._job_id, new, begins_again, choice)
        return None


def reader_of(kafka: KafkaSettings) -> Consumer:
    """A consumer outside every group, for one reading or to ask for offsets. Raises BrokerError."""
    return Consumer(kafka, group_id=f"alphaloop-reader-{uuid.uuid4().hex}", client_id="alphaloop-reader")


def everything_on(kafka: KafkaSettings, topics: Sequence[str], *, newest: int | None = None) -> Iterator[Record]:
    """Everything that lies on these topics now, in the order of each partition; only its `newest`, if given.

    Raises BrokerError, also where the rest does not come.
    """
    if not topics:
        return
    with contextlib.closing(reader_of(kafka)) as consumer:
        bounds = consumer.assign_from(topics, at="earliest", newest=newest)
        yield from consumer.read_through({partition: end for partition, (begin, end) in bounds.items() if end > begin})


def arrivals(
    kafka: KafkaSettings,
    batch: Batch,
    *,
    streams: bool,
    timeout_s: float | None,
    alive: Alive,
    complete: Callable[[Result], Result],
) -> Generator[list[Piece | Result]]:
    """What is new of the batch's jobs, as each poll brings it, until every job has its result.

    A copy of a result is dropped. A message that was refused because its job_id is another's counts for the job_id that
    it named. With `streams`, texts come too; the result comes after the last piece. `complete` adds texts that lie
    elsewhere. Raises ResultsMissing when the time is up, BrokerError.
    """
    waiting = set(batch.job_ids)
    answers: dict[str, GrowingAnswer] = {}
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    if not waiting:
        return
    with contextlib.closing(reader_of(kafka)) as consumer:
        bounds = consumer.bounds([RESULTS, TOKENS] if streams else [RESULTS])
        consumer.assign_at(_begins(bounds, batch.offsets()))
        while waiting:
            alive()
            wait_s = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
            if wait_s <= 0:
                raise _missing(waiting, len(set(batch.job_ids)), timeout_s)
            news = list[Piece | Result]()
            for record in consumer.poll_many(_READ_AT_ONCE, wait_s):
                if record.topic == TOKENS:
                    chunk = chunk_of(record, waiting)
                    if chunk is not None:
                        news += answers.setdefault(chunk.job_id, GrowingAnswer(chunk.job_id)).take(chunk)
                elif (result := _result_of(record, waiting)) is not None:
                    job_id, result = result.sent_job_id, complete(result)
                    waiting.discard(job_id)
                    answer = answers.pop(job_id, None) or GrowingAnswer(job_id)
                    if streams and (messages := result.messages):
                        news += answer.grown_to(AnswerSoFar(messages), is_end=True)
                    news.append(result)
            if news:
                yield news


def _missing(waiting: Collection[str], num_jobs: int, timeout_s: float | None) -> ResultsMissing:
    return ResultsMissing(
        f"{len(waiting)} of {how_many(num_jobs, 'job')} had no result within {timeout_s:g} s",
        hint="they go on if a worker runs, which `alphaloop status` shows; ask again with the same batch",
        job_ids=waiting,
    )


def _result_of(record: Record, waiting: Collection[str]) -> Result | None:
    """The result of a job that is waited for. Most are others', and are not parsed."""
    if key_of(record) not in waiting and _CLAIMED not in (record.value or b""):
        return None
    result = read_result(record)
    return result if result is not None and result.sent_job_id in waiting else None


def read_result(record: Record) -> Result | None:
    """A record of `results`; None for one that is no result."""
    try:
        return Result.decode(record.value or b"")
    except ValidationError:
        return None


def chunk_of(record: Record, waiting: Collection[str]) -> Chunk | None:
    """A record of `tokens` as the chunk of a job in `waiting`; None for other jobs, and for what is no chunk."""
    if key_of(record) in waiting:
        with contextlib.suppress(MalformedMessage):
            chunk = read_chunk(record.value, record.headers)
            return chunk if chunk.job_id in waiting else None
    return None


def key_of(record: Record) -> str:
    """The job_id that results and chunks have as their key."""
    return (record.key or b"").decode("utf-8", "replace")


def _begins(
    bounds: Mapping[TopicPartition, tuple[int, int]], noted: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Each partition from where it was noted; from its first record where it is newer, or was made anew since."""
    offsets = {partition: noted.get(partition, low) for partition, (low, _) in bounds.items()}
    return {place: offsets[place] if low <= offsets[place] <= end else low for place, (low, end) in bounds.items()}
