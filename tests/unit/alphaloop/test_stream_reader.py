"""What a reader makes of chunks that come twice, late, mixed, and of attempts that were given up."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.contract import chunk_schema
from alphaloop.errors import MalformedMessage
from alphaloop.messages import (
    Chunk,
    ContentReference,
    Status,
    StreamReader,
    StreamReaders,
    chunk_headers,
    final_chunk,
    read_chunk,
    text_chunk,
)
from alphaloop.messages.headers import encoded
from tests.fixtures.messages import described, succeeded


def chunks_of(texts: list[str], *, job_id: str = "j", attempt: int = 1, is_ended: bool = True) -> list[Chunk]:
    """The chunks of one attempt, with its final one if it ended."""
    found = [Chunk(job_id, attempt, seq, text) for seq, text in enumerate(texts)]
    end = [Chunk(job_id, attempt, len(texts), status=Status.SUCCEEDED)] if is_ended else []
    return found + end


#: Texts of each attempt's chunks: those before the last were given up, after any number of chunks.
ATTEMPTS = st.lists(st.lists(st.text(min_size=1, max_size=5), max_size=8), min_size=1, max_size=4)


@given(attempts=ATTEMPTS, num_copies=st.integers(1, 3), shuffled=st.randoms(use_true_random=False))
def test_any_order_with_any_copies_gives_the_text_of_the_highest_attempt(
    attempts: list[list[str]], num_copies: int, shuffled: random.Random
) -> None:
    last = len(attempts) - 1
    sent = [
        chunk
        for number, texts in enumerate(attempts)
        for chunk in chunks_of(texts, attempt=3 * number + 1, is_ended=number == last)
    ]
    arrived = sent * num_copies
    shuffled.shuffle(arrived)
    reader = StreamReader()
    for chunk in arrived:
        reader.take(chunk)
    assert reader.text == "".join(attempts[-1])
    assert reader.end == sent[-1]


@given(texts=st.lists(st.text(min_size=1, max_size=5), max_size=8), shuffled=st.randoms(use_true_random=False))
def test_a_gap_keeps_back_what_comes_after_it_and_the_end(texts: list[str], shuffled: random.Random) -> None:
    sent = chunks_of(texts)
    arrived = shuffled.sample(sent, len(sent))
    reader, shown = StreamReader(), ""
    for number, chunk in enumerate(arrived, 1):
        shown += reader.take(chunk)
        num_whole = next((i for i, one in enumerate(sent) if one not in arrived[:number]), len(sent))
        assert shown == reader.text == "".join(texts[:num_whole])
        assert reader.end == (sent[-1] if number == len(sent) else None)


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


@given(
    texts=st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=8),
    lost=st.sets(st.integers(0, 7)),
    shuffled=st.randoms(use_true_random=False),
)
def test_a_final_chunk_with_the_whole_text_needs_none_before_it(
    texts: list[str], lost: set[int], shuffled: random.Random
) -> None:
    """Whatever is lost, and in whatever order the rest comes: an outage and a dead worker together."""
    *chunks, final = chunks_of(texts)
    whole = "".join(texts)
    arrived = [chunk for chunk in chunks if chunk.seq not in lost] + [replace(final, whole_text=whole)]
    shuffled.shuffle(arrived)
    reader, shown = StreamReader(), ""
    for chunk in arrived:
        shown += reader.take(chunk)
        assert whole.startswith(shown)
    assert (shown, reader.text, reader.end) == (whole, whole, replace(final, whole_text=whole))


@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED, Status.EXPIRED])
def test_a_job_without_a_text_ends_its_stream_also_behind_a_gap(status: Status) -> None:
    reader = StreamReader()
    first, _lost, end = chunks_of(["one ", "two "])
    for chunk in (first, replace(end, status=status)):
        reader.take(chunk)
    assert (reader.text, reader.end and reader.end.status) == ("one ", status)


def test_a_whole_text_that_is_too_large_for_a_chunk_lies_where_the_final_one_says() -> None:
    result = succeeded("j", "one two ").model_copy(update={"num_chunks": 2, "num_unacknowledged_chunks": 1})
    reference = ContentReference.to("s3://b/a", b"one two ")
    for told in (result, result.model_copy(update={"text": None, "text_ref": reference})):
        ended = final_chunk(told, model="m")
        chunk, value = ended
        jsonschema.validate(json.loads(value), chunk_schema())
        assert read_chunk(value, encoded(chunk_headers(chunk, {}))) == chunk
        reader = StreamReader()
        reader.take(chunk)
        assert reader.end == chunk
        assert (reader.text, chunk.text_ref) == (("one two ", None) if told is result else ("", reference))


@given(text=st.text(max_size=20), seq=st.integers(0, 5), attempt=st.integers(1, 9))
def test_a_chunk_is_read_as_it_was_written_and_as_the_schemas_say(text: str, seq: int, attempt: int) -> None:
    chunk = Chunk("job-1", attempt, seq, text)
    value, headers = text_chunk(chunk, created=1, model="target"), chunk_headers(chunk, {"ce_causationid": "x"})
    assert read_chunk(value, encoded(headers)) == chunk
    jsonschema.validate(json.loads(value), chunk_schema())
    jsonschema.validate(headers, described("chunk_headers"))


CHUNK = Chunk("job-1", 1, 0, "a")
VALUE = text_chunk(CHUNK, created=1, model="t")


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (b"{}", {}),
        (b"not JSON", {}),
        (None, {}),
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
