"""The workload: phases from a file, and the batches that they come to."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.suites import read_prompts

FILE: Final = Path(__file__).with_name("phases.toml")
_MOST_PROMPTS: Final = 200


class Phase(BaseModel):
    """Blocks of one load."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    batch: int = Field(ge=1)
    blocks: int = Field(ge=1)
    tasks: tuple[str, ...] = Field(min_length=1)
    prompts: Mapping[str, str] = {}  #: task → whose prompts, where they are not its own


@dataclass(frozen=True, slots=True)
class Block:
    """One batch of one task."""

    number: int
    phase: str
    task: str
    prompts: tuple[str, ...] = field(repr=False)


def read_phases(file: Path, *, times: int = 1) -> list[Phase]:
    """The phases in their order, each `times` as long. Raises OSError, and ValueError for what is no workload."""
    phases = [Phase.model_validate(phase) for phase in tomllib.loads(file.read_text("utf-8"))["phase"]]
    return [phase.model_copy(update={"blocks": phase.blocks * times}) for phase in phases]


def blocks(phases: list[Phase], folder: Path, *, seed: int, max_characters: int) -> Iterator[Block]:
    """Every block, tasks in turn; prompts in an order drawn by `seed`, from the start again when all were used."""
    rng = random.Random(seed)
    sources: dict[str, Iterator[str]] = {}
    number = 0
    for phase in phases:
        for task in (phase.tasks[i % len(phase.tasks)] for i in range(phase.blocks)):
            source = phase.prompts.get(task, task)
            if source not in sources:
                drawn = read_prompts(folder, source, _MOST_PROMPTS, seed=seed, max_characters=max_characters)
                if not drawn:
                    raise ValueError(f"expected prompts of at most {max_characters} characters of {source}, found none")
                sources[source] = cycle(rng.sample(drawn, len(drawn)))
            yield Block(number, phase.name, task, tuple(next(sources[source]) for _ in range(phase.batch)))
            number += 1
