"""What the client promises of every kind of server, over real connections to a server that speaks its form."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from typing import Any, Final, get_args

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.engine import Sampling
from alphaloop.errors import (
    AlphaloopError,
    ModelNotServed,
    PromptTooLong,
    ReplyCut,
    ReplyInvalid,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerLoginRefused,
    ServerSilent,
    ServerUnavailable,
)
from alphaloop.messages import Job, Origin, parse_job
from alphaloop.server_identity import ServerKind
from tests.fixtures import server_replies
from tests.fixtures.inference_server import (
    SECRET,
    Answer,
    Asked,
    Connection,
    InferenceServer,
    Result,
    ask,
    head,
    listening,
    of_version,
    stream,
    whole,
)
from tests.fixtures.models import make_job
from tests.fixtures.server_replies import MAX_TOKENS, PROMPT, TEXT, openai, streamed
from worker.servers import http
from worker.servers.client import ServerClient
from worker.servers.http import endpoint_of
from worker.servers.replies import Reply

KINDS: Final[tuple[ServerKind, ...]] = get_args(ServerKind)
GREEDY: Final = Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
#: Five rounds accepted 4 of 4 behind the pass that read the prompt, and the last was cut at the limit.
ROUNDS: Final = AcceptanceCounts(6, 1, 1, (5, 5, 5, 4), (5, 5, 5, 4), (5, 5, 5, 4))
#: Five drafts of 3, as k = 3 would have it; the nine other tokens came one by one.
SUMS: Final = AcceptanceCounts(9, 4, 0, (5, 5, 5), (5, 5, 5), (5, 5, 5))
LENGTHS: Final = AcceptanceCounts(6, 1, 2, (5, 5, 5, 5), (5, 5, 5, 5), (5, 5, 5, 5))
TOLD: Final = {
    "vllm": ("rounds", 20, 20, ROUNDS),
    "sglang": ("lengths", 20, 20, LENGTHS),
    "tensorrt_llm": ("lengths", 20, 20, LENGTHS),
    "llama_cpp": ("sums", 15, 15, SUMS),
    "openai": ("nothing", 0, 0, None),
}
CHAT: Final = parse_job(
    json.dumps({"task": "code", "body": {"messages": [{"role": "user", "content": PROMPT}]}}).encode(),
    Origin("test", "jobs.code", 0, 1),
    task="code",
)


Ask = Callable[[ServerClient], Coroutine[Any, Any, Result]]


def asked(answer: Answer, act: Ask[Result], **given: Any) -> tuple[Result, list[Asked]]:
    """What `act` returns of a client of such a server, and the requests that came."""
    found, server = ask(answer, act, **given)
    return found, server.asked


def completed(job: Job | None = None) -> Ask[Reply]:
    return lambda client: client.complete(job or make_job(PROMPT), GREEDY)


def heard(texts: list[str], job: Job | None = None) -> Ask[Reply]:
    return lambda client: client.complete(
        job or make_job(PROMPT), GREEDY, on_piece=lambda piece: texts.append(piece.text)
    )


def facts(reply: Reply) -> tuple[object, ...]:
    told = reply.drafts
    return told.granularity, told.num_proposed, told.num_accepted, told.counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_read_whole_and_in_pieces_as_they_come(kind: ServerKind) -> None:
    sent = server_replies.of(kind)
    drafts = {"drafter": "ngram", "num_draft_tokens": 3} if kind == "llama_cpp" else {}
    reply, (*_, request) = asked(whole(sent), completed(), kind=kind, **drafts)
    assert (reply.text, reply.finish_reason) == (server_replies.text_of(sent), "length")
    assert (reply.num_prompt_tokens, reply.num_tokens) == (13, 24)
    assert facts(reply) == TOLD[kind]
    assert (reply.first_text_s, reply.drafts.doubt) == (None, None)
    assert reply.wall_s > 0
    assert (request.method, request.path, request.body["prompt"]) == ("POST", "/v1/completions", PROMPT)
    assert request.headers["authorization"] == f"Bearer {SECRET}"
    pieces = server_replies.vllm_stream() if kind == "vllm" else streamed(sent)
    texts: list[str] = []
    reply, (*_, request) = asked(of_version("0.5.23", stream(pieces)), heard(texts), kind=kind, **drafts)
    assert "".join(texts) == reply.text == server_replies.text_of(sent)
    assert len(texts) > 1
    assert facts(reply) == TOLD[kind]
    assert reply.first_text_s is not None
    assert 0 < reply.first_text_s <= reply.wall_s
    assert request.body["stream"] is True


def test_a_tensorrt_llm_that_changes_k_counts_by_the_positions_that_rounds_reached() -> None:
    """`draft_len_schedule`: its list is of how many tokens rounds accepted, and the sum of drafted ones is not read."""
    varying = {"drafter": "eagle", "num_draft_tokens": 6, "varies_drafts": True}
    reply, _ = asked(whole(server_replies.tensorrt_llm()), completed(), kind="tensorrt_llm", **varying)
    assert reply.drafts.granularity == "reached"
    assert reply.drafts.counts == AcceptanceCounts(6, 1, 2, (5,) * 6, (5, 5, 5, 5, 5, 0), (5, 5, 5, 5, 0, 0))


def test_messages_are_a_chat() -> None:
    sent = openai(text=None, message={"role": "assistant", "content": "hi"}, finish_reason="stop")
    reply, (request,) = asked(whole(sent), completed(CHAT))
    assert (reply.text, reply.finish_reason) == ("hi", "stop")
    assert request.path == "/v1/chat/completions"
    deltas = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}]}
        for text, reason in (("h", None), ("i", "stop"))
    ]
    end = {"choices": [], "usage": sent["usage"]}
    texts: list[str] = []
    reply, _ = asked(stream([*deltas, end]), heard(texts, CHAT))
    assert (reply.text, texts) == ("hi", ["h", "i"])


def test_times_and_token_ids_are_read_where_a_server_tells_them() -> None:
    reply, _ = asked(whole(server_replies.vllm()), completed(), kind="vllm")
    assert len(reply.token_ids) == 24
    assert reply.times.queue_s == pytest.approx(6.7e-5, rel=0.01)
    assert reply.times.prefill_s == pytest.approx(4.110, rel=0.001)
    assert reply.times.decode_s == pytest.approx(52.770, rel=0.001)
    reply, _ = asked(whole(server_replies.llama_cpp()), completed(), kind="llama_cpp")
    assert (reply.token_ids, reply.times.queue_s, reply.times.decode_s) == ((), None, pytest.approx(0.370, rel=0.01))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_connection_is_used_again(is_streamed: bool) -> None:
    kept = {"Connection": "keep-alive"}
    answer = stream(streamed(openai()), **kept) if is_streamed else whole(openai(), **kept)

    async def three(client: ServerClient) -> None:
        for number in range(3):
            await client.complete(make_job(PROMPT, number), GREEDY, on_piece=[].append if is_streamed else None)

    assert ask(answer, three, closes=False)[1].num_connections == 1


def second_on_a_kept_connection(lose: Callable[[InferenceServer], None]) -> tuple[list[str], InferenceServer]:
    """Two texts from a server that breaks the kept connection when the second request is on it, and then does more."""
    sound, num_asked = whole(openai(), Connection="keep-alive"), itertools.count()

    async def answer(connection: Connection) -> None:
        if next(num_asked) == 1:
            lose(connection.server)
            connection.reset()
            raise ConnectionError
        await sound(connection)

    async def two(client: ServerClient) -> list[str]:
        return [(await client.complete(make_job(PROMPT, number), GREEDY)).text for number in range(2)]

    return ask(answer, two, closes=False)


def test_a_request_that_finds_its_kept_connection_closed_is_sent_again() -> None:
    texts, server = second_on_a_kept_connection(lambda server: None)
    assert texts == [TEXT, TEXT]
    assert (server.num_connections, len(server.asked)) == (2, 3)


def test_a_server_that_dies_of_a_request_on_a_kept_connection_has_cut_the_reply() -> None:
    with pytest.raises(ReplyCut):
        second_on_a_kept_connection(InferenceServer.refuse)


def test_a_stream_that_stays_open_behind_its_end_is_a_text() -> None:
    async def answer(connection: Connection) -> None:
        await connection.send(head(content_type="text/event-stream"))
        for piece in [*map(json.dumps, streamed(openai())), "[DONE]"]:
            await connection.send(f"data: {piece}\n\n".encode())
        await connection.left()

    assert asked(answer, heard([]))[0].text == TEXT


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_cancelled_request_is_aborted_at_the_server(is_streamed: bool) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def answer(connection: Connection) -> None:
        if is_streamed:
            await connection.send(head(content_type="text/event-stream") + b'data: {"choices": []}\n\n')
        begun.set()
        await connection.left()
        left.set()

    async def ask(client: ServerClient) -> bool:
        on_piece = [].append if is_streamed else None
        task = asyncio.create_task(client.complete(make_job(PROMPT), GREEDY, on_piece=on_piece))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(20):
            await left.wait()
        return True

    assert asked(answer, ask)[0]


async def _reset(connection: Connection) -> None:
    connection.reset()


async def _reset_inside(connection: Connection) -> None:
    await connection.send(head(Content_Length="5000") + b'{"choices": [')
    connection.reset()


async def _end_inside(connection: Connection) -> None:
    await connection.send(head(Content_Length="5000") + b'{"choices": [')


async def _no_http(connection: Connection) -> None:
    await connection.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


def refused(status: int, **error: Any) -> Answer:
    return whole({"error": {"message": f"a text that quotes {PROMPT}", **error}}, status)


def of_tokens(num_tokens: int, num_prompt_tokens: object = 13, **choice: Any) -> dict[str, Any]:
    return {**openai(**choice), "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}}


def said(message: str, status: int = 400, **error: Any) -> Answer:
    """In vLLM's form."""
    return whole({"error": {"message": message, "code": status, **error}}, status)


