"""The speed-up of a vLLM server's own rounds, measured inside it. Without vLLM's own classes.

Requests with and without drafts share their rounds, so to compare one with another is biased both ways. Here all that
are on trial switch together for a few rounds, as on a device of our own: the same clock, blocks and slices
(`alphaloop/experiment/assign.py`), for the same estimator.

A drafter with a cache has to read the tokens of control rounds too, or it would draft nothing afterwards. A server
without speculation would not spend that time, so it is measured apart (`worker.py`) and taken off.

Slices go to the worker with a reply, of whichever request asks for them and ends next.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from alphaloop.experiment.assign import RoundDesign, RoundSchedule
from alphaloop.experiment.observe import SUMS, Slice
from alphaloop.experiment.rounds import FreeSequence, RoundTrials, Yielded

#: The field of a reply with the slices, inside vLLM's `kv_transfer_params`.
SLICES: Final = "alphaloop_slices"
#: A reply brings at most so many.
MOST_IN_A_REPLY: Final = 64
#: Held for replies to come. Where nobody asks, the oldest are dropped.
_MOST_HELD: Final = 4096


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step that was scheduled."""

    num_running: int
    mean_context_tokens: float
    has_prompt: bool
    is_for_cache_only: bool  #: whether its pass of the drafter serves no draft


class ServerExperiment:
    """Call `begin` before a step is scheduled, `scheduled` and `ended` with what it was. One thread owns it.

    Without a share nothing is measured.
    """

    def __init__(
        self,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._rng, self._clock, self._now = rng or random.Random(), clock, now
        self._share: float | None = None
        self._trials: RoundTrials | None = None
        self._slices: deque[Slice] = deque(maxlen=_MOST_HELD)
        self._free: Mapping[str, FreeSequence] = {}
        self._began_s, self._began_at = 0.0, now()
        self._step: StepFacts | None = None
        self._ended: tuple[Mapping[str, Yielded], float, float] | None = None  # tokens, drafter's seconds, end
        self._goes_on = False

    def share(self, control_share: float) -> None:
        """From now on control takes this share of the time of rounds on trial."""
        if control_share != self._share:
            self._share = control_share
            self._keep(self._trials.close() if self._trials is not None else ())
            self._trials = RoundTrials(RoundSchedule(RoundDesign(control_share=control_share), self._rng))
            self._free = {}

    def begin(self, free: Mapping[str, FreeSequence]) -> None:
        """A step is about to be scheduled, in which these decode: count the last one and draw the arms of this one."""
        began_s = self._clock()
        if self._trials is not None:
            self._count(self._trials, began_s)
            if free != self._free:
                self._free = dict(free)
                self._trials.consider(self._free)
            self._trials.next_round()
        self._began_s, self._began_at, self._step = began_s, self._now(), None

    def is_control(self, request_id: str) -> bool:
        """Whether the request decodes vanilla in this step because it is control."""
        return self._trials is not None and self._trials.is_control(request_id)

    def scheduled(self, facts: StepFacts) -> None:
        """What the step has in it."""
        self._step = facts

    def ended(self, yielded: Mapping[str, Yielded], *, drafter_s: float | None, goes_on: bool) -> None:
        """The step is over.

        `yielded`: by request; `drafter_s`: of the drafter's pass for its cache alone, None where nothing measures it;
        `goes_on`: whether another step follows at once, so that this round ends where that step begins.
        """
        step = self._step
        if step is None or (step.is_for_cache_only and drafter_s is None):
            self._ended = None  # its time as a vanilla round is not known
        else:
            self._ended = yielded, (drafter_s or 0.0) if step.is_for_cache_only else 0.0, self._clock()
        self._goes_on = goes_on

    def take(self) -> list[dict[str, Any]]:
        """Some of the slices that ended, as JSON; they are not kept."""
        return [as_json(self._slices.popleft()) for _ in range(min(MOST_IN_A_REPLY, len(self._slices)))]

    def _count(self, trials: RoundTrials, next_s: float) -> None:
        if self._step is None or self._ended is None:
            return
        yielded, drafter_s, end_s = self._ended
        self._ended = None
        wall_s = (next_s if self._goes_on else end_s) - self._began_s - drafter_s
        slices = trials.observe(
            yielded,
            started_at=self._began_at,
            wall_s=max(0.0, wall_s),
            num_running=self._step.num_running,
            mean_context_tokens=self._step.mean_context_tokens,
            has_prompt=self._step.has_prompt,
        )
        self._keep(slices)

    def _keep(self, slices: Sequence[Slice]) -> None:
        self._slices.extend(slices)


def as_json(part: Slice) -> dict[str, Any]:
    """A slice as replies have it."""
    return {
        "block": part.block_id,
        "subject": part.task,
        "phase": part.phase.value,
        "drafter": part.treatment.drafter,
        "num_draft_tokens": part.treatment.num_draft_tokens,
        "started_at": part.started_at.isoformat(),
        **{name: getattr(part, name) for name in SUMS},
    }
