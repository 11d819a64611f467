"""Decoding the prompts: every turn in full, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from alphaloop.errors import DecodeFailed
from alphaloop.payoff.figures import VANILLA, Candidate
from worker.engine import Engine, Generation, PreparedJob, Step
from worker.measuring.candidates import Turn
from worker.measuring.observations import Measured, Observation, times_of

WARM_UP_TOKENS: Final = 16


class Interrupted(Exception):
    """The run was told to stop; the unfinished turn is dropped."""


class Runner:
    """Drives the engine. `should_stop` is asked between two steps."""

    def __init__(
        self,
        engine: Engine,
        prepared: Sequence[PreparedJob],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._prepared = prepared
        self._should_stop = should_stop
        self._clock = clock

    def warm_up(self, block: Sequence[int], candidates: Sequence[Candidate]) -> None:
        """Decode shortly in every way, so that no measured time includes a device's first pass of a shape.

        Raises Interrupted or DecodeFailed.
        """
        jobs = [self._prepared[number] for number in block]
        short = [
            replace(job, sampling=replace(job.sampling, max_tokens=min(job.sampling.max_tokens, WARM_UP_TOKENS)))
            for job in jobs
        ]
        for candidate in (VANILLA, *candidates):
            self.decode(short, candidate)

    def run(self, turns: Iterable[Turn], measured: Measured, on_decoded: Callable[[int], None]) -> None:
        """Fill `measured` turn by turn; `on_decoded` is told how many texts were added.

        Ends early, with `is_interrupted`, when told to stop. Raises DecodeFailed; the turns before are kept.
        """
        for turn in turns:
            seen: dict[Candidate, Observation] = {}
            try:
                for candidate in turn.candidates:
                    seen[candidate] = self._observe(turn, candidate)
                    on_decoded(len(turn.prompts))
            except Interrupted:
                measured.is_interrupted = True
                return
            measured.turns.append(seen)

    def decode(self, jobs: Sequence[PreparedJob], candidate: Candidate) -> tuple[list[Generation], list[Step], float]:
        """Texts in the order of `jobs`, the steps, and seconds in all. Raises Interrupted or DecodeFailed.

        The engine is empty before and after. Where memory has no room for all jobs at once the rest follow.
        """
        waiting = list(jobs)
        steps: list[Step] = []
        found: dict[str, Generation] = {}
        began = self._clock()
        try:
            while waiting or len(found) < len(jobs):
                while waiting and self._engine.has_room(waiting[0]):
                    self._engine.admit(waiting.pop(0), candidate.decision)
                if self._should_stop():
                    raise Interrupted
                steps.append(step := self._engine.step())
                found |= {generation.job_id: generation for generation in step.finished}
                for failed in step.failed:
                    raise DecodeFailed(failed.error.message, hint=failed.error.hint)
                waiting += [job for job in jobs if job.job.job_id in step.interrupted]
        except (Interrupted, DecodeFailed):
            self._engine.abandon()
            raise
        wall_s = self._clock() - began
        return [found[job.job.job_id] for job in jobs], steps, wall_s

    def _observe(self, turn: Turn, candidate: Candidate) -> Observation:
        generations, steps, wall_s = self.decode([self._prepared[number] for number in turn.prompts], candidate)
        numbered = tuple(zip(turn.prompts, generations, strict=True))
        return Observation(candidate, turn.block, turn.repeat, numbered, times_of(steps), wall_s)