VLLM_TOO_LONG = (
    f"This model's maximum context length is 2048 tokens. However, your prompt {PROMPT} contains at least 2049"
)
SGLANG_TOO_LONG = "The input (6001 tokens) is longer than the model's context length (2048 tokens)."
SGLANG_FULL = {"object": "error", "message": "The request queue is full.", "type": "503", "code": 503}
FAILURES: Final[dict[str, tuple[Answer, type[AlphaloopError]]]] = {
    "reset before a word": (_reset, ReplyCut),
    "reset inside the reply": (_reset_inside, ReplyCut),
    "ended inside the reply": (_end_inside, ReplyCut),
    "no HTTP": (_no_http, ReplyInvalid),
    "429": (refused(429), ServerBusy),
    "503 that says when": (whole({}, 503, Retry_After="3"), ServerBusy),
    "503 while a model is loaded (llama.cpp)": (refused(503, type="unavailable_error", code=503), ServerUnavailable),
    "502 of a proxy": (whole(b"<html>Bad Gateway</html>", 502), ServerUnavailable),
    "504 of a proxy": (whole(b"", 504), ServerUnavailable),
    "a body without end": (whole(b"x" * (2 << 20), 502), ServerUnavailable),
    "500 (vLLM)": (refused(500, type="InternalServerError", code=500), ServerFailed),
    "401 (vLLM)": (whole({"error": "Unauthorized"}, 401), ServerLoginRefused),
    "403": (whole(b"", 403), ServerLoginRefused),
    "redirect": (whole(b"", 307, Location="http://127.0.0.1:9/"), RequestRefused),
    "too long (vLLM)": (said(VLLM_TOO_LONG), PromptTooLong),
    "too long (llama.cpp)": (
        refused(400, type="exceed_context_size_error", code=400, n_prompt_tokens=6001, n_ctx=2048),
        PromptTooLong,
    ),
    "too long (OpenAI)": (refused(400, code="context_length_exceeded"), PromptTooLong),
    "too long (TensorRT-LLM)": (
        whole({"object": "error", "message": "prompt length 6001 exceeds max_seq_len 2048"}, 400),
        PromptTooLong,
    ),
    "too long (SGLang)": (whole({"error": {"message": SGLANG_TOO_LONG}}, 400), PromptTooLong),
    "its queue is full (SGLang)": (whole(SGLANG_FULL, 503), ServerBusy),
    "no such model (vLLM)": (said("The model `nope` does not exist.", 404, type="NotFoundError"), ModelNotServed),
    "no such model (OpenAI)": (refused(404, code="model_not_found"), ModelNotServed),
    "wrong address": (whole({"detail": "Not Found"}, 404), RequestRefused),
    "a setting (vLLM)": (refused(400, type="BadRequestError", param="temperature", code=400), RequestRefused),
    "validation (FastAPI)": (whole({"detail": [{"loc": ["body"], "input": PROMPT}]}, 422), RequestRefused),
    "an error with status 200": (whole({"error": {"message": PROMPT, "code": 500}}), ServerFailed),
    "aborted": (whole(openai(finish_reason="abort")), ServerFailed),
    "no JSON": (whole(b"<html>" + PROMPT.encode()), ReplyInvalid),
    "another form": (whole(of_tokens(1, num_prompt_tokens=PROMPT)), ReplyInvalid),
    "no usage": (whole({**openai(), "usage": None}), ReplyInvalid),
    "two texts": (whole({**openai(), "choices": openai()["choices"] * 2}), ReplyInvalid),
    "an end of another kind": (whole(openai(finish_reason="content_filter")), ReplyInvalid),
    "an end with calls of tools, and none": (whole(openai(finish_reason="tool_calls")), ReplyInvalid),
    "no end": (whole(openai(finish_reason=None)), ReplyCut),
    "cut silently": (whole(of_tokens(20)), ReplyInvalid),
    "more than was asked for": (whole(of_tokens(25)), ReplyInvalid),
    "a text of no tokens": (whole(of_tokens(0, finish_reason="stop")), ReplyInvalid),
    "other token ids than tokens": (whole(openai(token_ids=[1, 2])), ReplyInvalid),
}


