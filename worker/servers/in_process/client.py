"""vLLM inside this process as one endpoint of the fleet: its texts, its death and its next life.

Its engine is a child process, so its death is a server's death: the requests that were in it are judged as elsewhere,
and the fleet's test of the endpoint starts the engine again. An engine that comes up again and again and finishes
nothing, or does not come up, is sick: then this process has to end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

from alphaloop.errors import ConfigError, EngineSick, ServerSilent, ServerUnreachable
from alphaloop.messages import Body, Job, Purpose
from alphaloop.server_identity import Answer, ServerIdentity, distance
from alphaloop.server_kind import ServerKind
from alphaloop.settings.in_process import InProcessSettings
from worker.engine import Sampling
from worker.servers.identity import GREEDY, NAME, NUM_LIKELIEST, PROMPTS
from worker.servers.in_process.library import RunningVllm, start_vllm, too_long
from worker.servers.in_process.pieces import answer_of, piece_of
from worker.servers.reading import Reply, ReplyReader

log = logging.getLogger(__name__)

#: Starts of the engine without a finished text between them.
STARTS_IN_VAIN: Final = 3

Result = TypeVar("Result")
Start = Callable[[Mapping[str, Any]], RunningVllm]


class VllmClient:
    """`worker.servers.endpoint_client.EndpointClient` of vLLM in this process. One event loop's thread uses it."""

    kind: Final[ServerKind] = "vllm"
    must_stream: Final = False  # vLLM tells when the first token came

    def __init__(self, name: str, settings: InProcessSettings, *, start: Start = start_vllm) -> None:
        self._name, self.settings, self._start = name, settings, start
        self.model = settings.served_model_name or settings.model
        self.sick: str | None = None
        self._vllm: RunningVllm | None = None
        self._is_silent = self._is_closed = False
        self._num_starts_in_vain = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        await self._end()

    async def start(self) -> None:
        """Load the model, the first time. Raises ConfigError and EngineSick."""
        began = time.perf_counter()
        self._vllm = await _on_a_thread(lambda: self._started())
        told = {"action": "vllm_started", "endpoint": self._name, "started_s": round(time.perf_counter() - began, 1)}
        log.info("vLLM is up in this process", extra=told)

    async def revive(self) -> None:
        """Start the engine again if it has died or says nothing. Raises ServerUnavailable where it does not start."""
        if self._vllm is not None and not self._vllm.is_dead and not self._is_silent:
            return
        if self._num_starts_in_vain >= STARTS_IN_VAIN:
            self.sick = f"vLLM at {self._name} was started {self._num_starts_in_vain} times and finished no text"
            raise ServerUnreachable(self.sick)
        self._num_starts_in_vain += 1
        log.warning("starting vLLM again", extra={"action": "vllm_restarted", "endpoint": self._name})
        await self._end()
        try:
            await self.start()
        except (ConfigError, EngineSick) as error:
            raise ServerUnreachable(error.message, hint=error.hint) from error
        self._is_silent = False

    async def complete(
        self,
        job: Job,
        sampling: Sampling,
        *,
        on_text: Callable[[str], None] | None = None,
        num_draft_tokens: int | None = None,
    ) -> Reply:
        """The text of a job. With `on_text` it is streamed, and each piece of text handed over as it comes.

        `num_draft_tokens` is not followed: what drafts here drafts for all requests.
        Raises PromptTooLong or a ServerError.
        """
        vllm = self._up()
        began = time.perf_counter()
        prompt = await vllm.prompt_of(job)
        if sampling.max_tokens > vllm.context_length - len(prompt["prompt_token_ids"]):
            raise too_long()
        reader = ReplyReader(self.kind, self.model, sampling.max_tokens, vllm.context_length)
        num_tokens = 0
        async with aclosing(self._outputs(vllm, prompt, sampling, is_streamed=on_text is not None)) as outputs:
            async for output in outputs:
                piece, num_tokens = piece_of(output, num_tokens)
                text = reader.add(piece)
                if text and on_text is not None:
                    reader.first_text_s = reader.first_text_s or time.perf_counter() - began
                    on_text(text)
        reply = reader.reply(time.perf_counter() - began)
        self._num_starts_in_vain = 0
        self._is_silent = False
        return reply

    async def room_behind(self, job: Job) -> int | None:
        """Tokens that the context leaves behind the job's prompt. Raises what `complete` raises."""
        vllm = self._up()
        return vllm.context_length - len((await vllm.prompt_of(job))["prompt_token_ids"])

    async def identity(self) -> ServerIdentity:
        """Its names, and its answers to the fixed prompts, one at a time and all at once. Raises ServerError."""
        vllm = self._up()
        answers = [await self._answer(vllm, prompt) for prompt in PROMPTS]
        together = await asyncio.gather(*(self._answer(vllm, prompt) for prompt in PROMPTS))
        return ServerIdentity(
            server=f"{self.kind}-{vllm.version}",
            model=self.model,
            root=self.settings.model,
            context_length=vllm.context_length,
            answers=tuple(answers),
            scatter=distance(answers, together) or 0.0,
        )

    @property
    def device(self) -> str:
        """What the engine runs on; empty before its start."""
        return self._vllm.device if self._vllm else ""

    async def _answer(self, vllm: RunningVllm, text: str) -> Answer:
        job = Job(job_id=NAME, task=NAME, body=Body(prompt=text), purpose=Purpose.CONTROL)
        prompt = await vllm.prompt_of(job)
        async with aclosing(self._outputs(vllm, prompt, GREEDY, num_likeliest=NUM_LIKELIEST)) as outputs:
            async for output in outputs:
                return answer_of(output)
        raise ServerUnreachable("vLLM gave no answer")

    async def _outputs(
        self,
        vllm: RunningVllm,
        prompt: Any,
        sampling: Sampling,
        *,
        is_streamed: bool = False,
        num_likeliest: int | None = None,
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs, within the limits on silence. Raises ServerSilent, after which the engine is started anew."""
        found = vllm.outputs(prompt, sampling, uuid.uuid4().hex, is_streamed=is_streamed, num_likeliest=num_likeliest)
        limit_s = self.settings.answer_s
        async with aclosing(found) as outputs:
            while True:
                try:
                    async with asyncio.timeout(limit_s):
                        output = await anext(outputs)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    self._is_silent = True
                    raise ServerSilent(f"vLLM said nothing for {limit_s:g} s") from None
                yield output
                limit_s = self.settings.silence_s

    def _up(self) -> RunningVllm:
        if self._vllm is None or self._vllm.is_dead:
            raise ServerUnreachable("vLLM's engine is not up")
        return self._vllm

    def _started(self) -> RunningVllm:
        vllm = self._start(self.settings.engine_args())
        if self._is_closed:  # the worker ended meanwhile
            vllm.close()
        return vllm

    async def _end(self) -> None:
        vllm, self._vllm = self._vllm, None
        if vllm is not None:
            await _on_a_thread(vllm.close)


async def _on_a_thread(act: Callable[[], Result]) -> Result:
    """What `act` returns or raises, on a thread of its own that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(Result, result))

    def run() -> None:
        result, failed = None, None
        try:
            result = act()
        except BaseException as error:
            failed = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="vllm-start", daemon=True).start()
    return await done
