"""Which arm runs when: the schedule of the experiment, its blocks, and the account that says when one begins.

The account is in device seconds of what is on trial. Time in treatment earns `share / (1 - share)` of itself; time
spent on control is paid. A block begins once the balance reaches a random multiple, 0.5 to 1.5, of what a block is
expected to take. The balance stays bounded, so the share of control tends to `control_share` whatever a round or a
request takes, and no periodic load can follow the blocks.

A block is a control slice between two treatment windows. It runs on one of two clocks:

- *rounds* (`RoundSchedule`), where the arm of a running sequence may change before each engine step;
- *requests* (`RequestSchedule`), where an engine cannot change how a running request drafts: the arm is drawn when a
  request starts, and holds to its end.

All subjects that speculate switch together, because they share their rounds or servers. If some went on drafting, a
control slice would take longer the more of its sequences are theirs, and that number differs from slice to slice.

A drafter on trial beside the one that it may replace has a *rival*: in blocks drawn by lot its subjects draft with the
rival in the control slice, and the others go on as they were.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Final, TypeAlias

from alphaloop.experiment.observe import Census, Phase, RequestFacts, RoundFacts, Slice, Treatment, TrialGroup

#: What a task's sequences do in a round: speculate like this, or None: vanilla. Either may be the control arm.
Arm: TypeAlias = Treatment | None

#: How far the time of a round moves towards the last one seen.
_ROUND_WEIGHT: Final = 0.05
#: Rounds by whose mean time the first block is planned. The first of them read prompts, so one alone is far too long.
_NUM_FIRST_ROUNDS: Final = 16
#: How far the expected price of a block of requests moves towards the last one's.
_PRICE_WEIGHT: Final = 0.3
#: A stage that saw this many times its rounds is given up: nearly every round reads a prompt.
_MOST_PROMPTS: Final = 4
#: Share of vanilla requests that may still run when the window after control begins.
_LEFT_SHARE: Final = 0.1
#: Starts after which that window begins in any case, over those of a window.
_MOST_WAITED: Final = 4
#: Slices of a control phase of requests, for each doubling of the load.
_BINS: Final = 2
#: The part of blocks that may be against a rival in which they are.
_RIVAL_SHARE: Final = 0.5

_NO_RIVALS: Final[Mapping[str, Treatment]] = {}


@dataclass(frozen=True, slots=True)
class RoundDesign:
    """How long the parts of a block are, in rounds, and how much of the device's time control takes.

    The lengths were chosen by simulation (docs/concepts/switchback.md). Slices of 32 rounds give half as many blocks
    and intervals wider by up to a third. Slices of 8 gain up to a tenth, but double the rows and the harm of a switch
    whose effect outlasts the washout. Two rounds of washout are enough for a draft model that reads what it missed in
    one round; four cost a fifth of the blocks.
    """

    control_share: float = 0.02  #: of speculating tasks' device time, with the rounds left out; 0: no trials
    num_control_rounds: int = 16
    num_washout_rounds: int = 2
    num_window_rounds: int = 16  #: of each of the two treatment windows

    @property
    def num_charged_rounds(self) -> int:
        """Rounds of a block that count as spent on control."""
        return self.num_control_rounds + 2 * self.num_washout_rounds


@dataclass(frozen=True, slots=True)
class RequestDesign:
    """How many requests the parts of a block have, and how much of the time control takes.

    The numbers were chosen by simulation (docs/concepts/switchback.md).
    """

    control_share: float = 0.02  #: of the time of requests on trial, weighted by how many run; 0: no trials
    control_turnover: float = 3.0  #: requests of a control slice, over those that run
    window_turnover: float = 2.0  #: requests of each of the two treatment windows, over those that run
    least_counted: int = 8  #: requests that each of them has at least

    def num_control(self, num_running: int) -> int:
        """Requests of a control slice while `num_running` run."""
        return max(self.least_counted, round(self.control_turnover * num_running))

    def num_window(self, num_running: int) -> int:
        """Requests of a window while `num_running` run."""
        return max(self.least_counted, round(self.window_turnover * num_running))


class _Schedule:
    """What both clocks have: the account, and the slices that are ready to be stored."""

    def __init__(self, control_share: float, rng: random.Random) -> None:
        self._account = _Account(control_share, rng)
        self._rng = rng
        self._ended: list[Slice] = []

    def take(self) -> tuple[Slice, ...]:
        """The slices that ended since the last call, to be stored."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"