HALVES: Final[dict[str, tuple[Answer, type[AlphaloopError]]]] = {
    "ended without [DONE]": (stream(streamed(openai())[:2], done=False), ReplyCut),
    "ended with [DONE] alone": (stream(streamed(openai())[:2]), ReplyCut),
    "an error inside (vLLM)": (
        stream([streamed(openai())[0], {"error": {"message": PROMPT, "type": "InternalServerError", "code": 500}}]),
        ServerFailed,
    ),
    "an error in words": (stream([{"error": PROMPT}]), ServerFailed),
    "too long, told inside (llama.cpp)": (
        stream([{"error": {"code": 400, "type": "exceed_context_size_error", "message": PROMPT}}]),
        PromptTooLong,
    ),
    "too long (SGLang)": (
        stream([{"error": {"message": f"{SGLANG_TOO_LONG} {PROMPT}", "code": 400, "retryable": False}}]),
        PromptTooLong,
    ),
    "its queue is full (SGLang)": (stream([{"error": SGLANG_FULL}]), ServerBusy),
    "going away (SGLang)": (stream([{"error": {"message": PROMPT, "code": 503}}]), ServerUnavailable),
    "an event that is no JSON": (stream([[1]]), ReplyInvalid),
}


@pytest.mark.parametrize(
    ("name", "is_streamed"), [*((name, False) for name in FAILURES), *((name, True) for name in HALVES)]
)
def test_a_failure_or_half_a_stream_is_an_error_of_ours_and_never_quotes_the_prompt(
    name: str, is_streamed: bool
) -> None:
    answer, expected = (HALVES if is_streamed else FAILURES)[name]
    with pytest.raises(AlphaloopError) as caught:
        asked(answer, heard([]) if is_streamed else completed())
    assert type(caught.value) is expected
    for secret in (PROMPT, SECRET):
        assert secret not in f"{caught.value} {caught.value!r}"


