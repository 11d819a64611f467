"""A loaded model as a function of the slot cache: what target and draft models have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from alphaloop.errors import UnsupportedModel
from worker.decoding.network.fused import FusedDecoder, can_fuse
from worker.decoding.network.groups import Read
from worker.decoding.network.passes import Pass, plan_pass
from worker.decoding.network.slots import KvShape, SlotCache
from worker.decoding.network.unfused import UnfusedDecoder

#: Tokens of a prompt that one pass reads where nothing else waits for it.
PREFILL_CHUNK: Final = 512


class Network(Protocol):
    """What computes a pass."""

    @property
    def kv_shape(self) -> KvShape:
        """What it keeps of every token."""

    @property
    def window(self) -> int | None:
        """Tokens that layers with a sliding window look back on, themselves included; None without such layers."""

    def __call__(self, cache: SlotCache, plan: Pass) -> Tensor:
        """Logits [wanted, vocabulary]; keys and values of all tokens are written into the cache."""


class LanguageModel:
    """A decoder-only model on its device, in eval mode, whose passes over slots were compared with its own."""

    def __init__(self, model: Any, num_positions: int) -> None:
        """Takes `model` over: where it can be fused, its layers are emptied. Raises UnsupportedModel."""
        self.config = model.config
        self.device: torch.device = model.device
        self.vocabulary_size: int = model.get_output_embeddings().weight.shape[0]
        self.is_fused = can_fuse(model.config)
        expected = _reference(model)
        self._network: Network
        self._network = FusedDecoder(model, num_positions) if self.is_fused else UnfusedDecoder(model)
        self._compare(expected)

    @property
    def kv_shape(self) -> KvShape:
        """What it keeps of every token."""
        return self._network.kv_shape

    def new_cache(self, num_slots: int, *, max_bytes: int | None = None) -> SlotCache:
        """An empty cache for this model."""
        return SlotCache(self._network.kv_shape, num_slots, self.device, max_bytes=max_bytes)

    def read(self, cache: SlotCache, reads: Sequence[Read]) -> Tensor:
        """One pass over `reads`, each written behind its slot's length, which stays as it is.

        Returns the logits wanted, [sum of num_logits, vocabulary], in the order of `reads`.
        """
        return self._network(cache, plan_pass(cache, reads, self._network.window))

    def prefill(self, cache: SlotCache, slot: int, token_ids: Sequence[int]) -> Tensor:
        """Read a text into a slot, behind what it holds; logits behind its last token, [1, vocabulary]."""
        for begin in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[begin : begin + PREFILL_CHUNK]
            is_last = begin + PREFILL_CHUNK >= len(token_ids)
            logits = self.read(cache, [Read(slot, chunk, num_logits=1 if is_last else 0)])
            cache.lengths[slot] += len(chunk)
            if is_last:
                return logits
        raise ValueError("expected at least one token")

    @torch.inference_mode()
    def _compare(self, expected: Tensor) -> None:
        """Raise UnsupportedModel unless ragged passes over slots agree with the model's own plain pass."""
        token_ids = _some_tokens(self.vocabulary_size)
        cache = self.new_cache(3)
        slots = [cache.acquire() for _ in range(3)]
        for row, slot, num in ((0, slots[0], 5), (1, slots[2], 8)):
            self.prefill(cache, slot, token_ids[row, :num].tolist())
        # One row goes on as a chain, the other as a tree: two tokens that do not count, then the text.
        chain = Read(slots[0], token_ids[0, 5:9].tolist(), num_logits=4)
        tree = Read(slots[2], [0, 1, *token_ids[1, 8:12].tolist()], num_logits=4, parents=[-1, 0, -1, 2, 3, 4])
        seen = self.read(cache, [chain, tree]).float()
        error = float((seen - expected).norm() / expected.norm())
        limit = 0.05 if self.kv_shape.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if not error <= limit:
            raise UnsupportedModel(
                f"passes over the slot cache differ from the model's own by {error:.1e} of the logits' norm, "
                f"expected at most {limit}: its attention depends on more than the mask and the positions"
            )


@torch.inference_mode()
def _reference(model: Any) -> Tensor:
    token_ids = _some_tokens(model.get_output_embeddings().weight.shape[0]).to(model.device)
    logits: Tensor = model(input_ids=token_ids, use_cache=False).logits.float()
    return torch.cat((logits[0, 5:9], logits[1, 8:12]))


def _some_tokens(vocabulary_size: int) -> Tensor:
    return torch.randint(0, vocabulary_size, (2, 12), generator=torch.Generator().manual_seed(0))
