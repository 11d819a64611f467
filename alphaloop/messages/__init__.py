"""The contract on Kafka: Job in, Result or DeadLetter out."""

# ruff: noqa: I001 - each name once, as itself: it is exported
from __future__ import annotations

from alphaloop.messages.codec import (
    derived_job_id as derived_job_id,
    encode_job as encode_job,
    encode_prompt as encode_prompt,
    field_as_sent as field_as_sent,
    fields_of as fields_of,
    parse_job as parse_job,
    payload_digest as payload_digest,
    refused_result as refused_result,
    with_prompt as with_prompt,
)
from alphaloop.messages.dead_letter import DeadLetter as DeadLetter, Origin as Origin, dead_letter as dead_letter
from alphaloop.messages.headers import carried_headers as carried_headers
from alphaloop.messages.answer_form import Constraint as Constraint
from alphaloop.messages.body import Body as Body
from alphaloop.messages.conversation import ChatMessage as ChatMessage
from alphaloop.messages.job import (
    ContentReference as ContentReference,
    Decoding as Decoding,
    Job as Job,
    Purpose as Purpose,
)
from alphaloop.messages.result import (
    AnswerMessage as AnswerMessage,
    Choice as Choice,
    ChosenToken as ChosenToken,
    DecodingReport as DecodingReport,
    Failure as Failure,
    Mode as Mode,
    RecordPlace as RecordPlace,
    Result as Result,
    Status as Status,
    RankedToken as RankedToken,
    Timings as Timings,
    ToolCall as ToolCall,
    ToolCallFunction as ToolCallFunction,
    Usage as Usage,
)
from alphaloop.messages.stream import (
    AnswerSoFar as AnswerSoFar,
    Chunk as Chunk,
    StreamReader as StreamReader,
    StreamReaders as StreamReaders,
    ToolCallHead as ToolCallHead,
    chunk_headers as chunk_headers,
    final_chunk as final_chunk,
    read_chunk as read_chunk,
    text_chunk as text_chunk,
)