def test_a_connection_that_breaks_inside_a_stream_is_a_reply_cut() -> None:
    texts: list[str] = []

    async def answer(connection: Connection) -> None:
        await connection.send(head(content_type="text/event-stream", Transfer_Encoding="chunked"))
        event = b'data: {"choices": [{"index": 0, "text": " four"}]}\n\n'
        await connection.send(f"{len(event):x}\r\n".encode() + event + b"\r\n")

    with pytest.raises(ReplyCut):
        asked(answer, heard(texts))
    assert texts == [" four"]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry_After": "7"}, 7.0),
        ({"Retry_After": "Mon, 23 Nov 2026 12:00:30 GMT"}, None),
        ({"Retry_After": "soon"}, None),
        ({"Retry_After": "-3"}, None),
        ({}, None),
    ],
)
def test_a_busy_server_says_when_to_come_back(headers: dict[str, str], seconds: float | None) -> None:
    with pytest.raises(ServerBusy) as caught:
        asked(whole({}, 429, **headers), completed())
    assert caught.value.retry_after_s == seconds


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("too long (llama.cpp)", "expected at most 2048 tokens, found a prompt of 6001"),
        ("a setting (vLLM)", r"^the server answered 400 \(BadRequestError: temperature\)"),
    ],
)
def test_a_refusal_tells_sizes_and_fields(name: str, told: str) -> None:
    with pytest.raises(AlphaloopError, match=told):
        asked(FAILURES[name][0], completed())


def test_another_model_is_not_the_one_that_was_asked_for() -> None:
    sent = {**openai(), "model": "smollm2-2026-11-23"}
    with pytest.raises(ModelNotServed):
        asked(whole(sent), completed(), kind="llama_cpp")  # it answers with its one model, whatever is asked for
    assert asked(whole(sent), completed(), kind="openai")[0].text == TEXT  # there a name stands for its newest date


