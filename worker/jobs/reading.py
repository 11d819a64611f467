"""Messages that were taken from Kafka, and which of them are jobs: read while there is room, and in portions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from alphaloop.errors import AlphaloopError, MessageError
from worker.intake.fetching import Fetching, Refusal, unreadable
from worker.intake.polling import Delivery
from worker.intake.validation import PromptElsewhere, ReadyJob, Validation

#: A portion ends after this long, because long prompts take seconds and claims must go on between them.
MOST_READING_S: Final = 0.05


class Reading:
    """Deliveries in their order until they are read. A job whose prompt lies elsewhere goes on to `fetching`."""

    def __init__(self, validation: Validation, clock: Callable[[], float], fetching: Fetching) -> None:
        self._validation = validation
        self._fetching = fetching
        self._clock = clock
        self._unread: deque[Delivery] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._unread)

    @property
    def num_bytes(self) -> int:
        """Of the messages that were not read yet."""
        return self._num_bytes

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Let these be read after the others."""
        for delivery in deliveries:
            self._unread.append(delivery)
            self._num_bytes += delivery.num_bytes

    def discard(self, unwanted: Callable[[Delivery], bool]) -> None:
        """Drop the deliveries for which `unwanted` holds (their partition went to another worker)."""
        kept = [delivery for delivery in self._unread if not unwanted(delivery)]
        self._unread, self._num_bytes = deque(), 0
        self.add(kept)

    def read(self, room_bytes: int) -> tuple[list[ReadyJob], list[Refusal]]:
        """Read until the jobs take `room_bytes`, or the portion's time is over; the jobs, and what was refused."""
        ready: list[ReadyJob] = []
        refused: list[Refusal] = []
        begun = self._clock()
        while self._unread and room_bytes > 0 and self._clock() - begun <= MOST_READING_S:
            delivery = self._unread.popleft()
            self._num_bytes -= delivery.num_bytes
            try:
                found = self._validation.read(delivery)
            except MessageError as error:
                refused.append((delivery, error))
            except AlphaloopError:
                raise
            except Exception as error:
                refused.append((delivery, unreadable(error)))
            else:
                if isinstance(found, PromptElsewhere):
                    self._fetching.add(found)
                    continue
                ready.append(found)
                room_bytes -= found.num_bytes
        return ready, refused
