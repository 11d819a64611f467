"""What the simulator plays, read from scenarios.toml and checked: devices, tasks, phases and slots.

With slots, moments are counted in output tokens of the stream, so that all rules meet the same load and the same slow
stretches at the same piece of work.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from alphaloop.costs import CostKind, CostPoint, CostTable

Slower: TypeAlias = tuple[tuple[str, float], ...]


class Part(BaseModel):
    """A part of the file: frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Bursts(Part):
    """Traffic in bursts: the open slots are drawn anew from `slots`, after `tokens` on average (exponential)."""

    slots: tuple[Annotated[int, Field(gt=0)], ...]
    tokens: int = Field(gt=0)


class Spell(Part):
    """Stretches in which a part is slow; the factor is uniform between the two of `slower`."""

    part: Literal["host", "draft"]  #: host: every part
    slower: tuple[float, float] = (2.0, 4.0)
    every_tokens: int = Field(gt=0)  #: mean distance, exponential
    lasts_tokens: int = Field(gt=0)  #: mean length, exponential


class Hiccup(Part):
    """So many rounds of a drafter take longer, once, from the job of this number on."""

    drafter: str
    from_job: int
    num_rounds: int = 40
    slower: float = 3.0


class Slots(Part):
    """The device's slots, each refilled in the round after it fell free."""

    num_slots: int = Field(gt=0)
    bursts: Bursts | None = None
    spells: tuple[Spell, ...] = ()
    hiccup: Hiccup | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of the stream, in output tokens, under one load and one speed."""

    num_open: int  #: slots
    slower: Slower  #: factor by part, "host" or a drafter's name; parts at their usual speed are left out


@dataclass(frozen=True, slots=True)
class Stretches:
    """All of them: `begins[i]` is the token with which stretch i begins."""

    begins: tuple[float, ...]
    of: tuple[Stretch, ...]

    def at(self, num_tokens: int) -> Stretch:
        """The one in which the stream is after `num_tokens` tokens."""
        return self.of[bisect_right(self.begins, num_tokens) - 1]


def draw_stretches(slots: Slots, num_tokens: int, rng: np.random.Generator) -> Stretches:
    """For a stream of `num_tokens` tokens."""
    loads = list(_loads(slots, num_tokens, rng))
    spells = [(spell.part, list(_spells(spell, num_tokens, rng))) for spell in slots.spells]
    edges = sorted({begin for begin, _ in loads} | {edge for _, its in spells for b, e, _ in its for edge in (b, e)})
    found = []
    for edge in edges:
        num_open = next(load for begin, load in reversed(loads) if begin <= edge)
        slower = tuple((part, factor) for part, its in spells for b, e, factor in its if b <= edge < e)
        found.append(Stretch(num_open, slower))
    return Stretches(tuple(edges), tuple(found))


def _loads(slots: Slots, num_tokens: int, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
    if slots.bursts is None:
        yield 0.0, slots.num_slots
        return
    at = 0.0
    while at < num_tokens:
        yield at, int(rng.choice(slots.bursts.slots))
        at += rng.exponential(slots.bursts.tokens)


def _spells(spell: Spell, num_tokens: int, rng: np.random.Generator) -> Iterator[tuple[float, float, float]]:
    at = rng.exponential(spell.every_tokens)
    while at < num_tokens:
        lasts = rng.exponential(spell.lasts_tokens)
        # Factors in steps of a half: the oracle knows what is best at each.
        yield at, at + lasts, float(np.round(2 * rng.uniform(*spell.slower)) / 2)
        at += lasts + rng.exponential(spell.every_tokens)


FILE = Path(__file__).with_name("scenarios.toml")

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class Surface(Part):
    """Milliseconds by batch, one for each of `widths`."""

    widths: tuple[int, ...]
    by_batch: dict[int, tuple[Positive, ...]]

    @model_validator(mode="after")
    def _rows_fit(self) -> Surface:
        for batch, row in self.by_batch.items():
            if len(row) != len(self.widths):
                raise ValueError(f"batch {batch}: expected {len(self.widths)} times, found {len(row)}")
        return self


class Device(Part):
    """What a round costs: the target's passes, and each drafter's proposals (width k + 1 proposes k tokens)."""

    target: Surface
    drafters: dict[str, Surface]
    prefill_ms_per_token: dict[str, float] = Field(default_factory=dict)  #: `target` and drafters; nothing: free

    def points(self, slower: dict[str, float] | None = None) -> tuple[CostPoint, ...]:
        """Every measured shape. `slower` multiplies the times of `target`, of a drafter, or of `wide` target passes."""
        slower = slower or {}
        found = []
        for name, surface in {"target": self.target, **self.drafters}.items():
            drafter = None if name == "target" else name
            for batch, row in surface.by_batch.items():
                for width, ms in zip(surface.widths, row, strict=True):
                    wide = slower.get("wide", 1.0) if drafter is None and width > 1 else 1.0
                    found.append(CostPoint(drafter, batch, width, ms * slower.get(name, 1.0) * wide, 15))
            if per_token := self.prefill_ms_per_token.get(name):
                ms = 512 * per_token * slower.get(name, 1.0)
                found += [CostPoint(drafter, 1, w, ms * w / 512, 5, 0, CostKind.PREFILL) for w in (1, 512)]
        return tuple(found)

    def table(self, slower: dict[str, float] | None = None) -> CostTable:
        """The points, interpolated."""
        return CostTable(self.points(slower))


class Acceptance(Part):
    """One drafter on one task: α_i and reach_i of the median job; the last value holds for all further positions.

    Several proposers that share the proposals of a round are one drafter here: what a round yields decides.
    """

    alpha: tuple[Probability, ...]
    reach: tuple[Probability, ...] = (1.0,)

    def at(self, k: int) -> tuple[list[float], list[float]]:
        """α_1..α_k and reach_1..reach_k."""
        return _extended(self.alpha, k), _extended(self.reach, k)


class Group(Part):
    """A share of a task's jobs that differs by `shift`, added to the logits of α_i and of reach_i."""

    name: str
    share: Positive = 1.0
    shift: float = 0.0
    prompt_tokens: int | None = None


