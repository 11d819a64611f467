"""Reads the counters of servers that tell nothing of a request, at the ends of slices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from alphaloop.errors import AlphaloopError, ServerSilent
from worker.engine import PreparedJob, SliceCounts
from worker.servers.client import ServerClient
from worker.servers.counter_slices import Answered, CounterSlices, Due, SliceKey
from worker.servers.counters import Counters
from worker.servers.reading import Reply

log = logging.getLogger(__name__)

_MOST_S: Final = 2.0  #: for one reading: a result waits for it
#: A server may answer a moment before it counts.
_NUM_READINGS: Final = 6
_BETWEEN_READINGS_S: Final = 0.05


class Counting:
    """The slices of all endpoints that have an address of metrics; does nothing for others. One loop uses it."""

    def __init__(self, clients: Mapping[str, ServerClient]) -> None:
        self._clients = clients
        self._slices = {
            name: CounterSlices(k)
            for name, client in clients.items()
            if client.endpoint.metrics_url is not None and (k := client.endpoint.num_draft_tokens) is not None
        }
        self._failing: set[str] = set()
        self._readings: set[asyncio.Task[SliceCounts | None]] = set()

    def counts(self, name: str) -> bool:
        """Whether that endpoint is counted by its counters."""
        return name in self._slices

    def began(self, name: str, prepared: PreparedJob) -> None:
        """The job is sent there now."""
        if (slices := self._slices.get(name)) is not None:
            job = prepared.job
            slices.began(SliceKey(job.task, prepared.segment, prepared.sampling.bucket, job.purpose.value))

    def ended(self, name: str, reply: Reply | None) -> Due | None:
        """Its request ended, without a reply if it failed or was given up; what is to be read, if that left it idle.

        The result of such a request waits for the reading, because the next request would come into it. Where there is
        no result, or where readings fail, the counters are read beside.
        """
        if (slices := self._slices.get(name)) is None:
            return None
        is_text = reply is not None and reply.num_tokens > 0
        due = slices.ended(Answered(reply.num_prompt_tokens, reply.num_tokens) if reply and is_text else None)
        if due is None or (is_text and name not in self._failing):
            return due
        reading = asyncio.create_task(self.read(name, due))
        self._readings.add(reading)
        reading.add_done_callback(self._readings.discard)
        return None

    async def read(self, name: str, due: Due) -> SliceCounts | None:
        """What the slice says; None where it says nothing."""
        slices = self._slices[name]
        for number in range(_NUM_READINGS):
            if (found := await self._counters(name)) is None:
                return None
            if number + 1 == _NUM_READINGS or not slices.is_early(due, found):
                return slices.read(due, found)
            await asyncio.sleep(_BETWEEN_READINGS_S)
        return None

    async def _counters(self, name: str) -> Counters | None:
        try:
            try:
                async with asyncio.timeout(_MOST_S):
                    found = await self._clients[name].counters()
            except TimeoutError:
                raise ServerSilent(f"no page of metrics within {_MOST_S:g} s") from None
        except AlphaloopError as error:
            if name not in self._failing:
                self._failing.add(name)
                told = {"action": "counters_not_read", "endpoint": name, "code": error.code}
                log.warning("%s: its counters were not read: %s", name, error.message, extra=told)
            return None
        self._failing.discard(name)
        return found
