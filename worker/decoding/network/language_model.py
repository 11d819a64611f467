"""A loaded model as a function of the slot cache, for target and draft models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from alphaloop.errors import UnsupportedModel
from worker.decoding.network.fused import FusedDecoder, can_fuse
from worker.decoding.network.groups import Read
from worker.decoding.network.kv_shape import KvShape
from worker.decoding.network.passes import Pass, plan_pass
from worker.decoding.network.self_check import NUM_HELD, NUM_READ, mask_error, reference, rotation_error, some_tokens
from worker.decoding.network.slots import SlotCache
from worker.decoding.network.unfused import UnfusedDecoder
from worker.decoding.text_facts import text_facts

#: Tokens of a prompt that one pass reads where nothing else waits for it.
PREFILL_CHUNK: Final = 512


class Network(Protocol):
    """A network that computes a pass."""

    @property
    def kv_shape(self) -> KvShape:
        """What it keeps of every token."""

    @property
    def window(self) -> int | None:
        """Tokens that a layer with a sliding window sees, the current one included; None without such layers."""

    def set_window(self, window: int | None) -> None:
        """The window of sliding layers from now on."""

    def __call__(self, cache: SlotCache, plan: Pass) -> Tensor:
        """Logits [wanted, vocabulary]; keys and values of all tokens are written into the cache."""


class LanguageModel:
    """A decoder-only model on its device, in eval mode, whose passes over slots were compared with its own.

    The compared passes read a few tokens, with a window so short that these cross it. At the windows and boundaries
    that the config names, where a pass would take too long, masks and rotations alone are compared.
    """

    def __init__(self, model: Any, num_positions: int) -> None:
        """Takes over `model`. If the model can be fused, its layers are emptied. Raises UnsupportedModel."""
        self.config = model.config
        self._num_positions = num_positions
        self.device: torch.device = model.device
        self.vocabulary_size: int = model.get_output_embeddings().weight.shape[0]
        self.num_rows: int = model.get_input_embeddings().weight.shape[0]  #: tokens that can be read
        self.is_fused = can_fuse(model.config)
        facts = text_facts(model.config)
        if (error := rotation_error(model, facts, num_positions)) is not None:
            raise UnsupportedModel(error)
        expected = reference(model, facts)
        self._network: Network
        if self.is_fused:
            self._network = FusedDecoder(model, num_positions)
        else:
            self._network = UnfusedDecoder(model)
        if (error := self._error(expected)) is not None:
            raise UnsupportedModel(error)

    @property
    def kv_shape(self) -> KvShape:
        """What it keeps of every token."""
        return self._network.kv_shape

    def new_cache(self, num_slots: int, *, max_bytes: int | None = None) -> SlotCache:
        """An empty cache for this model."""
        shape, most = self._network.kv_shape, self._num_positions
        return SlotCache(shape, num_slots, self.device, max_bytes=max_bytes, most_positions=most)

    def read(self, cache: SlotCache, reads: Sequence[Read]) -> Tensor:
        """One pass over `reads`. Each is written behind its slot's length, which does not change.

        Returns the logits wanted, [sum of num_logits, vocabulary], in the order of `reads`.
        """
        return self._network(cache, plan_pass(cache, reads, self._network.window))

    def prefill(self, cache: SlotCache, slot: int, token_ids: Sequence[int]) -> Tensor:
        """Read a text into a slot, behind its content. Returns the logits behind the last token, [1, vocabulary]."""
        for begin in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[begin : begin + PREFILL_CHUNK]
            is_last = begin + PREFILL_CHUNK >= len(token_ids)
            logits = self.read(cache, [Read(slot, chunk, num_logits=1 if is_last else 0)])
            cache.lengths[slot] += len(chunk)
            if is_last:
                return logits
        raise ValueError("expected at least one token")

    @torch.inference_mode()
    def _error(self, expected: tuple[int | None, Tensor]) -> str | None:
        """How ragged passes over slots differ from the model's own plain pass; None if they agree.

        `expected`: of `self_check.reference`.
        """
        window = self._network.window
        if window is not None and (error := mask_error(window)) is not None:
            return error
        shortened, logits = expected
        try:
            self._network.set_window(shortened)
            return self._difference(logits)
        finally:
            self._network.set_window(window)

    def _difference(self, expected: Tensor) -> str | None:
        token_ids = some_tokens(self.num_rows).tolist()
        cache = self.new_cache(3)
        slots = [cache.acquire() for _ in range(3)]
        used = (slots[0], slots[2])
        held = [Read(slot, text[:num], num_logits=0) for slot, text, num in zip(used, token_ids, NUM_HELD, strict=True)]
        self.read(cache, held)
        for read in held:
            cache.lengths[read.slot] += len(read.token_ids)
        first, second = (text[num : num + NUM_READ] for text, num in zip(token_ids, NUM_HELD, strict=True))
        # One row continues as a chain, the other as a tree: two tokens that are dropped, then the text.
        chain = Read(used[0], first, num_logits=NUM_READ)
        tree = Read(used[1], [0, 1, *second], num_logits=NUM_READ, parents=[-1, 0, -1, 2, 3, 4])
        seen = self.read(cache, [chain, tree]).float()
        error = float((seen - expected).norm() / expected.norm())
        limit = 0.05 if self.kv_shape.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if error <= limit:
            return None
        return (
            f"passes over the slot cache differ from the model's own by {error:.1e} of the logits' norm, "
            f"expected at most {limit}: its attention depends on more than the mask and the positions"
        )
