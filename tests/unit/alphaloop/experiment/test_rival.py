"""A drafter against its rival, on a simulated device whose true ratio is known."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import mean
from typing import Final

import pytest

from alphaloop.acceptance import Interval
from alphaloop.experiment.assign import RoundDesign, RoundSchedule
from alphaloop.experiment.estimate import measured_speedup
from alphaloop.experiment.observe import Phase, Slice, Treatment
from alphaloop.experiment.rounds import FreeSequence, RoundTrials, Yielded

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
HEADS, NEW = Treatment("heads", 3), Treatment("heads-2", 3)
_BASE_S, _SEQUENCE_S, _ROW_S = 0.02, 0.001, 0.0008
_NUM_SLOTS: Final = 6


@dataclass(slots=True)
class Text:
    """Acceptance differs from text to text, and both drafters find the same texts hard."""

    tokens_left: int
    ease: float
    reads_prompt: bool = True


class Device:
    """Texts of one task; `gain` is added to the acceptance of the new heads, in log-odds."""

    def __init__(self, seed: int, *, gain: float = 0.0, cost: float = 1.0) -> None:
        self.rng = random.Random(f"device {seed}")
        self.trials = RoundTrials(RoundSchedule(RoundDesign(control_share=0.2), random.Random(f"arms {seed}")))
        self.gain, self.cost = gain, cost
        self.now_s, self.minute = 0.0, 1.0
        self.texts: dict[str, Text] = {}
        self.num_texts = 0
        self.slices: list[Slice] = []
        self.treated_s = self.rival_s = self.prompt_s = 0.0

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            while len(self.texts) < _NUM_SLOTS:
                self.num_texts += 1
                length = 1 + round(self.rng.expovariate(1 / 60))
                self.texts[f"{self.num_texts}"] = Text(length, self.rng.gauss(0.4, 0.6))
            self._round()

    def _round(self) -> None:
        rng = self.rng
        if rng.random() < 0.002:
            self.minute = rng.choice((1.0, 1.0, 1.5))
        free = {
            name: FreeSequence("code greedy", NEW, rival=HEADS)
            for name, text in self.texts.items()
            if not text.reads_prompt
        }
        self.trials.consider(free)
        self.trials.next_round()
        arms = {name: (self.trials.rival_of(name) if self.trials.is_control(name) else NEW) for name in free}
        drafting = [arm for arm in arms.values() if arm is not None]
        is_new = NEW in drafting
        plain_s = _BASE_S + _SEQUENCE_S * len(self.texts)
        drafts_s = _ROW_S * 3 * len(drafting)
        factor = self.minute * math.exp(rng.gauss(0, 0.03))
        reading_s = factor * 0.03 * sum(text.reads_prompt for text in self.texts.values())
        round_s = factor * (plain_s + drafts_s * (self.cost if is_new else 1.0))
        yielded = {}
        for name, text in [*self.texts.items()]:
            arm = arms.get(name)
            num_tokens = min(self._yield(text, arm), text.tokens_left)
            if arm == NEW:
                self.treated_s += round_s
                self.prompt_s += reading_s
                per_round = self._mean_yield(text, HEADS) / self._mean_yield(text, NEW)
                self.rival_s += factor * (plain_s + drafts_s) / per_round
            yielded[name] = Yielded(num_tokens, 3 if arm else 0)
            text.reads_prompt = False
            text.tokens_left -= num_tokens
            if not text.tokens_left:
                del self.texts[name]
        self.slices += self.trials.observe(
            yielded,
            started_at=START + timedelta(seconds=self.now_s),
            wall_s=round_s + reading_s,
            num_running=len(yielded),
            mean_context_tokens=100.0,
            has_prompt=reading_s > 0,
        )
        self.now_s += round_s + reading_s

    def _alpha(self, text: Text, arm: Treatment) -> float:
        return 1 / (1 + math.exp(-text.ease - (self.gain if arm == NEW else 0.0)))

    def _mean_yield(self, text: Text, arm: Treatment) -> float:
        alpha = self._alpha(text, arm)
        return 1 + alpha + alpha**2 + alpha**3

    def _yield(self, text: Text, arm: Treatment | None) -> int:
        num_tokens = 1
        while arm is not None and num_tokens <= arm.num_draft_tokens and self.rng.random() < self._alpha(text, arm):
            num_tokens += 1
        return num_tokens

    @property
    def truth(self) -> float:
        return (self.rival_s + self.prompt_s) / (self.treated_s + self.prompt_s)


def against_rival(slices: list[Slice]) -> Interval:
    """The figure of the blocks against the rival."""
    measured = measured_speedup(part for part in slices if part.against == "heads" or part.phase is Phase.BETWEEN)
    assert measured.speedup is not None
    return measured.speedup


def play(seed: int, *, gain: float = 0.0, cost: float = 1.0, num_rounds: int = 6000) -> tuple[Interval, float]:
    device = Device(seed, gain=gain, cost=cost)
    device.run(num_rounds)
    return against_rival([*device.slices, *device.trials.close()]), device.truth


def test_a_rival_block_switches_its_tasks_alone_and_half_of_the_blocks_are_rival_ones() -> None:
    trials = RoundTrials(RoundSchedule(RoundDesign(control_share=0.3), random.Random(1)))
    free = {
        "new": FreeSequence("code greedy", NEW, rival=HEADS),
        "other": FreeSequence("sql greedy", Treatment("lookup", 4)),
    }
    slices: list[Slice] = []
    for number in range(6000):
        trials.consider(free)
        trials.next_round()
        if trials.is_control("new") and trials.rival_of("new") is not None:
            assert trials.rival_of("new") == HEADS
            assert not trials.is_control("other")
        elif trials.is_control("new"):
            assert trials.is_control("other")
            assert trials.rival_of("other") is None
        slices += trials.observe(
            {"new": Yielded(2, 3), "other": Yielded(2, 4)},
            started_at=START + timedelta(seconds=number),
            wall_s=1.0,
            num_running=2,
            mean_context_tokens=100.0,
            has_prompt=False,
        )
    control = [part for part in slices if part.phase is Phase.CONTROL and part.task == "code greedy"]
    num_rival = sum(part.against == "heads" for part in control)
    assert 0.3 < num_rival / len(control) < 0.7
    assert all(not part.against for part in slices if part.task == "sql greedy")
    assert all(not part.against for part in slices if part.phase is Phase.BETWEEN)


def test_a_task_whose_rival_has_gone_leaves_its_block() -> None:
    trials = RoundTrials(RoundSchedule(RoundDesign(control_share=0.3), random.Random(1)))
    with_rival = {"new": FreeSequence("code greedy", NEW, rival=HEADS)}
    without = {"new": FreeSequence("code greedy", NEW)}
    seen = 0
    for number in range(3000):
        trials.consider(with_rival)
        trials.next_round()
        if trials.rival_of("new") == HEADS and trials.is_control("new"):
            seen += 1
            trials.consider(without)
            trials.next_round()
            assert not trials.is_control("new")
        trials.observe(
            {"new": Yielded(2, 3)},
            started_at=START + timedelta(seconds=number),
            wall_s=1.0,
            num_running=1,
            mean_context_tokens=100.0,
            has_prompt=False,
        )
    assert seen


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rival_of_equal_worth_is_held_by_as_many_intervals_as_they_say() -> None:
    runs = [play(seed, num_rounds=3000) for seed in range(400)]
    assert 0.93 <= mean(speedup.low <= 1 <= speedup.high for speedup, _ in runs) <= 0.97
    assert abs(mean(math.log(speedup.mean) for speedup, _ in runs)) < 0.005


@pytest.mark.parametrize(("gain", "cost"), [(0.5, 1.0), (-0.4, 1.0), (0.5, 1.2)])
def test_a_rival_is_beaten_or_not_by_as_much_as_it_is_worth(gain: float, cost: float) -> None:
    runs = [play(seed, gain=gain, cost=cost) for seed in range(6)]
    assert sum(speedup.low <= truth <= speedup.high for speedup, truth in runs) >= 5
    assert abs(mean(math.log(speedup.mean / truth) for speedup, truth in runs)) < 0.012
