"""What is read of a reply: several texts, reasoning, calls of tools and logprobs, whole and in pieces; and odd ones."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from alphaloop.errors import AlphaloopError, ModelNotServed, ReplyCut, ReplyInvalid, RequestRefused, ServerFailed
from alphaloop.messages import Choice, Chunk, ToolCallHead, text_chunk
from alphaloop.messages.answer_form import constraint_of
from alphaloop.messages.result import encode_fields
from alphaloop.server_identity import ServerKind
from tests.fuzz.hostile import Raw, any_value, write
from worker.engine import AnswerPiece, Sampling
from worker.servers.forms import ReplyPiece, read_form
from worker.servers.replies import Reply, ReplyReader, SentRequest, generation_of

SAMPLING: Final = Sampling(max_tokens=1000, temperature=1.0)
USAGE: Final = {"prompt_tokens": 3, "completion_tokens": 20}
#: A prompt that no error may quote.
SECRET: Final = "the secret of the prompt"


def read(
    *pieces: dict[str, Any], sampling: Sampling = SAMPLING, kind: ServerKind = "vllm"
) -> tuple[Reply, list[AnswerPiece]]:
    """The reply of these JSON objects, and the pieces on the way."""
    reader = ReplyReader(kind, "model", sampling)
    heard: list[AnswerPiece] = []
    for one in pieces:
        heard += reader.add(read_form(ReplyPiece, json.dumps(one).encode()))
    return reader.reply(1.0), heard


def whole(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = [{"index": index, "finish_reason": "stop", **choice} for index, choice in enumerate(choices)]
    return {"model": "model", "choices": told, "usage": USAGE, **more}


def call(name: str | None, arguments: object = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def test_a_plain_text_is_all_that_a_plain_reply_says() -> None:
    for sent in ({"text": "hi"}, {"message": {"role": "assistant", "content": "hi", "tool_calls": []}}):
        reply, heard = read(whole(sent))
        assert (reply.text, reply.choices, reply.num_texts, heard) == ("hi", (), 1, [AnswerPiece("hi")])


@pytest.mark.parametrize(
    "message", [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": "hm", "reasoning_content": "hm"}]
)
def test_reasoning_has_the_name_of_each_server(message: dict[str, str]) -> None:
    told = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 12}}
    reply, heard = read(whole({"message": {"content": "yes", **message}}, usage=told))
    (choice,) = reply.choices
    assert choice.message is not None
    assert (choice.message.content, choice.message.reasoning, reply.text) == ("yes", "hm", "yes")
    assert [(one.part, one.text) for one in heard] == [("reasoning", "hm"), ("content", "yes")]
    assert reply.num_reasoning_tokens == 12
    sglangs, _ = read(whole({"message": {"content": None, **message}}, usage={**USAGE, "reasoning_tokens": 7}))
    assert (sglangs.text, sglangs.num_reasoning_tokens) == ("", 7)


def test_calls_of_tools_come_whole() -> None:
    calls = [call("f", '{"a": 1}', id="one"), call("g", {"b": 2})]
    reply, heard = read(whole({"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}))
    (choice,) = reply.choices
    assert choice.message is not None
    assert choice.message.content is None
    assert (reply.text, reply.finish_reason) == ("", "tool_calls")
    first, second = choice.message.tool_calls
    assert (first.id, first.function.name, first.function.arguments) == ("one", "f", '{"a": 1}')
    assert (second.id, second.function.name, json.loads(second.function.arguments)) == ("call_0_1", "g", {"b": 2})
    assert [one.tool_call and one.tool_call.name for one in heard] == ["f", "g"]


@pytest.mark.parametrize("is_numbered", [True, False])
def test_calls_of_tools_come_in_pieces_by_index_or_one_behind_the_other(is_numbered: bool) -> None:
    def delta(index: int, **told: Any) -> dict[str, Any]:
        told = {**told, "index": index} if is_numbered else told
        return {"choices": [{"index": 0, "delta": {"tool_calls": [told]}, "finish_reason": None}]}

    pieces = [
        delta(0, **call("f", "", id="one")),
        delta(0, function={"arguments": '{"a":'}),
        delta(0, function={"arguments": " 1}"}),
        delta(1, id="two", function={"arguments": "{"}),  # before its name
        delta(1, **call("g", "}")),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": USAGE},
    ]
    reply, heard = read(*pieces)
    assert reply.choices[0].message is not None
    told = [(one.id, one.function.name, one.function.arguments) for one in reply.choices[0].message.tool_calls]
    assert told == [("one", "f", '{"a": 1}'), ("two", "g", "{}")]
    assert heard == [
        AnswerPiece("", "tool_calls", ToolCallHead(0, "one", "f")),
        AnswerPiece('{"a":', "tool_calls", ToolCallHead(0)),
        AnswerPiece(" 1}", "tool_calls", ToolCallHead(0)),
        AnswerPiece("{}", "tool_calls", ToolCallHead(1, "two", "g")),
    ]


LOGPROBS: Final = {
    "of a chat": {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.25},
                    {"token": "a", "logprob": -0.5},
                    {"token": "c", "logprob": None},
                ],
            }
        ]
    },
    "of a prompt": {
        "text_offset": [0],
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5, "b": -0.25, "c": None}],
    },
}


@pytest.mark.parametrize("form", LOGPROBS)
@pytest.mark.parametrize("num_ranked", [0, 2, 5])
def test_logprobs_have_as_many_tokens_as_were_asked_for_likeliest_first(form: str, num_ranked: int) -> None:
    asked = Sampling(max_tokens=1000, temperature=1.0, num_logprobs=num_ranked)
    reply, _ = read(whole({"text": "a", "logprobs": LOGPROBS[form]}), sampling=asked)
    (token,) = reply.choices[0].logprobs or ()
    assert (token.token, token.logprob) == ("a", -0.5)
    ranked = [(one.token, one.logprob) for one in token.top_logprobs]
    assert ranked == [("b", -0.25), ("a", -0.5), ("c", -9999.0)][:num_ranked]
    unasked, _ = read(whole({"text": "a", "logprobs": LOGPROBS[form]}))
    assert unasked.choices == ()


def test_what_a_server_leaves_out_is_a_refusal_and_no_result() -> None:
    with pytest.raises(RequestRefused, match=r"body\.n: expected 3 texts, found 1"):
        read(whole({"text": "a"}), sampling=Sampling(max_tokens=1000, temperature=1.0, n=3))
    with pytest.raises(RequestRefused, match=r"body\.logprobs"):
        read(whole({"text": "a"}), sampling=Sampling(max_tokens=1000, temperature=1.0, num_logprobs=0))
    tools = constraint_of(None, None, [{"type": "function", "function": {"name": "f"}}], is_parallel=True)
    said = {"message": {"content": "No."}}
    must_call = Sampling(max_tokens=20, temperature=1.0, constraint=tools)
    with pytest.raises(RequestRefused, match=r"body\.tool_choice: the server made no call"):
        read(whole(said), sampling=must_call)
    cut, _ = read(whole(said | {"finish_reason": "length"}), sampling=must_call)
    assert cut.finish_reason == "length", "text may stand before the call, and what is cut at its limit is an answer"
    assert read(whole(said), sampling=replace(must_call, stop=("o",)))[0].text == "No."
    called = {"message": {"content": None, "tool_calls": [call("f", "{}")]}}
    assert read(whole(called), sampling=must_call)[0].finish_reason == "stop", "as vLLM ends a call of a named tool"


def texts(*lengths: int, reasons: Sequence[str], n: int = 3, **usage: int) -> Reply:
    told = [
        {"text": "x", "finish_reason": why, "token_ids": [1] * length}
        for why, length in zip(reasons, lengths, strict=True)
    ]
    sampling = Sampling(max_tokens=10, temperature=1.0, n=n)
    reader = ReplyReader("vllm", "model", sampling, context_length=50)
    sent = whole(*told, usage={"prompt_tokens": 3, "completion_tokens": sum(lengths)} | usage)
    reader.add(read_form(ReplyPiece, json.dumps(sent).encode()))
    return reader.reply(1.0)


def test_several_texts_have_the_tokens_and_limits_of_all() -> None:
    reply = texts(10, 4, 10, reasons=["length", "stop", "length"])
    assert (reply.num_tokens, reply.num_texts, len(reply.token_ids)) == (24, 3, 24)
    assert [one.index for one in reply.choices] == [0, 1, 2]
    assert reply.drafts.granularity == "nothing"
    assert texts(2, 2, 2, reasons=["length"] * 3, prompt_tokens=48).num_tokens == 6, "the context was full"
    with pytest.raises(ReplyInvalid, match="expected 20 tokens of texts cut at their limit, found 18"):
        texts(9, 4, 5, reasons=["length", "stop", "length"])
    with pytest.raises(ReplyInvalid, match="expected at most 30 tokens, found 31"):
        texts(11, 10, 10, reasons=["length"] * 3)
    with pytest.raises(ReplyInvalid, match="expected texts 0 to 1, found text 2"):
        texts(1, 1, 1, reasons=["stop"] * 3, n=2)


def test_the_tokens_of_several_texts_of_llama_cpp_are_counted_by_their_logprobs() -> None:
    """Its usage is that of one text."""
    token = {"token": "a", "logprob": -1.0}
    told = [{"text": "x" * num, "logprobs": {"content": [token] * num}} for num in (2, 3)]
    asked = Sampling(max_tokens=1000, temperature=1.0, n=2)
    reply, _ = read(whole(*told, usage={**USAGE, "completion_tokens": 3}), sampling=asked, kind="llama_cpp")
    assert (reply.num_tokens, [one.logprobs for one in reply.choices]) == (5, [None, None])


def test_a_thought_without_an_end_has_no_count() -> None:
    used = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 0}}
    assert read(whole({"message": {"content": None, "reasoning": "hm"}}, usage=used))[0].num_reasoning_tokens is None
    assert read(whole({"message": {"content": "hi"}}, usage=used))[0].num_reasoning_tokens == 0


#: A true answer: by text its reasoning, content, calls (name, arguments) and logprobs.
words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)
said = st.fixed_dictionaries(
    {
        "reasoning": st.none() | words,
        "content": st.none() | words,
        "calls": st.lists(st.tuples(words, words), max_size=3),
        "tokens": st.lists(words, min_size=1, max_size=5),
    }
)


@given(st.lists(said, min_size=1, max_size=4), st.booleans(), st.integers(0, 2**32))
def test_a_stream_says_what_the_whole_reply_says_however_it_is_cut(
    answers: list[dict[str, Any]], tells_logprobs: bool, seed: int
) -> None:
    rng = random.Random(seed)
    sampling = Sampling(max_tokens=1000, temperature=1.0, n=len(answers), num_logprobs=0 if tells_logprobs else None)
    one_piece, _ = read(whole(*(_whole(one) for one in answers)), sampling=sampling)
    waiting = [_events(index, one, rng) for index, one in enumerate(answers)]
    events = []
    while any(waiting):
        events.append(rng.choice([one for one in waiting if one]).pop(0))
    streamed, heard = read(*events, {"choices": [], "usage": USAGE}, sampling=sampling)
    assert streamed.choices == one_piece.choices
    assert streamed.text == one_piece.text
    assert _heard(heard, len(answers)) == [_told(choice) for choice in one_piece.choices] or not one_piece.choices
    for choice in one_piece.choices:
        its = tuple(token for piece in heard if piece.choice == choice.index for token in piece.logprobs)
        assert its == (choice.logprobs or ())


def _whole(answer: dict[str, Any]) -> dict[str, Any]:
    calls = [call(name, arguments, id=f"id-{place}") for place, (name, arguments) in enumerate(answer["calls"])]
    message = {"content": answer["content"], "reasoning": answer["reasoning"], "tool_calls": calls or None}
    return {"message": message, "logprobs": {"content": [{"token": one, "logprob": -1.0} for one in answer["tokens"]]}}


def _events(index: int, answer: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning", "content"):
        deltas += [{name: piece} for piece in _cut(answer[name] or "", rng)]
    for place, (name, arguments) in enumerate(answer["calls"]):
        deltas.append({"tool_calls": [call(name, "", id=f"id-{place}", index=place)]})
        deltas += [
            {"tool_calls": [{"index": place, "function": {"arguments": piece}}]} for piece in _cut(arguments, rng)
        ]
    events: list[dict[str, Any]] = [
        {"choices": [{"index": index, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    tokens = [{"token": one, "logprob": -1.0} for one in answer["tokens"]]
    end = {"index": index, "delta": {}, "finish_reason": "stop", "logprobs": {"content": tokens}}
    return [*events, {"choices": [end]}]


def _cut(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        at = rng.randint(1, len(text))
        pieces.append(text[:at])
        text = text[at:]
    return pieces


def _told(choice: Choice) -> tuple[str, str, list[tuple[str, str]]]:
    assert choice.message is not None
    calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
    return choice.message.reasoning or "", choice.message.content or "", calls


def _heard(pieces: Sequence[AnswerPiece], num_texts: int) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """What a reader of the stream puts together."""
    found: list[tuple[str, str, list[tuple[str, str]]]] = []
    for index in range(num_texts):
        own = [one for one in pieces if one.choice == index]
        calls: list[list[str]] = []
        for one in own:
            if one.part == "tool_calls":
                if one.tool_call is not None and one.tool_call.name is not None:
                    calls.append([one.tool_call.name, ""])
                calls[-1][1] += one.text
        reasoning, content = ("".join(one.text for one in own if one.part == part) for part in ("reasoning", "content"))
        found.append((reasoning, content, [(name, arguments) for name, arguments in calls]))
    return found


#: Values where others are expected: missing (by `None` for a key), null, of another type, odd and huge.
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([10**30, -(10**30), 1e308, -0.0, 2**63, 2**31]),
    st.sampled_from([SECRET, "", "stop", "length", "tool_calls", "abort", "\ud7ff", "x" * 5000]),
    st.lists(st.none() | st.integers(-1, 300) | st.just(SECRET), max_size=3),
    st.dictionaries(st.sampled_from(["content", "index", "function", "token", SECRET]), st.none() | st.just(SECRET)),
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A right reply in which some values are others."""
    calls = [call("f", "{}", id="one", index=0), call("g", "{}", index=1)]
    message = {"content": "hi", "reasoning": "hm", "reasoning_content": None, "tool_calls": calls}
    sent: dict[str, Any] = whole(
        {draw(st.sampled_from(["message", "delta"])): message, "logprobs": dict(LOGPROBS["of a chat"])},
        {"text": "ho", "logprobs": dict(LOGPROBS["of a prompt"]), "token_ids": [1, 2]},
        metrics={"queue_time_ms": 1.0, "speculative_decoding": {"num_spec_steps": 1, "per_step_drafted": [4]}},
    )
    sent = json.loads(json.dumps(sent))
    for _ in range(draw(st.integers(1, 4))):
        at: Any = sent
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
                at = at[key]
                continue
            if isinstance(at, dict) and draw(st.booleans()):
                del at[key]
            else:
                at[key] = draw(odd)
            break
    return sent


