"""The costs that decisions use: calibrated, corrected by every round, with growing doubt about unused drafters."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from alphaloop.cost import CostKind, CostPoint, CostTable
from alphaloop.cost_doubt import LogEstimate
from alphaloop.cost_state import CostBasis, CostState, with_shared_weights
from alphaloop.errors import StoreError
from worker.costs.fading import FadingCorrection, Moment
from worker.engine import Step

log = logging.getLogger(__name__)

#: A correction that moved by less is not worth a write.
_NEWS: Final = math.log(1.01)
#: A standard deviation that moved by less neither.
_DOUBT_NEWS: Final = 0.02
#: Corrections that rest on new rounds are stored at least so often, though they did not move: after a restart they are
#: as doubtful as they are old.
_STORED_EVERY_S: Final = 600.0
#: A table has the doubt of the moment when it was made; after so long without a step it is made again.
_TABLE_LASTS_S: Final = 10.0
#: Contexts are rounded to so many tokens, because a context changes a pass's time little and grows every round.
_CONTEXT_STEP: Final = 64
#: Most steps that wait to be observed. Observed together between two decisions, a step takes a quarter of the time
#: that it takes right after a pass, because a pass fills the processor's caches with weights.
_MOST_WAITING: Final = 64
#: Shapes whose calibrated time is remembered.
_MOST_KNOWN: Final = 10_000


class LiveCosts:
    """Measured points and what real rounds make of them. One thread owns it; others may ask `level` and `read_s`.

    Steps are learned from when the costs are asked for, so `level` is as of the last decision, or 64 steps old.
    `save` is called with every point whenever a correction or its doubt has moved, at most every `save_every_s`.
    Drafters named in `timed` have the times of the other one, corrections included (decoding/counts.py). `clock` tells
    seconds from any beginning.
    """

    def __init__(
        self,
        points: Sequence[CostPoint],
        *,
        half_life: int,
        save: Callable[[Sequence[CostPoint]], object],
        save_every_s: float,
        timed: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timed = dict(timed or {})
        points = [point for point in points if point.drafter not in self._timed]
        self._calibrated = CostTable(replace(point, correction=1.0) for point in points)
        self._points = self._saved = tuple(points)
        self._basis = CostBasis(self._points, self._timed)
        self._save, self._save_every_s, self._clock = save, save_every_s, clock
        self._saved_at = clock()
        self._due = self._saved_at + save_every_s
        self._num_rounds = 0  # of the target
        self._has_learned = False  # since the last save
        self._by_part = {part: [p for p in points if p.drafter == part] for part in {p.drafter for p in points}}
        self._known: dict[tuple[CostKind, str | None, int, float, int], tuple[CostPoint, float] | None] = {}
        self._corrections = {
            part: FadingCorrection(
                half_life,
                {point: LogEstimate(math.log(point.correction), point.correction_variance) for point in measured},
                self._now(),
            )
            for part, measured in self._by_part.items()
        }
        self._waiting: list[tuple[float, Step]] = []  # with the clock's seconds
        self._table: CostTable | None = None
        self._state: CostState | None = None  # that the table was made from
        self._table_at = 0.0

    @property
    def parts(self) -> tuple[str | None, ...]:
        """What was timed: None, the target, and the names of drafters; of those with the same weights one."""
        return tuple(self._corrections)

    def level(self, part: str | None) -> float:
        """How much slower than calibrated the target or a drafter is now."""
        return self._corrections[part].level(self._now(), self._towards(part)).factor

    def read_s(self, num_tokens: int) -> float:
        """Seconds in which the target reads so many tokens of a prompt, as slow as it is now; 0 if never measured."""
        ms = self._calibrated.prefill_ms(None, num_tokens)
        return ms * self.level(None) / 1000 if ms else 0.0

    @property
    def table(self) -> CostTable:
        """The costs as they are now."""
        self._learn_from_waiting()
        if self._table is None or self._clock() - self._table_at >= _TABLE_LASTS_S:
            self._state = self._now_corrected()
            self._table = self._state.table()
            self._table_at = self._clock()
        return self._table

    @property
    def state(self) -> CostState:
        """What `table` was made from when it was last asked for."""
        return self._state or self._now_corrected()

    def observe(self, step: Step) -> None:
        """Observe a step. Time that is not the draft's counts as the target's, because a vanilla round takes it too.

        A step that reads prompts beside a round is left out, because the one cannot be told from the other.
        """
        if step.batch == 0 or step.verify_s <= 0 or (step.num_prefill_tokens and step.num_positions):
            return
        self._waiting.append((self._clock(), step))
        if len(self._waiting) >= _MOST_WAITING:
            self._learn_from_waiting()

    def _learn_from_waiting(self) -> None:
        if self._waiting:
            self._table = None
        for at_s, step in self._waiting:
            self._num_rounds += not step.num_prefill_tokens
            self._learn_from(step, Moment(at_s, self._num_rounds))
        self._waiting.clear()

    def _learn_from(self, step: Step, at: Moment) -> None:
        if step.num_prefill_tokens:
            self._learn(at, CostKind.PREFILL, None, 1, step.num_prefill_tokens, 0, step.verify_s)
            return
        # A pass holds what its sequences proposed, side by side; a drafter is done when its longest proposal is.
        mean_width = step.num_positions / step.batch if step.num_positions else step.width
        context = step.context - step.context % _CONTEXT_STEP
        self._learn(at, CostKind.ROUND, None, step.batch, mean_width, context, step.verify_s + step.overhead_s)
        if step.drafter is not None and step.draft_s > 0:
            self._learn_from_draft(at, step, self._timed.get(step.drafter, step.drafter), context)

    def _learn_from_draft(self, at: Moment, step: Step, part: str, context: int) -> None:
        if not step.num_draft_prefill_tokens:
            self._learn(at, CostKind.ROUND, part, step.batch, step.width, context, step.draft_s)
            return
        # A prompt is measured up to its first token, which is the first of these drafts.
        first, all_of_them = (self._expected_ms(part, step.batch, width, context) for width in (2, step.width))
        if first is not None and all_of_them is not None and step.width > 1:
            seconds = step.draft_s - (all_of_them - first) / 1000
            if seconds > 0:
                self._learn(at, CostKind.PREFILL, part, 1, step.num_draft_prefill_tokens, 0, seconds)

    def _expected_ms(self, part: str, batch: int, width: int, context: int) -> float | None:
        """Milliseconds of a proposal, as slow as the drafter is on the whole now."""
        ms = self._calibrated.part_ms(part, batch, width, context)
        return None if ms is None else ms * self.level(part)

    def refresh(self) -> None:
        """The table is made in no time: whoever asks for it has all that was observed."""

    def save_when_due(self) -> bool:
        """Store corrections if there is news; a database that is away is tried again later. True if it was stored."""
        if self._clock() < self._due:
            return False
        self._due = self._clock() + self._save_every_s
        return self.save()

    def save(self) -> bool:
        """Store corrections if rounds have moved them since the last time; fading alone is no news."""
        self._learn_from_waiting()
        points = self._now_corrected().points()
        is_old = self._clock() - self._saved_at >= _STORED_EVERY_S
        if not self._has_learned or not (is_old or any(map(_is_news, points, self._saved))):
            return False
        try:
            self._save(with_shared_weights(points, self._timed))
        except StoreError as error:
            log.warning("corrected costs not stored: %s", error.message, extra={"action": "costs_not_saved"})
            return False
        self._saved, self._saved_at, self._has_learned = points, self._clock(), False
        return True

    def _learn(
        self, at: Moment, kind: CostKind, part: str | None, batch: int, width: float, context: int, seconds: float
    ) -> None:
        self._has_learned = True
        shape = (kind, part, batch, width, context)
        if shape not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[shape] = self._calibrated_for(*shape)
        if (known := self._known[shape]) is not None:
            nearest, ms = known
            self._corrections[part].observe(nearest, 1000 * seconds / ms, at, self._towards(part))

    def _calibrated_for(
        self, kind: CostKind, part: str | None, batch: int, width: float, context: int
    ) -> tuple[CostPoint, float] | None:
        """The measured point of the most similar shape, and the milliseconds calibrated for this one; None without.

        What a point lacks or has too much is counted in doublings.
        """
        if kind is CostKind.PREFILL:
            ms: float | None = self._calibrated.prefill_ms(part, width)
        else:
            ms = self._calibrated.part_ms(part, batch, width, context)
        if not ms:
            return None

        def distance(point: CostPoint) -> float:
            sizes = zip((point.batch, point.width, point.context), (batch, width, context), strict=True)
            return sum(abs(math.log((one + 1) / (other + 1))) for one, other in sizes)

        return min((point for point in self._by_part[part] if point.kind is kind), key=distance), ms

    def _now_corrected(self) -> CostState:
        now = self._now()
        return CostState(
            self._basis,
            {part: its.level(now, self._towards(part)) for part, its in self._corrections.items()},
            tuple(self._corrections[point.drafter].deviation(point) for point in self._points),
        )

    def _now(self) -> Moment:
        return Moment(self._clock(), self._num_rounds)

    def _towards(self, part: str | None) -> float | None:
        """ln(the level) that a drafter fades towards while it is not used; None for the target."""
        if part is None:
            return None
        return self._corrections[None].log_level if None in self._corrections else 0.0


def _is_news(now: CostPoint, then: CostPoint) -> bool:
    has_moved = abs(math.log(now.correction / then.correction)) >= _NEWS
    return has_moved or abs(math.sqrt(now.correction_variance) - math.sqrt(then.correction_variance)) >= _DOUBT_NEWS
