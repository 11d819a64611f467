"""A job's prompt as token ids, and whether it fits.

In a conversation, control tokens are what the chat template writes; in a message their strings are text. Otherwise
somebody who types `<|im_end|>` into a message could end it and begin another in the system's name. Why and how:
docs/decisions/0005-special-tokens.md. A prompt that cannot fit is refused before it is tokenized, by how much text one
token can stand for.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jinja2
from transformers.convert_slow_tokenizer import bytes_to_unicode

from alphaloop.errors import InvalidField, PromptTooLong, UnsupportedModel, reason_of
from alphaloop.messages import ChatMessage, Job
from worker.decoding.text import special_tokens
from worker.engine import PreparedJob, Sampling

log = logging.getLogger(__name__)


def prepare_job(
    tokenizer: Any,
    target: str,
    context_length: int,
    job: Job,
    sampling: Sampling,
    *,
    longest_token_chars: int | None = None,
    num_rows: int | None = None,
    num_logits: int | None = None,
) -> PreparedJob:
    """Tokenize and check. A chat model's template is applied to `messages`; `prompt` is continued as it stands.

    Control tokens may be written in a `prompt`; in a message their strings are text
    (docs/decisions/0005-special-tokens.md). `max_tokens` is lowered to what the context leaves behind the prompt; a
    prompt that leaves nothing is refused. So are token ids that the model does not have: in a prompt those from
    `num_rows`, the rows of its embeddings, and in sampling settings those from `num_logits`; None: what the tokenizer
    has. A prompt with more characters than the context's tokens could stand for, at `longest_token_chars` each, is
    refused before it is tokenized, because that takes seconds for a megabyte.
    """
    if job.body.model not in (None, target):
        raise InvalidField(f"expected {target!r}, the model served here", field="body.model")
    _refuse_unknown_tokens(sampling, len(tokenizer) if num_logits is None else num_logits)
    max_chars = None if longest_token_chars is None else context_length * longest_token_chars
    if job.body.prompt is not None:
        _refuse_longer(tokenizer, job.body.prompt, max_chars, field="body.prompt")
        token_ids = tuple(tokenizer(job.body.prompt)["input_ids"])
    else:
        token_ids = tuple(_encode_conversation(tokenizer, job.body.messages or (), max_chars))
    if not token_ids:
        raise InvalidField("expected a prompt of at least one token, found none", field="body")
    if num_rows is not None and (highest := max(token_ids)) >= num_rows:
        raise InvalidField(
            f"expected text that the target can read, found token {highest} "
            f"({tokenizer.convert_ids_to_tokens(highest)!r}): its embeddings have {num_rows} rows",
            field="body.prompt" if job.body.messages is None else "body.messages",
        )
    return fit_job(job, token_ids, sampling, context_length)


def fit_job(job: Job, token_ids: tuple[int, ...], sampling: Sampling, context_length: int) -> PreparedJob:
    """The prepared job with `max_tokens` that fit; raises PromptTooLong when not one does."""
    if (room := context_length - len(token_ids)) < 1:
        raise PromptTooLong(
            f"expected fewer than {context_length} prompt tokens, found {len(token_ids)} (max_tokens is "
            f"{sampling.max_tokens}, prompt and output share {context_length} tokens of context)",
            field="body.prompt" if job.body.messages is None else "body.messages",
            hint="shorten the prompt, or serve a model with a longer context",
        )
    return PreparedJob(job, token_ids, replace(sampling, max_tokens=min(sampling.max_tokens, room)))


def _refuse_unknown_tokens(sampling: Sampling, num_tokens: int) -> None:
    for field, tokens in (
        ("body.logit_bias", [token for token, _ in sampling.logit_bias]),
        ("body.stop_token_ids", sampling.stop_token_ids),
    ):
        if (highest := max(tokens, default=0)) >= num_tokens:
            raise InvalidField(f"expected token ids below {num_tokens}, found {highest}", field=field)


def _encode_conversation(tokenizer: Any, messages: Sequence[ChatMessage], max_chars: int | None) -> list[int]:
    """The prompt that the target answers to: its template's, or the contents one below the other without a template.

    Raises InvalidField where the template fails on the conversation, or where a control token would come from a
    message in a way that cannot be undone; PromptTooLong where the whole text has more than `max_chars`.
    """
    contents = [message.content for message in messages]
    text = _render(tokenizer, messages, contents)
    _refuse_longer(tokenizer, text, max_chars, field="body.messages")
    # A template writes the token that begins a text itself.
    options = {"add_special_tokens": not tokenizer.chat_template}
    control = _control_of(tokenizer)
    harmless = [control.defused(content) for content in contents]
    if harmless == contents:
        return list(tokenizer(text, **options)["input_ids"])
    plain = _render(tokenizer, messages, harmless)
    is_typed = any(any(control.found(content)) for content in contents)
    if not is_typed and control.found(text) == control.found(plain):
        return list(tokenizer(text, **options)["input_ids"])
    token_ids = _with_typed_as_text(tokenizer, control, messages, text, options)
    wanted = [token_id for token_id in tokenizer(plain, **options)["input_ids"] if token_id in control.token_ids]
    if token_ids is None or [token_id for token_id in token_ids if token_id in control.token_ids] != wanted:
        raise InvalidField(
            "expected messages without the strings of the target's control tokens, found some that the target's "
            "tokenizer or chat template cannot take as text",
            field="body.messages",
        )
    return token_ids


def apply_template(tokenizer: Any, turns: Sequence[Mapping[str, str]], *, asks_for_answer: bool = True) -> str:
    """The text of a conversation. Raises InvalidField where the template refuses it, or fails on it."""
    try:
        return str(tokenizer.apply_chat_template(turns, add_generation_prompt=asks_for_answer, tokenize=False))
    except jinja2.TemplateError as error:
        raise InvalidField(
            f"the target's chat template refuses this conversation: {error}", field="body.messages"
        ) from error
    except Exception as error:  # a template is a program, and may raise whatever Python does
        raise InvalidField(
            f"the target's chat template fails on this conversation: {reason_of(error)}",
            field="body.messages",
            hint="send other roles or contents, mend the template, or write the whole text as body.prompt",
        ) from error


def check_template(tokenizer: Any) -> None:
    """Raise UnsupportedModel for a chat template that can write no conversation at all."""
    if not (template := tokenizer.chat_template):
        return
    if isinstance(template, Mapping) and "default" not in template:
        raise UnsupportedModel(
            f"expected one chat template, or one that is named default, found {', '.join(sorted(template))}",
            hint="name one of them default in the model's chat templates, in a copy of its folder",
        )
    try:
        apply_template(tokenizer, [{"role": "user", "content": "hello"}])
    except InvalidField as error:
        if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            wrong = error.__cause__
            raise UnsupportedModel(
                f"its chat template is no Jinja template: line {wrong.lineno}: {wrong.message}",
                hint="mend the template in a copy of the model's folder, or delete it there",
            ) from error
        log.warning(
            "the target's chat template fails on one plain user message, so jobs with messages may be refused: %s",
            error.message,
            extra={"action": "chat_template_failed"},
        )


@dataclass(frozen=True, slots=True)
class _Control:
    """The control tokens of a tokenizer, and how they are found in a text: as it stands, and after the normalizer."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    pattern: re.Pattern[str]
    normalized: re.Pattern[str]
    letters: frozenset[str]  #: every control token has one of them
    normalize: Callable[[str], str]

    def found(self, text: str) -> tuple[list[str], list[str]]:
        """The control tokens in a text, in their order."""
        return self.pattern.findall(text), self.normalized.findall(self.normalize(text))

    def defused(self, content: str) -> str:
        """The content with an x for each character from which the normalizer may make one of `letters`."""
        unsafe = [one for one in set(content) if not self.letters.isdisjoint(one + self.normalize(one))]
        return content.translate({ord(one): "x" for one in unsafe}) if unsafe else content


