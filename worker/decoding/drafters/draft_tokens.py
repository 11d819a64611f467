"""Which tokens a draft model may propose to a target that has more, or other ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class DraftTokens:
    """Which tokens a draft may propose, and where they stand among the target's."""

    vocabulary: int  #: columns of the target's logits
    num_shared: int  #: ids below this mean the same to both models; those behind are never proposed
    end_tokens: frozenset[int]  #: a text ends with them, so nothing is drafted behind
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
