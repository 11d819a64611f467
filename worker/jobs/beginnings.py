"""Beginnings that prompts share: which the running jobs hold, and how much device time sharing one is worth. Pure.

The engine copies a beginning that a running sequence holds instead of reading it again (worker/decoding/prefixes.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, KeysView, Sequence
from typing import Final, NamedTuple

#: Tokens of the shortest beginning that is compared; each further one is twice as long.
SHORTEST_BEGINNING: Final = 64
LONGEST_BEGINNING: Final = 16_384
#: Share of the device time of a run of jobs that reading their beginning once may take.
READING_SHARE: Final = 0.05


class Beginning(NamedTuple):
    """The first tokens of a prompt. Prompts with equal beginnings have equal first tokens, to within a hash."""

    num_tokens: int
    digest: int


def beginnings_of(token_ids: Sequence[int]) -> tuple[Beginning, ...]:
    """The beginnings of a prompt, the longest first.

    The last token of a prompt is always read, so no beginning contains that token. 2 µs for 200 tokens.
    """
    found: list[Beginning] = []
    begin, end, digest = 0, SHORTEST_BEGINNING, 0
    while end < len(token_ids) and end <= LONGEST_BEGINNING:
        digest = hash((digest, *token_ids[begin:end]))
        found.append(Beginning(end, digest))
        begin, end = end, 2 * end
    return tuple(reversed(found))


class HeldBeginnings:
    """The beginnings that the slots will hold when the next job starts: those of the jobs admitted last.

    Jobs are claimed ahead of the engine, so a job that runs now may have ended when the next one starts. Which admitted
    jobs have ended is not known here, so the oldest ones are taken. A wrong guess costs only time: a beginning is read
    again, or a job goes first for nothing.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._by_job: deque[tuple[Beginning, ...]] = deque()
        self._num_jobs: dict[Beginning, int] = {}

    @property
    def beginnings(self) -> KeysView[Beginning]:
        """All of them."""
        return self._num_jobs.keys()

    def admit(self, beginnings: tuple[Beginning, ...]) -> None:
        """A job with these beginnings was admitted."""
        self._by_job.append(beginnings)
        for beginning in beginnings:
            self._num_jobs[beginning] = self._num_jobs.get(beginning, 0) + 1
        self.observe(self._num_slots)

    def observe(self, num_running: int) -> None:
        """Take the number of admitted jobs that have not ended."""
        while len(self._by_job) > num_running:
            for beginning in self._by_job.popleft():
                num_left = self._num_jobs.pop(beginning) - 1
                if num_left:
                    self._num_jobs[beginning] = num_left


class SharingSlack:
    """Device seconds by which jobs may go before their turn because they share a beginning with a running job.

    The slack is as long as a run of jobs of which reading the beginning takes `READING_SHARE`: 20 times what the target
    is measured to need for the beginning, at most `most_s`. So a beginning that is cheap to read changes no order.
    """

    def __init__(self, read_s: Callable[[int], float], most_s: float) -> None:
        """`read_s`: seconds in which the target reads so many tokens of a prompt, as measured."""
        self._read_s = read_s
        self._most_s = most_s

    @property
    def is_none(self) -> bool:
        """Whether no job may go before its turn."""
        return self._most_s <= 0

    def of(self, num_tokens: int) -> float:
        """Seconds for a beginning of so many tokens; 0 for none."""
        if not num_tokens or self.is_none:
            return 0.0
        return min(self._most_s, self._read_s(num_tokens) / READING_SHARE)
