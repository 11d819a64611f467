"""Equal work is done once: claimed jobs whose text is recorded for an equal job are not decoded.

Their way is that of every job: claimed, recorded with a result of their own in one transaction, published. Only the
engine does not see them. Jobs that are equal and run at the same time are each decoded, because none has a text yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import partial

from pydantic import ValidationError

from alphaloop.errors import StoreError
from alphaloop.messages import Result
from alphaloop.store.reuse import ReusableText, Reused, ReuseStore
from worker.background import Retry
from worker.claims import AnsweredEqual, ClaimedJob, Claims

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Reusing:
    """Answers claimed jobs from what is recorded."""

    store: ReuseStore
    _: KW_ONLY
    retry: Retry
    now: Callable[[], datetime]

    def answer(self, claims: Claims) -> None:
        """Move the jobs that a recorded text answers from `to_decode` to `reused`. Without an answer they are decoded.

        A database that is away is waited for.
        """
        if not (keys := {claimed.ready.reuse.key for claimed in claims.to_decode if claimed.ready.reuse}):
            return
        try:
            texts = self.retry.until_done("reuse", partial(self.store.find, keys))
        except StoreError as error:
            log.warning("no text is reused: %s", error.message, extra={"action": "reuse_failed"})
            return
        now = self.now()
        answered = [answer for claimed in claims.to_decode if (answer := _answer(claimed, texts, now)) is not None]
        if answered:
            gone = {answer.claimed.job_id for answer in answered}
            claims.to_decode = [claimed for claimed in claims.to_decode if claimed.job_id not in gone]
            claims.reused += answered


def _answer(claimed: ClaimedJob, texts: dict[bytes, ReusableText], now: datetime) -> AnsweredEqual | None:
    """The answer to a job; None without one, and where the text is too old or lies elsewhere, where it may go first."""
    rule, job = claimed.ready.reuse, claimed.ready.job
    if rule is None or (recorded := texts.get(rule.key)) is None or recorded.decoded_at < now - rule.max_age:
        return None
    try:
        result = Result.decode(recorded.outcome)
    except ValidationError:
        return None
    if result.is_elsewhere or not result.messages:
        return None
    source = Reused(recorded.job_id, job.task, job.segment or "", recorded.decoded_at)
    return AnsweredEqual(claimed, source, result)
