"""A transformers model over the slot cache, computed by its own modules: for families that `fused` does not know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from alphaloop.errors import UnsupportedModel
from worker.decoding.network.groups import Group
from worker.decoding.network.kv_shape import KvShape
from worker.decoding.network.passes import Pass
from worker.decoding.network.slots import SlotCache
from worker.decoding.text_facts import FULL, SLIDING, text_facts


class UnfusedDecoder:
    """Computes a pass group by group. The model's own forward reads each group as a padded rectangle."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.kv_shape = KvShape.of(model.config, model.dtype)
        facts = text_facts(model.config)
        self.window = facts.window
        self._has_kinds = facts.has_kinds

    def set_window(self, window: int | None) -> None:
        """The window of sliding layers from now on."""
        self.window = window

    def __call__(self, cache: SlotCache, plan: Pass) -> Tensor:
        """Logits [wanted, vocabulary]; keys and values of all tokens are written into the cache."""
        logits = torch.cat([self._read(cache, plan, group) for group in plan.groups])
        return logits if plan.wanted is None else logits.index_select(0, plan.wanted)

    def _read(self, cache: SlotCache, plan: Pass, group: Group) -> Tensor:
        rows = group.slots.stop - group.slots.start
        token_ids, positions = plan.token_ids[group.tokens], plan.positions[group.tokens]
        if group.padded is not None:
            token_ids, positions = token_ids[group.padded], positions[group.padded]
        logits: Tensor = self._model(
            input_ids=token_ids.view(rows, group.width),
            position_ids=positions.view(rows, group.width),
            attention_mask=self._masks(cache, group),
            past_key_values=_View(cache, plan, group),
            use_cache=True,
        ).logits.flatten(0, 1)
        return logits if group.cells is None else logits.index_select(0, group.cells)

    def _masks(self, cache: SlotCache, group: Group) -> Tensor | dict[str, Tensor]:
        """As transformers' modules take them: by kind where layers differ, otherwise the one of all layers."""
        shape = (group.slots.stop - group.slots.start, 1, group.width, group.num_keys)
        full, local = (
            torch.zeros(shape, dtype=self.kv_shape.dtype, device=cache.device) if mask is None else mask
            for mask in (group.mask, group.local_mask)
        )
        if self.window is None:
            return full
        return {FULL: full, SLIDING: local} if self._has_kinds else local


class _View(Cache):
    """One group's slots, as transformers' modules expect a cache."""

    def __init__(self, cache: SlotCache, plan: Pass, group: Group) -> None:
        self._num_keys = group.num_keys
        super().__init__(layers=[_LayerView(held, plan, group) for held in cache.layers])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_keys

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._num_keys, 0


class _LayerView(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's part of the cache. Only real tokens are written, never padding."""

    is_sliding = False

    def __init__(self, held: Tensor, plan: Pass, group: Group) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = held
        self._group = group
        num_heads = held.shape[1]
        self._stored = plan.stored.view(-1, num_heads)[group.tokens]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("a view of a slot cache has its memory from the start")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the group's tokens; returns keys and values of its rows, [rows, heads, num_keys, head_dim] each."""
        return self._written(key_states, first=0), self._written(value_states, first=self._held.shape[1] // 2)

    def _written(self, states: Tensor, first: int) -> Tensor:
        """Write the real tokens of `states` into the heads from `first`; returns what its rows hold there.

        A layer may have fewer and smaller heads than the cache: keys and values of latent attention differ.
        """
        num_heads, size = states.shape[1], states.shape[3]
        if num_heads > self._held.shape[1] // 2 or size > self._held.shape[3]:
            raise UnsupportedModel(
                f"expected keys and values of at most {self._held.shape[1] // 2} heads of {self._held.shape[3]}, "
                f"as the config says, found {num_heads} of {size}"
            )
        cells = states.transpose(1, 2).flatten(0, 1)
        if self._group.cells is not None:
            cells = cells.index_select(0, self._group.cells)
        flat = self._held.view(-1, self._held.shape[-1])
        places = self._stored[:, first : first + num_heads].reshape(-1)
        flat[:, :size].index_copy_(0, places, cells.reshape(-1, size))
        return self._held[self._group.slots, first : first + num_heads, : self._group.num_keys, :size]

    def get_seq_length(self) -> int:
        return self._group.num_keys

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._group.num_keys, 0

    def get_max_length(self) -> int:
        return -1
