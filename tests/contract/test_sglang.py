"""SGLang's own form, over real connections to a server that answers as its sources say: counts of every request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

import pytest

from alphaloop.errors import (
    AlphaloopError,
    PromptTooLong,
    ReplyCut,
    ReplyInvalid,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerUnavailable,
)
from alphaloop.messages import Body, ChatMessage, Job
from tests.fixtures import server_replies
from tests.fixtures.inference_server import Answer, Asked, Connection, head, listening, of_version, stream, whole
from tests.fixtures.models import make_job
from tests.fixtures.server_replies import PROMPT, SGLANG_DETAILS, TEXT
from worker.engine import Sampling
from worker.servers.client import ServerClient
from worker.servers.endpoint import Endpoint
from worker.servers.reading import Reply

GREEDY: Final = Sampling(max_tokens=24, temperature=0.0)
OLD: Final = "0.5.18"
NEW: Final = "0.5.19"
TOO_LONG: Final = "The input (6001 tokens) is longer than the model's context length (2048 tokens)."


def chat(*, is_streamed: bool = False) -> Job:
    said = (ChatMessage(role="user", content=PROMPT),)
    return Job(job_id="job-1", task="code", body=Body(messages=said, stream=is_streamed))


def asked(
    version: str,
    answer: Answer,
    texts: list[str] | None = None,
    *,
    job: Job | None = None,
    sampling: Sampling = GREEDY,
    k: int | None = 4,
    **told: object,
) -> tuple[Reply, Asked]:
    """The reply of such a server, and the request for it. With `texts` it is streamed into them."""

    async def run() -> tuple[Reply, Asked]:
        async with listening(of_version(version, answer, **told)) as server:
            endpoint = Endpoint(server.url, "sglang", "smollm2", num_draft_tokens=k)
            async with ServerClient(endpoint) as client:
                on_text = None if texts is None else texts.append
                reply = await client.complete(job or make_job(PROMPT), sampling, on_text=on_text)
            return reply, server.asked[-1]

    return asyncio.run(run())


def event(text: str, num_tokens: int, *, ids: Sequence[int] | None = None, **meta: Any) -> dict[str, Any]:
    """An event of a text of 24 tokens."""
    found = {"prompt_tokens": 13, "completion_tokens": num_tokens, "finish_reason": None}
    return {"text": text, "output_ids": list(range(num_tokens) if ids is None else ids), "meta_info": found | meta}


END: Final[dict[str, Any]] = server_replies.sglang_generated()["meta_info"]


def counted(reply: Reply) -> tuple[str, int, int, tuple[int, ...]]:
    told = reply.told
    assert told.counts is not None, told.doubt
    return told.granularity, told.num_proposed, told.num_accepted, told.counts.accepts


def test_an_old_server_tells_of_a_prompt_in_its_own_form() -> None:
    reply, request = asked(OLD, whole(server_replies.sglang_generated()))
    assert (reply.text, reply.finish_reason, reply.num_prompt_tokens, reply.num_tokens) == (TEXT, "length", 13, 24)
    assert reply.token_ids == tuple(range(100, 124))
    assert counted(reply) == ("lengths", 20, 20, (5, 5, 5, 5))
    assert (request.path, request.body["text"], request.body["stream"]) == ("/generate", PROMPT, False)


def test_every_setting_is_sent_in_its_words() -> None:
    sampling = Sampling(
        max_tokens=24,
        temperature=0.5,
        top_p=0.9,
        top_k=11,
        min_p=0.05,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        seed=3,
        stop=("END",),
        stop_token_ids=(7,),
        logit_bias=((5, -2.0),),
    )
    _, request = asked(OLD, whole(server_replies.sglang_generated()), sampling=sampling)
    assert request.body["sampling_params"] == {
        "max_new_tokens": 24,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "sampling_seed": 3,
        "stop": ["END"],
        "stop_token_ids": [7],
        "logit_bias": {"5": -2.0},
        "n": 1,
    }
    _, request = asked(OLD, whole(server_replies.sglang_generated()))
    sent = request.body["sampling_params"]
    assert (sent["top_k"], sent["stop"], "sampling_seed" in sent, "logit_bias" in sent) == (-1, [], False, False)


@pytest.mark.parametrize("told", [{}, {"incremental_streaming_output": False}])
def test_the_pieces_of_a_growing_text_are_what_is_new_and_whole_letters(told: dict[str, Any]) -> None:
    """A letter of four bytes comes in two tokens, the first of which can be shown as a replacement only."""
    grown = ["né", "né\ufffd", "né\ufffd\ufffd", "né🙂", "né🙂 né🙂\n", "né🙂 né🙂\n"]
    sizes = [2, 3, 4, 5, 20, 24]
    events = [event(text, size) for text, size in zip(grown[:-1], sizes[:-1], strict=True)]
    texts: list[str] = []
    reply, request = asked(OLD, stream([*events, event(grown[-1], 24, **END)]), texts, **told)
    assert texts == ["né", "🙂", " né🙂\n"]
    assert reply.text == "né🙂 né🙂\n"
    assert reply.token_ids == tuple(range(24))
    assert counted(reply) == ("lengths", 20, 20, (5, 5, 5, 5))
    assert reply.first_text_s is not None
    assert request.body["stream"] is True
    assert request.body["sampling_params"]["stream_interval"] > 1  # events repeat the text: not one for each token


def test_a_letter_that_never_became_whole_is_in_the_text() -> None:
    texts: list[str] = []
    reply, _ = asked(OLD, stream([event("a\ufffd", 2), event("a\ufffd", 24, **END)]), texts)
    assert (texts, reply.text) == (["a", "\ufffd"], "a\ufffd")


def test_pieces_that_are_new_alone_are_taken_as_they_are() -> None:
    """The second piece begins like the text so far: only the server's own word tells it from a text that grew."""
    events = [event("one", 2), event("one two", 6, ids=range(2, 6)), event(" three", 24, ids=range(6, 24), **END)]
    texts: list[str] = []
    reply, _ = asked(OLD, stream(events), texts, incremental_streaming_output=True)
    assert texts == ["one", "one two", " three"]
    assert (reply.text, reply.token_ids) == ("oneone two three", tuple(range(24)))


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (event("six seven", 6), {}),  # not what was handed over
        (event("one two", 6, ids=range(2, 6)), {"incremental_streaming_output": False}),  # new tokens alone
    ],
)
def test_a_text_that_does_not_grow_as_the_server_says_is_invalid(second: dict[str, Any], told: dict[str, Any]) -> None:
    with pytest.raises(ReplyInvalid, match="whole text so far"):
        asked(OLD, stream([event("one", 2), second, event("one two", 24, **END)]), [], **told)


