"""Which tokens a draft model proposes to a target that has more, or other ones.

A draft may propose frequent tokens only: its head costs a part of the target's (FR-Spec, arXiv 2502.14856). Its folder
is a plain transformers model with the full vocabulary; the file `draft_vocabulary.json` beside the weights names,
ascending, the tokens that it was trained to propose. Whoever drafts with it keeps those rows of the head and maps
column i of its logits to token `token_ids[i]`. Tokens outside have q = 0, which every exact acceptance rule allows. The
file is no safetensors file, because vLLM takes every tensor in such files for a weight.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from torch import Tensor, nn
from torch.nn import functional

from alphaloop.errors import UnsupportedModel
from engine.models import DRAFT_VOCABULARY


class _Vocabulary(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: list[NonNegativeInt] = Field(min_length=1)


def read_draft_vocabulary(folder: Path) -> Tensor | None:
    """The tokens that the draft in `folder` proposes: [number], int64, ascending. None: all of them."""
    file = folder / DRAFT_VOCABULARY
    if not file.is_file():
        return None
    try:
        token_ids = _Vocabulary.model_validate_json(file.read_bytes()).token_ids
    except (ValidationError, OSError) as error:
        raise UnsupportedModel(f"{file}: expected a list of token ids as `token_ids`: {error}") from error
    if any(before >= after for before, after in pairwise(token_ids)):
        raise UnsupportedModel(f"{file}: expected token ids in ascending order, each once")
    return torch.tensor(token_ids, dtype=torch.int64)


def write_draft_vocabulary(folder: Path, token_ids: Tensor) -> None:
    """Write `token_ids` [number], ascending, beside the weights in `folder`."""
    (folder / DRAFT_VOCABULARY).write_text(json.dumps({"token_ids": token_ids.tolist()}), encoding="utf-8")


def restrict_head(model: Any, token_ids: Tensor) -> None:
    """Cut the model's head to these rows, in place: its logits become [..., len(token_ids)]. Embeddings stay whole."""
    head = model.get_output_embeddings()
    if (highest := int(token_ids.max())) >= len(head.weight):
        raise UnsupportedModel(f"expected draft tokens below {len(head.weight)}, the rows of the head, found {highest}")
    rows = token_ids.to(head.weight.device)
    small = nn.Linear(head.weight.shape[1], len(rows), bias=head.bias is not None, device="meta")
    small.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        small.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    model.set_output_embeddings(small)


@dataclass(frozen=True, eq=False)
class DraftTokens:
    """Which tokens a draft may propose, and where they stand among the target's."""

    vocabulary: int  #: columns of the target's logits
    num_shared: int  #: ids below this mean the same to both models; higher ones are never proposed
    end_tokens: frozenset[int]  #: a text ends with them, so nothing is drafted after them
    token_ids: Tensor | None = None  #: [columns of the draft's logits] for a head that was cut; None: column i is id i

    def best(self, logits: Tensor, num: int) -> Tensor:
        """The `num` likeliest tokens of each row of the draft's `logits` [rows, columns]: [rows, num]."""
        columns = likeliest(self._proposable(logits), num)
        return columns if self.token_ids is None else self.token_ids[columns]

    def best_probability(self, logits: Tensor) -> Tensor:
        """The probability of each row's likeliest token among those that may be proposed: [rows]."""
        columns = self._proposable(logits).float()
        return (columns.amax(dim=-1) - columns.logsumexp(dim=-1)).exp()

    def spread(self, logits: Tensor) -> Tensor:
        """The draft's `logits` as the target would give them: [rows, vocabulary], -inf where none is proposed."""
        columns = self._proposable(logits)
        if self.token_ids is None:
            return functional.pad(columns, (0, self.vocabulary - self.num_shared), value=-torch.inf)
        whole = logits.new_full((len(logits), self.vocabulary), -torch.inf)
        whole[:, self.token_ids[: columns.shape[1]]] = columns
        return whole

    def _proposable(self, logits: Tensor) -> Tensor:
        return logits[:, : self._num_proposable]

    @cached_property
    def _num_proposable(self) -> int:
        # The ids of a cut head ascend: those that both models know come first.
        return self.num_shared if self.token_ids is None else int((self.token_ids < self.num_shared).sum())


def likeliest(scores: Tensor, num: int) -> Tensor:
    """Columns of the `num` highest scores of each row [rows, columns], the highest first: [rows, num]."""
    if num == 1:
        return scores.argmax(dim=-1, keepdim=True)
    return scores.topk(min(num, scores.shape[1]), dim=-1).indices
