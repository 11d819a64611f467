"""The real vLLM inside this process. It is not installed beside alphaloop's own engine, so this is run by hand:

    VLLM_TEST_MODEL=FOLDER PYTHON -m pytest tests/integration/test_real_vllm_in_process.py

PYTHON has vLLM and alphaloop's own packages, FOLDER has config.json and safetensors. The environment of the CPU build
is in docs/guides/engines.md. It takes some minutes, nearly all for two starts.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any, Final, TypeVar

import pytest

from alphaloop.errors import PromptTooLong, RequestRefused, ServerUnavailable
from alphaloop.messages import Job
from alphaloop.settings import InProcessSettings
from tests.contract.test_vllm_in_process import chat
from tests.fixtures.models import make_job
from worker.engine import Sampling
from worker.servers.in_process.client import VllmClient
from worker.servers.in_process.guard import NAME, marked
from worker.servers.loop_thread import LoopThread

MODEL: Final = os.environ.get("VLLM_TEST_MODEL", "")
REPEATS: Final = "one two three four five one two three four five one two three"
GREEDY: Final = Sampling(max_tokens=24, temperature=0.0)
Result = TypeVar("Result")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own are many
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None or not MODEL, reason="needs vLLM, and VLLM_TEST_MODEL"),
]


class Here:
    """vLLM with look-up drafts, started once for all tests."""

    def __init__(self) -> None:
        settings = InProcessSettings(
            model=MODEL,
            gpu_memory_utilization=0.3,
            max_model_len=2048,
            max_requests=4,
            drafter="ngram",
            num_draft_tokens=4,
            speculative_config={"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
            options={"enforce_eager": True, "enable_prefix_caching": False},
        )
        self.client, self.thread = VllmClient("here", settings), LoopThread("vllm")

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.thread.wait_for(work, 900)

    def complete(self, job: Job | None = None, sampling: Sampling = GREEDY, **named: Any) -> Any:
        return self.run(self.client.complete(job or make_job(REPEATS), sampling, **named))


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    here = Here()
    here.run(here.client.start())
    yield here
    here.run(here.client.__aexit__(None, None, None))
    here.thread.close()
    for child in multiprocessing.active_children():
        child.join(30)
    assert not multiprocessing.active_children()


def test_texts_counts_and_times_are_told(here: Here) -> None:
    texts: list[str] = []
    whole, streamed = here.complete(), here.complete(on_text=texts.append)
    assert whole.text == streamed.text == "".join(texts)
    assert len(texts) > 1
    assert (whole.finish_reason, whole.num_tokens, len(whole.token_ids)) == ("length", 24, 24)
    assert whole.told.granularity == "rounds"
    assert whole.told.counts == streamed.told.counts
    assert whole.told.counts.num_tokens == 24
    assert 0 < whole.told.num_accepted <= whole.told.num_proposed
    for reply in (whole, streamed):
        assert reply.times.prefill_s > 0
        assert reply.times.decode_s > 0
        assert reply.wall_s >= reply.times.prefill_s + reply.times.decode_s - 0.05
    assert here.complete(chat("user")).num_prompt_tokens > whole.num_prompt_tokens


def test_stop_strings_seeds_and_limits_are_kept(here: Here) -> None:
    whole = here.complete().text
    stop = whole.split()[3]
    cut = here.complete(sampling=replace(GREEDY, stop=(stop,)))
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    drawn = [here.complete(sampling=replace(GREEDY, temperature=1.0, seed=seed)).text for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(PromptTooLong):
        here.complete(make_job("word " * 2040))
    assert 0 < here.run(here.client.room_behind(make_job("word " * 2000))) < 60
    with pytest.raises(RequestRefused, match="vLLM refused the request"):
        here.complete(sampling=replace(GREEDY, logit_bias=((7, 1.0),)))


def test_its_identity_stays_the_same_between_two_questions(here: Here) -> None:
    one, other = here.run(here.client.identity()), here.run(here.client.identity())
    assert one.answers[0].likeliest == other.answers[0].likeliest
    assert len(one.answers[0].likeliest) == 5
    assert one.scatter == 0.0


def test_a_cancelled_request_leaves_the_engine_to_others(here: Here) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(here.client.complete(make_job(REPEATS), replace(GREEDY, max_tokens=1000)))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    here.run(cancel())
    assert here.complete().num_tokens == 24


def test_ctrl_c_leaves_the_engine_alone_and_its_death_is_not_the_end(here: Here) -> None:
    (engine,) = (child for child in multiprocessing.active_children() if child.name == "EngineCore")
    assert engine.pid in (marked_before := marked(os.environ[NAME])), "the guard would end it"
    assert len(marked_before) > 1, "and its own child"
    before = here.complete().text
    os.kill(engine.pid or 0, signal.SIGINT)

    async def die() -> None:
        task = asyncio.create_task(here.client.complete(make_job(REPEATS), replace(GREEDY, max_tokens=1000)))
        await asyncio.sleep(1.0)
        assert not task.done(), "SIGINT does not reach it"
        os.kill(engine.pid or 0, signal.SIGKILL)
        with pytest.raises(ServerUnavailable, match="died"):
            await task

    here.run(die())
    here.run(here.client.revive())
    assert here.complete().text == before
