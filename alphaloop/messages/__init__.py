"""The contract on Kafka: Job in, Result or DeadLetter out."""

from __future__ import annotations

from alphaloop.messages.body import Body, ChatMessage
from alphaloop.messages.codec import derived_job_id, encode_job, parse_job, payload_digest
from alphaloop.messages.dead_letter import DeadLetter, Origin, dead_letter
from alphaloop.messages.job import Decoding, Job, Purpose
from alphaloop.messages.result import DecodingReport, Failure, Mode, Result, Status, Timings, Usage

__all__ = [
    "Body",
    "ChatMessage",
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
    "Timings",
    "Usage",
    "dead_letter",
    "derived_job_id",
    "encode_job",
    "parse_job",
    "payload_digest",
]
