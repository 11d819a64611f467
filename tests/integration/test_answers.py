"""Answers that are more than a text, from an engine through Kafka and PostgreSQL to everybody who reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from alphaloop.claim_check.store import ContentStore, with_text
from alphaloop.cli.screen import as_shown
from alphaloop.client import Client, Piece
from alphaloop.kafka.topics import RESULTS, TOKENS
from alphaloop.messages import AnswerSoFar, Result, Status, StreamReaders, ToolCallHead, read_chunk
from alphaloop.outcomes.reading import as_one_text
from alphaloop.settings import ClaimCheckSettings, Settings
from tests.fakes import AnsweringEngine
from tests.fixtures.answers import ALL, CHAT, continued
from tests.fixtures.broker import Operator
from tests.fixtures.cli import Cli
from tests.fixtures.messages import batch_line, described
from tests.fixtures.worker import WAIT_S, changed, headers_of, kafka_extra, read, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.timeout(400)]

#: Engines give no more than one piece of the words of this one.
PLAIN: Final = "a prompt that names no answer"


def asked(name: str) -> dict[str, Any]:
    """A job of that answer; what continues a prompt has one."""
    prompt = {"prompt": name} if name.startswith("continued") else {"messages": [{"role": "user", "content": name}]}
    return {"job_id": name.replace(" ", "-"), "task": "code", "body": {**prompt, "max_tokens": 24}}


def messages_of(pieces: Sequence[Piece]) -> AnswerSoFar:
    """The answer that the pieces make."""
    answer = AnswerSoFar()
    for piece in pieces:
        if piece.begins_again:
            answer = AnswerSoFar()
        if call := piece.tool_call:
            answer.add(piece.choice, "tool_calls", call.arguments, ToolCallHead(call.index, call.id, call.name))
        elif piece.reasoning:
            answer.add(piece.choice, "reasoning", piece.reasoning)
        else:
            answer.add(piece.choice, "content", piece.text)
    return answer


def test_every_reader_has_the_whole_answer_also_of_a_job_that_was_decoded_again(
    worker_settings: Settings, stack_cli: Cli, tmp_path: Path
) -> None:
    names = [*ALL, PLAIN]
    with running_worker(worker_settings, AnsweringEngine(ALL, failing_steps=[3])), Client(worker_settings) as client:
        events = list(client.stream(client.submit(list(map(asked, names)), stream=True), timeout_s=WAIT_S))
        results = {one.job_id: one for one in events if isinstance(one, Result)}
        num_finals = len(names)

        def all_ended(records: Sequence[Any]) -> bool:
            return len({one.key for one in records if headers_of(one)["final"] == "1"}) == num_finals

        chunks = read(worker_settings.kafka, [TOKENS], all_ended)
        tails = {name: stack_cli("tail", asked(name)["job_id"]) for name in CHAT}
        waited = stack_cli("wait", "reasoning")
        lines = [json.loads(line) for line in stack_cli("tail", "call-alone", "--json").out.splitlines()]
        prompt = stack_cli("enqueue", "--task", "code", "--prompt", "text and calls", "--wait")
        live = stack_cli("enqueue", "--task", "code", "--prompt", "three of them think", "--stream")
    assert any(one.attempt > 1 for one in results.values()), "a step failed"
    readers = StreamReaders(results)
    for record in chunks:
        ChatCompletionChunk.model_validate_json(record.value or b"", strict=True)
        jsonschema.validate(json.loads(record.value or b""), described("chunk"))
        readers.take(read_chunk(record.value, record.headers))
    for name, choices in ALL.items():
        result = results[asked(name)["job_id"]]
        jsonschema.validate(json.loads(result.encode()), described("result"))
        assert (result.status, result.choices) == (Status.SUCCEEDED, choices)
        assert (result.text, result.finish_reason) == (choices[0].said.content, choices[0].finish_reason)
        assert result.usage is not None
        assert result.usage.completion_tokens_details is not None
        form = Completion if name.startswith("continued") else ChatCompletion
        assert len(form.model_validate(result.response, strict=True).choices) == len(choices)
        reader = readers[result.job_id]
        assert reader.end is not None
        assert reader.end.finish_reasons == tuple(choice.finish_reason for choice in choices)
        its = [one for one in events if isinstance(one, Piece) and one.job_id == result.job_id]
        said = {place: one for place, one in AnswerSoFar(result.messages).said.items() if one.text or one.name}
        assert reader.answer.said == messages_of(its).said == said
    plain = results[asked(PLAIN)["job_id"]]
    assert (plain.choices, readers[plain.job_id].text) == ((), plain.text)
    for name, shown in tails.items():
        text = as_shown(as_one_text([choice.said for choice in CHAT[name]]))
        assert shown.out.rstrip("\n") == text.rstrip("\n")
    assert waited.out == as_one_text([choice.said for choice in CHAT["reasoning"]]) + "\n"
    assert prompt.out == as_one_text([choice.said for choice in CHAT["text and calls"]]) + "\n"
    assert live.out == as_one_text([choice.said for choice in CHAT["three of them think"]]) + "\n"
    assert (lines[-1]["text"], lines[-1]["messages"][0]["tool_calls"][0]["id"]) == (None, "call_0")


def test_a_batch_comes_back_as_openais_objects(worker_settings: Settings, stack_cli: Cli, tmp_path: Path) -> None:
    batch, output = tmp_path / "batch.jsonl", tmp_path / "output.jsonl"
    batch.write_text("".join(json.dumps(batch_line(name, name, max_tokens=24)) + "\n" for name in CHAT))
    with running_worker(worker_settings, AnsweringEngine(ALL)):
        assert stack_cli("batch", "submit", batch, "--task", "code", "--wait").code == 0
        assert stack_cli("batch", "output", batch, "--to", output).code == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert {row["custom_id"] for row in rows} == CHAT.keys()
    for row in rows:
        choices = CHAT[row["custom_id"]]
        chat = ChatCompletion.model_validate(row["response"]["body"], strict=True)
        assert [one.message.content for one in chat.choices] == [one.said.content for one in choices]
        assert [len(one.message.tool_calls or ()) for one in chat.choices] == [
            len(one.said.tool_calls) for one in choices
        ]
        assert [one.logprobs is None for one in chat.choices] == [one.logprobs is None for one in choices]


def test_choices_that_are_too_large_for_a_message_travel_by_reference(
    worker_settings: Settings, tmp_path: Path
) -> None:
    limit, folder = 20_000, tmp_path / "contents"
    folder.mkdir()
    Operator(worker_settings.kafka.bootstrap_servers).create(RESULTS, max_message_bytes=limit)
    settings = changed(kafka_extra(worker_settings, compression_type="none"), worker={"lease_s": 2.0})
    settings = settings.model_copy(update={"claim_check": ClaimCheckSettings(url=str(folder))})
    contents = ContentStore.of(settings.claim_check)
    large = (continued(0, "short"), continued(1, "long " * limit))
    with running_worker(settings, AnsweringEngine({"continued large": large})), Client(settings) as client:
        batch = client.submit([asked("continued large")], stream=True)
        (found,) = client.results(batch, timeout_s=WAIT_S)
        with Client(settings.model_copy(update={"claim_check": ClaimCheckSettings()})) as poor:
            (small,) = poor.results(batch, timeout_s=WAIT_S)
    assert (found.choices, found.text, found.choices_ref) == (large, "short", None)
    assert (small.choices, small.text, small.finish_reason) == ((), None, "length")
    assert small.choices_ref is not None
    assert small.choices_ref.url.endswith(".1.json")
    assert with_text(small, contents) == found
