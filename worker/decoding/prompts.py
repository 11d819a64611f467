"""A job's prompt as token ids, and whether it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from alphaloop.errors import InvalidField, PromptTooLong
from alphaloop.messages import Job
from worker.decoding.conversation import encode_conversation
from worker.decoding.token_lengths import refuse_longer
from worker.engine import PreparedJob, Sampling


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
    has. A prompt with more
    characters than the context's tokens could stand for is refused before it is tokenized, because that takes seconds
    for a megabyte; `longest_token_chars` is of token_lengths.py.
    """
    if job.body.model not in (None, target):
        raise InvalidField(f"expected {target!r}, the model served here", field="body.model")
    _refuse_unknown_tokens(sampling, len(tokenizer) if num_logits is None else num_logits)
    max_chars = None if longest_token_chars is None else context_length * longest_token_chars
    token_ids = tuple(_tokenize(tokenizer, job, max_chars))
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
    room = context_length - len(token_ids)
    if room < 1:
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


def _tokenize(tokenizer: Any, job: Job, max_chars: int | None) -> list[int]:
    if job.body.prompt is not None:
        refuse_longer(tokenizer, job.body.prompt, max_chars, field="body.prompt")
        return list(tokenizer(job.body.prompt)["input_ids"])
    return encode_conversation(tokenizer, job.body.messages or (), max_chars=max_chars)
