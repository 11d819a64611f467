"""Texts while they are decoded, on the `tokens` topic; what a chunk is, alphaloop.messages.result says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alphaloop.kafka.topics import TOKENS
from alphaloop.messages import Chunk, Result, chunk_headers, final_chunk, text_chunk
from alphaloop.messages.headers import encoded

#: Stands in the JSON of every streamed job's result and of no other: inside a string its quotes would be escaped.
_IS_STREAMED = b'"num_chunks":'


@dataclass(frozen=True, slots=True)
class ChunkMessage:
    """A chunk to be published."""

    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    topic: str = TOKENS
    stream: JobStream | None = field(default=None, compare=False, repr=False)  #: that a chunk with text is part of

    @property
    def num_bytes(self) -> int:
        """Size of the message."""
        return len(self.value)

    def settle(self, *, is_acknowledged: bool) -> None:
        """The broker has acknowledged the chunk, or it was dropped: nothing more becomes of it. Called once."""
        if self.stream is not None:
            self.stream.num_settled += 1
            self.stream.num_acknowledged += is_acknowledged


class JobStream:
    """The chunks with text of one attempt of one job, numbered from 0. The loop adds them, the publisher settles them.

    The final chunk is made from the recorded result (`final_message`), because only the claim that recorded the outcome
    may end the stream, and because a worker that died may have left that to the relay.
    """

    def __init__(self, job_id: str, attempt: int, carried: Mapping[str, str]) -> None:
        self.num_chunks = 0  #: with text, so far; only the loop changes it
        # Only the publisher's thread changes these two.
        self.num_settled = 0  #: of these, acknowledged or dropped
        self.num_acknowledged = 0  #: of these, acknowledged
        self._job_id = job_id
        self._attempt = attempt
        self._carried = carried

    @property
    def is_settled(self) -> bool:
        """Whether every chunk so far was acknowledged or dropped."""
        return self.num_settled >= self.num_chunks

    @property
    def num_unacknowledged(self) -> int:
        """Chunks so far that the broker has not acknowledged: readers may never see them."""
        return self.num_chunks - self.num_acknowledged

    def add(self, text: str, *, created: int, model: str) -> ChunkMessage:
        """The chunk with the text that one step added; `created` in seconds since 1970."""
        chunk = Chunk(self._job_id, self._attempt, self.num_chunks, text)
        self.num_chunks += 1
        return _message(chunk, text_chunk(chunk, created=created, model=model), self._carried, self)


def final_message(result: bytes, carried: Mapping[str, str], model: str) -> ChunkMessage | None:
    """The chunk that ends the stream of the job with this recorded result; None for a job that was not streamed."""
    if _IS_STREAMED not in result:
        return None
    final = final_chunk(Result.decode(result), model=model)
    return _message(*final, carried) if final else None


def _message(chunk: Chunk, value: bytes, carried: Mapping[str, str], stream: JobStream | None = None) -> ChunkMessage:
    return ChunkMessage(chunk.job_id.encode(), value, encoded(chunk_headers(chunk, carried)), stream=stream)
