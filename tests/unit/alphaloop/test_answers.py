"""What a result says beside a text: choices on Kafka, and OpenAI's objects made of them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from alphaloop.messages import Choice, ChosenToken, Result, Status, Usage
from alphaloop.messages.result import CompletionTokensDetails, choices_to_write
from alphaloop.outcomes.reading import as_one_text
from tests.fixtures.answers import ALL, CHAT, CONTINUED, chosen, continued, message
from tests.fixtures.messages import described, succeeded


def answered(choices: tuple[Choice, ...], **fields: Any) -> Result:
    """A result with these choices."""
    told = {"text": choices[0].said.content, "choices": choices, "finish_reason": choices[0].finish_reason}
    return succeeded("j", "").model_copy(update={**told, **fields})


@pytest.mark.parametrize(
    ("choices", "is_written"),
    [
        ((), False),
        ((message(0, content="a"),), False),
        ((message(0, "length", content=""),), False),
        ((continued(0, "a"),), False),
        ((continued(0, "a", logprobs=()),), True),
        *((choices, True) for choices in ALL.values()),
    ],
)
def test_choices_are_written_where_they_say_more_than_the_text(choices: tuple[Choice, ...], is_written: bool) -> None:
    assert choices_to_write(choices) == (choices if is_written else ())


@pytest.mark.parametrize("name", ALL)
def test_choices_come_back_from_kafka_as_the_schema_says(name: str) -> None:
    result = answered(ALL[name])
    value = json.loads(result.encode())
    jsonschema.validate(value, described("result"))
    assert Result.decode(result.encode()) == result
    assert "null" not in result.encode().decode(), "what is not there is left out"
    assert not any(one.get("message", {}).get("tool_calls") == [] for one in value["choices"])


@pytest.mark.parametrize("name", CHAT)
def test_openais_types_read_every_answer_to_messages(name: str) -> None:
    details = CompletionTokensDetails(reasoning_tokens=2)
    usage = Usage(prompt_tokens=2, completion_tokens=3, total_tokens=5, completion_tokens_details=details)
    result = answered(CHAT[name], usage=usage)
    chat = ChatCompletion.model_validate(result.response, strict=True)
    assert chat.usage is not None
    assert (chat.id, chat.usage.total_tokens) == ("j", 5)
    assert chat.usage.completion_tokens_details is not None
    assert chat.usage.completion_tokens_details.reasoning_tokens == 2
    assert [choice.index for choice in chat.choices] == list(range(len(result.choices)))
    for found, choice in zip(chat.choices, result.choices, strict=True):
        said = choice.said
        assert (found.message.content, found.finish_reason) == (said.content, choice.finish_reason)
        assert getattr(found.message, "reasoning_content", None) == said.reasoning
        calls = [(one.id, one.function.name, one.function.arguments) for one in found.message.tool_calls or ()]  # type: ignore[union-attr]
        assert calls == [(one.id, one.function.name, one.function.arguments) for one in said.tool_calls]
        assert (found.logprobs is None) == (choice.logprobs is None)


def test_logprobs_of_a_chat_are_by_token_and_have_no_infinity() -> None:
    chat = ChatCompletion.model_validate(answered(CHAT["logprobs"]).response, strict=True)
    assert chat.choices[0].logprobs is not None
    first, second = chat.choices[0].logprobs.content or ()
    assert [(one.token, one.logprob) for one in first.top_logprobs] == [("Hi", -0.5), ("Ho", -1.5)]
    assert (first.bytes, second.token, second.logprob) == ([72, 105], "é", -9999.0)
    assert ChosenToken(token="a", logprob=float("nan")).logprob == -9999.0


@pytest.mark.parametrize("name", CONTINUED)
def test_openais_types_read_every_text_that_continues_a_prompt(name: str) -> None:
    result = answered(CONTINUED[name], endpoint="/v1/completions")
    raw = Completion.model_validate(result.response, strict=True)
    assert [choice.text for choice in raw.choices] == [choice.text for choice in result.choices]


def test_logprobs_of_a_completion_are_lists_of_which_the_offsets_count_characters() -> None:
    euro = "€".encode()
    halves = (
        ChosenToken(token="\ufffd", logprob=-1.0, bytes=tuple(euro[:2])),
        ChosenToken(token="\ufffd", logprob=-2.0, bytes=tuple(euro[2:])),
    )
    tokens = (chosen("a", -0.5, ("b", -1.0), ("a", -0.5)), *halves, chosen("🙂", -0.1, ("x", -3.0), ("x", -4.0)))
    told = (*tokens, ChosenToken(token="zz", logprob=0.0), chosen("c"))
    result = answered((continued(0, "a€🙂zzc", logprobs=told),), endpoint="/v1/completions")
    raw = Completion.model_validate(result.response, strict=True)
    found = raw.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["a", "\ufffd", "\ufffd", "🙂", "zz", "c"]
    assert found.text_offset == [0, 1, 1, 2, 3, 5]
    assert found.token_logprobs == [-0.5, -1.0, -2.0, -0.1, 0.0, -0.25]
    assert (found.top_logprobs or [])[0] == {"a": -0.5, "b": -1.0}
    assert (found.top_logprobs or [])[3] == {"🙂": -0.1, "x": -3.0}, "of one text the likelier"


def test_no_answer_is_made_of_one_that_lies_elsewhere_or_is_hidden() -> None:
    for fields in ({"choices": (), "text": None}, {"status": Status.FAILED}):
        hidden = answered(CHAT["three texts"]).model_copy(update=fields)
        assert (hidden.response, hidden.messages) == (None, ())


def test_a_text_to_read_is_the_text_itself_where_it_is_nothing_else() -> None:
    shown = {name: as_one_text([choice.said for choice in choices]) for name, choices in CHAT.items()}
    assert as_one_text(succeeded("j", "a\nb").messages) == "a\nb"
    assert shown["reasoning"] == "[reasoning]\n3 · 3 <b>is</b> 9\n\n[answer]\nNine."
    assert shown["call alone"] == '[call of get_weather]\n{"city": "Zürich"}'
    assert shown["three texts"] == "A river\n\n[text 2]\nA brook\n\n[text 3]\n"
    assert shown["logprobs"] == "Hié"
    assert shown["no content at all"] == ""


@given(name=st.sampled_from(list(CHAT)), data=st.data())
def test_a_text_to_read_only_grows_while_its_answer_does(name: str, data: st.DataObject) -> None:
    """So a terminal never has to take back what it shows."""
    said = CHAT[name][0].said
    parts = [said.reasoning or "", said.content or "", *(call.function.arguments for call in said.tool_calls)]
    cut = data.draw(st.integers(0, sum(map(len, parts))))
    kept, shown = list[str](), cut
    for part in parts:
        kept.append(part[:shown])
        shown = max(0, shown - len(part))
    calls = tuple(
        call.model_copy(update={"function": call.function.model_copy(update={"arguments": text})})
        for call, text in zip(said.tool_calls, kept[2:], strict=True)
        if text
    )
    so_far = said.model_copy(update={"reasoning": kept[0] or None, "content": kept[1] or None, "tool_calls": calls})
    whole = as_one_text([choice.said for choice in CHAT[name]])
    assert whole.startswith(as_one_text([so_far]))
