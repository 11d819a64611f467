"""The target: its model, its tokenizer, and the token ids that end a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from worker.decoding.network.language_model import LanguageModel
from worker.decoding.text import TextStream, byte_tokens, special_tokens
from worker.decoding.token_lengths import longest_token_chars
from worker.engine import EngineIdentity, SamplingDefaults


class Target:
    """What is served, and what names it."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,
        identity: EngineIdentity,
        end_tokens: frozenset[int],
        sampling_defaults: SamplingDefaults,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.identity = identity
        self.end_tokens = end_tokens
        self.sampling_defaults = sampling_defaults

    @cached_property
    def longest_token_chars(self) -> int | None:
        """The most characters that one token stands for; None where there is no such limit."""
        return longest_token_chars(self.tokenizer)

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Of the tokenizer, by token id; empty where it has none."""
        return byte_tokens(self.tokenizer)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Of the tokenizer, by token id."""
        return special_tokens(self.tokenizer)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    def new_text(self, stop: Sequence[str], *, is_live: bool, before: Sequence[int]) -> TextStream:
        """The text of tokens that will be generated, `before` being the tokens that it continues."""
        return TextStream(
            self.decode,
            stop,
            is_live=is_live,
            before=before,
            byte_tokens=self.byte_tokens,
            special_tokens=self.special_tokens,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens; special tokens have none."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
