"""The contract on Kafka: Job in, Result or DeadLetter out."""

from __future__ import annotations

from alphaloop.messages.codec import (
    derived_job_id,
    encode_job,
    encode_prompt,
    field_as_sent,
    fields_of,
    parse_job,
    payload_digest,
    with_prompt,
)
from alphaloop.messages.dead_letter import DeadLetter, Origin, dead_letter
from alphaloop.messages.headers import carried_headers, result_headers
from alphaloop.messages.job import Body, ChatMessage, ContentReference, Decoding, Job, Purpose
from alphaloop.messages.result import (
    Chunk,
    DecodingReport,
    Failure,
    Mode,
    Result,
    Status,
    StreamReader,
    StreamReaders,
    Timings,
    Usage,
    chunk_headers,
    final_chunk,
    read_chunk,
    text_chunk,
)

__all__ = [
    "Body",
    "ChatMessage",
    "Chunk",
    "ContentReference",
    "DeadLetter",
    "Decoding",
    "DecodingReport",
    "Failure",
    "Job",
    "Mode",
    "Origin",
    "Purpose",
    "Result",
    "Status",
    "StreamReader",
    "StreamReaders",
    "Timings",
    "Usage",
    "carried_headers",
    "chunk_headers",
    "dead_letter",
    "derived_job_id",
    "encode_job",
    "encode_prompt",
    "field_as_sent",
    "fields_of",
    "final_chunk",
    "parse_job",
    "payload_digest",
    "read_chunk",
    "result_headers",
    "text_chunk",
    "with_prompt",
]
