"""What a draft's folder says about itself: `draft.json`, beside its weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from alphaloop.errors import ConfigError
from alphaloop.files import replace_file
from alphaloop.messages.job import TaskName

FILE: Final = "draft.json"

#: What is trained: a smaller model, or heads over the target's states.
DraftMethod = Literal["draft_model", "heads", "eagle3"]


class MeasuredDraft(BaseModel):
    """Counts of one judgement; rates are computed where they are shown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_texts: int
    num_tokens: int  #: of greedy text, the first of each text left out
    rounds: int
    proposed: tuple[int, ...]
    trials: tuple[int, ...]
    accepts: tuple[int, ...]
    num_positions: int
    overlap_sum: float

    def alphas(self) -> list[float]:
        """α_1, α_2 … as far as they were tested."""
        return [accepts / trials for accepts, trials in zip(self.accepts, self.trials, strict=True) if trials]

    def overlap(self) -> float | None:
        """Mean Σ min(p, q): the acceptance of a draft sampled at temperature 1."""
        return self.overlap_sum / self.num_positions if self.num_positions else None


class DraftJudgement(BaseModel):
    """What was measured on held-out texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_draft_tokens: int  #: k of the rounds
    by_task: dict[str, MeasuredDraft]
    total: MeasuredDraft
    untrained: MeasuredDraft  #: the same layers before training, on the same texts
    target_pass_ms: float  #: one token at batch 1, transformers' own forward
    draft_pass_ms: float

    @property
    def cost_ratio(self) -> float:
        """c: a draft pass over a target pass."""
        return self.draft_pass_ms / self.target_pass_ms


class DraftCard(BaseModel):
    """A trained draft."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    draft_revision: str
    target: str
    target_revision: str
    method: DraftMethod = "draft_model"  #: as it is served
    trained_on: str = Field(description="In a sentence.")
    parent_revision: str | None = Field(None, description="Of the heads whose weights training began with.")
    recipe: dict[str, Any]
    judgement: DraftJudgement

    def write(self, folder: Path) -> None:
        """Into the folder, in one step."""
        replace_file(folder / FILE, self.model_dump_json(indent=2) + "\n")


def read_card(folder: Path) -> DraftCard:
    """The card in a draft's folder. Raises ConfigError where there is none or a wrong one."""
    file = folder / FILE
    try:
        return DraftCard.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"expected a draft's folder with {FILE}, found none in {folder}", hint="`alphaloop draft train` makes one"
        ) from None
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{file}: {error}", hint="train the draft again, or restore the file") from None


def draft_name(name: str) -> str:
    """The name as [models.drafters] takes it. Raises ConfigError."""
    try:
        return TypeAdapter[str](TaskName).validate_python(name)
    except ValidationError:
        message = f"expected a drafter's name, small letters, digits, _ and -, found {name[:100]!r}"
        raise ConfigError(message, hint="give one with --name") from None


def expected_speedup(alphas: list[float], num_draft_tokens: int, cost_ratio: float) -> float:
    """Over vanilla at batch 1, where a wider target pass costs no more: (1 + Σ Π α_i) / (1 + k c)."""
    accepted = sum(math.prod(alphas[: i + 1]) for i in range(min(num_draft_tokens, len(alphas))))
    return (1 + accepted) / (1 + num_draft_tokens * cost_ratio)


def best_length(alphas: list[float], cost_ratio: float) -> tuple[int, float]:
    """The k with the highest expected speed-up and that speed-up; (0, 1.0) where none beats vanilla."""
    lengths = {k: expected_speedup(alphas, k, cost_ratio) for k in range(1, len(alphas) + 1)}
    best = max(lengths, key=lambda k: lengths[k], default=0)
    return (best, lengths[best]) if best and lengths[best] > 1 else (0, 1.0)
