"""What the simulator plays: devices, tasks and phases, read from scenarios.toml. Pure data, checked when read."""

from __future__ import annotations

import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from alphaloop.costs import CostKind, CostPoint, CostTable
from benchmarks.policy.load import Part, Slots

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
    """One drafter on one task: α_i and reach_i of the median job; the last value holds for all further positions."""

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
    steps: int = Field(default=1, gt=0)  #: more than 1: the changes come gradually, in so many steps
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
    replayed: str | None = None  #: with slots: a file of real runs beside this one that the jobs are drawn from
    unwinnable: str = ""  #: what of the oracle's lead no rule can win
    inferred: dict[str, float] = Field(default_factory=dict)  #: calibrated times over the true ones of the first phase
    scored_free: tuple[str, ...] = ("lookup",)  #: drafters that finished texts are replayed to
    survival_more: int = 0  #: draft tokens beyond the best single k with which the survival rule does best
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