class RoundSchedule(_Schedule):
    """Call `next_round` before each engine step and `observe` after it. Not thread-safe: the decoding thread owns it.

    The treatment is what the policy wants in each round: k may change inside a block, as it does outside. A task leaves
    the block if its drafter changes or it has no sequence left. One that comes while a block runs switches with the
    others and is not counted.
    """

    def __init__(self, design: RoundDesign, rng: random.Random) -> None:
        super().__init__(design.control_share, rng)
        self._design = design
        self._num_rounds = 0  # of treatment
        self._round_s = 0.0  # the time of a round of treatment, smoothed
        self._censuses: dict[str, Census] = defaultdict(Census)
        self._arms: dict[str, Arm] = {}
        self._block: _RoundBlock | None = None

    @property
    def is_charged(self) -> bool:
        """Whether the round that was asked for last is spent on control, washouts included."""
        return self._block is not None and self._block.is_charged

    def next_round(
        self, running: Mapping[str, Treatment], rivals: Mapping[str, Treatment] = _NO_RIVALS
    ) -> Mapping[str, Arm]:
        """The arm of every task of `running`: those that have sequences and would speculate in this round.

        `rivals`: how the tasks whose drafter is on trial would speculate with the one that it may replace.
        """
        block = self._block
        if block is not None:
            for task, treatment in [*block.treatments.items()]:
                wanted, rival = running.get(task), rivals.get(task)
                has_left = wanted is None or wanted.drafter != treatment.drafter
                if has_left or (block.against and (rival is None or rival.drafter != block.against[task].drafter)):
                    block.leave(task)
            self._end_block_if_over()
        if self._block is None and self._design.control_share and running and self._account.is_due:
            self._begin_block(running, rivals)
        block = self._block
        if block is None or not block.is_control:
            self._arms = dict(running)
        elif block.against:
            self._arms = {task: rivals[task] if task in block.treatments else own for task, own in running.items()}
        else:
            self._arms = dict.fromkeys(running)
        return self._arms

    def observe(self, facts: RoundFacts) -> tuple[Slice, ...]:
        """The step after `next_round`. Returns the slices that ended with it, to be stored."""
        block, is_charged = self._block, self.is_charged
        if device_s := sum(facts.device_s(task) for task in self._arms):
            self._charge(device_s, is_charged)
        on_trial = block.treatments if block is not None else {}
        for task, arm in self._arms.items():
            own = facts.tasks.get(task)
            if own is not None and own.num_sequences and arm is not None and task not in on_trial and not is_charged:
                self._censuses[task].at(facts, arm).add(facts, own)
        if block is not None:
            block.observe(facts)
            self._end_block_if_over()
        return self.take()

    def close(self) -> tuple[Slice, ...]:
        """End the block that runs and hand over all that was counted: when the worker drains."""
        if self._block is not None:
            self._block.stage = _Stage.ENDED
            self._end_block_if_over()
        for task, census in self._censuses.items():
            self._ended += census.take(self._new_id(), task)
        return self.take()

    def _begin_block(self, running: Mapping[str, Treatment], rivals: Mapping[str, Treatment]) -> None:
        against = {task: rival for task, rival in rivals.items() if task in running}
        if against and self._rng.random() < _RIVAL_SHARE:
            on_trial = {task: running[task] for task in against}
            self._block = _RoundBlock(on_trial, self._new_id, self._design, against)
        else:
            self._block = _RoundBlock(running, self._new_id, self._design)
        self._draw()
        for task, block_id in self._block.ids.items():
            self._ended += self._censuses[task].take(block_id, task)

    def _end_block_if_over(self) -> None:
        if self._block is not None and self._block.is_over:
            self._ended += self._block.slices()
            self._block = None

    def _charge(self, device_s: float, is_control: bool) -> None:
        self._account.spend(device_s, is_control)
        if not is_control:
            self._num_rounds += 1
            self._round_s += max(_ROUND_WEIGHT, 1 / self._num_rounds) * (device_s - self._round_s)
            if self._num_rounds == _NUM_FIRST_ROUNDS:
                self._draw()

    def _draw(self) -> None:
        self._account.draw(self._design.num_charged_rounds * self._round_s)


