"""The test of a server: it must decode a text that every server can decode, and be what it was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from alphaloop.errors import AlphaloopError, ServerFailed, ServerSilent, reason_of
from alphaloop.messages import Body, Job, Purpose
from alphaloop.server_identity import ServerIdentity, differs, told_apart
from worker.engine import Sampling
from worker.servers.client import ServerClient
from worker.servers.fleet import Fleet
from worker.servers.identity import ask_identity
from worker.servers.server import Server
from worker.servers.switching import why_not

log = logging.getLogger(__name__)

_JOB: Final = Job(job_id="self-test", task="self-test", body=Body(prompt="one two one two"), purpose=Purpose.CONTROL)
#: Enough rounds that a drafter drafts too.
_SAMPLING: Final = Sampling(max_tokens=8, temperature=0.0)
_MOST_S: Final = 60.0  #: a busy server has others to serve first


class Tests:
    """The tests that run, one of each endpoint at most. One event loop's thread uses it."""

    def __init__(
        self,
        clients: Mapping[str, ServerClient],
        servers: Mapping[str, Server],
        fleet: Fleet,
        known: Mapping[str, ServerIdentity],
    ) -> None:
        """All by endpoint. `known` is what each was when the worker began."""
        self._clients, self._servers, self._fleet = clients, servers, fleet
        self._known = dict(known)
        self._running: dict[str, asyncio.Task[AlphaloopError | None]] = {}
        self._ended = asyncio.Event()

    def begin(self, name: str) -> asyncio.Task[AlphaloopError | None]:
        """The test of an endpoint that runs, or a new one."""
        if name not in self._running:
            self._running[name] = asyncio.create_task(self._test(name))
        return self._running[name]

    async def of(self, name: str) -> AlphaloopError | None:
        """What the test found; None: the server is well. Cancelling the caller leaves the test to others."""
        return await asyncio.shield(self.begin(name))

    async def end(self) -> None:
        """Cancel those that run, and wait for their end."""
        running = tuple(self._running.values())
        for test in running:
            test.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def next_end(self) -> None:
        """Return when a test has ended."""
        await self._ended.wait()

    async def _test(self, name: str) -> AlphaloopError | None:
        was_down = self._is_down(name)
        try:
            await _is_well(self._clients[name])
            # A request may have found it gone meanwhile, and another server may have answered.
            was_down = was_down or self._is_down(name)
            told = await self._changed(name) if was_down else None
            if was_down and self._servers[name].switches_drafts:
                await self._look_again(name)
        except AlphaloopError as error:
            self._fleet.tested(name, error)
            return error
        except Exception as error:
            # Without a verdict the endpoint would count as being tested for ever.
            log.error("a test of endpoint %s failed", name, exc_info=error, extra=_extra(name, "test_raised"))
            failure = ServerFailed(f"testing the server failed: {reason_of(error)}")
            self._fleet.tested(name, failure)
            return failure
        else:
            self._fleet.tested(name, None)
            if told is not None:
                hint = "start the worker again to take the new server in"
                log.error("endpoint %s came back as another: %s; %s", name, told, hint, extra=_extra(name))
                self._fleet.retired(name, f"it came back as another server: {told}")
            return None
        finally:
            del self._running[name]
            self._ended.set()
            self._ended = asyncio.Event()

    def _is_down(self, name: str) -> bool:
        return any(status.name == name and status.state == "down" for status in self._fleet.statuses())

    async def _look_again(self, name: str) -> None:
        """See whether it follows requests that want no drafts: that is part of how a server was started."""
        told = await why_not(self._clients[name])
        self._fleet.switches(name, told is None)
        if told is not None:
            log.error("endpoint %s: %s", name, told, extra=_extra(name, "drafts_not_switched"))

    async def _changed(self, name: str) -> str | None:
        """What is other than before the server went away, in words.

        A server that was away at the worker's start must have the weights of the others, because a task may be sent to
        either.
        """
        server = self._servers[name]
        found = await ask_identity(server.endpoint, max_requests=server.max_requests)
        if (before := self._known.get(name)) is not None:
            return differs(before, found)
        first = next(iter(self._known.values()), found)
        self._known[name] = found
        told = told_apart(first, found)
        return told.sentence if told is not None and told.nature == "weights" else None


def _extra(name: str, action: str = "server_changed") -> dict[str, str]:
    return {"action": action, "endpoint": name}


async def _is_well(client: ServerClient) -> None:
    """Return when the server has decoded the text. Raises ServerError."""
    try:
        async with asyncio.timeout(_MOST_S):
            await client.complete(_JOB, _SAMPLING)
    except TimeoutError:
        raise ServerSilent(f"the server did not finish a short text within {_MOST_S:g} s") from None
