"""Which contents go where: prompts of jobs and texts of results, under names that tell their content or their job."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import datetime
from typing import Final

from alphaloop.claim_check.store import ContentStore
from alphaloop.messages import Job, Result, encode_job, encode_prompt

_BODIES: Final = "bodies"
_RESULTS: Final = "results"
_NUM_FOLDERS: Final = 256
#: A prompt, or what a writer left of one when it was killed.
_PROMPT: Final = re.compile(r"[0-9a-f]{64}\.json(\.[0-9a-f]{32}\.part)?")
#: Shares no factor with the number of folders, so that a day's runs begin all over it.
_STRIDE: Final = 37


def by_reference(job: Job, max_bytes: int, store: ContentStore | None) -> Job:
    """The job as it is sent: its prompt in the store if its message would be larger than `max_bytes`.

    The prompt is stored under its digest, so that the same job sent twice has the same reference. Without a store the
    job stays as it is, and a worker refuses it. Raises ContentStoreUnavailable.
    """
    if store is None or job.body_ref is not None or len(encode_job(job)) <= max_bytes:
        return job
    content = encode_prompt(job)
    digest = hashlib.sha256(content).hexdigest()
    reference = store.write(f"{_BODIES}/{digest[:2]}/{digest}.json", content)
    return job.model_copy(update={"body_ref": reference})


def drop_prompts(store: ContentStore, before: datetime, time_is_up: Callable[[], bool]) -> tuple[int, bool]:
    """Delete what `by_reference` has written and nobody wrote again since `before`; how much, and whether that is all.

    Runs of different hours begin at different folders, so that each folder has its turn where the time is up early.
    Raises ContentStoreUnavailable.
    """
    num_dropped = 0
    first = int(before.timestamp() // 3600) * _STRIDE
    for number in range(first, first + _NUM_FOLDERS):
        if time_is_up():
            return num_dropped, False
        for url in store.written_before(f"{_BODIES}/{number % _NUM_FOLDERS:02x}", before):
            if not _PROMPT.fullmatch(url.rpartition("/")[2]):
                continue
            if time_is_up():
                return num_dropped, False
            store.delete(url, written_before=before)
            num_dropped += 1
    return num_dropped, True


def text_by_reference(result: Result, store: ContentStore) -> Result:
    """The result with its text in the store. Its name is of job and attempt: a repeat writes the same."""
    digest = hashlib.sha256(result.job_id.encode()).hexdigest()
    text = (result.text or "").encode()
    reference = store.write(f"{_RESULTS}/{digest[:2]}/{digest}.{result.attempt}.txt", text)
    return result.model_copy(update={"text": None, "text_ref": reference})


def with_text(result: Result, store: ContentStore | None) -> Result:
    """The result with its text, wherever that lies; as it is without a store. Raises ContentError, InvalidField."""
    if result.text_ref is None or store is None:
        return result
    return result.model_copy(update={"text": store.read(result.text_ref).decode(), "text_ref": None})
