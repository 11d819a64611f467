"""Which tokens a draft can propose: those with the most probability in the target's texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from worker.decoding.training.teaching import Lesson


def choose_vocabulary(
    lessons: Sequence[Lesson], num_tokens: int, vocabulary: int, always: Iterable[int]
) -> Tensor | None:
    """Token ids, ascending, int64: the `num_tokens` with the most probability in all lessons, `always` among them.

    None for the whole vocabulary: if `num_tokens` is 0, or as many as there are.
    """
    if num_tokens == 0 or num_tokens >= vocabulary:
        return None
    mass = torch.zeros(vocabulary, dtype=torch.float64)
    for lesson in lessons:
        mass.index_add_(0, lesson.top_ids.flatten(), lesson.top_log_probs.double().exp().flatten())
    mass[[token for token in always if token < vocabulary]] = torch.inf
    # A stable sort: of tokens with equal mass, which is zero for most, the lower id goes first. It is the same on every
    # machine, and a tokenizer that was made by merging has its frequent tokens there.
    return mass.argsort(descending=True, stable=True)[:num_tokens].sort().values


def columns_of(token_ids: Tensor | None, vocabulary: int) -> Tensor | None:
    """[vocabulary]: the place of each token in `token_ids`, -1 if it has none; None for None."""
    if token_ids is None:
        return None
    columns = torch.full((vocabulary,), -1, dtype=torch.long)
    columns[token_ids] = torch.arange(len(token_ids))
    return columns
