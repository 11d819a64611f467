"""What a vLLM server's own steps take and what drafts gain in them, measured inside it. Without vLLM's own classes.

*Times.* A step takes its drafter's passes, as many as its longest draft has tokens, and the target's pass over all its
positions. Both are added up by shape: with them the worker decides as on a device of its own.

*The speed-up.* Requests with and without drafts share their rounds, so to compare one with another is biased both
ways. Here all that are on trial switch together for a few rounds, as on a device of our own: the same clock, blocks and
slices (`alphaloop/experiment/assign.py`), for the same estimator.

A drafter with a cache has to read the tokens of control rounds too, or it would draft nothing afterwards. A server
without speculation would not spend that time, so it is measured apart (`worker.py`) and taken off.

Both go to the worker with a reply, of whichever request asks for them and ends next.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from alphaloop.experiment.assign import RoundDesign, RoundSchedule
from alphaloop.experiment.observe import SUMS, Slice
from alphaloop.experiment.rounds import FreeSequence, RoundTrials, Yielded

#: The fields of a reply, inside vLLM's `kv_transfer_params`.
SLICES: Final = "alphaloop_slices"
STEPS: Final = "alphaloop_steps"
#: Most of each that a reply brings.
MOST_IN_A_REPLY: Final = 64
#: Slices held for replies to come. Where no request asks, the oldest are dropped.
_MOST_HELD: Final = 4096
#: Tokens: steps of contexts nearer to each other are added up.
_CONTEXT_STEP: Final = 256


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step that was scheduled."""

    num_running: int
    mean_context_tokens: float
    has_prompt: bool
    num_positions: int  #: that the target reads, of all requests
    num_drafted: int = 0  #: tokens of a request that the server's drafter proposes after it; 0: it rests, or is none
    is_for_cache_only: bool = False  #: whether the drafter's pass serves no draft


@dataclass(frozen=True, slots=True)
class DrafterTime:
    """What the server's drafter took in a step."""

    num_tokens: int  #: that it proposed for each request
    seconds: float


@dataclass(slots=True)
class StepTimes:
    """Steps of one shape that read no prompt, added up."""

    batch: int  #: requests
    num_drafted: int
    num_steps: int = 0
    num_positions: int = 0
    context: float = 0.0  #: Σ of the mean tokens of context
    wall_s: float = 0.0
    drafter_s: float = 0.0


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
        self._times: dict[tuple[int, int, int, int], StepTimes] = {}
        self._step: StepFacts | None = None
        self._ended: _Ended | None = None

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
        self._count(began_s)
        if self._trials is not None:
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

    def ended(self, yielded: Mapping[str, Yielded], *, drafter: DrafterTime | None, goes_on: bool) -> None:
        """The step is over.

        `yielded`: by request; `drafter`: None where nothing measures it; `goes_on`: whether another step follows at
        once, so that this round ends where that step begins.
        """
        self._ended = _Ended(yielded, drafter, self._clock(), goes_on)

    def take(self) -> dict[str, Any]:
        """What is new, by the fields of a reply; it is not kept."""
        taken: dict[str, Any] = {}
        if self._slices:
            num = min(MOST_IN_A_REPLY, len(self._slices))
            taken[SLICES] = [as_json(self._slices.popleft()) for _ in range(num)]
        if self._times:
            shapes = [*self._times][:MOST_IN_A_REPLY]
            taken[STEPS] = [asdict(self._times.pop(shape)) for shape in shapes]
        return taken

    def _count(self, next_s: float) -> None:
        step, ended, self._ended = self._step, self._ended, None
        if step is None or ended is None:
            return
        wall_s = (next_s if ended.goes_on else ended.at_s) - self._began_s
        drafter_s = 0.0
        if step.num_drafted:
            if ended.drafter is None or ended.drafter.num_tokens != step.num_drafted:
                return  # how long the drafter took is not known
            drafter_s = ended.drafter.seconds
        if not step.has_prompt:
            self._time(step, wall_s, drafter_s)
        if self._trials is not None:
            slices = self._trials.observe(
                ended.yielded,
                started_at=self._began_at,
                wall_s=max(0.0, wall_s - drafter_s * step.is_for_cache_only),
                num_running=step.num_running,
                mean_context_tokens=step.mean_context_tokens,
                has_prompt=step.has_prompt,
            )
            self._keep(slices)

    def _time(self, step: StepFacts, wall_s: float, drafter_s: float) -> None:
        batch, drafted = step.num_running, step.num_drafted
        shape = batch, drafted, step.num_positions, int(step.mean_context_tokens) // _CONTEXT_STEP
        if shape not in self._times and len(self._times) >= _MOST_HELD:
            self._times.pop(next(iter(self._times)))
        times = self._times.setdefault(shape, StepTimes(batch, drafted))
        times.num_steps += 1
        times.num_positions += step.num_positions
        times.context += step.mean_context_tokens
        times.wall_s += wall_s
        times.drafter_s += drafter_s

    def _keep(self, slices: Sequence[Slice]) -> None:
        self._slices.extend(slices)


@dataclass(frozen=True, slots=True)
class _Ended:
    yielded: Mapping[str, Yielded]
    drafter: DrafterTime | None
    at_s: float
    goes_on: bool


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
