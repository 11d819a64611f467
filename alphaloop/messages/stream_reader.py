"""From chunks to a clean text: repeats, lower attempts, interleaved jobs and disorder go away here. Pure."""

from __future__ import annotations

from collections.abc import Collection

from alphaloop.messages.chunk import Chunk


class StreamReader:
    """One job's stream. Give it every chunk of the job; `text` is what is certain so far.

    A chunk of a lower attempt, or one that was taken before, changes nothing. A higher attempt decodes the job from its
    start, so `text` begins again with it. A chunk whose predecessors are missing waits for them. `end` is the final
    chunk, once every chunk before it is here, or at once if it has the whole text or the job has none.
    """

    def __init__(self) -> None:
        self.attempt = 0  #: the highest seen; 0 before the first chunk
        self.text = ""  #: of that attempt, up to the first gap
        self.end: Chunk | None = None
        self._next_seq = 0
        self._waiting: dict[int, Chunk] = {}

    @property
    def is_final_seen(self) -> bool:
        """Whether the final chunk is here, perhaps behind a gap. A gap that stays is filled by the job's result."""
        return self.end is not None or any(chunk.is_final for chunk in self._waiting.values())

    def take(self, chunk: Chunk) -> str:
        """The text that this chunk makes certain: of a new attempt from its start, often empty."""
        if chunk.attempt < self.attempt or self.end is not None:
            return ""
        if chunk.attempt > self.attempt:
            self.attempt, self.text, self._next_seq = chunk.attempt, "", 0
            self._waiting.clear()
        if chunk.ends_alone:
            return self._end_with(chunk)
        if chunk.seq >= self._next_seq:
            self._waiting.setdefault(chunk.seq, chunk)
        added = []
        while (following := self._waiting.pop(self._next_seq, None)) is not None:
            self._next_seq += 1
            added.append(following.text)
            if following.is_final:
                self.end = following
        self.text += (new := "".join(added))
        return new

    def _end_with(self, final: Chunk) -> str:
        """End with a final chunk that needs none before it."""
        self.end = final
        self._waiting.clear()
        before, self.text = self.text, self.text if final.whole_text is None else final.whole_text
        return self.text[len(before) :]


class StreamReaders:
    """The streams of several jobs on one topic."""

    def __init__(self, job_ids: Collection[str]) -> None:
        self._by_job = {job_id: StreamReader() for job_id in job_ids}

    def __getitem__(self, job_id: str) -> StreamReader:
        return self._by_job[job_id]

    def take(self, chunk: Chunk) -> str:
        """Give the chunk to its job's reader; a chunk of another job is passed over."""
        reader = self._by_job.get(chunk.job_id)
        return reader.take(chunk) if reader else ""
