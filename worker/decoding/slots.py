"""A key/value cache in which every sequence has a slot and a length of its own.

Each layer holds [slots, heads, capacity, head_dim]. A pass writes `width` columns behind the length of each of its
rows, and the mask lets every column see its row up to itself: rows may be ragged, and join or leave without touching
the others. Rejected positions are never counted in the length, so the next pass overwrites them; so are the columns
that pad a row to the pass's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Window:
    """The columns of one pass: where they are written and what they may see."""

    rows: Tensor  #: [batch] slots
    positions: Tensor  #: [batch, width]
    mask: Tensor  #: [batch, 1, width, num_keys], true where a column may look
    num_keys: int
    span: slice | None  #: the rows as a slice, where they lie side by side: then nothing is copied


class SlotCache(Cache):
    """Slots of all layers, and how many positions of each count."""

    def __init__(self, num_layers: int, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.num_slots = num_slots
        self.lengths = [0] * num_slots
        self.window: Window | None = None
        self.capacity = 0
        self._free = sorted(range(num_slots), reverse=True)
        self._slot_layers = [_SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=[*self._slot_layers])

    def acquire(self) -> int:
        """The lowest free slot, empty."""
        slot = self._free.pop()
        self.lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; what it holds becomes invisible at once."""
        self._free = sorted([*self._free, slot], reverse=True)

    def clear(self) -> None:
        """Free every slot and drop the memory, whatever state a failed pass left it in."""
        self.lengths = [0] * self.num_slots
        self._free = sorted(range(self.num_slots), reverse=True)
        self.window, self.capacity = None, 0
        for layer in self._slot_layers:
            layer.keys = layer.values = None

    def open(self, rows: Sequence[int], width: int) -> Window:
        """Prepare a pass of `width` columns behind the current length of each of `rows`."""
        lengths = [self.lengths[row] for row in rows]
        num_keys = max(lengths) + width
        if num_keys > self.capacity:
            self.capacity = -(-num_keys // BLOCK) * BLOCK
        starts = torch.tensor(lengths, device=self.device)
        positions = starts[:, None] + torch.arange(width, device=self.device)
        mask = torch.arange(num_keys, device=self.device) <= positions[:, :, None]
        beside = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        span = slice(rows[0], rows[0] + len(rows)) if beside else None
        self.window = Window(torch.tensor(rows, device=self.device), positions, mask[:, None], num_keys, span)
        return self.window


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, [slots, heads, capacity, head_dim]."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._grown(None, key_states), self._grown(None, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's columns; returns all that its rows hold up to the last of them."""
        window = self._cache.window
        if window is None:
            raise RuntimeError("expected open() before a pass")
        if self.keys is None or self.values is None or self.keys.shape[2] < self._cache.capacity:
            self.keys, self.values = self._grown(self.keys, key_states), self._grown(self.values, value_states)
        return _write(self.keys, window, key_states), _write(self.values, window, value_states)

    def _grown(self, held: Tensor | None, states: Tensor) -> Tensor:
        # Zeros, not empty memory: a masked column weighs nothing, but nothing times NaN is NaN.
        _, num_heads, _, head_dim = states.shape
        grown = states.new_zeros((self._cache.num_slots, num_heads, self._cache.capacity, head_dim))
        if held is not None:
            grown[:, :, : held.shape[2]] = held
        return grown

    def get_seq_length(self) -> int:
        return max(self._cache.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.window.num_keys if self._cache.window else query_length, 0

    def get_max_length(self) -> int:
        return -1


def _write(held: Tensor, window: Window, states: Tensor) -> Tensor:
    held[window.rows[:, None], :, window.positions] = states.transpose(1, 2)
    if window.span is not None:
        return held[window.span, :, : window.num_keys]
    return held[window.rows, :, : window.num_keys]
