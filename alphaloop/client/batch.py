"""Jobs that were sent together, and where reading for their results begins."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from alphaloop.errors import AlphaloopError, MalformedMessage
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.messages import RecordPlace


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
        return {TopicPartition(one.topic, one.partition): one.offset for one in self.begins}

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
