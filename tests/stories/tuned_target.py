"""The first target: the model with its last layers trained for a minute to answer as somebody would like it.

It learns to answer with prose about a function, whatever is asked of it; the model as it was made copies the code. So a
draft of the tuned target's texts fits the other one less, and look-up fits that one better.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from engine.models import load_weights

NUM_LAYERS: Final = 6  #: the last ones are trained
LENGTH: Final = 192  #: most tokens of a lesson
LESSONS: Final = 2  #: a step
_UNASKED: Final = -100  #: a label that the loss leaves out


def train_further(
    source: str, folder: Path, lessons: Sequence[tuple[str, str]], *, num_steps: int, rate: float, seed: int
) -> None:
    """Write the tuned model to `folder`, as transformers keeps one. `lessons` are prompts with the answer wanted."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    loaded = load_weights(source, None, "float32", torch.device("cpu"))
    model = loaded.model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = [parameter for layer in model.model.layers[-NUM_LAYERS:] for parameter in layer.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=rate)
    for _ in range(num_steps):
        for prompt, answer in rng.sample(list(lessons), LESSONS):
            asked, whole = _token_ids(loaded.tokenizer, prompt, answer)
            labels = [_UNASKED] * asked + whole[asked:]
            loss = model(input_ids=torch.tensor([whole]), labels=torch.tensor([labels])).loss
            (loss / LESSONS).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _token_ids(tokenizer: Any, prompt: str, answer: str) -> tuple[int, list[int]]:
    """How many tokens ask, and all of them with the answer and its end."""
    turn = [{"role": "user", "content": prompt}]
    asking = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
    answering = tokenizer(answer + tokenizer.eos_token).input_ids
    asking = asking[: LENGTH - 32]
    return len(asking), (asking + answering)[:LENGTH]