def test_nobody_at_the_address_is_unavailable() -> None:
    async def run() -> None:
        async with listening(_reset) as server:
            url = server.url  # nobody listens there when the block has ended
        async with ServerClient(endpoint_of(url, "vllm", "smollm2")) as client:
            await client.complete(make_job(PROMPT), GREEDY)

    with pytest.raises(ServerUnavailable, match="no connection to the server"):
        asyncio.run(run())


def test_plain_http_where_tls_is_expected_is_a_refused_login() -> None:
    async def run() -> None:
        async with listening(_no_http, waits=False) as server:
            endpoint = endpoint_of(server.url.replace("http:", "https:"), "vllm", "smollm2")
            async with ServerClient(endpoint) as client:
                await client.models()

    with pytest.raises(ServerLoginRefused):
        asyncio.run(run())


async def _say_nothing(connection: Connection) -> None:
    await connection.left()


async def _stop_inside(connection: Connection) -> None:
    await connection.send(head(content_type="text/event-stream") + b'data: {"choices": []}\n\n')
    await connection.left()


@pytest.mark.parametrize("answer", [_say_nothing, _stop_inside])
def test_a_server_that_hangs_is_silent(answer: Answer) -> None:
    with pytest.raises(ServerSilent, match=r"0\.2 s"):
        asked(answer, heard([]), answer_s=0.2)


async def _endless(connection: Connection) -> None:
    await connection.send(head(content_type="text/event-stream"))
    while True:
        await connection.send(b'data: {"choices": []}\n\n' * 100)


@pytest.mark.parametrize(
    ("answer", "limit", "most"),
    [
        (whole(openai()), "MAX_REPLY_BYTES", 100),
        (_endless, "MAX_REPLY_BYTES", 50_000),
        (stream([openai(text="x" * 5000)]), "MAX_EVENT_BYTES", 1000),
    ],
)
def test_no_more_is_read_than_the_limits_allow(
    answer: Answer, limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, limit, most)
    with pytest.raises(ReplyInvalid, match=f"at most {most} bytes"):
        asked(answer, heard([]))


def test_the_models_of_a_server_are_listed() -> None:
    sent = {
        "object": "list",
        "data": [
            {"id": "smollm2", "object": "model", "root": "/models/smollm2", "max_model_len": 2048},
            {"id": "other", "meta": {"n_ctx": 4096}},
            {"id": "third"},
        ],
    }
    found, (request,) = asked(whole(sent), lambda client: client.models())
    assert [(card.id, card.context_length) for card in found] == [("smollm2", 2048), ("other", 4096), ("third", None)]
    assert (request.method, request.path) == ("GET", "/v1/models")


@pytest.mark.parametrize(
    ("kind", "path", "sent", "version"),
    [
        ("vllm", "/version", {"version": "0.32.0"}, "0.32.0"),
        ("tensorrt_llm", "/version", {"version": "1.3.0"}, "1.3.0"),
        ("sglang", "/server_info", {"version": "0.5.23", "model_path": "/models/smollm2"}, "0.5.23"),
        ("llama_cpp", "/props", {"build_info": "b8681-Debian", "total_slots": 2}, "b8681-Debian"),
        ("vllm", "/version", {"version": "\x1b[2J"}, None),
        ("vllm", "/version", {}, None),
    ],
)
def test_a_server_says_its_version(kind: ServerKind, path: str, sent: dict[str, Any], version: str | None) -> None:
    found, (request,) = asked(whole(sent), lambda client: client.version(), kind=kind)
    assert (found, request.path) == (version, path)
    for other in ("vllm", "sglang"):
        assert asked(whole({"detail": "Not Found"}, 404), lambda client: client.version(), kind=other)[0] is None
    assert asked(whole({}), lambda client: client.version(), kind="openai") == (None, [])


def test_counts_that_contradict_the_text_leave_the_text() -> None:
    sent = server_replies.vllm()
    sent["metrics"]["speculative_decoding"]["per_step_accepted"] = [4, 4, 4, 4, 3]
    reply, _ = asked(whole(sent), completed(), kind="vllm")
    assert (reply.num_tokens, reply.drafts.counts, reply.drafts.num_proposed) == (24, None, 0)
    assert reply.drafts.doubt == "the rounds do not add up to 20 of 20 tokens"
