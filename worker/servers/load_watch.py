"""Asks each server twice a second how many requests it has, so that those of other clients are known.

No request waits for it. It asks while jobs of this worker are at a server or were a moment ago, and only where there
are two routes: nothing is on trial elsewhere.

SGLang is asked at `/v1/loads`, which needs no option: its gauges for Prometheus are renewed every 40 rounds, and before
July 2026 not for up to 30 s after the last request. Versions of 2025 have no such page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from alphaloop.errors import AlphaloopError, ReplyInvalid, ServerUnavailable, ServerUnreachable
from alphaloop.settings.models import EndpointSettings
from worker.servers.client import ServerClient
from worker.servers.counters import values
from worker.servers.fleet import Fleet
from worker.servers.forms import Count, Form, read_form

log = logging.getLogger(__name__)

#: In simulation intervals of the trial are too narrow with one answer a second, and as wide as they should be with two.
EVERY_S: Final = 0.5
#: A server that does not tell is asked so seldom: it may be started again with another option.
SELDOM_S: Final = 60.0
_VLLM: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_LLAMA: Final = ("llamacpp:requests_processing", "llamacpp:requests_deferred")


class LoadWatch:
    """The pages of all servers of a fleet. One event loop uses it."""

    def __init__(self, clients: Mapping[str, ServerClient], fleet: Fleet, *, clock: Callable[[], float]) -> None:
        has_choice = len({route for server in fleet.servers.values() for route in server.routes}) > 1
        self._clients = dict(clients) if has_choice else {}
        self._fleet, self._clock = fleet, clock
        self._failing: set[str] = set()

    async def run(self) -> None:
        """Ask until it is cancelled; servers do not wait for each other."""
        await asyncio.gather(*(self._watch(name) for name in self._clients))

    async def _watch(self, name: str) -> None:
        while True:
            began_s, pause_s = self._clock(), EVERY_S
            if self._fleet.is_load_wanted():
                pause_s = await self._ask(name)
            await asyncio.sleep(max(0.0, pause_s - (self._clock() - began_s)))

    async def _ask(self, name: str) -> float:
        """Ask once; seconds from its beginning until it is asked again."""
        client, places = self._clients[name], self._fleet.members[name].places
        before = places.num_in_flight
        try:
            num_present = await ask_num_present(client)
        except AlphaloopError as error:
            return self._failed(name, error)
        except Exception as error:
            log.error("asking %s for its load failed", name, exc_info=error, extra={"action": "load_raised"})
            return SELDOM_S
        if num_present is None:
            return SELDOM_S
        # It counted at some moment in between.
        places.told(num_present, (before + places.num_in_flight) / 2)
        if name in self._failing:
            self._failing.discard(name)
            log.info("%s tells its load", name, extra={"action": "load_told", "endpoint": name})
        return EVERY_S

    def _failed(self, name: str, error: AlphaloopError) -> float:
        if isinstance(error, ServerUnreachable) and self._clients[name].endpoint.has_own_metrics:
            self._fleet.members[name].places.told(0, 0)  # what takes no connection has no requests
        elif name not in self._failing:
            self._failing.add(name)
            extra = {"action": "load_not_told", "endpoint": name, "code": error.code}
            log.info("%s does not tell its load: %s", name, error.message, extra=extra)
        return EVERY_S if isinstance(error, ServerUnavailable) else SELDOM_S


async def ask_num_present(client: ServerClient) -> int | None:
    """Requests of all clients that run or wait there now; None for a server that has no page for it.

    Raises ServerError, which is RequestRefused where the page was not turned on.
    """
    url = load_url(client.endpoint)
    return None if url is None else num_present_on(client.endpoint, await client.page(url))


def load_url(endpoint: EndpointSettings) -> str | None:
    """The address of the page; None of a server that has none."""
    match endpoint.kind:
        case "vllm":
            return endpoint.metrics_url or f"{endpoint.root}/metrics"
        case "sglang":
            return f"{endpoint.root}/v1/loads?include=core"
        case "llama_cpp":
            return f"{endpoint.root}/metrics"
        case _:
            return endpoint.metrics_url  # in vLLM's form, as its counters are


def num_present_on(endpoint: EndpointSettings, page: bytes) -> int:
    """Requests of all clients that run or wait there. Raises ReplyInvalid."""
    if endpoint.kind == "sglang":
        if not (loads := read_form(_Loads, page).loads):
            raise ReplyInvalid("expected the load of at least one rank, found none")
        return sum(one.num_running_reqs + one.num_waiting_reqs for one in loads)
    names = _LLAMA if endpoint.kind == "llama_cpp" else _VLLM
    found = values(page.decode(errors="replace"), names, hint="is the server of the kind that was named?")
    return sum(number for by_label in found.values() for number in by_label.values())


class _RankLoad(Form):
    """Of one of SGLang's data-parallel ranks."""

    num_running_reqs: Count
    num_waiting_reqs: Count


class _Loads(Form):
    """SGLang's `/v1/loads`."""

    loads: tuple[_RankLoad, ...]