class RequestSchedule(_Schedule):
    """Call `start` and `end` when a request on trial starts and ends. Not thread-safe: the loop's thread owns it.

    Requests are named by ids. `start` returns how a request is decoded; `end` takes it out.
    """

    def __init__(self, design: RequestDesign, rng: random.Random) -> None:
        super().__init__(design.control_share, rng)
        self._design = design
        self._running: dict[str, _Request] = {}
        self._num_control = 0  # of those that run
        #: Treated requests that ended last, undisturbed: the window before the next block.
        self._recent: deque[tuple[TrialGroup, RequestFacts]] = deque()
        self._censuses: dict[TrialGroup, Census] = defaultdict(Census)
        self._block: _RequestBlock | None = None
        self._open: list[_RequestBlock] = []  # over, but some requests that they count still run
        self._seen_at: datetime | None = None
        self._busy_s, self._num_started = 0.0, 0
        self._price_s: float | None = None  # of a block, smoothed

    def start(self, request_id: str, trial: TrialGroup, now: datetime) -> bool:
        """A request starts: whether it speculates. False: it is decoded vanilla, as control."""
        self._pass_time(now)
        self._num_started += 1
        self._begin_when_due()
        block = self._block
        speculates = block is None or not block.is_control
        is_pure = block is None or not block.is_charged
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
            if request.is_pure and not (self._block is not None and self._block.is_charged):
                self._recent.append((request.trial, facts))
            else:
                self._count(request.trial, facts)
        self._forget(self._design.num_window(len(self._running) + 1))
        self._advance()

    def close(self) -> tuple[Slice, ...]:
        """End what runs and hand over all that was counted: when the worker ends."""
        for block in [*self._open, *([self._block] if self._block else [])]:
            self._settle(block)
        self._open, self._block = [], None
        self._running.clear()
        self._num_control = 0
        self._forget(0)
        self._end_censuses(lambda trial: self._new_id())
        return self.take()

    def _pass_time(self, now: datetime) -> None:
        passed_s = (now - self._seen_at).total_seconds() if self._seen_at is not None else 0.0
        self._seen_at = now
        if not self._running or passed_s <= 0:
            return
        control = self._num_control / len(self._running)
        self._busy_s += passed_s
        self._account.spend(passed_s, control)
        if self._block is not None:
            self._block.spent_s += passed_s * control

    def _begin_when_due(self) -> None:
        num_running = len(self._running)
        num_window = self._design.num_window(num_running)
        if self._block is not None or len(self._recent) < num_window or not self._design.control_share:
            return
        if self._price_s is None:
            self._price_s = self._design.num_control(num_running) * self._busy_s / self._num_started
        if not self._account.has_drawn:
            self._account.draw(self._price_s)
        if not self._account.is_due:
            return
        self._forget(num_window)
        self._block = _RequestBlock(self._recent, self._new_id, self._design, num_running)
        self._recent.clear()
        self._account.has_drawn = False
        self._end_censuses(self._block.id_of)

    def _advance(self) -> None:
        if (block := self._block) is not None:
            block.advance(len(self._running) - self._num_control, self._num_control)
            if block.is_over:
                before_s = block.spent_s if self._price_s is None else self._price_s
                self._price_s = before_s + _PRICE_WEIGHT * (block.spent_s - before_s)
                self._open.append(block)
                self._block = None
        for block in [block for block in self._open if block.is_whole]:
            self._open.remove(block)
            self._settle(block)

    def _settle(self, block: _RequestBlock) -> None:
        slices, alone = block.slices()
        self._ended += slices
        for trial, facts in alone:
            self._count(trial, facts)

    def _forget(self, num_kept: int) -> None:
        """Leave `num_kept` requests in the window before the next block; older ones are counted outside it."""
        while len(self._recent) > num_kept:
            self._count(*self._recent.popleft())

    def _count(self, trial: TrialGroup, facts: RequestFacts) -> None:
        self._censuses[trial].at(facts, trial.treatment).add_request(facts)

    def _end_censuses(self, id_of: Callable[[TrialGroup], str]) -> None:
        for trial, census in self._censuses.items():
            self._ended += census.take(id_of(trial), trial.subject)
        self._censuses.clear()


@dataclass(frozen=True, slots=True)
class _Request:
    trial: TrialGroup
    speculates: bool
    is_pure: bool  #: treated, and when it started the load was not on its way between endpoints
    block: _RequestBlock | None = None  #: that counts it
    phase: Phase | None = None


