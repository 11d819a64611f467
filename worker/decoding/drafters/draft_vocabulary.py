"""A draft that proposes only frequent tokens: its head costs a part of the target's (FR-Spec, arXiv 2502.14856).

The draft's folder is a plain transformers model with the full vocabulary; the file `draft_vocabulary.safetensors`
beside the weights names, ascending, the tokens it was trained to propose. Whoever drafts with it keeps those rows of
the head and maps column i of its logits to token `token_ids[i]`. Tokens outside have q = 0, which every exact
acceptance rule allows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from alphaloop.errors import UnsupportedModel

FILE: Final = "draft_vocabulary.safetensors"
_KEY: Final = "token_ids"


def read_draft_vocabulary(folder: Path) -> Tensor | None:
    """The tokens that the draft in `folder` proposes: [number], int64, ascending. None: all of them."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        token_ids = load_file(file)[_KEY]
    except (SafetensorError, KeyError, OSError) as error:
        raise UnsupportedModel(f"{file}: expected a tensor {_KEY!r}: {error}") from error
    if token_ids.dtype != torch.int64 or token_ids.dim() != 1 or not len(token_ids) or token_ids[0] < 0:
        raise UnsupportedModel(f"{file}: expected token ids, found {token_ids.dtype} of shape {tuple(token_ids.shape)}")
    if not bool((token_ids.diff() > 0).all()):
        raise UnsupportedModel(f"{file}: expected token ids in ascending order, each once")
    return token_ids


def write_draft_vocabulary(folder: Path, token_ids: Tensor) -> None:
    """Write `token_ids` [number], ascending, beside the weights in `folder`."""
    save_file({_KEY: token_ids.to(torch.int64).contiguous()}, folder / FILE)


def restrict_head(model: Any, token_ids: Tensor) -> None:
    """Cut the model's head to these rows, in place: its logits become [..., len(token_ids)]. Embeddings stay whole."""
    head = model.get_output_embeddings()
    if int(token_ids[-1]) >= len(head.weight):
        raise UnsupportedModel(
            f"expected draft tokens below {len(head.weight)}, the rows of the head, found {token_ids[-1]}"
        )
    rows = token_ids.to(head.weight.device)
    small = nn.Linear(head.weight.shape[1], len(rows), bias=head.bias is not None, device="meta")
    small.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        small.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    model.set_output_embeddings(small)
