"""Tells a job that cannot be decoded from an engine that cannot decode: after a failure the engine is tested."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from alphaloop.deciding.policy import Decision, DraftSetting, Reason
from alphaloop.errors import EngineSick, reason_of
from alphaloop.liveness import beat
from alphaloop.messages import Body, Job, Mode, Purpose
from worker.engine import Engine, PreparedJob, Sampling

log = logging.getLogger(__name__)

#: So many failed jobs in a row, each followed by a failed test, and the engine is sick.
MOST_IN_A_ROW: Final = 3
#: Output of a test: enough rounds that a drafter drafts too.
NUM_TOKENS: Final = 16
_NAME: Final = "self-test"
_PROMPT: Final = "one two three four one two three four one two"


class SelfTest:
    """After a job failed alone, the engine decodes a text that it must be able to decode, in the same way.

    The text is the beginning of the last job that succeeded here, or a fixed prompt before the first one. If the test
    passes, the failure was the job's. If the test fails too, nothing is said against the job, and it is tried again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._job = Job(job_id=_NAME, task=_NAME, body=Body(prompt=_PROMPT), purpose=Purpose.CONTROL)
        self._known = engine.prepare(self._job, Sampling(max_tokens=NUM_TOKENS, temperature=0.0))
        self._num_failed_in_a_row = 0
        self._error = ""

    def worked(self, prepared: PreparedJob) -> None:
        """The engine decoded this job to its end."""
        self._known = prepared
        self._num_failed_in_a_row = 0

    def is_job_to_blame(self, job_id: str, setting: DraftSetting) -> bool:
        """Test the engine, which is empty, because this job failed alone while it drafted as `setting` says.

        True: the failure is the job's. False: the engine failed the test too, so the job is to be tried again.
        """
        error = self._decode(setting)
        if error is None:
            self._num_failed_in_a_row = 0
            return True
        self._num_failed_in_a_row += 1
        self._error = error
        told = {"job_id": job_id, "num_in_a_row": self._num_failed_in_a_row}
        log.error("a job failed, and then the self-test: %s", error, extra={"action": "self_test_failed", **told})
        return False

    def check(self) -> None:
        """Raise EngineSick when MOST_IN_A_ROW jobs failed, and the test after each of them, without a success."""
        if self._num_failed_in_a_row >= MOST_IN_A_ROW:
            num_jobs = self._num_failed_in_a_row
            raise EngineSick(
                f"{num_jobs} jobs in a row failed, and after each of them the self-test: {self._error}",
                hint="see docs/guides/operate.md, a worker ended with code 3",
            )

    def _decode(self, setting: DraftSetting) -> str | None:
        """What went wrong; None when the text came to its end."""
        mode = Mode.SPECULATIVE if setting.num_draft_tokens else Mode.VANILLA
        decision = Decision(mode, setting.drafter, None, setting.num_draft_tokens, Reason.CONTROL, "self-test")
        sampling = replace(self._known.sampling, max_tokens=min(NUM_TOKENS, self._known.sampling.max_tokens))
        try:
            self._engine.abandon()
            self._engine.admit(PreparedJob(self._job, self._known.token_ids, sampling), decision)
            while self._engine.load().num_running:
                beat()
                self._engine.step()
        except Exception as error:
            return reason_of(error)
        return None