class _Account:
    """What was accrued for control and is not spent, in device seconds."""

    def __init__(self, share: float, rng: random.Random) -> None:
        self._earning = share / (1 - share)
        self._rng = rng
        self._balance_s = self._due_s = 0.0
        self.has_drawn = False

    def spend(self, seconds: float, control: float) -> None:
        """Time passed, of which this share was control."""
        self._balance_s += seconds * (self._earning * (1 - control) - control)

    def draw(self, price_s: float) -> None:
        """When the next block begins: in seconds, so that a change of load or host does not call a block."""
        self._due_s, self.has_drawn = self._rng.uniform(0.5, 1.5) * price_s, True

    @property
    def is_due(self) -> bool:
        """Whether the balance has reached the moment drawn."""
        return self.has_drawn and self._balance_s >= self._due_s


class _Stage(IntEnum):
    """The stages of a block, in order. Blocks of requests begin with control: their first window is already over."""

    BEFORE = 0
    LEAVING = 1  #: washout: vanilla already, not counted
    CONTROL = 2
    RETURNING = 3  #: washout: treatment again, not counted; of requests, vanilla ones run on
    AFTER = 4
    ENDED = 5


_COUNTED: Final = {_Stage.BEFORE: Phase.BEFORE, _Stage.CONTROL: Phase.CONTROL, _Stage.AFTER: Phase.AFTER}


class _Block:
    """A block that is running, as a row of stages. `lengths` are in rounds, or in requests that start."""

    def __init__(self, lengths: Mapping[_Stage, int]) -> None:
        self._lengths = lengths
        self.stage = min(lengths)
        # In this stage: all rounds or requests, and the rounds without a prompt.
        self._num_begun = self._num_counted = 0

    @property
    def is_control(self) -> bool:
        """Whether the next round is of the control arm, or the next request starts so."""
        return self.stage in (_Stage.LEAVING, _Stage.CONTROL)

    @property
    def is_charged(self) -> bool:
        """Whether the next round is spent on control, or the load is on its way between endpoints."""
        return _Stage.LEAVING <= self.stage <= _Stage.RETURNING

    @property
    def is_over(self) -> bool:
        """Whether another block may begin."""
        return self.stage is _Stage.ENDED

    def _go_on(self) -> None:
        """To the next stage, as often as this one is over."""
        while not self.is_over and self._is_stage_over():
            self.stage = _Stage(self.stage + 1)
            self._num_begun = self._num_counted = 0

    def _is_stage_over(self) -> bool:
        return self._num_begun >= self._lengths[self.stage]


class _RoundBlock(_Block):
    """Treatment, control, treatment, with rounds left out at each switch.

    A task may leave before the block ends. The slices of those that stay name the k with which the block began.
    """

    def __init__(
        self,
        treatments: Mapping[str, Treatment],
        new_id: Callable[[], str],
        design: RoundDesign,
        against: Mapping[str, Treatment] = _NO_RIVALS,
    ) -> None:
        super().__init__(
            {
                _Stage.BEFORE: design.num_window_rounds,
                _Stage.LEAVING: design.num_washout_rounds,
                _Stage.CONTROL: design.num_control_rounds,
                _Stage.RETURNING: design.num_washout_rounds,
                _Stage.AFTER: design.num_window_rounds,
            }
        )
        self.treatments = dict(treatments)  #: of the tasks that are still in the block
        self.against: Final = against  #: how each task's control slice drafts; empty: vanilla
        self.ids: Final = {task: new_id() for task in treatments}  #: of each task's slices
        self._slices: dict[tuple[str, Phase], Slice] = {}

    def leave(self, task: str) -> None:
        """The task has no sequence left, or another drafter. The block ends when all have left."""
        del self.treatments[task]
        if not self.treatments:
            self.stage = _Stage.ENDED

    def observe(self, facts: RoundFacts) -> None:
        """The round that ran. A task without sequences in it leaves the block."""
        for task in [*self.treatments]:
            if task not in facts.tasks or not facts.tasks[task].num_sequences:
                self.leave(task)
        if self.is_over:
            return
        self._num_begun += 1
        if (phase := _COUNTED.get(self.stage)) is not None:
            for task, treatment in self.treatments.items():
                if (task, phase) not in self._slices:
                    against = self.against[task].drafter if self.against else ""
                    self._slices[task, phase] = Slice(
                        self.ids[task], task, phase, treatment, facts.started_at, against=against
                    )
                self._slices[task, phase].add(facts, facts.tasks[task])
            self._num_counted += not facts.has_prompt
            length = self._lengths[self.stage]
            if self._num_counted < length and self._num_begun >= _MOST_PROMPTS * length:
                self.stage = _Stage.ENDED
        self._go_on()

    def slices(self) -> list[Slice]:
        """What was counted: of a task nothing unless its control slice is complete."""
        controls = {task: part.num_rounds for (task, phase), part in self._slices.items() if phase is Phase.CONTROL}
        return [
            part
            for (task, _), part in self._slices.items()
            if part.num_rounds and controls.get(task, 0) >= self._lengths[_Stage.CONTROL]
        ]

    def _is_stage_over(self) -> bool:
        num_done = self._num_counted if self.stage in _COUNTED else self._num_begun
        return num_done >= self._lengths[self.stage]


