"""What rounds and prompts take on servers, measured through requests of our own.

The texts that are asked for are scratch. They share the server with whatever runs there, so a measurement of a busy
server says what it takes beside that.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from alphaloop.errors import AlphaloopError, DecodeFailed
from alphaloop.messages import Body, Job, Purpose
from worker.engine import Generation, Sampling
from worker.servers.client import ServerClient
from worker.servers.loop_thread import LoopThread
from worker.servers.served_text import Sent, generation_of
from worker.servers.server import Server

_NUM_TOKENS: Final = 24  #: of a text that is timed
_WORDS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "the", "and")
_MOST_S: Final = 300.0  #: for the requests of one measurement


class Timing:
    """Asks the first endpoint of each route. One thread owns it; the requests run on the event loop's."""

    def __init__(self, servers: Sequence[Server], clients: Mapping[str, ServerClient], thread: LoopThread) -> None:
        self._clients, self._thread = clients, thread
        self._by_drafter: dict[str | None, Server] = {}
        for server in servers:
            self._by_drafter.setdefault(server.drafter_name, server)
        for server in servers:  # rather one that never drafts
            for route in server.routes:
                self._by_drafter.setdefault(route, server)
        self._rng = random.Random(0)

    def round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """Median milliseconds of a round of `batch` requests with `context` tokens before. Raises DecodeFailed.

        Where the server follows requests in that, with `width` - 1 draft tokens.
        """
        found = []
        for _ in range(num_samples):
            for generation in self._together(
                drafter, batch, max(1, context - _NUM_TOKENS // 2), _NUM_TOKENS, width - 1
            ):
                served = generation.served
                num_passes = served.num_passes(generation.counts.num_tokens) if served else None
                if served and served.decode_s is not None and num_passes is not None and num_passes > 1:
                    found.append(1000 * served.decode_s / (num_passes - 1))
        if not found:
            raise DecodeFailed(
                f"the server tells neither times nor rounds of its texts: {self._server(drafter).name}",
                hint="docs/guides/engines.md says what each kind of server has to be started with",
            )
        return statistics.median(found)

    def prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """Median milliseconds to the first token of a prompt of about `num_tokens`. Raises DecodeFailed."""
        found = [
            1000 * (generation.served.prefill_s or generation.time_to_first_token_s)
            for _ in range(num_samples)
            for generation in self._together(drafter, 1, num_tokens, 1)
            if generation.served
        ]
        return statistics.median(found)

    def _together(
        self, drafter: str | None, batch: int, num_prompt_tokens: int, num_tokens: int, k: int | None = None
    ) -> list[Generation]:
        server = self._server(drafter)
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0)
        jobs = [self._job(number, num_prompt_tokens) for number in range(batch)]
        asked = _asked(server, drafter, k)

        async def ask_all() -> list[Generation]:
            async with asyncio.timeout(_MOST_S):
                return await asyncio.gather(*(self._ask(server, job, sampling, asked, batch) for job in jobs))

        try:
            return self._thread.wait_for(ask_all())
        except TimeoutError:
            raise DecodeFailed(f"{server.name}: {batch} texts took more than {_MOST_S:g} s") from None
        except AlphaloopError as error:
            raise DecodeFailed(f"measuring {server.name} failed: {error.message}", hint=error.hint) from error

    async def _ask(self, server: Server, job: Job, sampling: Sampling, asked: int | None, batch: int) -> Generation:
        client = self._clients[server.name]
        clock = asyncio.get_running_loop().time
        began = clock()
        on_text = (lambda text: None) if client.must_stream else None
        reply = await client.complete(job, sampling, on_text=on_text, num_draft_tokens=asked)
        drafter = None if asked == 0 else server.drafter
        sent = Sent(server.name, drafter, began, began, clock(), float(batch), asked_length=asked)
        return generation_of(job.job_id, reply, sent)

    def _server(self, drafter: str | None) -> Server:
        if drafter not in self._by_drafter:
            raise DecodeFailed(f"no endpoint {'drafts' if drafter is None else 'has'} {drafter or 'nothing'}")
        return self._by_drafter[drafter]

    def _job(self, number: int, num_tokens: int) -> Job:
        """A prompt that no cache of prefixes has: its words are drawn, about one token each."""
        words = " ".join(self._rng.choices(_WORDS, k=max(1, num_tokens)))
        return Job(job_id=f"measuring-{number}", task="measuring", body=Body(prompt=words), purpose=Purpose.CONTROL)


def _asked(server: Server, drafter: str | None, k: int | None) -> int | None:
    """Draft tokens to ask the server for; None: for nothing, so that it drafts as it was started."""
    if server.drafter is None:
        return None
    if drafter is None:
        return 0
    is_shorter = server.switches_drafts and k is not None and k < server.drafter.max_draft_tokens
    return k if is_shorter else None
