"""What vLLM inside the worker promises, as the client over HTTP does, over a package `vllm` of the documented form."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, Final, TypeVar

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.errors import (
    AlphaloopError,
    ConfigError,
    EngineSick,
    PromptTooLong,
    ReplyInvalid,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerSilent,
    ServerUnavailable,
    ServerUnreachable,
)
from alphaloop.messages import Job, Origin, parse_job
from alphaloop.settings import InProcessSettings
from tests.fixtures import fake_vllm, server_replies
from tests.fixtures.fake_vllm import FakeVllm, Generate, RequestOutputKind, SamplingParams, Times, output
from tests.fixtures.models import make_job
from tests.fixtures.server_replies import MAX_TOKENS, PROMPT
from worker.engine import Sampling
from worker.servers.in_process.client import STARTS_IN_VAIN, VllmClient

GREEDY: Final = Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
#: As the client over HTTP reads the same request (test_inference_servers.py).
ROUNDS: Final = AcceptanceCounts(6, 1, 1, (5, 5, 5, 4), (5, 5, 5, 4), (5, 5, 5, 4))
Result = TypeVar("Result")
Ask = Callable[[VllmClient], Coroutine[Any, Any, Result]]


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with fake_vllm.installed(FakeVllm()) as fake:
        yield fake


def asked(ask: Ask[Result], **settings: Any) -> Result:
    """What `ask` returns of a client whose engine was started."""

    async def run() -> Result:
        client = VllmClient("here", InProcessSettings(model="smollm2", **settings))
        async with client:
            await client.start()
            return await ask(client)

    return asyncio.run(run())


def completed(job: Job | None = None, sampling: Sampling = GREEDY, **named: Any) -> Ask[Any]:
    return lambda client: client.complete(job or make_job(PROMPT), sampling, **named)


def recorded() -> Generate:
    """The outputs that vLLM 0.32 made the recorded replies of."""
    whole, events = server_replies.vllm(), server_replies.vllm_stream()
    (choice,) = whole["choices"]
    metrics = whole["metrics"]
    times = Times(1.0, 1.0 + metrics["queue_time_ms"] / 1000)
    times.first_token_ts = times.scheduled_ts + metrics["time_to_first_token_ms"] / 1000
    times.last_token_ts = times.first_token_ts + metrics["generation_time_ms"] / 1000
    end: dict[str, Any] = {"num_prompt_tokens": 13, "times": times, "drafted": metrics["speculative_decoding"]}

    async def generate(prompt: dict[str, Any], params: SamplingParams) -> AsyncIterator[Any]:
        assert prompt["prompt"] == PROMPT
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            yield output(choice["text"], choice["token_ids"], choice["finish_reason"], **end)
            return
        for event in events:
            for one in event["choices"]:
                reason = one["finish_reason"]
                yield output(one["text"], one["token_ids"], reason, **(end if reason else {}))

    return generate


def failing(error: Exception) -> Generate:
    async def generate(prompt: dict[str, Any], params: SamplingParams) -> AsyncIterator[Any]:
        raise error
        yield

    return generate


def test_a_whole_text_has_the_counts_and_times_that_the_server_sends(fake: FakeVllm) -> None:
    fake.generate = recorded()
    reply = asked(completed())
    assert (reply.text, reply.finish_reason) == (server_replies.text_of(server_replies.vllm()), "length")
    assert (reply.num_prompt_tokens, reply.num_tokens, len(reply.token_ids)) == (13, 24, 24)
    assert (reply.told.granularity, reply.told.num_proposed, reply.told.num_accepted) == ("rounds", 20, 20)
    assert (reply.told.counts, reply.told.doubt, reply.first_text_s) == (ROUNDS, None, None)
    assert reply.times.queue_s == pytest.approx(6.7e-5, rel=0.01)
    assert reply.times.prefill_s == pytest.approx(4.110, rel=0.001)
    assert reply.times.decode_s == pytest.approx(52.770, rel=0.001)


def test_a_stream_gives_the_same_and_its_pieces_as_they_come(fake: FakeVllm) -> None:
    fake.generate = recorded()
    texts: list[str] = []
    streamed, whole = asked(completed(on_text=texts.append)), asked(completed())
    assert "".join(texts) == streamed.text == whole.text
    assert len(texts) > 1
    assert (streamed.told, streamed.token_ids, streamed.times) == (whole.told, whole.token_ids, whole.times)
    assert streamed.first_text_s is not None
    assert 0 < streamed.first_text_s <= streamed.wall_s


def test_every_setting_is_passed_on_and_no_request_is_logged(fake: FakeVllm) -> None:
    sampling = Sampling(
        max_tokens=5,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias=((7, -1.0),),
        seed=11,
        stop=("END",),
        stop_token_ids=(3,),
    )
    settings = {
        "tensor_parallel_size": 2,
        "dtype": "float16",
        "gpu_memory_utilization": 0.4,
        "max_model_len": 512,
        "max_requests": 3,
        "options": {"enforce_eager": True},
    }
    asked(completed(sampling=sampling), **settings)
    (params,) = fake.engine.asked
    assert params == SamplingParams(
        max_tokens=5,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias={7: -1.0},
        seed=11,
        stop=["END"],
        stop_token_ids=[3],
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    args = fake.engine.args
    assert (args.tensor_parallel_size, args.dtype, args.gpu_memory_utilization) == (2, "float16", 0.4)
    assert (args.max_model_len, args.max_num_seqs, args.enforce_eager) == (512, 3, True)
    assert (args.enable_log_requests, args.speculative_config, args.per_request_spec_decode_metrics) == (
        False,
        None,
        "none",
    )


def test_what_drafts_is_passed_on_with_its_k_and_tells_of_each_round(fake: FakeVllm) -> None:
    drafting = {"drafter": "ngram", "num_draft_tokens": 4, "speculative_config": {"method": "ngram"}}
    asked(completed(), **drafting)
    assert fake.engine.args.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}
    assert fake.engine.args.per_request_spec_decode_metrics == "detailed"


def chat(role: str) -> Job:
    body = {"messages": [{"role": role, "content": PROMPT}]}
    return parse_job(json.dumps({"task": "code", "body": body}).encode(), Origin("t", "jobs.code", 0, 1), task="code")


def test_messages_go_through_the_models_template(fake: FakeVllm) -> None:
    assert asked(completed(chat("user"))).num_prompt_tokens == 13
    with pytest.raises(RequestRefused, match="chat template") as refused:
        asked(completed(chat("system")))
    assert PROMPT not in str(refused.value)


@pytest.mark.parametrize("num_words", [2040, 3000])
def test_a_prompt_that_leaves_too_little_room_is_refused_and_says_how_much_there_is(
    fake: FakeVllm, num_words: int
) -> None:
    job = make_job("word " * num_words)
    with pytest.raises(PromptTooLong):
        asked(completed(job))
    if num_words < 2048:
        assert asked(lambda client: client.room_behind(job)) == 8
    assert not fake.engine.asked


FAILURES: Final[dict[str, tuple[Exception, type[AlphaloopError]]]] = {
    "refused": (fake_vllm.VLLMValidationError(f"quotes {PROMPT}", parameter="logit_bias"), RequestRefused),
    "refused for another reason": (fake_vllm.VLLMClientError(f"quotes {PROMPT}"), RequestRefused),
    "too long": (fake_vllm.VLLMValidationError(f"quotes {PROMPT}", parameter="input_text"), PromptTooLong),
    "queue full": (fake_vllm.GracefulHTTPError("busy", fake_vllm.HTTPStatus.SERVICE_UNAVAILABLE), ServerBusy),
    "dead": (fake_vllm.EngineDeadError(), ServerUnavailable),
    "failed": (fake_vllm.EngineGenerateError(f"quotes {PROMPT}"), ServerFailed),
    "anything": (RuntimeError(f"quotes {PROMPT}"), ServerFailed),
}


@pytest.mark.parametrize("name", FAILURES)
def test_every_failure_is_an_error_of_alphaloops_and_quotes_nothing(fake: FakeVllm, name: str) -> None:
    error, expected = FAILURES[name]
    fake.generate = failing(error)
    with pytest.raises(AlphaloopError) as caught:
        asked(completed())
    assert type(caught.value) is expected
    assert PROMPT not in str(caught.value)


def test_outputs_of_another_form_are_invalid(fake: FakeVllm) -> None:
    async def generate(prompt: dict[str, Any], params: SamplingParams) -> AsyncIterator[Any]:
        found = output("text", [1], "length")
        del found.outputs[0].token_ids
        yield found

    fake.generate = generate
    with pytest.raises(ReplyInvalid, match="AttributeError"):
        asked(completed())


def test_an_aborted_text_is_a_failure(fake: FakeVllm) -> None:
    async def generate(prompt: dict[str, Any], params: SamplingParams) -> AsyncIterator[Any]:
        yield output("text", [1], "abort", num_prompt_tokens=13)

    fake.generate = generate
    with pytest.raises(ServerFailed, match="gave the request up"):
        asked(completed())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_silence_ends_a_request(fake: FakeVllm, is_streamed: bool) -> None:
    async def generate(prompt: dict[str, Any], params: SamplingParams) -> AsyncIterator[Any]:
        if is_streamed:
            yield output("text", [1])
        await asyncio.Event().wait()

    fake.generate = generate
    limits = {"answer_s": 30.0, "silence_s": 0.01} if is_streamed else {"answer_s": 0.01, "silence_s": 30.0}
    on_text = [].append if is_streamed else None
    with pytest.raises(ServerSilent):
        asked(completed(on_text=on_text), **limits)
    assert len(fake.engine.aborted) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_cancelled_request_is_aborted_in_the_engine(fake: FakeVllm, is_streamed: bool) -> None:
    async def ask(client: VllmClient) -> bool:
        begun = asyncio.Event()

        async def generate(prompt: dict[str, Any], params: SamplingParams) -> AsyncIterator[Any]:
            if is_streamed:
                yield output("text", [1])
            begun.set()
            await asyncio.Event().wait()

        fake.generate = generate
        task = asyncio.create_task(
            client.complete(make_job(PROMPT), GREEDY, on_text=[].append if is_streamed else None)
        )
        await begun.wait()
        assert not fake.engine.aborted
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return True

    assert asked(ask)
    assert len(fake.engine.aborted) == 1


def test_its_identity_is_that_of_the_server_of_the_same_version(fake: FakeVllm) -> None:
    found = asked(lambda client: client.identity())
    assert (found.server, found.model, found.root, found.context_length) == ("vllm-0.32.0", "smollm2", "smollm2", 2048)
    assert len(found.answers) == 16
    assert found.scatter == 0.0
    named = asked(lambda client: client.identity(), served_model_name="small")
    assert (named.model, named.root, named.answers) == ("small", "smollm2", found.answers)
    first = found.answers[0].likeliest
    assert sorted(first.values(), reverse=True) == [-0.5, -1.5, -2.5, -3.5, -4.5]


def test_a_dead_engine_is_started_again_and_a_living_one_is_not(fake: FakeVllm) -> None:
    async def ask(client: VllmClient) -> int:
        await client.revive()
        assert len(fake.lives) == 1
        fake.engine.die()
        with pytest.raises(ServerUnreachable):
            await client.complete(make_job(PROMPT), GREEDY)
        await client.revive()
        first, second = fake.lives
        assert first.is_shut_down
        assert not second.errored
        return int((await client.complete(make_job(PROMPT), GREEDY)).num_tokens)

    assert asked(ask) > 0
    assert fake.engine.is_shut_down, "the worker's end is its end"


def test_an_engine_that_says_nothing_is_started_again(fake: FakeVllm) -> None:
    async def silent(prompt: dict[str, Any], params: SamplingParams) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async def ask(client: VllmClient) -> None:
        fake.generate = silent
        with pytest.raises(ServerSilent):
            await client.complete(make_job(PROMPT), GREEDY)
        fake.generate = None
        await client.revive()
        assert len(fake.lives) == 2
        await client.revive()
        assert len(fake.lives) == 2, "it is as new"

    asked(ask, answer_s=0.01)


def test_an_engine_that_finishes_nothing_over_several_lives_is_sick(fake: FakeVllm) -> None:
    async def ask(client: VllmClient) -> None:
        for number in range(STARTS_IN_VAIN):
            assert client.sick is None
            fake.engine.die()
            fake.num_failing_starts = number % 2  # whether it comes up or not
            if fake.num_failing_starts:
                with pytest.raises(ServerUnreachable, match="did not start: RuntimeError: Engine core"):
                    await client.revive()
            else:
                await client.revive()
        fake.engine.die()
        with pytest.raises(ServerUnreachable):
            await client.revive()
        assert client.sick is not None
        assert "3 times" in client.sick

    asked(ask)


def test_a_finished_text_between_two_deaths_is_not_sickness(fake: FakeVllm) -> None:
    async def ask(client: VllmClient) -> None:
        for _ in range(2 * STARTS_IN_VAIN):
            fake.engine.die()
            await client.revive()
            await client.complete(make_job(PROMPT), GREEDY)
        assert client.sick is None

    asked(ask)


def test_a_start_that_the_workers_end_overtakes_leaves_no_engine_behind(fake: FakeVllm) -> None:
    may_start, has_ended = threading.Event(), threading.Event()

    async def run() -> None:
        from worker.servers.in_process.library import RunningVllm, start_vllm

        def start(args: Any) -> RunningVllm:
            may_start.wait(20)
            try:
                return start_vllm(args)
            finally:
                has_ended.set()

        client = VllmClient("here", InProcessSettings(model="smollm2"), start=start)
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        await client.__aexit__(None, None, None)
        may_start.set()
        await starting

    asyncio.run(run())
    assert has_ended.is_set()
    assert fake.engine.is_shut_down


def test_mistakes_of_the_settings_are_named(fake: FakeVllm) -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.32\.0 has no option enforce_eagre"):
        asked(completed(), options={"enforce_eagre": True})
    with pytest.raises(ConfigError, match="vLLM refuses its options: ValueError: Invalid repository ID"):
        asyncio.run(VllmClient("here", InProcessSettings(model="no-such-model")).start())
    fake.num_failing_starts = 1
    with pytest.raises(EngineSick, match="did not start: RuntimeError: Engine core initialization failed"):
        asked(completed())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="vllm is not installed") as caught:
        asked(completed())
    assert caught.value.hint == "in an environment of its own, without alphaloop[decode]: pip install 'alphaloop[vllm]'"


def test_an_early_end_of_outputs_closes_the_request(fake: FakeVllm) -> None:
    async def ask(client: VllmClient) -> None:
        vllm = client._up()
        outputs = vllm.outputs(await vllm.prompt_of(make_job(PROMPT)), GREEDY, "one", is_streamed=True)
        async with aclosing(outputs):
            await anext(outputs)

    fake.round_s = 0.001
    asked(ask)
    assert fake.engine.aborted == ["one"]
