"""How a draft is made: every setting, with the default that was best for SmolLM2-135M."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from alphaloop.errors import ConfigError
from alphaloop.files import read_toml
from alphaloop.settings.section import Section


class Recipe(BaseModel):
    """A TOML file of configs/drafts/ holds these names at its top level."""

    model_config = Section.model_config

    num_layers: int = Field(2, ge=1)  #: number of layers: the target's first ones
    num_draft_tokens_known: int = Field(8192, ge=0)  #: most frequent tokens, which the draft can propose; 0: all
    num_texts: int = Field(800, ge=1)  #: texts to train on
    num_taught: int = Field(200, ge=1)  #: texts that the target reads again; the others teach only their own tokens
    num_held_out: int = Field(64, ge=1)  #: further texts, only to judge
    max_prompt_tokens: int = Field(96, ge=1)  #: of a prompt that the target writes itself
    max_answer_tokens: int = Field(192, ge=1)
    max_length: int = Field(512, ge=8)  #: tokens of a text that are trained on, its last ones
    batch_size: int = Field(48, ge=1)  #: texts written side by side
    num_teacher_tokens: int = Field(32, ge=1)  #: likeliest tokens of the target that are kept at each position
    prompt_weight: float = Field(0.5, ge=0)  #: weight of a position in the prompt; one in the answer has 1
    hard_label_share: float = Field(0.5, ge=0, le=1)  #: share of the loss that asks for the target's best token
    num_epochs: int = Field(4, ge=1)
    batch_tokens: int = Field(512, ge=16)  #: tokens of one step, padding included
    learning_rate: float = Field(1e-3, gt=0)
    warmup_share: float = Field(0.05, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    num_unrolled: int = Field(4, ge=1, le=16)  #: of heads: tokens in a row that they draft in training
    precision: Literal["bfloat16", "float32"] = "bfloat16"  #: dtype of the passes in training; the weights stay float32
    seed: int = 0


def read_recipe(file: Path | None, *, seed: int | None = None) -> Recipe:
    """The recipe in a TOML file, or the defaults; `seed` overrides its seed. Raises ConfigError."""
    fields = {} if file is None else read_toml(file, required=True)
    try:
        return Recipe(**fields | ({} if seed is None else {"seed": seed}))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{file}: {name}: {first['msg']}", hint=f"known are {', '.join(Recipe.model_fields)}"
        ) from None
