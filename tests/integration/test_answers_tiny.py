"""Whole answers of models that think and call tools: the same with and without drafts, streamed and not."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.engine import Generation, Sampling, TokenDelta
from alphaloop.errors import InvalidField
from alphaloop.messages import Constraint, Job, Origin, parse_job
from engine.prompts import prepare_job
from tests.fixtures.chat_templates import MISTRAL, OPENED, QWEN, WEATHER, memorised, tokenizer_with
from tests.fixtures.models import VANILLA, engine_over, finish, lookup_decision, steps

BERN: Final = '{"city": "Bern"}'
CALL: Final = f'{{"name": "get_weather", "arguments": {BERN}}}'
TAGGED: Final = f"<tool_call>\n{CALL}\n</tool_call>"
GREEDY: Final = Sampling(max_tokens=120, temperature=0.0)
#: The template, fields of the body, what the model writes; what the message says, why it ends.
CASES: Final[dict[str, tuple[str, dict[str, Any], str, dict[str, Any], str]]] = {
    "qwen thinks and calls": (
        QWEN,
        {"tools": [WEATHER]},
        f"<think>\nHm, Bern\n</think>\n\nLooking.\n{TAGGED}\n{TAGGED}",
        {"content": "Looking.", "reasoning": "Hm, Bern", "calls": 2},
        "tool_calls",
    ),
    "the prompt opens the thought": (
        OPENED,
        {},
        "Hm, Bern\n</think>\n\nRain.",
        {"content": "Rain.", "reasoning": "Hm, Bern", "calls": 0},
        "stop",
    ),
    "mistral calls": (
        MISTRAL,
        {"tools": [WEATHER], "stop": ["never"]},
        f"[TOOL_CALLS][{CALL}]",
        {"content": None, "reasoning": None, "calls": 1},
        "tool_calls",
    ),
    "what cannot be read stays text": (
        QWEN,
        {"tools": [WEATHER]},
        "<tool_call>\n{get_weather}\n</tool_call>",
        {"content": "<tool_call>\n{get_weather}\n</tool_call>", "reasoning": None, "calls": 0},
        "stop",
    ),
}


def ask(number: int, **body: Any) -> Job:
    value = {"task": "qa", "body": {"messages": [{"role": "user", "content": "weather?"}], **body}}
    return parse_job(json.dumps(value).encode(), Origin("c", "jobs.qa", 0, number), task="qa")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_answer_has_its_parts_in_every_mode(
    case: tuple[str, dict[str, Any], str, dict[str, Any], str], tmp_path: Path
) -> None:
    template, body, reply, expected, finish_reason = case
    tokenizer = tokenizer_with(template)
    job = ask(1, **body)
    prompt = prepare_job(tokenizer, "tiny", 2000, job, GREEDY).token_ids
    folder = memorised(tmp_path / "model", tokenizer, [(prompt, reply)])
    engine = engine_over(folder, drafters={"lookup": {}})
    found: list[Generation] = []
    num_accepted = 0
    modes = product((VANILLA, lookup_decision(6)), (False, True), (None, 1))
    for number, (decided, is_streamed, num_logprobs) in enumerate(modes):
        sampling = Sampling(max_tokens=120, temperature=0.0, stop=job.body.stop, num_logprobs=num_logprobs)
        deltas: list[TokenDelta] = []
        for step in steps(engine, [(ask(number, stream=is_streamed, **body), sampling, decided)]):
            deltas += step.deltas
            found += step.finished
        made = found[-1]
        num_accepted += made.counts.num_accepted
        assert tokenizer.decode(made.token_ids) == reply + tokenizer.eos_token
        assert made.finish_reason == finish_reason
        assert made.text == (expected["content"] or "")
        assert made.text == "".join(one.text for one in deltas if one.part == "content")
        if is_streamed and expected["reasoning"]:
            assert len(deltas) > 1, "a stream came at once"
        streamed_logprobs = tuple(token for one in deltas for token in one.logprobs)
        if not (expected["calls"] or expected["reasoning"]):
            assert made.num_unparsed_calls == 1
            if num_logprobs is None:
                assert not made.choices, "a content alone is the text alone"
                continue
        (choice,) = made.choices
        assert streamed_logprobs == (choice.logprobs or ()) if is_streamed else not streamed_logprobs
        message = choice.message
        assert message is not None
        assert (message.content, message.reasoning) == (expected["content"], expected["reasoning"])
        assert [call.function.arguments for call in message.tool_calls] == [BERN] * expected["calls"]
        assert choice.finish_reason == finish_reason
        starts = [one.tool_call for one in deltas if one.tool_call is not None]
        assert [(one.id, one.name) for one in starts] == [(call.id, "get_weather") for call in message.tool_calls]
        assert "".join(one.text for one in deltas if one.part == "reasoning") == (expected["reasoning"] or "")
        if expected["reasoning"]:
            (end,) = tokenizer("</think>", add_special_tokens=False)["input_ids"]
            assert made.num_reasoning_tokens == made.token_ids.index(end) + 1
    assert num_accepted > 0 or len(reply) < 60, "look-up accepted nothing"


CITY: Final = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
CHOOSE: Final = {
    "type": "function",
    "function": {"name": "choose", "parameters": {**CITY, "additionalProperties": False}},
}


@pytest.mark.parametrize("template", [QWEN, MISTRAL], ids=["qwen", "mistral"])
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_a_call_that_has_to_be_made_is_made_by_a_model_that_knows_nothing(
    template: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """Random weights, held to the grammar of the call; with logprobs and min_tokens too, and as several texts."""
    tokenizer = tokenizer_with(template)
    folder = memorised(tmp_path / "model", tokenizer, [(tokenizer("a")["input_ids"], "b")])
    engine = engine_over(folder, drafters={"lookup": {}})
    body = {"tools": [CHOOSE, WEATHER], "tool_choice": {"type": "function", "function": {"name": "choose"}}}
    body |= {"parallel_tool_calls": False}
    if template is QWEN:
        body |= {"chat_template_kwargs": {"enable_thinking": False}}
    constraint = ask(0, **body).body.constraint
    plain = Sampling(max_tokens=90, constraint=constraint, **how)
    asked = [plain, replace(plain, num_logprobs=2), replace(plain, bad_words=("Paris",)), replace(plain, min_tokens=2)]
    if plain.temperature:
        asked.append(replace(plain, n=3))
    texts: dict[Sampling, set[str]] = {}
    for number, (sampling, decided) in enumerate(product(asked, (VANILLA, lookup_decision(5)))):
        (made,) = finish(engine, [(ask(number, **body), sampling, decided)]).values()
        assert len(made.choices) == sampling.n
        for choice in made.choices:
            assert choice.message is not None
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls"
            assert call.function.name == "choose"
            assert json.loads(call.function.arguments)["city"] in ("Bern", "Rome")
            if sampling.num_logprobs is not None:
                assert choice.logprobs is not None
                assert len(choice.logprobs) == len(made.token_ids)
        assert made.counts.num_tokens == len(made.token_ids)
        if decided is VANILLA:  # where a pass has to say that a token may follow, or how likely it is, none is forced
            assert (made.counts.num_forced > 0) == (sampling in (plain, replace(plain, n=3)))
        texts.setdefault(sampling, set()).add(tokenizer.decode(made.token_ids))
    assert all(len(one) == 1 for one in texts.values()), "drafts or forced tokens changed a text"
    assert texts[plain] == texts[asked[1]] == texts[asked[2]]
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "if": {"type": "object"}}}}
    wrong = ask(0, tools=[CHOOSE, broken], tool_choice="required")
    with pytest.raises(InvalidField) as caught:
        engine.prepare(wrong, replace(plain, constraint=wrong.body.constraint))
    assert caught.value.field is not None
    assert caught.value.field.startswith("body.tools.1.function.parameters")


def test_a_text_that_cannot_go_on_ends_all_of_its_job(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(QWEN)
    folder = memorised(tmp_path / "model", tokenizer, [(tokenizer("a")["input_ids"], "b")])
    engine = engine_over(folder)
    constraint = Constraint("choice", '["ab", "cd"]', "body.structured_outputs.choice")
    sampling = Sampling(max_tokens=9, temperature=1.0, n=4, constraint=constraint, bad_words=("a", "c", "ab", "cd"))
    beside = ask(8)
    engine.admit(engine.prepare(ask(7), sampling), VANILLA)
    failed = [one for step in steps(engine, [(beside, replace(GREEDY, max_tokens=4), VANILLA)]) for one in step.failed]
    assert [(one.job_id, one.is_final) for one in failed] == [(ask(7).job_id, True)]
    assert failed[0].error.code == "grammar_conflict"
    assert not engine._unfinished._ended
