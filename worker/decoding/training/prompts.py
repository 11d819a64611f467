"""The prompts of a draft's training texts: the user's own, or prompts that the target writes itself.

An instruct model that reads only the opening of a user's turn continues with a typical request from its training
(Magpie, arXiv 2406.08464). A system message that names a kind of request steers half of the prompts to the configured
tasks. The answer is then written without this message, as in serving.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from alphaloop.errors import ConfigError, InvalidField, PromptTooLong
from alphaloop.files import reading
from alphaloop.job_lines import BadLine, JobReader
from alphaloop.settings import Settings, TaskSettings
from worker.decoding.conversation import apply_template
from worker.decoding.prompts import prepare_job
from worker.decoding.training.recipe import Recipe
from worker.engine import Sampling

#: Label of texts whose prompt the target chose freely.
FREE: Final = "any"
_MARK: Final = "@@the user's turn@@"
_LONGEST_PROMPT: Final = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """A text to be written."""

    number: int
    task: str
    prompt: tuple[int, ...] | None = None  #: None: the target writes it, behind `opening`
    opening: tuple[int, ...] = ()


def read_prompts(file: Path, settings: Settings, tokenizer: Any, task: str | None) -> list[Request]:
    """The prompts of a JSONL file, in any form that `alphaloop enqueue` takes, tokenized as when served.

    Raises ConfigError for a file that cannot be read, for wrong lines with their places, and for no line at all.
    """
    with reading(file) as source:
        lines = list(JobReader(settings, task=task).read(source.lines, source.name))
    found: list[Request] = []
    wrong: list[str] = []
    for line in lines:
        if isinstance(line, BadLine):
            wrong.append(f"{line.where}: {line.error.field or 'line'}: {line.error.message}")
            continue
        try:
            prepared = prepare_job(
                tokenizer, settings.models.target.name, _LONGEST_PROMPT, line.job, Sampling(max_tokens=1, temperature=0)
            )
        except PromptTooLong:
            continue
        except InvalidField as error:
            wrong.append(f"{line.where}: {error.field}: {error.message}")
            continue
        found.append(Request(len(found), line.job.task, prepared.token_ids))
    if wrong:
        raise ConfigError(f"{len(wrong)} wrong lines; the first: {wrong[0]}", hint="see docs/guides/enqueue.md")
    if not found:
        raise ConfigError(f"{file}: expected at least one prompt below {_LONGEST_PROMPT} tokens, found none")
    return found


def plan_requests(
    tokenizer: Any,
    tasks: Mapping[str, TaskSettings],
    recipe: Recipe,
    prompts: Sequence[Request] | None,
    held_out: Sequence[Request] | None,
) -> tuple[list[Request], int]:
    """Every text to write, the held-out ones first, and the number of held-out ones.

    Without `prompts` the target writes `recipe.num_texts` prompts itself. Without `held_out` some of the same kind are
    held out: `recipe.num_held_out` that the target writes itself, or at most a fifth of the given prompts. Raises
    ConfigError.
    """
    num_self = recipe.num_texts if prompts is None else 0
    if held_out is None and prompts is None:
        num_held_out, num_self = recipe.num_held_out, recipe.num_texts + recipe.num_held_out
    given = list(prompts or ())
    if held_out is None and prompts is not None:
        if len(given) < 2:
            raise ConfigError("expected at least two prompts, one to train on and one to judge with, found one")
        random.Random(recipe.seed).shuffle(given)
        num_held_out = min(recipe.num_held_out, max(1, len(given) // 5))
    if held_out is not None:
        num_held_out = len(held_out)
        given = [*held_out, *given]
    planned = [*given, *_self_written(tokenizer, tasks, num_self)] if num_self else given
    return [replace(request, number=number) for number, request in enumerate(planned)], num_held_out


def _self_written(tokenizer: Any, tasks: Mapping[str, TaskSettings], num: int) -> list[Request]:
    """Requests whose prompts the target writes. Every second one is steered to a task."""
    free = _opening(tokenizer, None)
    steered = [
        (name, opening)
        for name, task in sorted(tasks.items())
        if task.description and (opening := _opening(tokenizer, task.description)) is not None
    ]
    if free is None:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise ConfigError(
                "the target has neither a chat template nor a first token, so it cannot write prompts",
                hint="give some with --prompts FILE.jsonl",
            )
        free = (int(start),)
    openings = [(FREE, free)]
    if steered:
        openings = [opening for task in steered for opening in ((FREE, free), task)]
    return [
        Request(number, task, opening=opening)
        for number, (task, opening) in zip(range(num), itertools.cycle(openings), strict=False)
    ]


def answer_prompt(tokenizer: Any, user_turn: str) -> tuple[int, ...]:
    """Token ids of a conversation that begins with this turn, up to where the answer begins."""
    if not tokenizer.chat_template:
        return tuple(tokenizer(user_turn)["input_ids"])
    text = apply_template(tokenizer, [{"role": "user", "content": user_turn}])
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _opening(tokenizer: Any, kind: str | None) -> tuple[int, ...] | None:
    """The chat template up to where the user's turn begins; None if the template has no such place."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": _MARK}]
    if kind is not None:
        instruction = f"You are a helpful AI assistant. The user asks for this kind of help: {kind}. The request holds "
        turns.insert(0, {"role": "system", "content": f"{instruction}everything that is needed to answer it."})
    try:
        text = apply_template(tokenizer, turns, asks_for_answer=False)
    except InvalidField:
        return None
    before, mark, _ = text.partition(_MARK)
    return tuple(tokenizer(before, add_special_tokens=False)["input_ids"]) or None if mark else None
