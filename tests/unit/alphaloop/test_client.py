"""The client without a broker: OpenAI's objects, texts that grow, batches to keep, and what it says of wrong input."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.client import AsyncClient, Batch, Client, KafkaSettings, Piece, Settings
from alphaloop.client.arrivals import GrowingAnswer
from alphaloop.errors import BrokerUnavailable, InvalidField, MalformedMessage, MessageError
from alphaloop.messages import (
    AnswerMessage,
    AnswerSoFar,
    Chunk,
    RecordPlace,
    ToolCallHead,
)
from alphaloop.messages.stream import AnswerPlace
from tests.fixtures.answers import CHAT, chunks_of_answer
from tests.fixtures.broker import limit_requests

NOWHERE = Settings(kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"))


#: Of an answer of two texts.
PLACES = [
    AnswerPlace(0, "reasoning"),
    AnswerPlace(0, "content"),
    AnswerPlace(0, "tool_calls", 1),
    AnswerPlace(1, "content"),
    AnswerPlace(1, "tool_calls"),
]


def test_the_import_needs_no_database_no_model_and_no_screen() -> None:
    unwanted = ("sqlalchemy", "psycopg", "torch", "transformers", "worker", "scheduler", "typer", "rich", "fsspec")
    program = f"import alphaloop.client, sys; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("job", "field", "found"),
    [
        ({"task": "code", "prompt": "p", "temperature": 3}, "jobs[0].temperature", "found 3"),
        ({"task": "code", "prompt": "p", "tempreature": 1}, "jobs[0].tempreature", "no field of a job"),
        ({"prompt": "p"}, "jobs[0].task", "expected the task"),
        ({"task": "code"}, "jobs[0].prompt", "found nothing"),
        ({"task": "code", "prompt": object()}, "jobs[0]", "what JSON can hold"),
        ("text", "jobs[0]", "expected a mapping or a Job"),
    ],
)
def test_a_wrong_job_is_named_before_anything_connects(job: Any, field: str, found: str) -> None:
    with Client(NOWHERE) as client, pytest.raises(MessageError, match=found) as caught:
        client.submit([job])
    assert caught.value.field == field


def test_a_label_that_no_result_could_repeat_is_refused() -> None:
    with Client(NOWHERE) as client, pytest.raises(InvalidField, match="1 to 100 characters") as caught:
        client.submit([], batch_id="x" * 101)
    assert caught.value.field == "batch_id"


def test_no_job_needs_no_broker() -> None:
    with Client(NOWHERE) as client:
        batch = client.submit([])
        assert (len(batch), list(client.results(batch))) == (0, [])


def test_a_broker_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_requests(monkeypatch, 0.5)
    job = {"task": "code", "prompt": "p"}
    with Client("127.0.0.1:1") as client:
        with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
            client.submit(job)
        with pytest.raises(BrokerUnavailable):
            client.cancel("job-1")

    async def submit() -> None:
        async with AsyncClient(NOWHERE) as client:
            await client.submit(job)

    with pytest.raises(BrokerUnavailable):
        asyncio.run(submit())


def test_a_batch_is_kept_as_json() -> None:
    places = (RecordPlace(topic="results", partition=0, offset=7), RecordPlace(topic="results", partition=1, offset=0))
    batch = Batch(job_ids=("b", "a"), batch_id="monday", begins=places)
    assert Batch.from_json(batch.to_json()) == batch
    for wrong in ("", "{}", "[1]", json.dumps({"job_ids": "ab", "begins": []})):
        with pytest.raises(MalformedMessage, match="expected a batch"):
            Batch.from_json(wrong)


def chunk(attempt: int, seq: int, text: str) -> Chunk:
    return Chunk("j", attempt, seq, text)


def of_text(text: str) -> AnswerSoFar:
    return AnswerSoFar([AnswerMessage(content=text)])


def test_a_text_that_is_decoded_again_goes_on_where_it_says_the_same() -> None:
    answer = GrowingAnswer("j")
    chunks = [chunk(1, 0, "A ri"), chunk(1, 1, "ver"), chunk(2, 0, "A "), chunk(2, 1, "river"), chunk(2, 2, " runs")]
    assert [answer.take(one) for one in chunks] == [
        [Piece("j", "A ri")],
        [Piece("j", "ver")],
        [],
        [],
        [Piece("j", " runs")],
    ]
    assert answer.grown_to(of_text("A river runs"), is_end=True) == []


def test_another_text_begins_again() -> None:
    answer = GrowingAnswer("j")
    assert answer.take(chunk(1, 1, "late")) == [], "the one before is missing"
    assert answer.take(chunk(1, 0, "A ")) == [Piece("j", "A late")]
    assert answer.take(chunk(2, 0, "A brook")) == [Piece("j", "A brook", begins_again=True)]
    assert answer.grown_to(of_text("A "), is_end=True) == [Piece("j", "A ", begins_again=True)]
    assert answer.grown_to(of_text(""), is_end=True) == [Piece("j", "", begins_again=True)]


def test_reasoning_and_calls_come_in_pieces_of_their_own() -> None:
    """So a program that prints `text` prints the answer and nothing else."""
    answer = GrowingAnswer("j")
    pieces = [piece for one in chunks_of_answer(CHAT["text and calls"]) for piece in answer.take(one)]
    assert "".join(piece.text for piece in pieces) == "Let me look."
    calls = [piece.tool_call for piece in pieces if piece.tool_call]
    heads = {(call.index, call.id, call.name) for call in calls}
    assert heads == {(0, "call_0", "get_weather"), (1, "call_1", "<script>")}
    assert "".join(call.arguments for call in calls if call.index == 1) == "not JSON"
    first = GrowingAnswer("j").take(chunks_of_answer(CHAT["reasoning"])[0])
    assert first == [Piece("j", "", reasoning="3 ")]


@given(
    st.lists(st.lists(st.tuples(st.sampled_from(PLACES), st.text(alphabet="ab", max_size=3)), max_size=6), max_size=4)
)
def test_the_pieces_always_make_the_answer(attempts: list[list[tuple[AnswerPlace, str]]]) -> None:
    """Whatever attempts say so far, what a reader has at the end is the whole answer."""
    answer, shown, whole = GrowingAnswer("j"), AnswerSoFar(), AnswerSoFar()
    for number, told in enumerate(attempts, 1):
        whole = AnswerSoFar()
        for place, text in told:
            head = ToolCallHead(place.call, f"call_{number // 2}", "f") if place.part == "tool_calls" else None
            whole.add(place.choice, place.part, text, head)
            shown = taken(answer.grown_to(whole), shown)
    shown = taken(answer.grown_to(whole, is_end=True), shown)
    assert {place: said for place, said in shown.said.items() if said.text or said.name} == {
        place: said for place, said in whole.said.items() if said.text or said.name
    }


def taken(pieces: list[Piece], shown: AnswerSoFar) -> AnswerSoFar:
    for piece in pieces:
        if piece.begins_again:
            shown = AnswerSoFar()
        if call := piece.tool_call:
            head = ToolCallHead(call.index, call.id, call.name)
            shown.add(piece.choice, "tool_calls", call.arguments, head)
        elif piece.reasoning:
            shown.add(piece.choice, "reasoning", piece.reasoning)
        else:
            shown.add(piece.choice, "content", piece.text)
    return shown


def test_the_async_client_has_the_methods_of_the_client() -> None:
    public = [{name for name in vars(one) if not name.startswith("_")} for one in (Client, AsyncClient)]
    assert public[0] - public[1] == {"polled"}
    assert public[1] <= public[0]
