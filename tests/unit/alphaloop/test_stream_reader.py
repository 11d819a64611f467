"""What a reader makes of chunks that come twice, late, mixed, and of attempts that were given up."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from alphaloop.errors import MalformedMessage
from alphaloop.messages import (
    AnswerMessage,
    AnswerSoFar,
    Chunk,
    ContentReference,
    Result,
    Status,
    StreamReader,
    StreamReaders,
    ToolCallHead,
    chunk_headers,
    final_chunk,
    read_chunk,
    text_chunk,
)
from alphaloop.messages.headers import encoded
from alphaloop.messages.result import ChosenToken, RankedToken
from tests.fixtures.answers import ALL, chunks_of_answer
from tests.fixtures.messages import described, succeeded


def chunks_of(texts: list[str], *, job_id: str = "j", attempt: int = 1, is_ended: bool = True) -> list[Chunk]:
    """The chunks of one attempt, with its final one if it ended."""
    found = [Chunk(job_id, attempt, seq, text) for seq, text in enumerate(texts)]
    end = [Chunk(job_id, attempt, len(texts), status=Status.SUCCEEDED)] if is_ended else []
    return found + end


@given(jobs=st.lists(st.lists(st.text(min_size=1, max_size=5), max_size=6), max_size=4), mixed=st.randoms())
def test_streams_of_one_topic_do_not_mix(jobs: list[list[str]], mixed: random.Random) -> None:
    wanted = [f"job-{number}" for number in range(len(jobs))]
    arrived = [chunk for job_id, texts in zip(wanted, jobs, strict=True) for chunk in chunks_of(texts, job_id=job_id)]
    arrived += chunks_of(["somebody else's"], job_id="other")
    mixed.shuffle(arrived)
    readers = StreamReaders(wanted)
    for chunk in arrived:
        readers.take(chunk)
    assert [readers[job_id].text for job_id in wanted] == ["".join(texts) for texts in jobs]


@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED, Status.EXPIRED])
def test_a_job_without_a_text_ends_its_stream_also_after_a_gap(status: Status) -> None:
    reader = StreamReader()
    first, _lost, end = chunks_of(["one ", "two "])
    for chunk in (first, replace(end, status=status)):
        reader.take(chunk)
    assert (reader.text, reader.end and reader.end.status) == ("one ", status)


@pytest.mark.parametrize(
    ("chunk", "is_first", "delta"),
    [
        (Chunk("j", 1, 0, "Aé"), False, {"role": "assistant", "content": "Aé"}),
        (Chunk("j", 1, 7, "b"), False, {"content": "b"}),
        (Chunk("j", 1, 7, "b", 2), True, {"role": "assistant", "content": "b"}),
        (Chunk("j", 1, 7, "hm", 1, "reasoning"), False, {"reasoning_content": "hm"}),
        (
            Chunk("j", 1, 7, "{", 1, "tool_calls", ToolCallHead(1, "call_1", "f")),
            False,
            {
                "tool_calls": [
                    {"index": 1, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{"}}
                ]
            },
        ),
        (
            Chunk("j", 1, 7, "}", 0, "tool_calls", ToolCallHead(1)),
            False,
            {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
        ),
    ],
)
def test_a_chunk_is_openais_and_has_one_piece_of_one_text(chunk: Chunk, is_first: bool, delta: dict[str, Any]) -> None:
    value = text_chunk(chunk, created=1, model="t", is_first=is_first)
    assert json.loads(value)["choices"] == [{"index": chunk.choice, "delta": delta, "finish_reason": None}]
    headers = chunk_headers(chunk, {"ce_causationid": "x"})
    assert read_chunk(value, encoded(headers)) == chunk
    jsonschema.validate(json.loads(value), described("chunk"))
    jsonschema.validate(headers, described("chunk_headers"))
    ChatCompletionChunk.model_validate_json(value, strict=True)


@pytest.mark.parametrize("text", ["a", ""])
def test_a_chunk_has_the_logprobs_of_its_tokens_as_openais(text: str) -> None:
    """Of a token whose text is not certain yet the chunk has logprobs and no text, and adds nothing to the answer."""
    ranked = RankedToken(token="b", logprob=-2.0, bytes=(98,))
    token = ChosenToken(token="a", logprob=-0.5, bytes=(97,), top_logprobs=(ranked,))
    chunk = Chunk("j", 1, 0, text, logprobs=(token,))
    value = text_chunk(chunk, created=1, model="t")
    assert read_chunk(value, encoded(chunk_headers(chunk, {}))) == chunk
    jsonschema.validate(json.loads(value), described("chunk"))
    read = ChatCompletionChunk.model_validate_json(value, strict=True).choices[0].logprobs
    assert read is not None
    assert [(one.token, [top.token for top in one.top_logprobs]) for one in read.content or ()] == [("a", ["b"])]
    reader = StreamReader()
    assert reader.take(chunk) == text
    assert reader.news == (chunk,)
    assert reader.answer.messages == ((AnswerMessage(content="a"),) if text else ())


def final_of(result: Result) -> tuple[Chunk, bytes]:
    found = final_chunk(result, model="t")
    assert found is not None
    return found


#: Of each attempt the name of its answer, and how many of its pieces come: those before the last one were given up.
ANSWERS = st.lists(st.tuples(st.sampled_from(list(ALL)), st.integers(0, 12)), min_size=1, max_size=3)


def ended_as(name: str, attempt: int, num_chunks: int, num_missing: int = 0) -> Chunk:
    """The final chunk of an answer."""
    choices = ALL[name]
    told = {"text": choices[0].said.content, "choices": choices, "finish_reason": choices[0].finish_reason}
    counts = {"attempt": attempt, "num_chunks": num_chunks, "num_unacknowledged_chunks": num_missing or None}
    chunk, value = final_of(succeeded("j", "").model_copy(update={**told, **counts}))
    jsonschema.validate(json.loads(value), described("chunk"))
    assert read_chunk(value, encoded(chunk_headers(chunk, {}))) == chunk
    return chunk


def whole(name: str) -> tuple[AnswerMessage, ...]:
    """What its pieces make: no piece tells of an empty content, nor of an empty text behind the last one."""
    said = [choice.said.model_copy(update={"content": choice.said.content or None}) for choice in ALL[name]]
    while said and said[-1] == AnswerMessage():
        said.pop()
    return tuple(said)


@given(attempts=ANSWERS, num_copies=st.integers(1, 2), shuffled=st.randoms(use_true_random=False))
def test_any_order_with_any_copies_gives_every_text_of_the_highest_attempt(
    attempts: list[tuple[str, int]], num_copies: int, shuffled: random.Random
) -> None:
    last = attempts[-1][0]
    sent = [
        chunk
        for number, (name, num_pieces) in enumerate(attempts[:-1], 1)
        for chunk in chunks_of_answer(ALL[name], number)[:num_pieces]
    ]
    complete = chunks_of_answer(ALL[last], 9)
    final = ended_as(last, 9, len(complete))
    arrived = [*sent, *complete, final] * num_copies
    shuffled.shuffle(arrived)
    reader = StreamReader()
    for chunk in arrived:
        reader.take(chunk)
    assert reader.answer.messages == whole(last)
    assert reader.end == final
    assert reader.end.finish_reasons == tuple(choice.finish_reason for choice in ALL[last])
    assert reader.text == (ALL[last][0].said.content or "")


@given(name=st.sampled_from(list(ALL)), shuffled=st.randoms(use_true_random=False))
def test_the_news_are_every_chunk_once_and_in_order(name: str, shuffled: random.Random) -> None:
    sent = chunks_of_answer(ALL[name])
    sent.append(ended_as(name, 1, len(sent)))
    reader, told, shown = StreamReader(), list[Chunk](), ""
    for chunk in shuffled.sample(sent * 2, 2 * len(sent)):
        shown += reader.take(chunk)
        told += reader.news
    assert told == sent
    assert shown == reader.text


@given(name=st.sampled_from(list(ALL)), lost=st.sets(st.integers(0, 12)), shuffled=st.randoms(use_true_random=False))
def test_a_final_chunk_with_every_text_needs_none_before_it(name: str, lost: set[int], shuffled: random.Random) -> None:
    chunks = chunks_of_answer(ALL[name])
    final = ended_as(name, 1, len(chunks), num_missing=max(1, len(lost)))
    assert final.ends_alone
    arrived = [chunk for chunk in chunks if chunk.seq not in lost] + [final]
    shuffled.shuffle(arrived)
    reader, shown = StreamReader(), ""
    for chunk in arrived:
        shown += reader.take(chunk)
    said = tuple(choice.said for choice in ALL[name])
    assert (reader.answer.messages, reader.end) == (AnswerSoFar(said).messages, final)
    assert shown == reader.text == (said[0].content or "")


@pytest.mark.parametrize(
    ("place", "shown"), [(None, "one two "), ("text_ref", ""), ("choices_ref", "")], ids=["here", "text", "choices"]
)
def test_texts_that_are_too_large_for_a_chunk_lie_where_the_final_one_says(place: str | None, shown: str) -> None:
    reference = ContentReference.to("s3://b/a", b"one two ")
    elsewhere = {"text": None, place: reference} if place else {}
    counts = {"num_chunks": 2, "num_unacknowledged_chunks": 1}
    chunk, value = final_of(succeeded("j", "one two ").model_copy(update=counts | elsewhere))
    jsonschema.validate(json.loads(value), described("chunk"))
    assert read_chunk(value, encoded(chunk_headers(chunk, {}))) == chunk
    reader = StreamReader()
    reader.take(chunk)
    assert (reader.end, reader.text, chunk.is_elsewhere) == (chunk, shown, place is not None)
    assert place is None or getattr(chunk, place) == reference


CHUNK = Chunk("job-1", 1, 0, "a")
VALUE = text_chunk(CHUNK, created=1, model="t")


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (b"{}", {}),
        (b"not JSON", {}),
        (None, {}),
        (VALUE.replace(b'"index":0', b'"index":128'), {}),
        (VALUE.replace(b'{"role":"assistant","content":"a"}', b'{"tool_calls":[]}'), {}),
        (VALUE.replace(b'"choices":[{', b'"choices":[],"other":[{'), {}),
        (VALUE, {"seq": "first"}),
        (VALUE, {"attempt": "-1"}),
        (VALUE, {"final": "1"}),
        (VALUE, {"final": "1", "status": "nearly"}),
    ],
)
def test_anything_else_is_no_chunk(value: bytes | None, wrong: dict[str, str]) -> None:
    with pytest.raises(MalformedMessage):
        read_chunk(value, encoded(chunk_headers(CHUNK, {}) | wrong))


@pytest.mark.parametrize("name", ["job_id", "attempt", "seq", "final"])
def test_a_message_without_a_place_is_no_chunk(name: str) -> None:
    headers = chunk_headers(CHUNK, {})
    del headers[name]
    with pytest.raises(MalformedMessage, match=name):
        read_chunk(VALUE, encoded(headers))


def test_a_reader_ignores_what_comes_after_the_end() -> None:
    reader = StreamReader()
    sent = chunks_of(["a"])
    for chunk in (*sent, replace(sent[0], seq=5, text="later")):
        reader.take(chunk)
    assert reader.text == "a"
