"""Whatever a model can write, from its tokens through Kafka: valid JSON or content, and the worker goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from pydantic_core import from_json

from alphaloop.kafka.topics import RESULTS, TOKENS
from alphaloop.messages import AnswerSoFar, Choice, Result, Status, StreamReaders, read_chunk
from alphaloop.settings import Settings
from engine.own import TransformersEngine
from tests.fakes import AnsweringEngine
from tests.fixtures.answers import continued
from tests.fixtures.chat_templates import CLOCK, QWEN, WEATHER, tokenizer_with
from tests.fixtures.models import engine_over, small_llama_of
from tests.fixtures.worker import Client, by_id, headers_of, running_worker
from tests.fuzz.hostile import any_value, write
from worker.recording import OUTCOME_REFUSED

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.model, pytest.mark.timeout(400)]

NUM_DRAWN: Final = 24
MOST_TOKENS: Final = 1900
CALL: Final = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
#: What ended workers, and what its neighbours are.
FIXED: Final = (
    CALL.format(name='"clock"', arguments=r'{"a": "\ud83d"}'),
    CALL.format(name=r'"\udc00"', arguments="{}"),
    CALL.format(name='"clock"', arguments=r'{"\ud83d": NaN}'),
    CALL.format(name='"clock"', arguments='{"a": ' + "[" * 1500),
    CALL.format(name='"clock"', arguments='{"a": ' + "[" * 700 + "]" * 700 + "}"),
    CALL.format(name='"clock"', arguments='{"a": ' + "9" * 1000 + ".5}"),
    "abc <tool_call>",
    CALL.format(name='"clock"', arguments=r'{"a": 1e5, "a": "\u0000\ud83d\ude00", "": {}}'),
    "<think>\n" + "[" * 50 + "</think>\n<tool_call>",
)
PARTS: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>", " ", "\n", "abc", "é😀", '{"name": "clock"')


class ScriptedModel:
    """In place of a target's passes: its likeliest token is always the next one of the job's script."""

    def __init__(self, engine: TransformersEngine, scripts: Mapping[str, Sequence[int]]) -> None:
        self._engine, self._scripts, self._read = engine, scripts, engine._target.model.read
        engine._target.model.read = self  # type: ignore[method-assign]

    def __call__(self, cache: Any, reads: Sequence[Any]) -> torch.Tensor:
        logits = self._read(cache, reads)
        sequences = {one.slot: one for one in self._engine._admitted.running}
        row = 0
        for read in reads:
            sequence = sequences[read.slot]
            end = cache.lengths[read.slot] + len(read.token_ids) - sequence.num_prompt
            script = self._scripts.get(sequence.spec.owner.rpartition("-")[0], ())
            for place in range(end - read.num_logits, end):
                token = script[place + 1] if place + 1 < len(script) else self._engine._target.tokenizer.eos_token_id
                logits[row, token] += 1000.0
                row += 1
        return logits


def drawn(chance: random.Random) -> str:
    """Text with calls whose names and arguments are hostile, and pieces of what is none."""
    pieces = []
    for _ in range(chance.randint(1, 4)):
        if chance.random() < 0.5:
            pieces.append(chance.choice(PARTS))
            continue
        name = chance.choice(['"clock"', '"clock"', '"get_weather"', '""', "3", "null", r'"\ud83d"', '["clock"]'])
        value = write(any_value(chance))[: chance.choice([40, 400])]
        keyed = f'{{"a": {value}, "a": {write(any_value(chance))[:40]}}}'
        pieces.append(CALL.format(name=name, arguments=chance.choice([keyed, keyed, value, f"[{value}]"])))
    return "".join(pieces)


def test_whatever_a_model_writes_is_a_result_that_every_reader_takes(
    worker_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    tokenizer = tokenizer_with(QWEN)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        small_llama_of(len(tokenizer), tokenizer.eos_token_id).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = engine_over(tmp_path, num_slots=8, drafters={"lookup": {}}, dtype="float32")
    for name in ("measure_round_ms", "measure_prefill_ms"):
        monkeypatch.setattr(engine, name, lambda *_: 1.0)
    texts = [*FIXED, *(drawn(rng) for _ in range(NUM_DRAWN))]
    scripts = {
        str(number): tokenizer(text, add_special_tokens=False)["input_ids"][: MOST_TOKENS - 1]
        for number, text in enumerate(texts)
    }
    # Tokens that are parts of characters, and control tokens.
    scripts["bytes"] = [rng.randrange(len(tokenizer) - 1) + 1 for _ in range(200)]
    ScriptedModel(engine, scripts)
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "tools": [WEATHER, CLOCK],
        "temperature": 0.0,
        "stream": True,
    }
    jobs = [
        {
            "job_id": f"{name}-{decoding}",
            "decoding": decoding,
            "body": {
                **body,
                "temperature": 0.0,
                "max_tokens": min(len(script) + 1, MOST_TOKENS),
                "logprobs": len(script) < 50,
            },
        }
        for name, script in scripts.items()
        for decoding in ("vanilla", "speculative")
    ]
    client = Client(worker_settings)
    with running_worker(worker_settings, engine):
        client.send("code", [json.dumps(job).encode() for job in jobs])
        records = client.read([RESULTS], lambda found: len({one.key for one in found}) >= len(jobs))
        chunks = client.read([TOKENS], lambda found: sum(headers_of(one)["final"] == "1" for one in found) >= len(jobs))
    results = by_id(records)
    readers = StreamReaders(results)
    for one in chunks:
        from_json(one.value or b"", allow_inf_nan=False)
        readers.take(read_chunk(one.value, one.headers))
    for record in records:
        from_json(record.value or b"", allow_inf_nan=False)
    for name in scripts:
        vanilla, drafted = (results[f"{name}-{decoding}"] for decoding in ("vanilla", "speculative"))
        for result in (vanilla, drafted):
            assert (result.status, result.attempt) == (Status.SUCCEEDED, 1), (name, result.error)
            assert readers[result.job_id].answer.said == said(result), name
            for call in (call for message in result.messages for call in message.tool_calls):
                assert isinstance(from_json(call.function.arguments, allow_inf_nan=False), dict)
                json.loads(call.function.arguments, parse_constant=pytest.fail)
        assert answer(vanilla) == answer(drafted), name
    assert any(result.messages[0].tool_calls for result in results.values())
    assert any("kept as text" in result.decoding.explanation for result in results.values() if result.decoding)
    assert results["6-vanilla"].text == "abc <tool_call>"


def test_an_answer_that_cannot_be_written_fails_alone(worker_settings: Settings) -> None:
    """Whatever reader let it through: its worker, and the jobs beside it, go on."""
    bad = Choice.model_construct(index=0, message=None, text="\ud83d", finish_reason="stop", logprobs=())
    jobs = [{"job_id": f"job-{n}", "body": {"prompt": "bad" if n % 3 else "good", "stream": True}} for n in range(9)]
    client = Client(worker_settings)
    with running_worker(worker_settings, AnsweringEngine({"bad": (bad,), "good": (continued(0, "yes"),)})):
        client.send("code", [json.dumps(job).encode() for job in jobs])
        results = {one.job_id: one for one in client.results(len(jobs))}
    for number in range(9):
        result = results[f"job-{number}"]
        expected = (Status.FAILED, OUTCOME_REFUSED) if number % 3 else (Status.SUCCEEDED, None)
        assert (result.status, result.error and result.error.code, result.attempt) == (*expected, 1)


def said(result: Result) -> dict[Any, Any]:
    """What the result says, as a stream would."""
    return {place: one for place, one in AnswerSoFar(result.messages).said.items() if one.text or one.name}


def answer(result: Result) -> list[Any]:
    """What two jobs of one script have to agree in: all but the ids of calls."""
    return [
        (one.content, one.reasoning, [call.function for call in one.tool_calls], result.finish_reason)
        for one in result.messages
    ]
