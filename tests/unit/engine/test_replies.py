"""An answer's parts, told apart whole and piece by piece: reasoning, content, calls, and what only looks like one."""

# ruff: noqa: E501
from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from alphaloop.engine import AnswerPiece, Sampling
from alphaloop.messages import Constraint, Job, Origin, parse_job
from engine import replies
from engine.prompts import prepare_job
from engine.replies import AnswerReader, reader_of, reply_form
from tests.fixtures.chat_templates import CLOCK, LLAMA, MISTRAL, OPENED, QWEN, WEATHER, tokenizer_with
from tests.fixtures.models import TEMPLATE

CALL = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
OTHER = '{"name": "clock", "arguments": {}}'
BERN, NOW = ("get_weather", {"city": "Bern"}), ("clock", {})
LLAMAS = '{"name": "get_weather", "parameters": {"city": "Bern"}}'
TRICKY = '{"name": "get_weather", "arguments": {"city": "a </tool_call> b"}}'
#: Values that json.loads takes and others refuse, or the other way round.
HOSTILE: Final = (
    *(r'"\ud83d"', r'"\udc00\ud800"', "NaN", "-Infinity", "1e999", "9" * 400 + ".5", "9" * 5000, '"\x01"', r'"\u0000"'),
    *("[" * 1500, "[" * 1500 + "]" * 1500, '{"a":' * 30 + "1" + "}" * 30, '1, "a": 2', '"a', "[1, 2", "{}}", "0.1e1"),
)


def call_with(value: str, tag: str = "<tool_call>") -> str:
    """A call with that value as an argument."""
    return f'{tag}{{"name": "clock", "arguments": {{"a": {value}}}}}{tag.replace("<", "</") if tag.startswith("<t") else ""}'


def job(**body: Any) -> Job:
    value = {"task": "qa", "body": {"messages": [{"role": "user", "content": "weather?"}], **body}}
    return parse_job(json.dumps(value).encode(), Origin("c", "jobs.qa", 0, 1), task="qa")


def reader(template: str, **body: Any) -> AnswerReader:
    return readers(template, None, **body)()


def readers(template: str, response: Any, **body: Any) -> Callable[[], AnswerReader]:
    """Makes readers of answers to one job; `response`: the tokenizer's own response template."""
    tokenizer = tokenizer_with(template)
    if response is not None:
        tokenizer.response_template = response
    form = reply_form(tokenizer)
    prepared = prepare_job(tokenizer, "tiny", 4000, job(**body), Sampling(100, 0.0), reply_form=form)

    def made() -> AnswerReader:
        found = reader_of(form, prepared, lambda tokens: str(tokenizer.decode(tokens)), "job-1")
        assert found is not None
        return found

    return made


def told(made: AnswerReader, pieces: list[AnswerPiece]) -> tuple[str, str, list[tuple[str, Any]]]:
    """What a stream's reader puts together, which has to be what the result says."""
    content = "".join(one.text for one in pieces if one.part == "content")
    reasoning = "".join(one.text for one in pieces if one.part == "reasoning")
    calls: list[tuple[str, str]] = []
    for one in pieces:
        if one.part == "tool_calls":
            assert one.tool_call is not None
            assert one.tool_call.index == len(calls)
            assert one.tool_call.id == made.calls[len(calls)].id
            calls.append((one.tool_call.name, one.text))
    assert (content, reasoning) == (made.content, made.reasoning)
    assert calls == [(call.function.name, call.function.arguments) for call in made.calls]
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


TOOLS = {"tools": [WEATHER, CLOCK]}
ONE_CALL = {**TOOLS, "parallel_tool_calls": False}
NO_CALLS = {**TOOLS, "tool_choice": "none"}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
PLAIN = TEMPLATE + "{{ tools }}"
CITY = ("get_weather", {"city": "a </tool_call> b"})
NEWER = '[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{"city": "Bern"}[TOOL_CALLS]clock{}'
BESIDE = f'[{{"name": "clock", "arguments": {{}}, "city": "Bern"}}, {OTHER}]'
Read = tuple[str, str, list[Any], int]  # content, reasoning, calls, calls that could not be read


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def content(text: str, num_unparsed: int = 0) -> tuple[str, Read]:
    """An answer that is read as it stands."""
    return text, (text, "", [], num_unparsed)


