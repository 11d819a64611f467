"""Whether a job may be sent to servers, and about how many tokens its prompt has."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from alphaloop.errors import InvalidField
from alphaloop.messages import Job
from worker.engine import PreparedJob, Sampling
from worker.servers.asking import refuse_settings
from worker.servers.server import Server

#: Of English text with a vocabulary of 50,000; what servers count replaces it.
_FIRST_BYTES_PER_TOKEN: Final = 4.0
#: Bytes of prompts that the first estimate weighs as much as.
_FIRST_WEIGHT: Final = 4096.0
#: Bytes that are remembered: a change of the kind of prompts is followed.
_MEMORY: Final = 1e6
#: Tokens that a chat template adds to a message, about.
_AROUND_A_MESSAGE: Final = 5


class TokenEstimate:
    """Tokens of a prompt by its bytes, learned from what servers count. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes, self._num_tokens = _FIRST_WEIGHT, _FIRST_WEIGHT / _FIRST_BYTES_PER_TOKEN

    def of(self, job: Job) -> int:
        """At least 1."""
        with self._lock:
            rate = self._num_tokens / self._num_bytes
        return max(1, round(rate * num_prompt_bytes(job)) + _AROUND_A_MESSAGE * len(job.body.messages or ()))

    def learn(self, job: Job, num_tokens: int) -> None:
        """A server counted so many tokens."""
        added = max(0, num_tokens - _AROUND_A_MESSAGE * len(job.body.messages or ()))
        num_bytes = num_prompt_bytes(job)
        with self._lock:
            fade = min(1.0, _MEMORY / (self._num_bytes + num_bytes))
            self._num_bytes = fade * self._num_bytes + num_bytes
            self._num_tokens = fade * self._num_tokens + added


def num_prompt_bytes(job: Job) -> int:
    """Bytes of the prompt's text in UTF-8."""
    texts: Iterable[str] = (
        (job.body.prompt,) if job.body.prompt is not None else (said.content for said in job.body.messages or ())
    )
    return sum(len(text.encode()) for text in texts)


def prepare(
    job: Job, sampling: Sampling, servers: Sequence[Server], *, limit: int, tokens: TokenEstimate
) -> PreparedJob:
    """The job as an engine of servers takes it; `limit` is the longest context of the servers, in tokens.

    Raises InvalidField for settings that none of the servers can follow. How long the prompt is only the servers know,
    so they refuse one that is too long.
    """
    if job.body.prompt == "":
        raise InvalidField("expected a prompt of at least one token, found none", field="body.prompt")
    refusals = [refusal_of(server, sampling) for server in servers]
    if all(refusals):
        raise next(refusal for refusal in refusals if refusal)
    fitting = replace(sampling, max_tokens=min(sampling.max_tokens, limit - 1))
    return PreparedJob(job, (), fitting, num_estimated_tokens=tokens.of(job))


def refusal_of(server: Server, sampling: Sampling) -> InvalidField | None:
    """Why the server cannot follow the settings; None where it can."""
    try:
        refuse_settings(server.kind, sampling, drafts=server.drafter is not None)
    except InvalidField as error:
        return error
    return None
