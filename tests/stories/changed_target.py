"""Another revision of the served model: its last layers trained further, for minutes, on Python's own sources.

The sources have nothing of a conversation, so what the model writes moves, and a draft that was trained on its former
texts fits it less.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from alphaloop.demo.sources import stdlib_folder
from worker.decoding.models import load_weights

NUM_LAYERS: Final = 6  #: the last ones are trained
LENGTH: Final = 128  #: tokens of a piece
PIECES: Final = 3  #: a step


def train_further(source: str, folder: Path, *, num_steps: int, rate: float, seed: int) -> None:
    """Write the changed model to `folder`, as transformers keeps one. The same seed gives nearly the same weights."""
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
    files = sorted(path for path in stdlib_folder().glob("*.py") if path.stat().st_size > 20_000)
    for _ in range(num_steps):
        pieces = torch.stack([_piece(loaded.tokenizer, rng.choice(files), rng) for _ in range(PIECES)])
        loss = model(input_ids=pieces, labels=pieces).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _piece(tokenizer: object, file: Path, rng: random.Random) -> Tensor:
    text = file.read_text(encoding="utf-8")
    begin = rng.randrange(len(text) - 8 * LENGTH)
    token_ids = tokenizer(text[begin : begin + 8 * LENGTH], return_tensors="pt").input_ids[0]  # type: ignore[operator]
    return token_ids[:LENGTH].clone()