def test_pieces_of_a_server_that_changed_its_way_do_not_add_up() -> None:
    events = [event("one", 2), event("one two", 24, **END)]
    with pytest.raises(ReplyInvalid, match="24 token ids, found 26"):
        asked(OLD, stream(events), [], incremental_streaming_output=True)


def test_new_pieces_with_tokens_of_their_own_beside_a_growing_text_leave_no_token_ids() -> None:
    events = [event("one", 2), event("one two", 24, ids=range(2, 24), **END)]  # SGLang 0.5.9 with --stream-output
    assert asked(OLD, stream(events), [])[0].token_ids == ()


def test_messages_get_the_servers_template() -> None:
    reply, request = asked(OLD, whole(server_replies.sglang_chat()), [], job=chat())
    assert counted(reply) == ("lengths", 20, 20, (5, 5, 5, 5))
    assert (request.path, request.body["return_meta_info"], request.body["stream"]) == (
        "/v1/chat/completions",
        True,
        False,
    )
    texts: list[str] = []
    events = server_replies.streamed(server_replies.sglang_chat())
    reply, request = asked(OLD, stream(events), texts, job=chat(is_streamed=True))
    assert (reply.told.granularity, "".join(texts), request.body["stream"]) == ("nothing", TEXT, True)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("version", [NEW, "0.6.0.dev3+g1234", "1.0.0", "unheard of"])
