"""An engine that answers at once: one token a job, in the step after its admission. No model, no text machinery."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.decision import Decision
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import (
    CacheMemory,
    Engine,
    EngineIdentity,
    Generation,
    Load,
    PreparedJob,
    Sampling,
    SamplingDefaults,
    Step,
)
from alphaloop.messages import Job
from alphaloop.messages.capabilities import served_by

TEXT: Final = "ok"
#: What a prompt of about 400 bytes comes to. Tokenizing is the engine's work, which is not measured here.
_PROMPT: Final = tuple(range(90))
#: A job's only round is the reading of its prompt, which proposes nothing.
_COUNTS: Final = AcceptanceCounts().with_round(0, 0, num_emitted=1)
#: Every shape costs the same, so no drafter can pay; the worker still has to decide that.
_ROUND_MS: Final = 0.01


class InstantEngine(Engine):
    """`alphaloop.engine.Engine` that takes next to no time. One drafter is loaded, so deciding has something to weigh.

    `moments` holds, by job_id, the seconds since the epoch at which the job's only step began and at which its token
    was there.
    """

    identity = EngineIdentity("instant-1", "instant", "000000000000", "float32", "no-device", 4096, "no-host")
    features = served_by("own").features
    drafters: tuple[DrafterState, ...] = (DrafterState("lookup", "instant-1", 8),)
    sampling_defaults = SamplingDefaults()
    can_redraft = True

    def __init__(self, num_slots: int) -> None:
        self.moments: dict[str, tuple[float, float]] = {}
        self._num_slots = num_slots
        self._running: list[Any] = []  # each has the `job`

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        """The same tokens for every prompt."""
        return PreparedJob(job, _PROMPT, sampling)

    def has_room(self, prepared: PreparedJob) -> bool:
        """Whether a slot is free."""
        return self.load().num_free > 0

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        """Take a job in."""
        self._running.append(prepared)

    def step(self) -> Step:
        """Every admitted job ends with one token."""
        began, started = time.time(), time.perf_counter()
        jobs, self._running = self._running, []
        batch = len(jobs)
        device_s = _ROUND_MS / 1000
        finished = tuple(
            Generation(
                prepared.job.job_id,
                TEXT,
                (0,),
                "length",
                len(_PROMPT),
                _COUNTS,
                device_s,
                device_s,
                device_s / batch,
                batch,
            )
            for prepared in jobs
        )
        moments = began, time.time()
        for prepared in jobs:
            self.moments[prepared.job.job_id] = moments
        wall_s = time.perf_counter() - started
        return Step(
            finished,
            (),
            batch,
            1,
            wall_s,
            verify_s=wall_s,
            context=len(_PROMPT),
            num_prefill_tokens=batch * len(_PROMPT),
        )

    def cancel(self, job_id: str) -> bool:
        """Drop a job."""
        kept = [running for running in self._running if running.job.job_id != job_id]
        is_here, self._running = len(kept) < len(self._running), kept
        return is_here

    def abandon(self) -> None:
        """Drop every job."""
        self._running = []

    def load(self) -> Load:
        """How full the engine is."""
        return Load(len(self._running), self._num_slots)

    def memory(self) -> CacheMemory:
        """A gigabyte, of which nothing is ever taken."""
        return CacheMemory(1 << 30, 0, 1 << 30, 1000, {}, 1, 1000)

    def unserved(self, jobs: Sequence[PreparedJob]) -> Mapping[str, str]:
        """The drafter serves every job."""
        return {}

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """The same for every shape."""
        return _ROUND_MS

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """The same for every prompt."""
        return _ROUND_MS
