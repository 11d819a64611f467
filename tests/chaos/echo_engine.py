"""The null engine: no model, and a text that is a function of the prompt, one word a round."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.decision import Decision
from alphaloop.engine import Generation, PreparedJob, Step, TokenDelta
from alphaloop.errors import DecodeFailed
from benchmarks.pipeline.instant_engine import InstantEngine
from tests.chaos.work import KILLER_MARK, num_failures, text_of


class EchoEngine(InstantEngine):
    """An instant engine whose rounds take `round_s`, so that faults meet running jobs.

    It sleeps for that time, because a GPU also leaves the processor to others. A planted job fails as often as its
    prompt says: `failures` is a folder in which the engines of all processes count them, one file a job.
    """

    def __init__(self, num_slots: int, *, round_s: float, failures: Path) -> None:
        super().__init__(num_slots)
        self._round_s = round_s
        self._failures = failures
        self._num_rounds: dict[str, int] = {}

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        """Take a job in; an earlier attempt of it leaves nothing behind."""
        super().admit(prepared, decision)
        self._num_rounds[prepared.job.job_id] = 0

    def step(self) -> Step:
        """One word of every text. A prompt with KILLER_MARK ends the process, as a fault of a driver would.

        Raises DecodeFailed while a job is to fail. Only a failure of a job that runs alone is one of its failures.
        """
        started = time.perf_counter()
        prompts = {prepared.job.job_id: _prompt(prepared) for prepared in self._running}
        if any(KILLER_MARK in prompt for prompt in prompts.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        for job_id, prompt in prompts.items():
            self._fail(job_id, num_failures(prompt), is_alone=len(prompts) == 1)
        time.sleep(self._round_s)
        deltas, finished, batch = [], [], len(self._running)
        wall_s = time.perf_counter() - started
        for prepared in tuple(self._running):
            job_id = prepared.job.job_id
            text, number = text_of(prompts[job_id]), self._num_rounds[job_id]
            words = text.split(" ")
            deltas.append(TokenDelta(job_id, words[number] if number == 0 else f" {words[number]}", number))
            self._num_rounds[job_id] += 1
            if number + 1 == len(words):
                finished.append(self._generation(prepared, text, len(words), wall_s, batch))
                self._running.remove(prepared)
                del self._num_rounds[job_id]
        num_positions = len(prompts)
        return Step(tuple(finished), tuple(deltas), batch, 1, wall_s, verify_s=wall_s, num_positions=num_positions)

    def _fail(self, job_id: str, num_times: int, *, is_alone: bool) -> None:
        if not num_times:
            return
        counted = self._failures / job_id
        if counted.exists() and counted.stat().st_size >= num_times:
            return
        if is_alone:
            with counted.open("ab") as file:
                file.write(b".")
        raise DecodeFailed("told to fail")

    def _generation(self, prepared: PreparedJob, text: str, num_words: int, round_s: float, batch: int) -> Generation:
        return Generation(
            prepared.job.job_id,
            text,
            tuple(range(num_words)),
            "length",
            len(prepared.token_ids),
            AcceptanceCounts(num_words, num_words),
            time_to_first_token_s=round_s,
            wall_s=num_words * round_s,
            device_s=num_words * round_s / batch,
            batch_size=batch,
            num_vanilla_rounds=num_words,
        )


def _prompt(prepared: PreparedJob) -> str:
    body = prepared.job.body
    return body.messages[-1].content if body.messages else body.prompt or ""
