"""Fits the head to the draft's states before training.

The target's head reads states of the last of many layers. States of the first layers have another basis. The linear map
W with least squares between W·h of the draft and the target's state at the same position has a closed form (Belrose et
al., arXiv 2303.08112, train such a map for every layer). With W folded into the head, the first layers are a better
draft than after an epoch of training (docs/log.md). Training continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from worker.decoding.training.teaching import Lesson

#: Ridge, in units of the mean variance of a coordinate.
_RIDGE: Final = 1e-3


@torch.inference_mode()
def fit_map(draft: Any, lessons: Sequence[Lesson], on_text: Callable[[], None]) -> Tensor:
    """W [hidden, hidden], float32: the target's state is about W times the draft's, both behind their final norm.

    Lessons without states are skipped.
    """
    hidden = draft.config.hidden_size
    seen = torch.zeros(hidden, hidden, dtype=torch.float64)
    shared = torch.zeros(hidden, hidden, dtype=torch.float64)
    for lesson in lessons:
        if lesson.states is None:
            continue
        # Without the head, which costs more than a few layers.
        output = draft.base_model(input_ids=lesson.token_ids[None, :-1].to(draft.device), use_cache=False)
        states = output.last_hidden_state[0].to("cpu", torch.float64)
        seen += states.T @ states
        shared += states.T @ lesson.states.double()
        on_text()
    ridge = _RIDGE * seen.trace() / hidden * torch.eye(hidden, dtype=torch.float64)
    mapping: Tensor = torch.linalg.solve(seen + ridge, shared)
    return mapping.T.to(torch.float32).contiguous()


@torch.no_grad()
def turn_head(draft: Any, mapping: Tensor) -> None:
    """Fold W into the head, in place: its logits for h become those of the old head for W·h. It must not be tied."""
    weight = draft.get_output_embeddings().weight
    weight.copy_((weight.float() @ mapping.to(weight.device)).to(weight.dtype))
