"""What becomes of results that Kafka refuses, so that the recorded outcome and what is published agree."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from pydantic import ValidationError

from alphaloop.claim_check.store import ContentStore, text_by_reference
from alphaloop.errors import ContentStoreUnavailable, MessageRefused, MessageTooLarge
from alphaloop.liveness import beat
from alphaloop.messages import Failure, Result, Status
from alphaloop.store.outbox import OutboxMessage

log = logging.getLogger(__name__)

TOO_LARGE: Final = "result_too_large"
REFUSED: Final = "result_refused"
#: What else was done with a result that is too large, beside OnRefusal.
BY_REFERENCE: Final = "by_reference"  #: its text lies in the store of contents
POSTPONED: Final = "postponed"  #: that store is away


class OnRefusal(StrEnum):
    """What is done with a result if Kafka refuses it."""

    REPLACE = "replaced"  #: nobody has seen it: a failure is recorded and published in its place
    SET_ASIDE = "set_aside"  #: somebody may have seen it, or it is such a failure itself: a person has to decide
    LEAVE = "not_repeated"  #: a repeated answer: the first one was published, or its row in the outbox is dealt with


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A result on its way to Kafka."""

    message: OutboxMessage
    on_refusal: OnRefusal


class Store(Protocol):
    """What is needed of alphaloop.store.outbox.RefusedResultStore."""

    def replace(self, row_id: int, results: Mapping[str, bytes]) -> set[str]: ...
    def refer(self, row_id: int, results: Mapping[str, bytes], urls: Mapping[str, str]) -> set[str]: ...
    def postpone(self, row_id: int, job_ids: Collection[str]) -> set[str]: ...
    def set_aside(self, row_id: int, because: Mapping[str, str]) -> set[str]: ...


class RefusedResults:
    """Settles refused results; `count` is told the code and what was done, of each.

    With `contents`, the text of a result that is too large lies there, and the result refers to it. While that store is
    away the result waits in the outbox, and the others go on.
    """

    def __init__(self, store: Store, count: Callable[[str, str], None], contents: ContentStore | None = None) -> None:
        self._store = store
        self._count = count
        self._contents = contents

    def settle(self, refused: Sequence[tuple[Outgoing, MessageRefused]]) -> list[Outgoing]:
        """Record what becomes of them; returns what is to be published instead. Raises StoreError.

        May be called again for the same results after an error.
        """
        instead, refused = self._moved(refused)
        replaced: dict[int, dict[str, bytes]] = defaultdict(dict)
        aside: dict[int, dict[str, str]] = defaultdict(dict)
        why = {outgoing.message.job_id: error for outgoing, error in refused}
        messages = {outgoing.message.job_id: outgoing.message for outgoing, _ in refused}
        for outgoing, error in refused:
            message = outgoing.message
            failure = failure_instead(message, error) if outgoing.on_refusal is OnRefusal.REPLACE else None
            if failure is not None:
                replaced[message.id][message.job_id] = failure
            elif outgoing.on_refusal is OnRefusal.LEAVE:
                self._tell(message.job_id, error, OnRefusal.LEAVE)
            else:
                aside[message.id][message.job_id] = error.message
        for row_id, job_ids in aside.items():
            for job_id in sorted(self._store.set_aside(row_id, job_ids)):
                self._tell(job_id, why[job_id], OnRefusal.SET_ASIDE)
        for row_id, results in replaced.items():
            for job_id in sorted(self._store.replace(row_id, results)):
                message = messages[job_id]._replace(value=results[job_id])
                instead.append(Outgoing(message, OnRefusal.SET_ASIDE))
                self._tell(job_id, why[job_id], OnRefusal.REPLACE)
        return instead

    def _moved(
        self, refused: Sequence[tuple[Outgoing, MessageRefused]]
    ) -> tuple[list[Outgoing], list[tuple[Outgoing, MessageRefused]]]:
        """Move texts that make results too large into the store; returns the smaller results, and what is left."""
        instead: list[Outgoing] = []
        left: list[tuple[Outgoing, MessageRefused]] = []
        for outgoing, error in refused:
            message, contents = outgoing.message, self._contents
            result = _with_text(message) if outgoing.on_refusal is not OnRefusal.LEAVE else None
            if contents is None or result is None or not isinstance(error, MessageTooLarge):
                left.append((outgoing, error))
                continue
            beat()  # each text may take as long as the store may
            try:
                smaller = text_by_reference(result, contents)
            except ContentStoreUnavailable as away:
                log.warning(
                    "a result waits: %s", away.message, extra={"action": "result_waits", "job_id": result.job_id}
                )
                if self._store.postpone(message.id, [result.job_id]):
                    self._count(_code(error), POSTPONED)
                continue
            value, url = smaller.encode(), smaller.text_ref.url if smaller.text_ref else ""
            if self._store.refer(message.id, {result.job_id: value}, {result.job_id: url}):
                instead.append(dataclasses.replace(outgoing, message=message._replace(value=value)))
                self._count(_code(error), BY_REFERENCE)
        return instead, left

    def _tell(self, job_id: str, error: MessageRefused, done: OnRefusal) -> None:
        code = _code(error)
        self._count(code, done.value)
        told = {"action": f"result_{done.value}", "job_id": job_id, "code": code, "hint": error.hint or ""}
        log.error("a result was refused and %s: %s", done.value.replace("_", " "), error.message, extra=told)


def _with_text(message: OutboxMessage) -> Result | None:
    """The result, if it has a text that could lie elsewhere."""
    try:
        result = Result.decode(message.value)
    except ValidationError:
        return None
    return result if result.text else None


def failure_instead(message: OutboxMessage, error: MessageRefused) -> bytes | None:
    """The result that says why the refused one cannot be read; None if that one is no result."""
    try:
        result = Result.decode(message.value)
    except ValidationError:
        return None
    failure = Failure(
        code=_code(error),
        message=f"Kafka refused the result of {len(message.value)} bytes: {error.message}",
        hint="ask for fewer tokens; an operator can read the text and raise the topic's limit",
    )
    kept = {"status": Status.FAILED, "text": None, "finish_reason": None, "decoding": None, "error": failure}
    return result.model_copy(update=kept).encode()


def _code(error: MessageRefused) -> str:
    return TOO_LARGE if isinstance(error, MessageTooLarge) else REFUSED
