"""Real runs in a file of JSON lines, a job each: what `python -m benchmarks.policy.export` writes from a database."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Count: TypeAlias = Annotated[int, Field(ge=0)]


class DrafterRun(BaseModel):
    """What one drafter was counted with in a job, by draft position."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    proposed: tuple[Count, ...] = ()
    trials: tuple[Count, ...] = ()
    accepts: tuple[Count, ...] = ()
    chances: tuple[Count, ...] = ()  #: rounds that allowed the position, with all before it accepted


class RealRun(BaseModel):
    """A job as it was decoded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    segment: str = ""
    sampling_bucket: str
    prompt_bucket: str
    num_prompt_tokens: Count
    num_tokens: int = Field(ge=2)
    drafters: dict[str, DrafterRun] = {}

    def of(self, drafter: str) -> DrafterRun:
        """The drafter's counts; empty where it neither decoded the job nor was scored on it."""
        return self.drafters.get(drafter, DrafterRun())

    def rates(
        self, drafter: str, most: int, pooled: tuple[tuple[float, ...], tuple[float, ...]], num_trials: float
    ) -> tuple[list[float], list[float]]:
        """α_i and reach_i of this job: its own counts beside `num_trials` trials with the rates of its task."""
        its = self.of(drafter)
        alpha, reach = [], []
        for i in range(most):
            accepts, trials, proposed, chances = (
                (row[i] if len(row) > i else 0) for row in (its.accepts, its.trials, its.proposed, its.chances)
            )
            alpha.append((accepts + num_trials * pooled[0][i]) / (trials + num_trials))
            reach.append(min(1.0, (proposed + num_trials * pooled[1][i]) / (max(chances, proposed) + num_trials)))
        return alpha, reach


def read_runs(path: Path) -> tuple[RealRun, ...]:
    """All lines, in their order. Raises pydantic's ValidationError for a line that is not a run."""
    return tuple(RealRun.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line)


def write_runs(path: Path, runs: Iterable[RealRun]) -> int:
    """Write the file; returns the number of lines."""
    lines = [json.dumps(run.model_dump(exclude_defaults=True)) for run in runs]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)