class _RequestBlock(_Block):
    """A treatment window, a control slice, a treatment window, of whole requests.

    The window before is of the requests that ended last when the block began; that after, of those that start first
    when nearly all vanilla requests have ended. Vanilla requests count from the switch on, while the load moves to
    their endpoint: how it slows them is seen there, and is taken out (`estimate.load_law`).
    """

    def __init__(
        self,
        before: Iterable[tuple[TrialGroup, RequestFacts]],
        new_id: Callable[[], str],
        design: RequestDesign,
        num_running: int,
    ) -> None:
        num_window = design.num_window(num_running)
        super().__init__(
            {
                _Stage.CONTROL: design.num_control(num_running),
                _Stage.RETURNING: _MOST_WAITED * num_window,
                _Stage.AFTER: num_window,
            }
        )
        self.spent_s = 0.0  #: on control
        self._are_few_left = False
        self._ids: dict[TrialGroup, str] = defaultdict(new_id)
        self._facts: dict[TrialGroup, dict[Phase, list[RequestFacts]]] = defaultdict(lambda: defaultdict(list))
        self._num_open = 0  # counted requests that run
        for trial, facts in before:
            self._facts[trial][Phase.BEFORE].append(facts)

    def id_of(self, trial: TrialGroup) -> str:
        """The id of the trial's slices."""
        return self._ids[trial]

    @property
    def is_whole(self) -> bool:
        """Whether it is over, and all requests that it counts have ended."""
        return self.is_over and not self._num_open

    def start(self) -> Phase | None:
        """A request starts: the slice that counts it, if one does."""
        self._num_begun += 1
        phase = _COUNTED.get(self.stage)
        self._num_open += phase is not None
        return phase

    def end(self, trial: TrialGroup, phase: Phase, facts: RequestFacts | None) -> None:
        """A counted request ended; without facts where nothing is known of it."""
        self._num_open -= 1
        if facts is not None:
            self._facts[trial][phase].append(facts)

    def advance(self, num_treated: int, num_control: int) -> None:
        """Go on to the next stage, as often as the requests that run, by arm, allow."""
        self._are_few_left = num_control <= _LEFT_SHARE * (num_treated + num_control)
        self._go_on()

    def slices(self) -> tuple[list[Slice], list[tuple[TrialGroup, RequestFacts]]]:
        """What was counted, and treated requests of trials that no control request was compared with."""
        slices: list[Slice] = []
        alone: list[tuple[TrialGroup, RequestFacts]] = []
        for trial, by_phase in self._facts.items():
            if by_phase.get(Phase.CONTROL):
                for phase, facts in by_phase.items():
                    slices += _slices_by_load(self._ids[trial], trial, phase, facts)
            else:
                alone += ((trial, facts) for requests in by_phase.values() for facts in requests)
        return slices, alone

    def _is_stage_over(self) -> bool:
        return (self.stage is _Stage.RETURNING and self._are_few_left) or super()._is_stage_over()


def _slices_by_load(block_id: str, trial: TrialGroup, phase: Phase, facts: Iterable[RequestFacts]) -> list[Slice]:
    """One slice of a window; of control one for each load, because the load is on its way there."""
    by_load: dict[int, Slice] = {}
    for request in sorted(facts, key=lambda request: request.started_at):
        load = round(_BINS * math.log2(max(request.num_beside, 1.0))) if phase is Phase.CONTROL else 0
        if load not in by_load:
            # Slices of one phase differ in the moment they begin.
            begun = [held.started_at + timedelta(microseconds=1) for held in by_load.values()]
            begin = max([request.started_at, *begun])
            by_load[load] = Slice(block_id, trial.subject, phase, trial.treatment, begin)
        by_load[load].add_request(request)
    return list(by_load.values())
