"""A simulated vLLM server whose true speed-up is known, with the experiment that runs inside it.

Requests of three kinds share its rounds: on trial with drafts, decided vanilla, and forced to draft. A round takes as
long as its sequences, its proposed tokens and the drafter's passes; slow minutes and noise multiply all of it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from alphaloop.acceptance import Interval
from alphaloop.experiment.estimate import measured_speedup
from alphaloop.experiment.observe import Slice, Treatment
from alphaloop.experiment.rounds import FreeSequence, Yielded
from alphaloop.inside_vllm.measuring import DrafterTime, ServerExperiment, StepFacts

_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_BASE_S, _SEQUENCE_S, _ROW_S = 0.02, 0.001, 0.0008  #: of a round, of each sequence, of each proposed token
_PROMPT_S: Final = 0.03
_MEAN_TOKENS: Final = 60
_NUM_SLOTS: Final = 8
_NOISE: Final = 0.03


@dataclass(frozen=True, slots=True)
class ServerScenario:
    """What may disturb the figure."""

    name: str
    k: int = 3
    acceptance: float = 0.7
    pass_s: float = 0.004  #: of the drafter, for one token of all sequences
    timing_error: float = 0.0  #: of the drafter's measured time, as a factor less 1
    share_vanilla: float = 0.25  #: of requests that were decided vanilla
    share_forced: float = 0.0  #: of requests that draft in control rounds too
    has_slow_minutes: bool = False
    has_bursts: bool = False
    takes_off: bool = True  #: False: the drafter's time stays in control rounds


@dataclass(slots=True)
class _Text:
    kind: str  #: trial, vanilla, forced
    tokens_left: int
    reads_prompt: bool = True


@dataclass(slots=True)
class Truth:
    """Sequence-seconds of the rounds on trial outside control, and of the same tokens without speculation."""

    treatment_s: float = 0.0
    vanilla_s: float = 0.0
    prompt_s: float = 0.0

    @property
    def speedup(self) -> float:
        """Reading prompts counts the same in both."""
        return (self.vanilla_s + self.prompt_s) / (self.treatment_s + self.prompt_s)


@dataclass(eq=False)
class ServerWorld:
    """One run."""

    scenario: ServerScenario
    seed: int
    control_share: float = 0.2
    truth: Truth = field(default_factory=Truth)
    slices: list[Slice] = field(default_factory=list)
    num_rounds: int = 0
    num_control: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(f"world {self.seed}")
        self._now_s = 0.0
        self._experiment = ServerExperiment(
            rng=random.Random(f"arms {self.seed}"),
            clock=lambda: self._now_s,
            now=lambda: _START + timedelta(seconds=self._now_s),
        )
        self._experiment.share(self.control_share)
        self._running: dict[str, _Text] = {}
        self._num_started = 0
        self._minute = 1.0

    def run(self, num_rounds: int) -> Interval | None:
        """The measured speed-up."""
        for _ in range(num_rounds):
            self._fill()
            self._round()
        taken: list[Slice] = [*self._experiment._slices]
        return measured_speedup(taken).speedup

    def _fill(self) -> None:
        rng, scenario = self._rng, self.scenario
        slots = _NUM_SLOTS
        if scenario.has_bursts and math.sin(2 * math.pi * self._now_s / 37.0) < 0:
            slots = _NUM_SLOTS // 4
        while len(self._running) < slots:
            draw = rng.random()
            kind = "vanilla" if draw < scenario.share_vanilla else "trial"
            if draw > 1 - scenario.share_forced:
                kind = "forced"
            self._num_started += 1
            num_tokens = 1 + round(rng.expovariate(1 / _MEAN_TOKENS))
            self._running[f"{self._num_started}"] = _Text(kind, num_tokens)

    def _round(self) -> None:
        rng, scenario, running = self._rng, self.scenario, self._running
        if scenario.has_slow_minutes and rng.random() < 0.002:
            self._minute = rng.choice((1.0, 1.0, 1.6))
        treatment = Treatment("draft", scenario.k)
        free = {
            name: FreeSequence("code greedy", treatment)
            for name, text in running.items()
            if text.kind == "trial" and not text.reads_prompt
        }
        self._experiment.begin(free)
        drafts = {
            name: scenario.k
            for name, text in running.items()
            if not text.reads_prompt
            and (text.kind == "forced" or (name in free and not self._experiment.is_control(name)))
        }
        is_control = any(map(self._experiment.is_control, free))
        self.num_rounds += 1
        self.num_control += is_control
        wants = any(text.kind != "vanilla" for text in running.values())
        num_passes = scenario.k if drafts else int(wants)
        is_for_cache_only = wants and not drafts and is_control
        has_prompt = any(text.reads_prompt for text in running.values())
        self._experiment.scheduled(
            StepFacts(
                len(running),
                100.0,
                has_prompt,
                num_positions=len(running) + sum(drafts.values()),
                num_drafted=num_passes,
                is_for_cache_only=is_for_cache_only,
            )
        )
        factor = self._minute * math.exp(rng.gauss(0, _NOISE))
        drafter_s = scenario.pass_s * math.exp(rng.gauss(0, _NOISE))
        plain_s = _BASE_S + _SEQUENCE_S * len(running)
        prompt_s = factor * _PROMPT_S * sum(text.reads_prompt for text in running.values())
        forced_s = _ROW_S * sum(drafts[name] for name in drafts if running[name].kind == "forced")
        round_s = factor * (plain_s + _ROW_S * sum(drafts.values()) + num_passes * drafter_s)
        vanilla_s = factor * (plain_s + forced_s + (num_passes * drafter_s if forced_s else 0.0))
        yielded = self._yield(drafts)
        if not is_control:
            self.truth.treatment_s += round_s * len(free)
            self.truth.prompt_s += prompt_s * len(free)
            self.truth.vanilla_s += vanilla_s * sum(yielded[name].num_tokens for name in free)
        wall_s = round_s + prompt_s
        self._now_s += wall_s
        measured_s = factor * drafter_s * (1 + scenario.timing_error) if scenario.takes_off else 0.0
        self._experiment.ended(yielded, drafter=DrafterTime(num_passes, measured_s), goes_on=True)

    def _yield(self, drafts: dict[str, int]) -> dict[str, Yielded]:
        yielded: dict[str, Yielded] = {}
        for name, text in [*self._running.items()]:
            accepted = 0
            while accepted < drafts.get(name, 0) and self._rng.random() < self.scenario.acceptance:
                accepted += 1
            text.reads_prompt = False
            num_tokens = min(accepted + 1, text.tokens_left)
            yielded[name] = Yielded(num_tokens, drafts.get(name, 0))
            text.tokens_left -= num_tokens
            if not text.tokens_left:
                del self._running[name]
        return yielded


def play(scenario: ServerScenario, seed: int, num_rounds: int = 6000) -> tuple[Interval, Truth, float]:
    """What was measured in one run, the truth, and control's share of the rounds."""
    world = ServerWorld(scenario, seed)
    speedup = world.run(num_rounds)
    assert speedup is not None
    return speedup, world.truth, world.num_control / world.num_rounds
