"""One block of the experiment over whole requests: a treatment window, a control slice, a treatment window."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Final

from alphaloop.errors import ConfigError
from alphaloop.switchback.requests import RequestFacts, Trial
from alphaloop.switchback.rounds import Tally
from alphaloop.switchback.slices import Phase, Slice


@dataclass(frozen=True, slots=True)
class RequestDesign:
    """How many requests the parts of a block have, and how much of the time control takes.

    The numbers were chosen by simulation (docs/concepts/switchback.md). Raises ConfigError.
    """

    control_share: float = 0.02  #: of the time of requests on trial, weighted by how many run; 0: no trials
    control_turnover: float = 3.0  #: requests of a control slice, over those that run
    window_turnover: float = 2.0  #: requests of each of the two treatment windows, over those that run
    least_counted: int = 8  #: requests that each of them has at least
    left_share: float = 0.1  #: vanilla requests that may still run when the window after control begins
    most_waited: float = 4.0  #: that window begins after so many starts in any case, over those of a window

    def __post_init__(self) -> None:
        if not 0 <= self.control_share <= 0.5:
            raise ConfigError(
                f"expected a control share of 0 to 0.5, found {self.control_share}",
                hint="more vanilla requests than that leave too few of the treatment beside them",
            )

    def num_control(self, num_running: int) -> int:
        """Requests of a control slice while so many run."""
        return max(self.least_counted, round(self.control_turnover * num_running))

    def num_window(self, num_running: int) -> int:
        """Requests of a window while so many run."""
        return max(self.least_counted, round(self.window_turnover * num_running))


class RequestStage(IntEnum):
    """Where a block stands, in order."""

    CONTROL = 0  #: requests start vanilla
    RETURNING = 1  #: requests start in treatment again, and the window does not count them: vanilla ones run on
    AFTER = 2  #: requests start in treatment, and the window counts them
    ENDED = 3


_COUNTED: Final = {RequestStage.CONTROL: Phase.CONTROL, RequestStage.AFTER: Phase.AFTER}
#: Slices of a control phase, for each doubling of the load.
_BINS: Final = 2


class RequestBlock:
    """A block that is running. All subjects switch together.

    The window before is of the requests that ended last when the block began; that after, of those that start first
    when nearly all vanilla requests have ended. Vanilla requests count from the switch on, while the load moves to
    their endpoint: how it slows them is seen there, and is taken out (load_law.py).
    """

    def __init__(
        self,
        before: Iterable[tuple[Trial, RequestFacts]],
        new_id: Callable[[], str],
        design: RequestDesign,
        num_running: int,
    ) -> None:
        self.stage = RequestStage.CONTROL
        self.spent_s = 0.0  #: on control
        self._left_share = design.left_share
        num_window = design.num_window(num_running)
        self._lengths = {
            RequestStage.CONTROL: design.num_control(num_running),
            RequestStage.RETURNING: round(design.most_waited * num_window),
            RequestStage.AFTER: num_window,
        }
        self._ids: dict[Trial, str] = defaultdict(new_id)
        self._facts: dict[Trial, dict[Phase, list[RequestFacts]]] = defaultdict(lambda: defaultdict(list))
        self._num_open = 0  # counted requests that run
        self._num_started = 0  # of this stage
        for trial, facts in before:
            self._facts[trial][Phase.BEFORE].append(facts)

    def id_of(self, trial: Trial) -> str:
        """The id of the trial's slices."""
        return self._ids[trial]

    @property
    def is_vanilla(self) -> bool:
        """Whether the next request starts vanilla."""
        return self.stage is RequestStage.CONTROL

    @property
    def is_disturbed(self) -> bool:
        """Whether the load is on its way between endpoints."""
        return self.stage <= RequestStage.RETURNING

    @property
    def is_over(self) -> bool:
        """Whether another block may begin."""
        return self.stage is RequestStage.ENDED

    @property
    def is_whole(self) -> bool:
        """Whether it is over, and all requests that it counts have ended."""
        return self.is_over and not self._num_open

    def start(self) -> Phase | None:
        """A request starts: the slice that counts it, if one does."""
        self._num_started += 1
        phase = _COUNTED.get(self.stage)
        self._num_open += phase is not None
        return phase

    def end(self, trial: Trial, phase: Phase, facts: RequestFacts | None) -> None:
        """A counted request ended; without facts where nothing is known of it."""
        self._num_open -= 1
        if facts is not None:
            self._facts[trial][phase].append(facts)

    def advance(self, num_treated: int, num_control: int) -> None:
        """Go on to the next stage, as often as the requests that run, by arm, allow."""
        while not self.is_over and self._is_stage_over(num_treated, num_control):
            self.stage = RequestStage(self.stage + 1)
            self._num_started = 0

    def slices(self) -> tuple[list[Slice], list[tuple[Trial, RequestFacts]]]:
        """What was counted, and treated requests of trials that no control request was compared with."""
        found: list[Slice] = []
        alone: list[tuple[Trial, RequestFacts]] = []
        for trial, by_phase in self._facts.items():
            if by_phase.get(Phase.CONTROL):
                for phase, facts in by_phase.items():
                    found += _slices(self._ids[trial], trial, phase, facts)
            else:
                alone += ((trial, facts) for its in by_phase.values() for facts in its)
        return found, alone

    def _is_stage_over(self, num_treated: int, num_control: int) -> bool:
        if self.stage is RequestStage.RETURNING and num_control <= self._left_share * (num_treated + num_control):
            return True
        return self._num_started >= self._lengths[self.stage]


def _slices(block_id: str, trial: Trial, phase: Phase, facts: Iterable[RequestFacts]) -> list[Slice]:
    """One slice of a window; of control one for each load, because the load is on its way there."""
    by_load: dict[int, Tally] = {}
    for one in sorted(facts, key=lambda one: one.started_at):
        load = round(_BINS * math.log2(max(one.num_beside, 1.0))) if phase is Phase.CONTROL else 0
        if load not in by_load:
            # Slices of one phase are told apart by the moment they begin.
            latest = max((tally.started_at for tally in by_load.values()), default=None)
            is_new = latest is None or one.started_at > latest
            by_load[load] = Tally(one.started_at if is_new or latest is None else latest + timedelta(microseconds=1))
        by_load[load].add_request(one)
    return [tally.slice(block_id, trial.subject, phase, trial.treatment) for tally in by_load.values()]
