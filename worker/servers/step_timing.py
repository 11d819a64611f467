"""What a pass and a draft cost on a server that reports the times of its steps: test texts of a chosen shape show it.

A pass of width w is that of drafts of w - 1 tokens that say nothing, for which no drafter runs. The seconds of the
server's own drafter stand beside those of each step. Drafts that the scheduler writes, and n-grams, are part of the
step: their time is not known apart, and is the pass's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from alphaloop.engine import Sampling, StepTimes
from alphaloop.errors import AlphaloopError, DecodeFailed
from worker.servers.client import ServerClient
from worker.servers.obedience import GREEDY
from worker.servers.request_body import AskedDrafts, Measured
from worker.servers.testing import timing_job

log = logging.getLogger(__name__)

#: Tokens of a text; more where the texts of a measurement were never all in one step.
_NUM_TOKENS: Final = (24, 96)
_TIMING_S: Final = 300.0  #: for the texts of one measurement
#: Milliseconds of a drafter whose time is part of the pass: costs have logarithms.
PART_OF_PASS_MS: Final = 1e-3


class StepTiming:
    """Asks one server. One event loop uses it."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def round_ms(self, drafter: str | None, batch: int, width: int, context: int) -> float:
        """Milliseconds of a pass of `batch` texts, or of the drafter's part of a round. Raises DecodeFailed."""
        is_pass = drafter is None
        for num_tokens in _NUM_TOKENS:
            times = await self._together(batch, width - 1, context, num_tokens, is_filler=is_pass and width > 1)
            if not is_pass and not any(step.num_drafted for step in times):
                return PART_OF_PASS_MS
            if of_shape := [step for step in times if step.batch == batch and _has_width(step, width, is_pass=is_pass)]:
                seconds = sum(
                    step.num_steps * (step.wall_s - step.drafter_s if is_pass else step.drafter_s) for step in of_shape
                )
                return max(PART_OF_PASS_MS, 1000 * seconds / sum(step.num_steps for step in of_shape))
        raise DecodeFailed(f"{self._client.endpoint.url}: no step of {batch} texts and width {width} was reported")

    async def _together(
        self, batch: int, k: int, context: int, num_tokens: int, *, is_filler: bool
    ) -> Sequence[StepTimes]:
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        length = max(1, context - num_tokens // 2)
        measured = Measured(is_filler=is_filler)
        try:
            async with asyncio.timeout(_TIMING_S):
                replies = await asyncio.gather(
                    *(
                        self._client.complete(
                            timing_job(number, length), sampling, asked=AskedDrafts(k), measured=measured
                        )
                        for number in range(batch)
                    )
                )
        except TimeoutError:
            raise DecodeFailed(f"{batch} texts took more than {_TIMING_S:g} s") from None
        except AlphaloopError as error:
            raise DecodeFailed(f"measuring failed: {error.message}", hint=error.hint) from error
        return [step for reply in replies for step in reply.steps]


def _has_width(step: StepTimes, width: int, *, is_pass: bool) -> bool:
    """Whether the step is of that shape: the first one after a prompt has no draft yet."""
    if is_pass:
        return step.num_drafted == 0 and round(step.width) == width
    return step.num_drafted == width - 1


async def reports_steps(client: ServerClient) -> bool:
    """Whether the server reports the times of its steps, and drafts as requests for them say. Raises ServerError."""
    measured = Measured(is_filler=True)
    reply = await client.complete(timing_job(0, 8), GREEDY, asked=AskedDrafts(2), measured=measured)
    return any(round(step.width) == 3 for step in reply.steps)