def test_a_new_server_tells_of_all_in_openais_form(version: str, is_chat: bool) -> None:
    sent = server_replies.sglang()
    if is_chat:
        sent = {**server_replies.sglang_chat(), "sglext": sent["sglext"]}
    job = chat() if is_chat else make_job(PROMPT)
    reply, request = asked(version, whole(sent), job=job)
    assert counted(reply) == ("lengths", 20, 20, (5, 5, 5, 5))
    assert request.path == ("/v1/chat/completions" if is_chat else "/v1/completions")
    assert request.body["return_spec_tokens_details"] is True
    events = [
        {"choices": [{"index": 0, "delta": {"content": TEXT}} if is_chat else {"index": 0, "text": TEXT}]},
        {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
        {"choices": [], "sglext": sent["sglext"]},
        {"choices": [], "usage": sent["usage"]},
    ]
    texts: list[str] = []
    reply, _ = asked(version, stream(events), texts, job=job)
    assert (counted(reply), texts) == (("lengths", 20, 20, (5, 5, 5, 5)), [TEXT])


def test_a_proxy_that_lets_openais_paths_through_alone_is_asked_there() -> None:
    async def answer(connection: Connection) -> None:
        is_known = connection.asked.path == "/v1/completions"
        await (whole(server_replies.sglang()) if is_known else whole({"detail": "Not Found"}, 404))(connection)

    async def run() -> list[str]:
        async with listening(answer) as server, ServerClient(Endpoint(server.url, "sglang", "smollm2")) as client:
            for number in range(2):
                await client.complete(make_job(PROMPT, number), GREEDY)
            return [request.path for request in server.asked]

    assert asyncio.run(run()) == ["/server_info", "/v1/completions", "/v1/completions"]


def details(histogram: list[int], num_proposed: int, num_rounds: int) -> Answer:
    found = {
        "spec_verify_ct": num_rounds,
        "spec_num_proposed_drafts": num_proposed,
        "spec_num_correct_drafts": sum(length * rounds for length, rounds in enumerate(histogram)),
        "spec_correct_drafts_histogram": histogram,
    }
    return whole({**server_replies.sglang(), "sglext": {"spec_tokens_details": SGLANG_DETAILS | found}})


def test_a_list_that_ends_at_the_longest_accepted_is_a_list_of_k() -> None:
    """Texts none of whose drafts was accepted whole count like others: α would be too high without them."""
    reply, _ = asked(NEW, details([16, 2, 1], 76, 19))
    assert counted(reply) == ("lengths", 76, 4, (3, 1, 0, 0))
    assert reply.told.counts is not None
    assert reply.told.counts.trials == (19, 3, 1, 0)


@pytest.mark.parametrize("k", [3, None])
def test_a_tree_counts_by_level_where_its_depth_is_known(k: int | None) -> None:
    reply, _ = asked(NEW, details([16, 2, 1], 19 * 7, 19), k=k)  # three levels, eight tokens with the root
    depth = 7 if k is None else 3
    assert counted(reply) == ("lengths", 19 * depth, 4, (3, 1, *(0,) * (depth - 2)))


@pytest.mark.parametrize(
    ("histogram", "num_proposed", "k"), [([0, 0, 0, 0, 5], 20, 3), ([16, 2, 1], 76, 5), ([16, 2, 1], 75, 4)]
)
def test_drafts_of_another_length_than_was_said_are_doubted(histogram: list[int], num_proposed: int, k: int) -> None:
    reply, _ = asked(NEW, details(histogram, num_proposed, sum(histogram)), k=k)
    assert reply.told.counts is None
    assert reply.told.doubt is not None
    assert f"drafts are not of {k} tokens" in reply.told.doubt


def test_a_server_that_tells_of_no_round_tells_nothing() -> None:
    """It cannot be told from one that does not count: nothing says then that nothing was accepted."""
    generated = server_replies.sglang_generated()
    meta = {name: value for name, value in generated["meta_info"].items() if not name.startswith("spec_")}
    assert asked(OLD, whole({**generated, "meta_info": meta}))[0].told.granularity == "nothing"
    assert asked(NEW, whole(server_replies.openai()))[0].told.granularity == "nothing"


def aborted(**end: Any) -> dict[str, Any]:
    return event("one", 2, finish_reason={"type": "abort", "message": PROMPT, **end})


FAILURES: Final[dict[str, tuple[Answer, type[AlphaloopError]]]] = {
    "too long": (whole({"error": {"message": TOO_LONG}}, 400), PromptTooLong),
    "against its schema": (whole({"error": "text: expected a string"}, 400), RequestRefused),
    "its queue is full": (
        whole({"object": "error", "message": "The request queue is full.", "type": "503", "code": 503}, 503),
        ServerBusy,
    ),
    "given up": (whole(aborted()), ServerFailed),
    "no meta_info": (whole({"text": TEXT}), ReplyInvalid),
    "no counts of tokens": (
        whole({"text": TEXT, "meta_info": {"finish_reason": {"type": "stop", "matched": 2}}}),
        ReplyInvalid,
    ),
    "not ended": (whole(event("one", 2)), ReplyCut),
}
HALVES: Final[dict[str, tuple[Answer, type[AlphaloopError]]]] = {
    "too long": (stream([{"error": {"message": TOO_LONG, "code": 400, "retryable": False}}]), PromptTooLong),
    "its queue is full": (
        stream([aborted(message="The request queue is full.", status_code=503)]),
        ServerBusy,
    ),
    "going away": (stream([aborted(status_code=503)]), ServerUnavailable),
    "asked to wait": (stream([aborted(status_code=429)]), ServerBusy),
    "failed inside": (stream([event("one", 2), aborted(status_code=500)]), ServerFailed),
    "given up": (stream([event("one", 2), aborted()]), ServerFailed),
    "ended with [DONE] alone": (stream([event("one", 2)]), ReplyCut),
    "ended without [DONE]": (stream([event("one", 2)], done=False), ReplyCut),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_one_of_ours_and_never_quotes_the_prompt(name: str) -> None:
    answer, expected = FAILURES[name]
    with pytest.raises(AlphaloopError) as caught:
        asked(OLD, answer)
    assert (type(caught.value), PROMPT in str(caught.value)) == (expected, False)


@pytest.mark.parametrize("name", HALVES)
def test_half_a_stream_is_no_text(name: str) -> None:
    answer, expected = HALVES[name]
    with pytest.raises(AlphaloopError) as caught:
        asked(OLD, answer, [])
    assert (type(caught.value), PROMPT in str(caught.value)) == (expected, False)


def test_a_request_that_is_cancelled_closes_its_connection() -> None:
    """SGLang aborts a request whose connection closes."""
    begun, left = asyncio.Event(), asyncio.Event()

    async def answer(connection: Connection) -> None:
        sent = f"data: {json.dumps(event('one', 2))}\n\n".encode()
        await connection.send(head(content_type="text/event-stream") + sent)
        await connection.left()
        left.set()

    async def run() -> None:
        async with (
            listening(of_version(OLD, answer)) as server,
            ServerClient(Endpoint(server.url, "sglang", "smollm2")) as client,
        ):
            asking = client.complete(make_job(PROMPT), GREEDY, on_text=lambda text: begun.set())
            task = asyncio.create_task(asking)
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(20):
                await left.wait()

    asyncio.run(run())
