"""Which arm the running sequences are in, round by round.

There is a ledger in device seconds of the tasks that speculate. A round in treatment earns `share / (1 - share)` of its
time; a round spent on control takes its time. A block begins once the balance reaches a random multiple, 0.5 to 1.5, of
what a block is expected to take. The balance stays bounded, so the share of control tends to `control_share` whatever a
round takes, and no periodic load can follow the blocks.

All tasks that speculate switch together, because they share their rounds. If some went on drafting, a control slice
would take longer the more of its sequences are theirs, and that number differs from slice to slice.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Final, TypeAlias

from alphaloop.errors import ConfigError
from alphaloop.experiment.observe import Census, Phase, RequestFacts, RoundFacts, Slice, Tally, Treatment, TrialGroup

#: What a task's sequences do in a round: speculate like this, or None: vanilla, the control arm.
Arm: TypeAlias = Treatment | None

#: How far the time of a round moves towards the last one seen.
_ROUND_WEIGHT: Final = 0.05
#: Rounds by whose mean time the first block is planned. The first of them read prompts, so one alone is far too long.
_NUM_FIRST_ROUNDS: Final = 16


class SwitchbackSchedule:
    """Ask `next_round` before each engine step, tell `observe` after it. Not thread-safe: the decoding thread owns it.

    The treatment is what the policy wants in each round: k may change inside a block, as it does outside. A task leaves
    the block if its drafter changes or it has no sequence left. One that comes while a block runs switches with the
    others and is not counted.
    """

    def __init__(self, design: SwitchbackDesign, rng: random.Random) -> None:
        self._design, self._rng = design, rng
        self._ledger = _Ledger(design, rng)
        self._censuses: dict[str, Census] = defaultdict(Census)
        self._arms: dict[str, Arm] = {}
        self._block: Block | None = None
        self._ended: list[Slice] = []

    @property
    def is_charged(self) -> bool:
        """Whether the round that was asked for last is spent on control, washouts included."""
        return self._block is not None and self._block.is_charged

    def next_round(self, running: Mapping[str, Treatment]) -> Mapping[str, Arm]:
        """The arm of every task of `running`: those that have sequences and would speculate in this round."""
        block = self._block
        if block is not None:
            for task, treatment in block.treatments.items():
                wanted = running.get(task)
                if wanted is None or wanted.drafter != treatment.drafter:
                    block.leave(task)
            if block.stage is Stage.ENDED:
                self._end_block()
        if self._block is None and self._design.control_share and running and self._ledger.is_due:
            self._begin_block(running)
        is_vanilla = self._block is not None and self._block.is_vanilla
        self._arms = dict.fromkeys(running) if is_vanilla else dict(running)
        return self._arms

    def observe(self, facts: RoundFacts) -> tuple[Slice, ...]:
        """The step that `next_round` spoke of. Returns the slices that ended with it, to be stored."""
        block, is_disturbed = self._block, self.is_charged
        self._ledger.charge(sum(facts.device_s(task) for task in self._arms), is_control=is_disturbed)
        on_trial = block.treatments if block is not None else {}
        for task, arm in self._arms.items():
            own = facts.tasks.get(task)
            if own is not None and own.num_sequences and arm is not None and task not in on_trial and not is_disturbed:
                self._censuses[task].add(facts, own, arm)
        if block is not None:
            block.observe(facts)
            if block.stage is Stage.ENDED:
                self._end_block()
        ended, self._ended = tuple(self._ended), []
        return ended

    def close(self) -> tuple[Slice, ...]:
        """End the block that runs and hand over all that was counted: when the worker drains."""
        self._end_block()
        for task, census in self._censuses.items():
            self._ended += census.take(self._new_id(), task)
        ended, self._ended = tuple(self._ended), []
        return ended

    def _begin_block(self, running: Mapping[str, Treatment]) -> None:
        self._block = Block(running, self._new_id, self._design)
        self._ledger.draw()
        for task, block_id in self._block.ids.items():
            self._ended += self._censuses[task].take(block_id, task)

    def _end_block(self) -> None:
        if self._block is not None:
            self._ended += self._block.slices()
            self._block = None

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"


class _Ledger:
    """What was accrued for control and is not spent, in device seconds."""

    def __init__(self, design: SwitchbackDesign, rng: random.Random) -> None:
        share = design.control_share
        self._earning = share / (1 - share)
        self._num_charged_rounds = design.num_charged_rounds
        self._rng = rng
        self._num_rounds = 0  # of treatment
        self._round_s = 0.0  # the time of a round of treatment, smoothed
        self._balance_s = 0.0
        self._due_s = 0.0

    def draw(self) -> None:
        """When the next block begins: in seconds, so that a change of load or host does not call a block."""
        self._due_s = self._rng.uniform(0.5, 1.5) * self._num_charged_rounds * self._round_s

    def charge(self, device_s: float, *, is_control: bool) -> None:
        """A round."""
        if not device_s:
            return
        if is_control:
            self._balance_s -= device_s
            return
        self._num_rounds += 1
        self._round_s += max(_ROUND_WEIGHT, 1 / self._num_rounds) * (device_s - self._round_s)
        self._balance_s += self._earning * device_s
        if self._num_rounds == _NUM_FIRST_ROUNDS:
            self.draw()

    @property
    def is_due(self) -> bool:
        """Whether the balance has reached the moment drawn."""
        return self._num_rounds >= _NUM_FIRST_ROUNDS and self._balance_s >= self._due_s


#: A stage that saw this many times its rounds is given up: nearly every round reads a prompt.
_MOST_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class SwitchbackDesign:
    """How long the parts of a block are, in rounds, and how much of the device's time control takes.

    The lengths were chosen by simulation (docs/concepts/switchback.md). Slices of 32 rounds give half as many blocks
    and intervals wider by up to a third. Slices of 8 gain up to a tenth, but double the rows and the harm of a switch
    whose effect outlasts the washout. Two rounds of washout are enough for a draft model that reads what it missed in
    one round; four cost a fifth of the blocks. Raises ConfigError.
    """

    control_share: float = 0.02  #: of speculating tasks' device time, with the rounds left out; 0: no trials
    num_control_rounds: int = 16
    num_washout_rounds: int = 2
    num_window_rounds: int = 16  #: of each of the two treatment windows

    def __post_init__(self) -> None:
        if min(self.num_control_rounds, self.num_window_rounds) < 1 or self.num_washout_rounds < 0:
            raise ConfigError(
                f"expected at least 1 control round, 1 window round and 0 washout rounds, found "
                f"{self.num_control_rounds}, {self.num_window_rounds}, {self.num_washout_rounds}"
            )
        if not 0 <= self.control_share <= self.largest_share:
            raise ConfigError(
                f"expected a control share of 0 to {self.largest_share:.3f}, found {self.control_share}",
                hint="blocks of these lengths, one after the other, have no larger share of control rounds",
            )

    @property
    def num_charged_rounds(self) -> int:
        """Rounds of a block that count as spent on control."""
        return self.num_control_rounds + 2 * self.num_washout_rounds

    @property
    def largest_share(self) -> float:
        """The share of blocks that follow each other without a round between."""
        return self.num_charged_rounds / (self.num_charged_rounds + 2 * self.num_window_rounds)


class Stage(IntEnum):
    """Where a block stands, in order."""

    BEFORE = 0
    LEAVING = 1  #: washout: vanilla already, not counted
    CONTROL = 2
    RETURNING = 3  #: washout: treatment again, not counted
    AFTER = 4
    ENDED = 5


_COUNTED = {Stage.BEFORE: Phase.BEFORE, Stage.CONTROL: Phase.CONTROL, Stage.AFTER: Phase.AFTER}


class Block:
    """A block that is running: all tasks that speculate switch together, so the control slice has nothing but vanilla.

    A task may leave before the block ends. The slices of those that stay name the k with which the block began.
    """

    def __init__(
        self, treatments: Mapping[str, Treatment], new_id: Callable[[], str], design: SwitchbackDesign
    ) -> None:
        self.stage = Stage.BEFORE
        self._parts = {task: _Part(new_id(), task, treatment) for task, treatment in treatments.items()}
        self._lengths = {
            Stage.BEFORE: design.num_window_rounds,
            Stage.LEAVING: design.num_washout_rounds,
            Stage.CONTROL: design.num_control_rounds,
            Stage.RETURNING: design.num_washout_rounds,
            Stage.AFTER: design.num_window_rounds,
        }
        # Of this stage.
        self._num_rounds = self._num_counted = 0

    @property
    def treatments(self) -> Mapping[str, Treatment]:
        """Of the tasks that are still in the block."""
        return {task: part.treatment for task, part in self._parts.items() if part.is_here}

    @property
    def ids(self) -> Mapping[str, str]:
        """The id of each task's slices."""
        return {task: part.block_id for task, part in self._parts.items()}

    @property
    def is_vanilla(self) -> bool:
        """Whether the next round decodes vanilla."""
        return self.stage in (Stage.LEAVING, Stage.CONTROL)

    @property
    def is_charged(self) -> bool:
        """Whether the next round counts as spent on control."""
        return Stage.LEAVING <= self.stage <= Stage.RETURNING

    def leave(self, task: str) -> None:
        """The task has no sequence left, or another drafter. The block ends when all have left."""
        self._parts[task].is_here = False
        if not self.treatments:
            self.stage = Stage.ENDED

    def observe(self, facts: RoundFacts) -> None:
        """The round that ran. A task without sequences in it leaves the block."""
        for task in self.treatments:
            if task not in facts.tasks or not facts.tasks[task].num_sequences:
                self.leave(task)
        if self.stage is Stage.ENDED:
            return
        self._num_rounds += 1
        phase = _COUNTED.get(self.stage)
        num_done, length = self._num_rounds, self._lengths[self.stage]
        if phase is not None:
            for task in self.treatments:
                self._parts[task].add(phase, facts)
            self._num_counted += not facts.has_prompt
            num_done = self._num_counted
            if num_done < length and self._num_rounds >= _MOST_PROMPTS * length:
                self.stage = Stage.ENDED
        while self.stage < Stage.ENDED and num_done >= self._lengths[self.stage]:
            self.stage = Stage(self.stage + 1)
            self._num_rounds = self._num_counted = num_done = 0

    def slices(self) -> tuple[Slice, ...]:
        """What was counted: of a task nothing unless its control slice is complete."""
        complete = self._lengths[Stage.CONTROL]
        return tuple(one for part in self._parts.values() for one in part.slices(complete))