@settings(max_examples=1500)
@given(st.lists(mutated(), min_size=1, max_size=3), st.integers(1, 3), st.none() | st.integers(0, 2))
def test_an_odd_reply_is_read_or_is_an_error_of_ours_that_quotes_nothing(
    sent: list[dict[str, Any]], n: int, num_logprobs: int | None
) -> None:
    sampling = Sampling(max_tokens=25, temperature=1.0, n=n, num_logprobs=num_logprobs)
    for kind in ("vllm", "sglang", "llama_cpp", "tensorrt_llm", "openai"):
        found: Reply | AlphaloopError
        try:
            found, _ = read(*sent, sampling=sampling, kind=kind)
        except (ReplyInvalid, ReplyCut, RequestRefused, ServerFailed, ModelNotServed) as error:
            found = error
        if isinstance(found, AlphaloopError):
            assert SECRET not in f"{found.message} {found.hint}"
            continue
        generation_of("job", found, SentRequest("one", None, 0.0, 0.0, 1.0, 1.0))
        for choice in found.choices:
            assert Choice.model_validate_json(choice.model_dump_json()) == choice


@settings(max_examples=300, derandomize=True)
@given(st.integers(0, 2**32))
def test_hostile_json_is_an_error_of_ours_or_a_result_that_every_reader_takes(seed: int) -> None:
    """Half surrogate pairs, NaN, huge numbers, deep values, names twice; as arguments, names, texts and logprobs."""
    chance = random.Random(seed)
    hostile = [Raw(write(any_value(chance))[:3000]) for _ in range(6)]
    called = Raw(write({"city": hostile[0], "a": Raw(chance.choice(["NaN", "1e999", '"\\ud83d"', "1"]))}))
    calls = [call("f", chance.choice([called, hostile[0], "{}"]), id="one", index=0)]
    if chance.random() < 0.3:
        calls[0]["function"]["name"] = hostile[1]
    message = {"content": chance.choice([hostile[2], "hi"]), "reasoning": chance.choice([hostile[3], "hm"])}
    token = {"token": chance.choice([hostile[4], "a"]), "logprob": chance.choice([hostile[5], Raw("1e999"), -1.0])}
    choice = {"index": 0, "finish_reason": "stop", "message": {**message, "tool_calls": calls}}
    sent = {"model": "model", "choices": [{**choice, "logprobs": {"content": [token]}}], "usage": USAGE}
    reader = ReplyReader("sglang", "model", replace(SAMPLING, num_logprobs=0))
    try:
        pieces = reader.add(read_form(ReplyPiece, write(sent, is_ascii=True).encode()))
        reply = reader.reply(1.0)
    except AlphaloopError:
        return
    generation = generation_of("job", reply, SentRequest("one", None, 0.0, 0.0, 1.0, 1.0))
    written = encode_fields({"choices": [one.model_dump(mode="json") for one in generation.choices]})
    from_json(written, allow_inf_nan=False)
    for piece in pieces:
        from_json(text_chunk(Chunk("job", 1, 0, piece.text, logprobs=piece.logprobs), created=0, model="m"))
    if calls[0]["function"]["arguments"] is called:
        (told,) = generation.choices[0].message.tool_calls if generation.choices[0].message else ()
        from_json(told.function.arguments, allow_inf_nan=False)


def test_bytes_that_are_no_json_are_an_error_of_ours() -> None:
    rng = random.Random(0)
    right = json.dumps(whole({"message": {"content": "hi", "tool_calls": [call("f", "{}")]}})).encode()
    for _ in range(2000):
        broken = bytearray(right)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        reader = ReplyReader("openai", "model", SAMPLING)
        with suppress(AlphaloopError):
            reader.add(read_form(ReplyPiece, bytes(broken)))
            reader.reply(1.0)
