"""A job's prompt as token ids, and whether it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jinja2

from alphaloop.errors import InvalidField, PromptTooLong
from alphaloop.messages import Job
from worker.engine import PreparedJob, Sampling


def prepare_job(tokenizer: Any, target: str, context_length: int, job: Job, sampling: Sampling) -> PreparedJob:
    """Tokenize and check. A chat model's template is applied to `messages`; `prompt` is continued as it stands.

    `max_tokens` is lowered to what the context leaves behind the prompt; a prompt that leaves nothing is refused.
    """
    if job.body.model not in (None, target):
        raise InvalidField(f"expected {target!r}, the model served here", field="body.model")
    token_ids = tuple(_tokenize(tokenizer, job))
    if not token_ids:
        raise InvalidField("expected a prompt of at least one token, found none", field="body")
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


def _tokenize(tokenizer: Any, job: Job) -> list[int]:
    if job.body.prompt is not None:
        return list(tokenizer(job.body.prompt)["input_ids"])
    messages = job.body.messages or ()
    if not tokenizer.chat_template:
        return list(tokenizer("\n\n".join(message.content for message in messages))["input_ids"])
    # `developer` is OpenAI's newer word for `system`, which is what templates know.
    turns = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in messages
    ]
    try:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError as error:
        raise InvalidField(
            f"the target's chat template refuses this conversation: {error}", field="body.messages"
        ) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