class Producer(Part):
    """Who sends a share of a task's jobs. No rule knows the producer of a job."""

    share: Positive = 1.0
    drafters: dict[str, Acceptance] = Field(default_factory=dict)  #: where they differ from the task's


class Task(Part):
    """A kind of prompt."""

    share: float = Field(default=1.0, ge=0)
    drafters: dict[str, Acceptance]
    tokens: int = 48  #: median output
    #: Share of it that a grammar forces: these tokens come in every mode without a trial, so no round is for them.
    forced: float = Field(default=0.0, ge=0, lt=1)
    tokens_spread: float = 0.5  #: standard deviation of its logarithm
    prompt_tokens: int = 120
    longest: Positive = 2.5  #: longest output, in medians; inf: uncut
    job_spread: float = 0.6  #: standard deviation over jobs of the logits of α_i: what makes tokens of a job alike
    #: With slots only. Above 0: instead of the logits moving together, each drafter's α_i of a job are moved so that
    #: α_1 is from a beta distribution with this correlation between two trials of a job.
    correlation: float = Field(default=0.0, ge=0, lt=1)
    #: With slots only. Above 1: rounds that get a proposal of a drafter with reach_1 < 1 come in runs of this mean.
    run_rounds: float = Field(default=1.0, ge=1)
    producers: tuple[Producer, ...] = (Producer(),)  #: with slots only
    segments: tuple[Group, ...] = (Group(name=""),)
    samplings: tuple[Group, ...] = (Group(name="greedy"),)
    prompts: tuple[Group, ...] = (Group(name="<=256"),)
    forms: tuple[Group, ...] = (Group(name=""),)


class Change(Part):
    """What is different about a task from a phase on."""

    share: float | None = None
    drafters: dict[str, Acceptance] = Field(default_factory=dict)
    tokens: int | None = None


class Phase(Part):
    """A stretch of the stream. Changes last until another phase changes the same thing again.

    A scenario with slots has one phase, of which only `jobs` counts.
    """

    jobs: int = Field(gt=0)
    batch: int = Field(default=1, gt=0)
    hours: Positive = 24.0
    tasks: dict[str, Change] = Field(default_factory=dict)
    steps: int = Field(default=1, gt=0)  #: more than 1: the number of steps in which the changes come
    slower: dict[str, float] = Field(default_factory=dict)  #: the device's real times, times these
    restart: bool = False  #: the process is started anew at the phase's beginning


class Scenario(Part):
    """A stream to decide for."""

    name: str
    story: str
    kind: Literal["stationary", "changing"]
    device: str
    draft_tokens: dict[str, int]  #: drafter → longest draft
    tasks: dict[str, Task]
    phases: tuple[Phase, ...]
    slots: Slots | None = None  #: jobs join and leave one by one; without it, as described in stream.py
    unwinnable: str = ""  #: what of the oracle's lead no rule can win
    inferred: dict[str, float] = Field(default_factory=dict)  #: calibrated times over the true ones of the first phase
    scored_free: tuple[str, ...] = ("lookup",)  #: drafters that finished texts are replayed to
    new_task: str | None = None  #: the one whose cold start is judged

    @property
    def num_jobs(self) -> int:
        """Jobs of all phases."""
        return sum(phase.jobs for phase in self.phases)

    @cached_property
    def actions(self) -> tuple[tuple[str | None, int], ...]:
        """Every (drafter, k), vanilla first."""
        return ((None, 0), *((d, k) for d, most in self.draft_tokens.items() for k in range(1, most + 1)))


class Scenarios(Part):
    """The file."""

    devices: dict[str, Device]
    scenarios: tuple[Scenario, ...]

    @model_validator(mode="after")
    def _names_are_known(self) -> Scenarios:
        for scenario in self.scenarios:
            device = self.devices.get(scenario.device)
            if device is None:
                raise ValueError(f"{scenario.name}: no device {scenario.device}")
            lacking = [
                f"{task}/{drafter}"
                for task, of_it in scenario.tasks.items()
                for drafter in scenario.draft_tokens
                if drafter not in of_it.drafters or drafter not in device.drafters
            ]
            if scenario.slots and (len(scenario.phases) != 1 or not scenario.unwinnable):
                raise ValueError(f"{scenario.name}: expected one phase, and what no rule can win there")
            unknown = [t for phase in scenario.phases for t in phase.tasks if t not in scenario.tasks]
            if lacking or unknown:
                raise ValueError(f"{scenario.name}: no acceptance or costs for {lacking}, no task {unknown}")
        return self

    def named(self, name: str) -> Scenario:
        """The scenario of that name; KeyError where there is none."""
        return {scenario.name: scenario for scenario in self.scenarios}[name]


def read_scenarios(path: Path = FILE) -> Scenarios:
    """The committed scenarios, or those of another file of the same form."""
    return Scenarios.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))


def _extended(values: tuple[float, ...], k: int) -> list[float]:
    return [values[min(i, len(values) - 1)] for i in range(k)]