@lru_cache(maxsize=4)
def _control_of(tokenizer: Any) -> _Control:
    special = special_tokens(tokenizer)
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    normalize = normalizer.normalize_str if normalizer else str
    strings = tuple(special.values())
    normalized = tuple(map(normalize, strings))
    return _Control(
        token_ids=frozenset(special),
        strings=strings,
        pattern=_any_of(strings),
        normalized=_any_of(normalized),
        letters=frozenset(map(_telling_letter, filter(None, (*strings, *normalized)))),
        normalize=normalize,
    )


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Longest first, as the tokenizer finds them."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, strings), key=len, reverse=True))) or "(?!)")


def _telling_letter(string: str) -> str:
    """A character that few other texts have: `<` of `<|im_end|>`. SentencePiece writes ▁ for each space."""
    return next((one for one in string if not (one.isalnum() or one.isspace() or one == "▁")), string[0])


def _with_typed_as_text(
    tokenizer: Any, control: _Control, messages: Sequence[ChatMessage], text: str, options: Mapping[str, bool]
) -> list[int] | None:
    """Token ids in which control tokens that stand in a message are ordinary tokens; None where they cannot be told."""
    if not tokenizer.is_fast:
        return None
    encoded = tokenizer(text, return_offsets_mapping=True, **options)
    tokens = list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))
    # What the normalizer makes a control token of is known only from the tokens.
    written = {text[begin:end].strip() for token_id, (begin, end) in tokens if token_id in control.token_ids}
    typed = _any_of(written.union(control.strings))
    mark = next(mark for number in itertools.count() if (mark := f"\ue000{number}\ue000") not in text)
    contents = [typed.sub(lambda found: mark + found[0], message.content) for message in messages]
    pieces = _render(tokenizer, messages, contents).split(mark)
    if "".join(pieces) != text:
        return None
    places = set(itertools.accumulate(map(len, pieces[:-1])))
    token_ids: list[int] = []
    for token_id, (begin, end) in tokens:
        # A token that takes the white space before it begins there.
        if end > begin and begin + len(text[begin:end]) - len(text[begin:end].lstrip()) in places:
            literal = tokenizer(text[begin:end], add_special_tokens=False, split_special_tokens=True)
            token_ids += literal["input_ids"]
        else:
            token_ids.append(token_id)
    return token_ids


def _render(tokenizer: Any, messages: Sequence[ChatMessage], contents: Sequence[str]) -> str:
    if not tokenizer.chat_template:
        return "\n\n".join(contents)
    # `developer` is OpenAI's newer word for `system`, which is what templates know.
    turns = [
        {"role": "system" if message.role == "developer" else message.role, "content": content}
        for message, content in zip(messages, contents, strict=True)
    ]
    return apply_template(tokenizer, turns)


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


def _refuse_longer(tokenizer: Any, text: str, max_chars: int | None, *, field: str) -> None:
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
    return {part["type"]}.union(*map(_kinds, part.get("pretokenizers", ())))
