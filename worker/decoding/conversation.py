"""A conversation as token ids. Control tokens are what the chat template writes; in a message their strings are text.

Somebody who could type `<|im_end|>` into a message could end it and begin another in the system's name. Why and how:
docs/decisions/0005-special-tokens.md.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import jinja2

from alphaloop.errors import InvalidField
from alphaloop.messages import ChatMessage
from worker.decoding.token_lengths import refuse_longer


def encode_conversation(tokenizer: Any, messages: Sequence[ChatMessage], *, max_chars: int | None = None) -> list[int]:
    """The prompt that the target answers to: its template's, or the contents one below the other without a template.

    Raises InvalidField where the template refuses the conversation, or where it does something else with a message
    because of a control token's string in it, PromptTooLong where the whole text has more than `max_chars`.
    """
    contents = [message.content for message in messages]
    text = _render(tokenizer, messages, contents)
    refuse_longer(tokenizer, text, max_chars, field="body.messages")
    # A template writes the token that begins a text itself.
    options = {"add_special_tokens": not tokenizer.chat_template}
    control = re.compile("|".join(map(re.escape, _control_strings(tokenizer))) or "(?!)")
    if not any(map(control.search, contents)):
        return list(tokenizer(text, **options)["input_ids"])
    mark = next(mark for number in itertools.count() if (mark := f"\ue000{number}\ue000") not in text)
    marked = _render(tokenizer, messages, [control.sub(lambda found: mark + found[0], text) for text in contents])
    pieces = marked.split(mark)
    if "".join(pieces) != text or not tokenizer.is_fast:
        raise InvalidField(
            "expected messages without the strings of the target's control tokens, found some that the target's "
            "tokenizer or chat template cannot take as text",
            field="body.messages",
        )
    typed = set(itertools.accumulate(map(len, pieces[:-1])))
    encoded = tokenizer(text, return_offsets_mapping=True, **options)
    token_ids: list[int] = []
    for token_id, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        # A token that takes the white space before it begins there.
        if end > begin and begin + len(text[begin:end]) - len(text[begin:end].lstrip()) in typed:
            literal = tokenizer(text[begin:end], add_special_tokens=False, split_special_tokens=True)
            token_ids += literal["input_ids"]
        else:
            token_ids.append(token_id)
    return token_ids


def _control_strings(tokenizer: Any) -> list[str]:
    """Longest first, as the tokenizer finds them."""
    added = tokenizer.added_tokens_decoder.values()
    return sorted((token.content for token in added if token.special), key=len, reverse=True)


def _render(tokenizer: Any, messages: Sequence[ChatMessage], contents: Sequence[str]) -> str:
    if not tokenizer.chat_template:
        return "\n\n".join(contents)
    # `developer` is OpenAI's newer word for `system`, which is what templates know.
    turns = [
        {"role": "system" if message.role == "developer" else message.role, "content": content}
        for message, content in zip(messages, contents, strict=True)
    ]
    try:
        return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    except jinja2.TemplateError as error:
        raise InvalidField(
            f"the target's chat template refuses this conversation: {error}", field="body.messages"
        ) from error
