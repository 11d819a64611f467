"""The target: its passes over the slot cache, and the token ids that end a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from alphaloop.errors import UnsupportedModel
from worker.decoding.slots import SlotCache
from worker.engine import EngineIdentity

PREFILL_CHUNK: Final = 512


class Target:
    """A loaded model in eval mode on its device, its tokenizer, and what names them."""

    def __init__(self, model: Any, tokenizer: Any, identity: EngineIdentity, end_tokens: frozenset[int]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.identity = identity
        self.end_tokens = end_tokens
        self.device: torch.device = model.device

    def new_cache(self, num_slots: int) -> SlotCache:
        """An empty cache for this model."""
        return SlotCache(self.model.config.num_hidden_layers, num_slots, self.device)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of generated tokens; special tokens have none."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def prefill(self, cache: SlotCache, slot: int, token_ids: Sequence[int]) -> Tensor:
        """Read a prompt into an empty slot; logits behind its last token, [1, vocabulary]."""
        logits = None
        for begin in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[begin : begin + PREFILL_CHUNK]
            logits = self.logits(cache, [slot], torch.tensor([chunk]), num_kept=1)
            cache.lengths[slot] += len(chunk)
        if logits is None:
            raise ValueError("expected at least one token")
        return logits[0]

    def logits(self, cache: SlotCache, rows: Sequence[int], token_ids: Tensor, *, num_kept: int = 0) -> Tensor:
        """One pass over `token_ids` [batch, width], written behind the rows' lengths, which stay as they are.

        Returns [batch, width, vocabulary], or only the last `num_kept` columns.
        """
        window = cache.open(rows, token_ids.shape[1])
        output = self.model(
            input_ids=token_ids.to(self.device),
            attention_mask=window.mask,
            position_ids=window.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_kept,
        )
        logits: Tensor = output.logits
        return logits

    @torch.inference_mode()
    def check_slots(self) -> None:
        """Raise UnsupportedModel unless ragged passes over slots agree with the model's own plain pass."""
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(0, self.model.config.vocab_size, (2, 12), generator=generator)
        plain = self.model(input_ids=token_ids.to(self.device), use_cache=False).logits.float()
        cache = self.new_cache(3)
        for slot, prompt in ((0, token_ids[0, :5]), (2, token_ids[1, :8])):
            self.prefill(cache, slot, prompt.tolist())
        ragged = torch.stack((token_ids[0, 5:9], token_ids[1, 8:12]))
        seen = self.logits(cache, [0, 2], ragged).float()
        expected = torch.stack((plain[0, 5:9], plain[1, 8:12]))
        error = (seen - expected).norm() / expected.norm()
        limit = 0.05 if self.identity.dtype in ("bfloat16", "float16") else 1e-3
        if not error <= limit:
            raise UnsupportedModel(
                f"passes over the slot cache differ from the model's own by {error:.1e} of the logits' norm, "
                f"expected at most {limit}: its attention depends on more than the mask and the positions"
            )