CASES: dict[str, tuple[str, dict[str, Any], tuple[str, Read]]] = {
    "content alone": (QWEN, TOOLS, content("It rains.\n")),
    "a call": (QWEN, TOOLS, (tagged(CALL), ("", "", [BERN], 0))),
    "content before it": (QWEN, TOOLS, (f"Let me see.\n\n{tagged(CALL)}\n", ("Let me see.", "", [BERN], 0))),
    "two calls": (QWEN, TOOLS, (tagged(CALL, OTHER), ("", "", [BERN, NOW], 0))),
    "one at most": (QWEN, ONE_CALL, (tagged(CALL, OTHER), ("", "", [BERN], 0))),
    "its end is missing": (QWEN, TOOLS, (f"<tool_call>\n{CALL}", ("", "", [BERN], 0))),
    "it was cut": (QWEN, TOOLS, content('<tool_call>\n{"name": "get_w', 1)),
    "no JSON": (QWEN, TOOLS, (f"{tagged('oh')} {tagged(CALL)}", (tagged("oh"), "", [BERN], 1))),
    "no call": (QWEN, TOOLS, content("<tool_call>[1, 2]</tool_call>", 1)),
    "a tag in an argument": (QWEN, TOOLS, (f"<tool_call>{TRICKY}</tool_call>", ("", "", [CITY], 0))),
    "a tag's beginning": (QWEN, TOOLS, content("a <tool_cal b <")),
    "no tools, no calls": (QWEN, {}, content(tagged(CALL))),
    "none may be called": (QWEN, NO_CALLS, content(tagged(CALL))),
    "reasoning": (QWEN, {}, ("<think>\nHm. a < b\n</think>\n\nIt rains.", ("It rains.", "Hm. a < b", [], 0))),
    "reasoning and a call": (QWEN, TOOLS, (f"<think>\nHm\n</think>\n\n{tagged(CALL)}", ("", "Hm", [BERN], 0))),
    "a call in a thought": (QWEN, TOOLS, (f"<think>{CALL}<tool_call></think>no", ("no", f"{CALL}<tool_call>", [], 0))),
    "a thought without an end": (QWEN, TOOLS, ("<think>\nHm, </thi", ("", "Hm, </thi", [], 0))),
    "an empty thought": (QWEN, {}, ("<think>\n\n</think>\n\nYes", ("Yes", "", [], 0))),
    "a tag after the beginning": (QWEN, {}, content("No <think> here")),
    "the prompt opened it": (OPENED, TOOLS, (f"Hm\n</think>\n{tagged(CALL)}", ("", "Hm", [BERN], 0))),
    "the prompt closed it": (QWEN, NO_THOUGHT, content("Yes")),
    "llama": (LLAMA, TOOLS, (LLAMAS, ("", "", [BERN], 0))),
    "llama, tagged": (LLAMA, TOOLS, (f"<|python_tag|>{LLAMAS}; {OTHER}", ("", "", [BERN, NOW], 0))),
    "llama, content": (LLAMA, TOOLS, content(f"I would {LLAMAS}")),
    "llama, JSON that is no call": (LLAMA, TOOLS, content('{"city": 1}')),
    "llama, another name": (LLAMA, TOOLS, content('{"name": "Eva", "age": 3}', 1)),
    "mistral": (MISTRAL, TOOLS, (f"[TOOL_CALLS] [{CALL}, {OTHER}]", ("", "", [BERN, NOW], 0))),
    "mistral, newer": (MISTRAL, TOOLS, (NEWER, ("", "", [BERN, NOW], 0))),
    "mistral, broken": (MISTRAL, TOOLS, content("a [TOOL_CALLS] [{]", 1)),
    "plain JSON": (PLAIN, TOOLS, (f"[{CALL}, {OTHER}]", ("", "", [BERN, NOW], 0))),
    "plain JSON, names of its own": (PLAIN, TOOLS, content('{"name": "clock", "city": "Bern"}', 1)),
    "plain JSON, more than a call": (PLAIN, TOOLS, content(BESIDE, 1)),
    "plain JSON, as OpenAI's": (
        PLAIN,
        TOOLS,
        (f'{{"id": "a", "type": "function", "function": {CALL}}}', ("", "", [BERN], 0)),
    ),
    "arguments under other names": (
        QWEN,
        TOOLS,
        content('<tool_call>{"name": "clock", "city": "Bern"}</tool_call>', 1),
    ),
    "plain JSON, content": (PLAIN, TOOLS, content(" It rains")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_answer_is_read_the_same_whole_and_in_any_pieces(
    case: tuple[str, dict[str, Any], tuple[str, Read]], rng: random.Random
) -> None:
    template, body, (text, (*expected, num_unparsed)) = case
    cuts = [[], list(range(len(text)))] + [sorted(rng.sample(range(len(text)), min(4, len(text)))) for _ in range(4)]
    for places in cuts:
        made = reader(template, **body)
        pieces: list[AnswerPiece] = []
        for begin, end in zip([0, *places], [*places, len(text)], strict=True):
            pieces += made.take(text[begin:end], is_last=False)
            assert "</think>" not in made.content
        pieces += made.take("", is_last=True)
        assert told(made, pieces) == tuple(expected)
        assert made.num_unparsed == num_unparsed


def test_content_comes_as_soon_as_it_can_be_no_tag() -> None:
    made = reader(QWEN, **TOOLS)
    assert [one.text for one in made.take("It rains <tool", is_last=False)] == ["It rains"]
    assert [one.text for one in made.take("box>", is_last=False)] == [" <toolbox>"]
    thinking = reader(OPENED)
    assert [(one.part, one.text) for one in thinking.take("\nHm </th", is_last=False)] == [("reasoning", "Hm")]
    assert [(one.part, one.text) for one in thinking.take("e", is_last=False)] == [("reasoning", " </the")]


def test_a_tag_that_stands_in_an_argument_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that writes the tag for ever holds nobody up: each look reads the call from its beginning."""
    looks: list[str] = []
    is_open = replies._is_open_text
    monkeypatch.setattr(replies, "_is_open_text", lambda written: looks.append(written) or is_open(written))
    made = reader(QWEN, **TOOLS)
    tags = ["</tool_call>"] * 50
    for text in ('<tool_call>{"name": "clock", "arguments": {"a": "', *tags, "</tool", '_call>"}}</tool_call>'):
        made.take(text, is_last=False)
    assert len(looks) == 52
    assert [json.loads(call.function.arguments) for call in made.calls] == [{"a": "</tool_call>" * 51}]
    made.take("<tool_call>" + OTHER + "</tool_call>", is_last=True)
    assert made.calls[1].function.name == "clock"


@pytest.mark.parametrize(
    ("template", "parser", "reasoning"),
    [
        (QWEN, "hermes", True),
        (LLAMA, "llama3", False),
        (MISTRAL, "mistral", False),
        (TEMPLATE, "json", False),
        (None, "json", False),
    ],
)
def test_a_form_is_found_in_the_chat_template(template: Any, parser: str, reasoning: bool) -> None:
    found = reply_form(tokenizer_with(template))
    assert (found.parser, found.reasoning is not None) == (parser, reasoning)
    assert reply_form(tokenizer_with(template), "mistral").parser == "mistral"


def test_an_answer_without_parts_is_not_read() -> None:
    tokenizer = tokenizer_with(LLAMA)
    form = reply_form(tokenizer)
    prepared = prepare_job(tokenizer, "tiny", 4000, job(), Sampling(100, 0.0), reply_form=form)
    assert reader_of(form, prepared, tokenizer.decode, "job-1") is None


def test_ids_of_calls_are_what_their_template_takes() -> None:
    made = [reader(template, **TOOLS) for template in (QWEN, MISTRAL, MISTRAL)]
    for one, text in zip(made, (f"<tool_call>{CALL}", f"[TOOL_CALLS][{CALL}]", f"[TOOL_CALLS][{CALL}]"), strict=True):
        one.take(text, is_last=True)
    qwen, mistral, again = (one.calls[0].id for one in made)
    assert qwen.startswith("call_")
    assert len(mistral) == 9
    assert mistral.isalnum()
    assert mistral == again, "the same job gets the same ids"


def response(thinking: dict[str, str], call: dict[str, str]) -> dict[str, Any]:
    """A response template, given what opens and closes a thought and a call."""
    transform = {"type": "function", "function": "{content}"}
    calls = {**call, "content": "json", "repeats": True, "transform": transform}
    fields = {"thinking": thinking, "tool_calls": calls, "content": {}}
    return {"start_anchor": "<|im_start|>assistant\n", "fields": fields}


RESPONSE: Final = response({"open": "<think>", "close": "</think>"}, {"open": "<tool_call>", "close": "</tool_call>"})
#: With patterns that more text may make longer.
RESPONSE_PATTERNS: Final = response(
    {"open_pattern": r"<think>\s*", "close_pattern": r"\s*</think>\s*"},
    {"open_pattern": r"<tool_call>\s*", "close_pattern": r"\s*</tool_call>"},
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"<think>Hm</think>Look:<tool_call>{CALL}</tool_call><tool_call>{OTHER}</tool_call>",
            ("Look:", "Hm", [BERN, NOW], 0),
        ),
        ("Only text", ("Only text", "", [], 0)),
        ("Text <tool_call>{oh</tool_call>", ("Text <tool_call>{oh</tool_call>", "", [], 1)),
    ],
)
def test_a_tokenizers_own_response_template_comes_first(text: str, expected: Any, rng: random.Random) -> None:
    make = readers(QWEN, RESPONSE, **TOOLS)
    for places in ([], list(range(len(text)))):
        made = make()
        assert "<|im_end|>" in made.markers
        pieces = [
            piece
            for begin, end in zip([0, *places], [*places, len(text)], strict=True)
            for piece in made.take(text[begin:end], is_last=False)
        ]
        pieces += made.take("", is_last=True)
        assert told(made, pieces) == expected[:3]
        assert made.num_unparsed == expected[3]
    tokenizer = tokenizer_with(QWEN)
    tokenizer.response_template = RESPONSE
    assert reply_form(tokenizer, "hermes").template is None, "the settings come before it"
    broken = readers(QWEN, {"fields": {}}, **TOOLS)()
    assert told(broken, broken.take(text, is_last=True))[0] == text


#: What answers are put together from: tags and their beginnings, calls, and JSON that some readers refuse.
PIECES: Final = (
    *("<tool_call>", "</tool_call>", "<tool_", "</tool", "<", "[TOOL_CALLS]", "[TOOL", "[", "]", "<|python_tag|>"),
    *("<|py", "<think>", "</think>", "</thi", " ", "\n", "\n\n", "abc", "é😀", "a < b", ", ", ";", "{", "}", '"', "\\"),
    *(CALL, OTHER, LLAMAS, TRICKY, "null", "[1]", "[ARGS]", "clock", '"get_weather"', '"name": ', '"arguments": {'),
    *(call_with(one) for one in HOSTILE),
)
READERS: Final[dict[str, tuple[str, dict[str, Any], Any]]] = {
    "qwen": (QWEN, TOOLS, None),
    "qwen, thinks": (QWEN, {}, None),
    "qwen, one call": (QWEN, {**TOOLS, "parallel_tool_calls": False}, None),
    "opened": (OPENED, TOOLS, None),
    "llama": (LLAMA, TOOLS, None),
    "mistral": (MISTRAL, TOOLS, None),
    "json": (TEMPLATE + "{{ tools }}", TOOLS, None),
    "template": (QWEN, TOOLS, RESPONSE),
    "template, patterns": (QWEN, TOOLS, RESPONSE_PATTERNS),
}


@pytest.fixture(scope="module", params=READERS)
def make(request: pytest.FixtureRequest) -> Callable[[], AnswerReader]:
    template, body, response = READERS[request.param]
    return readers(template, response, **body)


@settings(max_examples=120, derandomize=True)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=9), seed=st.integers(0, 2**32))
def test_any_text_in_any_pieces_is_one_answer_that_can_be_sent(
    make: Callable[[], AnswerReader], pieces: list[str], seed: int
) -> None:
    """Look-up brings many tokens a round, and vanilla decoding one: the answer is the same, and JSON for everybody."""
    text, chance = "".join(pieces), random.Random(seed)
    answers = []
    for places in ([], list(range(1, len(text))), sorted(chance.choices(range(len(text) + 1), k=4))):
        made, heard = make(), list[AnswerPiece]()
        cuts = list(zip([0, *places], [*places, len(text)], strict=True))
        for number, (begin, end) in enumerate(cuts):
            heard += made.take(text[begin:end], is_last=bool(places) and number == len(cuts) - 1)
        heard += [] if places else made.take("", is_last=True)
        answers.append((*told(made, heard), made.num_unparsed))
    assert answers[0] == answers[1] == answers[2]
    for call in made.calls:
        from_json(call.function.arguments, allow_inf_nan=False)
        assert isinstance(json.loads(call.function.arguments, parse_constant=pytest.fail), dict)
    result = to_json({"content": made.content, "reasoning": made.reasoning, "calls": made.calls})
    assert b"Infinity" not in to_json(
        [json.loads(call.function.arguments) for call in made.calls], inf_nan_mode="constants"
    )
    assert from_json(result, allow_inf_nan=False)
    if not (made.calls or made.reasoning or "think>" in text):
        assert made.content.strip() == text.strip(), "what is no call stays text, all of it"


#: A schema that says of objects alone what they are.
NAMELESS: Final = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
}


@pytest.mark.parametrize(
    ("template", "body", "good", "bad"),
    [
        (QWEN, {}, [f"<tool_call>\n{CALL}\n</tool_call>", f"<think>a <b\n</think>\n\n<tool_call>\n{OTHER}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"], ["Yes", f"<tool_call>\n{CALL}"]),
        (QWEN, {"parallel_tool_calls": False}, [f"<tool_call>\n{CALL}\n</tool_call>"], [f"<tool_call>\n{OTHER}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"]),
        (QWEN, {"tool_choice": {"type": "function", "function": {"name": "clock"}}}, [f"<tool_call>\n{OTHER}\n</tool_call>"], [f"<tool_call>\n{CALL}\n</tool_call>"]),
        (OPENED, {}, [f"Hm</think>\n<tool_call>\n{CALL}\n</tool_call>"], [f"<tool_call>\n{CALL}\n</tool_call>"]),
        (LLAMA, {}, [LLAMAS, f'{LLAMAS}; {{"name": "clock", "parameters": {{}}}}'], [CALL, '{"name": "get_weather", "parameters": {}}']),
        (MISTRAL, {}, [f"[TOOL_CALLS][{CALL}, {OTHER}]"], [f"[{CALL}]"]),
        (TEMPLATE + "{{ tools }}", {}, [f"[{CALL}]"], [CALL]),
        (QWEN, {"tools": [NAMELESS]}, ['<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": 2}}\n</tool_call>'], ['<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>', '<tool_call>\n{"name": "f", "arguments": {"\\u0061": "x"}}\n</tool_call>']),
    ],
)  # fmt: skip
def test_a_call_that_has_to_be_made_is_a_grammar_in_the_targets_form(
    template: str, body: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """The library that compiles it takes what the reader reads, and nothing else."""
    library, of_tokenizers = pytest.importorskip("llguidance"), pytest.importorskip("llguidance.hf")
    tokenizer = tokenizer_with(template)
    form = reply_form(tokenizer)
    asked = job(**{**TOOLS, "tool_choice": "required", **body})
    assert asked.body.constraint is not None
    sampling = Sampling(100, 0.0, constraint=asked.body.constraint)
    prepared = prepare_job(tokenizer, "tiny", 4000, asked, sampling, reply_form=form)
    wanted = prepared.sampling.constraint
    assert isinstance(wanted, Constraint)
    assert (wanted.kind, wanted.field) == ("grammar", "body.tool_choice")
    grammar = library.LLMatcher.grammar_from_lark(wanted.source)
    for text in (*good, *bad):
        matcher = library.LLMatcher(of_tokenizers.from_tokenizer(tokenizer), grammar)
        assert not matcher.get_error(), wanted.source
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        num = matcher.validate_tokens(tokens)
        assert matcher.consume_tokens(tokens[:num])
        assert (num == len(tokens) and matcher.is_accepting()) == (text in good), (text, num, matcher.get_error())
    for text in good:
        made = reader(template, **{**TOOLS, **body})
        made.take(text, is_last=True)
        assert made.calls


def test_the_guides_answer_is_read_as_it_says() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "tools-and-reasoning.md").read_text(encoding="utf-8")
    sent, message = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", guide, re.DOTALL))
    (written,) = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    assert parse_job(json.dumps(sent).encode(), Origin("c", "jobs.f", 0, 1), task=sent["task"]).body.callable_tools
    made = reader(QWEN, **sent["body"])
    made.take(written, is_last=True)
    assert made.reasoning == message["reasoning"]
    assert made.content == (message["content"] or "")
    expected = [call["function"] for call in message["tool_calls"]]
    assert [call.function.model_dump() for call in made.calls] == expected
