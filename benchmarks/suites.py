"""What is compared: which engines in which modes, on which prompts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Contest:
    """Prompts that every entry generates for, one entry behind the other."""

    group: str  #: what a ratio is taken over: a task, a batch size
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    entries: tuple[tuple[str, str], ...]  #: (contestant, mode)
    stop_at_end: bool


def read_prompts(folder: Path, task: str, num: int, *, seed: int, max_characters: int) -> list[str]:
    """`num` prompts of a task, drawn by `seed`, none longer than `max_characters`."""
    lines = (folder / f"{task}.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    fitting = [prompt for prompt in prompts if len(prompt) <= max_characters]
    return random.Random(seed).sample(fitting, min(num, len(fitting)))


class Tokenizer:
    """Chat prompts as every engine gets them."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def __call__(self, prompt: str) -> tuple[int, ...]:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class Samples:
    """How much is measured."""

    num_prompts: int
    max_tokens: int
    seed: int
    max_characters: int = 3500
    batches: tuple[int, ...] = (1, 4, 8, 16)
    tasks: tuple[str, ...] = field(default=())


def batch_contests(folder: Path, tokenize: Tokenizer, samples: Samples, contestants: set[str]) -> list[Contest]:
    """Vanilla decoding of every engine at every batch size; each round has other prompts, of all tasks."""
    every = [
        prompt
        for task in samples.tasks
        for prompt in read_prompts(folder, task, 24, seed=samples.seed, max_characters=1200)
    ]
    rng = random.Random(samples.seed)
    entries = tuple((name, "vanilla") for name in ("ours", "transformers", "vllm") if name in contestants)
    return [
        Contest(
            f"{batch}",
            tuple(tokenize(prompt) for prompt in rng.sample(every, batch)),
            samples.max_tokens,
            _rotated(entries, number),
            stop_at_end=False,
        )
        for batch in samples.batches
        for number in range(samples.num_prompts)
    ]


def task_contests(
    folder: Path, tokenize: Tokenizer, samples: Samples, entries: tuple[tuple[str, str], ...]
) -> list[Contest]:
    """Every entry on the same prompts of each task, one at a time."""
    return [
        Contest(task, (tokenize(prompt),), samples.max_tokens, _rotated(entries, number), stop_at_end=True)
        for task in samples.tasks
        for number, prompt in enumerate(
            read_prompts(folder, task, samples.num_prompts, seed=samples.seed, max_characters=samples.max_characters)
        )
    ]


def _rotated(entries: tuple[tuple[str, str], ...], by: int) -> tuple[tuple[str, str], ...]:
    """Whoever comes first finds the machine colder: nobody always does."""
    by %= len(entries)
    return entries[by:] + entries[:by]
