"""Attention of a pass over the slot cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worker.decoding.passes import Group, Pass


def attend(queries: Tensor, held: Tensor, plan: Pass, scaling: float, *, is_local: bool) -> Tensor:
    """[tokens, heads * head_dim] from `queries` [tokens, heads, head_dim] and a layer's slots.

    `held` [slots, 2 * key heads, capacity, head_dim] already contains the pass's own tokens.
    """
    if len(plan.groups) == 1:
        return _attend_group(queries, held, plan.groups[0], scaling, is_local=is_local)
    parts = [_attend_group(queries[group.tokens], held, group, scaling, is_local=is_local) for group in plan.groups]
    return torch.cat(parts)


def _attend_group(queries: Tensor, held: Tensor, group: Group, scaling: float, *, is_local: bool) -> Tensor:
    num_heads, head_dim = queries.shape[1:]
    num_key_heads = held.shape[1] // 2
    rows, width = group.slots.stop - group.slots.start, group.width
    padded = queries if group.padded is None else queries.index_select(0, group.padded)
    # Query heads that share a key head become further queries of it, so that keys are neither copied nor read again:
    # [rows, width, key heads, shared, head_dim] → [rows, key heads, shared * width, head_dim].
    shared = num_heads // num_key_heads
    grouped = padded.view(rows, width, num_key_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    mask = group.local_mask if is_local else group.mask
    if mask is not None and shared > 1:
        mask = mask[:, :, None].expand(-1, -1, shared, -1, -1).reshape(rows, 1, shared * width, group.num_keys)
    seen = functional.scaled_dot_product_attention(
        grouped.reshape(rows, num_key_heads, shared * width, head_dim),
        held[group.slots, :num_key_heads, : group.num_keys],
        held[group.slots, num_key_heads:, : group.num_keys],
        attn_mask=mask,
        scale=scaling,
    )
    seen = seen.view(rows, num_key_heads, shared, width, head_dim).permute(0, 3, 1, 2, 4)
    flat = seen.reshape(rows * width, num_heads * head_dim)
    return flat if group.cells is None else flat.index_select(0, group.cells)
