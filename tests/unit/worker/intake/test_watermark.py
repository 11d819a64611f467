"""The watermark against a naive model of a log: never past an unfinished message that the log still has."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from worker.intake.partitions import Watermark


@dataclass
class Log:
    """A partition that can be cut and written again; `delivered` are the messages that it still has, oldest first."""

    next_offset: int = 0
    delivered: list[tuple[int, int]] = field(default_factory=list)  # offset and number of delivery

    def cut(self, offset: int) -> None:
        """Lose everything from an offset on."""
        self.next_offset = offset
        self.delivered = [one for one in self.delivered if one[0] < offset]

    def unfinished(self, finished: set[int]) -> list[int]:
        """Offsets of messages that were delivered and are not finished."""
        return [offset for offset, number in self.delivered if number not in finished]


@given(st.randoms(use_true_random=False), st.integers(0, 80), st.booleans())
def test_nothing_that_the_log_has_is_committed_past(chance: random.Random, num_acts: int, may_go_back: bool) -> None:
    watermark, log = Watermark(), Log()
    numbers: list[int] = []
    finished: set[int] = set()
    committed, was_read = -1, False
    for _ in range(num_acts):
        act = chance.random()
        went_back = False
        if act < 0.1 and may_go_back and log.delivered:
            log.cut(chance.choice([0, *(offset for offset, _ in log.delivered)]))
            # The consumer notices with the next message.
            act = 0.2
            went_back = True
        if act < 0.55:
            offset = log.next_offset + chance.choice([0, 0, 0, 1, 5])
            if went_back:
                offset = log.next_offset
            number, is_back = watermark.deliver(offset)
            assert is_back == went_back
            assert number not in numbers
            log.delivered.append((offset, number))
            log.next_offset = offset + 1
            numbers.append(number)
        elif numbers:
            # Any delivery may end at any time, also one that the log lost, and also twice.
            number = chance.choice(numbers)
            finished.add(number)
            watermark.finish(number)
        if chance.random() < 0.2:
            # What is behind the newest message holds no message, as far as the consumer has read.
            log.next_offset += chance.choice([0, 1, 7])
            watermark.pass_over(log.next_offset)
            was_read = True
        elif not numbers and not was_read:
            assert watermark.committable is None
            continue
        unfinished = log.unfinished(finished)
        assert watermark.committable == min(unfinished, default=log.next_offset)
        assert watermark.num_in_flight == len(unfinished)
        assert watermark.distance == log.next_offset - watermark.committable
        assert went_back or watermark.committable >= committed, "it falls only when the log goes back"
        committed = watermark.committable
