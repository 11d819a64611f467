"""The test of a server: it must decode a text that every server can decode."""

from __future__ import annotations

import asyncio
from typing import Final

from alphaloop.errors import ServerSilent
from alphaloop.messages import Body, Job, Purpose
from worker.engine import Sampling
from worker.servers.client import ServerClient

_JOB: Final = Job(job_id="self-test", task="self-test", body=Body(prompt="one two one two"), purpose=Purpose.CONTROL)
#: Enough rounds that a drafter drafts too.
_SAMPLING: Final = Sampling(max_tokens=8, temperature=0.0)
_MOST_S: Final = 60.0  #: a busy server has others to serve first


async def is_well(client: ServerClient) -> None:
    """Return when the server has decoded the text. Raises ServerError."""
    try:
        async with asyncio.timeout(_MOST_S):
            await client.complete(_JOB, _SAMPLING)
    except TimeoutError:
        raise ServerSilent(f"the server did not finish a short text within {_MOST_S:g} s") from None