@dataclass(slots=True)
class _Part:
    """A task's share in a block."""

    block_id: str
    task: str
    treatment: Treatment
    is_here: bool = True
    tallies: dict[Phase, Tally] = field(default_factory=dict)

    def add(self, phase: Phase, facts: RoundFacts) -> None:
        self.tallies.setdefault(phase, Tally(facts.started_at)).add(facts, facts.tasks[self.task])

    def slices(self, num_control_rounds: int) -> tuple[Slice, ...]:
        control = self.tallies.get(Phase.CONTROL)
        if control is None or control.num_rounds < num_control_rounds:
            return ()
        return tuple(
            tally.slice(self.block_id, self.task, phase, self.treatment)
            for phase, tally in self.tallies.items()
            if tally.num_rounds
        )


#: How far the expected price of a block moves towards the last one's.
_PRICE_WEIGHT: Final = 0.3


@dataclass(frozen=True, slots=True)
class _Request:
    trial: TrialGroup
    speculates: bool
    is_pure: bool  #: treated, and when it started the load was not on its way between endpoints
    block: RequestBlock | None = None  #: that counts it
    phase: Phase | None = None


class RequestSchedule:
    """Tell it when each request on trial starts and ends. Not thread-safe: the loop's thread owns it.

    Requests are named by ids. `start` says how a request is decoded; `end` and `drop` take it out.
    """

    def __init__(self, design: RequestDesign, rng: random.Random) -> None:
        self._design, self._rng = design, rng
        self._account = _Account(design.control_share, rng)
        self._running: dict[str, _Request] = {}
        self._num_control = 0  # of those that run
        #: Treated requests that ended last, undisturbed: the window before the next block.
        self._recent: deque[tuple[TrialGroup, RequestFacts]] = deque()
        self._census: dict[TrialGroup, Census] = defaultdict(Census)
        self._block: RequestBlock | None = None
        self._open: list[RequestBlock] = []  # over, but some requests that they count still run
        self._ended: list[Slice] = []

    def start(self, request_id: str, trial: TrialGroup, now: datetime) -> bool:
        """A request starts: whether it speculates. False: it is decoded vanilla, as control."""
        self._pass_time(now)
        self._account.started()
        self._begin_when_due()
        block = self._block
        speculates = block is None or not block.is_vanilla
        is_pure = block is None or not block.is_disturbed
        phase = block.start() if block is not None else None
        self._running[request_id] = _Request(trial, speculates, is_pure, block if phase else None, phase)
        self._num_control += not speculates
        self._advance()
        return speculates

    def end(self, request_id: str, facts: RequestFacts | None, now: datetime) -> None:
        """A request ended; without facts where nothing is known of it, or another endpoint took it."""
        if request_id not in self._running:
            return
        self._pass_time(now)  # the request ran until now, so it is among those that run
        request = self._running.pop(request_id)
        self._num_control -= not request.speculates
        if request.block is not None and request.phase is not None:
            request.block.end(request.trial, request.phase, facts)
        elif facts is not None and request.speculates:
            self._recent.append((request.trial, facts))
            is_disturbed = self._block is not None and self._block.is_disturbed
            if not request.is_pure or is_disturbed:
                self._count(*self._recent.pop())
        self._forget(self._design.num_window(len(self._running) + 1))
        self._advance()

    def take(self) -> tuple[Slice, ...]:
        """The slices that ended since the last call, to be stored."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def close(self) -> tuple[Slice, ...]:
        """End what runs and hand over all that was counted: when the worker ends."""
        for block in [*self._open, *([self._block] if self._block else [])]:
            self._settle(block)
        self._open, self._block = [], None
        self._running.clear()
        self._num_control = 0
        self._forget(0)
        for trial in list(self._census):
            self._ended += self._census[trial].take(self._new_id(), trial.subject)
        self._census.clear()
        return self.take()

    def _pass_time(self, now: datetime) -> None:
        num = len(self._running)
        spent_s = self._account.pass_time(now, self._num_control / num if num else None)
        if self._block is not None:
            self._block.spent_s += spent_s

    def _begin_when_due(self) -> None:
        num_running = len(self._running)
        num_window = self._design.num_window(num_running)
        if self._block is not None or len(self._recent) < num_window or not self._design.control_share:
            return
        if not self._account.is_due(self._design.num_control(num_running)):
            return
        self._forget(num_window)
        self._block = RequestBlock(self._recent, self._new_id, self._design, num_running)
        self._recent.clear()
        for trial, census in self._census.items():
            self._ended += census.take(self._block.id_of(trial), trial.subject)
        self._census.clear()

    def _advance(self) -> None:
        if (block := self._block) is not None:
            block.advance(len(self._running) - self._num_control, self._num_control)
            if block.is_over:
                self._account.paid(block.spent_s)
                self._open.append(block)
                self._block = None
        for block in [block for block in self._open if block.is_whole]:
            self._open.remove(block)
            self._settle(block)

    def _settle(self, block: RequestBlock) -> None:
        found, alone = block.slices()
        self._ended += found
        for trial, facts in alone:
            self._count(trial, facts)

    def _forget(self, num_kept: int) -> None:
        """Leave so many requests in the window before the next block; older ones are counted outside it."""
        while len(self._recent) > num_kept:
            self._count(*self._recent.popleft())

    def _count(self, trial: TrialGroup, facts: RequestFacts) -> None:
        self._census[trial].add_request(facts, trial.treatment)

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"


class _Account:
    """What was accrued for control and is not spent, in seconds."""

    def __init__(self, share: float, rng: random.Random) -> None:
        self._earning = share / (1 - share)
        self._rng = rng
        self._last: datetime | None = None
        self._busy_s = 0.0
        self._num_started = 0
        self._balance_s = 0.0
        self._price_s: float | None = None  # of a block, smoothed
        self._due_s: float | None = None

    def started(self) -> None:
        """A request."""
        self._num_started += 1

    def pass_time(self, now: datetime, control: float | None) -> float:
        """The time since the last call, in which this share of requests was control; None: none ran.

        Returns the seconds spent.
        """
        passed_s = (now - self._last).total_seconds() if self._last is not None else 0.0
        self._last = now
        if control is None or passed_s <= 0:
            return 0.0
        self._busy_s += passed_s
        self._balance_s += passed_s * (self._earning * (1 - control) - control)
        return passed_s * control

    def is_due(self, num_vanilla: int) -> bool:
        """Whether the balance has reached the moment drawn, where about so many requests of a block are vanilla."""
        if self._price_s is None:
            self._price_s = num_vanilla * self._busy_s / self._num_started
        if self._due_s is None:
            self._due_s = self._rng.uniform(0.5, 1.5) * self._price_s
        return self._balance_s >= self._due_s

    def paid(self, spent_s: float) -> None:
        """A block is over."""
        before_s = spent_s if self._price_s is None else self._price_s
        self._price_s = before_s + _PRICE_WEIGHT * (spent_s - before_s)
        self._due_s = None


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


_COUNTED_OF_REQUESTS: Final = {RequestStage.CONTROL: Phase.CONTROL, RequestStage.AFTER: Phase.AFTER}
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
        before: Iterable[tuple[TrialGroup, RequestFacts]],
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
        self._ids: dict[TrialGroup, str] = defaultdict(new_id)
        self._facts: dict[TrialGroup, dict[Phase, list[RequestFacts]]] = defaultdict(lambda: defaultdict(list))
        self._num_open = 0  # counted requests that run
        self._num_started = 0  # of this stage
        for trial, facts in before:
            self._facts[trial][Phase.BEFORE].append(facts)

    def id_of(self, trial: TrialGroup) -> str:
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
        phase = _COUNTED_OF_REQUESTS.get(self.stage)
        self._num_open += phase is not None
        return phase

    def end(self, trial: TrialGroup, phase: Phase, facts: RequestFacts | None) -> None:
        """A counted request ended; without facts where nothing is known of it."""
        self._num_open -= 1
        if facts is not None:
            self._facts[trial][phase].append(facts)

    def advance(self, num_treated: int, num_control: int) -> None:
        """Go on to the next stage, as often as the requests that run, by arm, allow."""
        while not self.is_over and self._is_stage_over(num_treated, num_control):
            self.stage = RequestStage(self.stage + 1)
            self._num_started = 0

    def slices(self) -> tuple[list[Slice], list[tuple[TrialGroup, RequestFacts]]]:
        """What was counted, and treated requests of trials that no control request was compared with."""
        found: list[Slice] = []
        alone: list[tuple[TrialGroup, RequestFacts]] = []
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


def _slices(block_id: str, trial: TrialGroup, phase: Phase, facts: Iterable[RequestFacts]) -> list[Slice]:
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
