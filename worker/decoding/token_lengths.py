"""How much text one token can stand for, so that a prompt that cannot fit is refused before it is tokenized."""

from __future__ import annotations

import json
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from alphaloop.errors import PromptTooLong


def longest_token_chars(tokenizer: Any) -> int | None:
    """The most characters that one token of this tokenizer stands for; None where there is no such limit.

    There is one where every character of the text is part of a token: the vocabulary has all bytes, and no control
    token takes up the white space beside it.
    """
    if not tokenizer.is_fast:
        return None
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    is_of_bytes = "ByteLevel" in _kinds(content["pre_tokenizer"]) and vocabulary.keys() >= set(
        bytes_to_unicode().values()  # type: ignore[no-untyped-call]
    )
    has_all_bytes = is_of_bytes or content["model"].get("byte_fallback")
    takes_white_space = any(token["lstrip"] or token["rstrip"] for token in content["added_tokens"])
    if not has_all_bytes or takes_white_space:
        return None
    # A byte-level token is written with one character a byte, and a character has at least one byte.
    return max(map(len, vocabulary))


def refuse_longer(tokenizer: Any, text: str, max_chars: int | None, *, field: str) -> None:
    """Raise PromptTooLong for a text of more characters than that; None is no limit.

    Characters count as they are tokenized, because a normalizer may shorten a text.
    """
    if max_chars is None or len(text) <= max_chars:
        return
    normalizer = tokenizer.backend_tokenizer.normalizer
    num_chars = len(normalizer.normalize_str(text)) if normalizer else len(text)
    if num_chars > max_chars:
        raise PromptTooLong(
            f"expected at most {max_chars} characters, which is the context's tokens times the longest token's "
            f"characters, found {num_chars}",
            field=field,
            hint="shorten the prompt, or serve a model with a longer context",
        )


def _kinds(part: dict[str, Any] | None) -> set[str]:
    """The types of a tokenizer's part, and of the parts that it consists of."""
    if part is None:
        return set()
    inner = part.get("pretokenizers", ())
    return {part["type"]}.union(*map(_kinds, inner))
