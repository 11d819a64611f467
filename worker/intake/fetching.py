"""Prompts that lie outside Kafka: read by threads of their own, so that a slow store holds up no other job."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from alphaloop.errors import (
    AlphaloopError,
    ContentError,
    ContentStoreUnavailable,
    InvalidField,
    MalformedMessage,
    MessageError,
    reason_of,
)
from alphaloop.messages import ContentReference, Failure
from worker.intake.delivery import Delivery
from worker.intake.validation import PromptElsewhere, ReadyJob, Validation
from worker.retry import Retry

log = logging.getLogger(__name__)

Refusal = tuple[Delivery, MessageError]


class Contents(Protocol):
    """What is needed of alphaloop.claim_check.store.ContentStore."""

    def read(self, reference: ContentReference) -> bytes: ...


class Fetching:
    """Jobs whose prompts are being read. The feed's thread owns it; each prompt is read in a thread of its own.

    A store that is away is asked again until it answers: nothing is claimed yet, so that costs the jobs no try. A
    prompt that is missing or altered is the job's own failure.
    """

    def __init__(
        self,
        contents: Contents | None,
        validation: Validation,
        *,
        num_at_once: int,
        retry: Retry,
        wake: Callable[[], object],
    ) -> None:
        """`wake` is called from the reading threads each time that a prompt is there."""
        self._contents = contents
        self._validation = validation
        self._num_at_once = num_at_once
        self._retry = retry
        self._wake = wake
        self._waiting: deque[PromptElsewhere] = deque()
        self._num_running = 0
        self._done: SimpleQueue[tuple[PromptElsewhere, bytes | Failure | None]] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._waiting) + self._num_running

    def add(self, waiting: PromptElsewhere) -> None:
        """Let this prompt be read after the others."""
        self._waiting.append(waiting)

    def discard(self, unwanted: Callable[[Delivery], bool]) -> None:
        """Drop the jobs for which `unwanted` holds and whose prompts are not being read yet."""
        self._waiting = deque(one for one in self._waiting if not unwanted(one.delivery))

    def take(self, room_bytes: int) -> tuple[list[ReadyJob], list[Refusal]]:
        """The jobs whose prompts have come, and what was refused; begins to read the next ones while there is room."""
        ready: list[ReadyJob] = []
        refused: list[Refusal] = []
        for waiting, content in self._arrived():
            try:
                job = self._validation.with_prompt(waiting, content)
            except MessageError as error:
                refused.append((waiting.delivery, error))
            except AlphaloopError:
                raise
            except Exception as error:
                refused.append((waiting.delivery, unreadable(error)))
            else:
                ready.append(job)
                room_bytes -= job.num_bytes
        while self._waiting and self._num_running < self._num_at_once and room_bytes > 0:
            waiting = self._waiting.popleft()
            self._num_running += 1
            room_bytes -= waiting.reference.num_bytes
            # A daemon, because a folder on a network may never answer and must not keep the process.
            threading.Thread(target=self._fetch, args=(waiting,), name="content", daemon=True).start()
        return ready, refused

    def _arrived(self) -> list[tuple[PromptElsewhere, bytes | Failure]]:
        found: list[tuple[PromptElsewhere, bytes | Failure]] = []
        try:
            while True:
                waiting, content = self._done.get_nowait()
                self._num_running -= 1
                if content is not None:
                    found.append((waiting, content))
        except Empty:
            return found

    def _fetch(self, waiting: PromptElsewhere) -> None:
        """Read one prompt; of a worker that ends meanwhile there is none, and Kafka delivers the job again."""
        self._done.put((waiting, self._read(waiting.reference)))
        self._wake()

    def _read(self, reference: ContentReference) -> bytes | Failure | None:
        assert self._contents is not None  # noqa: S101 - without a store, validation refuses references
        contents = self._contents
        try:
            return self._retry.until_done("read a prompt", lambda: contents.read(reference))
        except ContentStoreUnavailable:
            return None
        except (ContentError, InvalidField) as error:
            return Failure(code=error.code, message=error.message, hint=error.hint)


def unreadable(error: Exception) -> MalformedMessage:
    """The refusal of a message on which our own code raised, so that it does not stop its partition.

    The exception's text is left out of the dead letter, because it may quote the prompt. The log leaves it out too.
    """
    log.error("a message could not be read", exc_info=error, extra={"action": "validation_failed"})
    return MalformedMessage(f"could not be read: {reason_of(error)}")
