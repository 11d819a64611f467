"""Prompts that begin alike: which prefixes the running jobs hold, and what sharing a prefix is worth. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, KeysView, Sequence
from typing import Final, NamedTuple

#: Most device time by which jobs may go before their turn to share a prompt's prefix with a running job.
MOST_LEAD_S: Final = 10.0
#: Tokens of the shortest prefix that is compared; each further one is twice as long.
SHORTEST_BEGINNING: Final = 64
LONGEST_BEGINNING: Final = 16_384
#: Share of the device time of a run of jobs that reading their prefix once may take.
READING_SHARE: Final = 0.05


class Prefix(NamedTuple):
    """The first tokens of a prompt. Prompts with equal prefixes have equal first tokens, to within a hash."""

    num_tokens: int
    digest: int


def prefixes_of(token_ids: Sequence[int]) -> tuple[Prefix, ...]:
    """The prefixes of a prompt, the longest first.

    The last token of a prompt is always read, so no prefix contains that token. 2 µs for 200 tokens.
    """
    prefixes: list[Prefix] = []
    begin, end, digest = 0, SHORTEST_BEGINNING, 0
    while end < len(token_ids) and end <= LONGEST_BEGINNING:
        digest = hash((digest, *token_ids[begin:end]))
        prefixes.append(Prefix(end, digest))
        begin, end = end, 2 * end
    return tuple(reversed(prefixes))


class SharedPrefixes:
    """The prefixes that the slots will hold when the next job starts, and how much device time sharing one is worth.

    The engine copies a prefix that a running sequence holds (engine/network/slots.py) and does not read it
    again. Jobs are claimed ahead of the engine, so a job that runs now may have ended when the next one starts. Which
    admitted jobs have ended is not known here, so those admitted last are taken to run. A wrong guess costs only time:
    a prefix is read again, or a job goes first for nothing.

    The lead is as long as a run of jobs of which reading the prefix takes `READING_SHARE`: 20 times what the target
    is measured to need for the prefix, at most `MOST_LEAD_S`. So a prefix that is cheap to read changes no
    order.
    """

    def __init__(self, num_slots: int, read_s: Callable[[int], float]) -> None:
        """`read_s`: seconds in which the target reads this number of prompt tokens, as measured."""
        self._num_slots = num_slots
        self._read_s = read_s
        self._by_job: deque[tuple[Prefix, ...]] = deque()
        self._num_jobs: Counter[Prefix] = Counter()

    @property
    def held(self) -> KeysView[Prefix]:
        """Every prefix that a job holds."""
        return self._num_jobs.keys()

    def lead_s(self, num_tokens: int) -> float:
        """Device seconds by which a job may go before its turn to share `num_tokens`; 0 for none."""
        return min(MOST_LEAD_S, self._read_s(num_tokens) / READING_SHARE) if num_tokens else 0.0

    def admit(self, prefixes: tuple[Prefix, ...]) -> None:
        """A job with these prefixes was admitted."""
        self._by_job.append(prefixes)
        self._num_jobs.update(prefixes)
        self.observe(self._num_slots)

    def observe(self, num_running: int) -> None:
        """Take the number of admitted jobs that have not ended."""
        while len(self._by_job) > num_running:
            for prefix in self._by_job.popleft():
                if num_left := self._num_jobs.pop(prefix) - 1:
                    self._num_jobs[prefix] = num_left
