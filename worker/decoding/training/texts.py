"""Texts of the target, on disk. A text is written once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from alphaloop.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A prompt and what the target answered."""

    number: int  #: its place in the run, from 0
    task: str
    prompt: tuple[int, ...]  #: token ids, the chat template's included
    output: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt + self.output


class TextStore:
    """A folder of shards, each a safetensors file with some finished texts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, texts: Sequence[WrittenText]) -> None:
        """Write one more shard. If this fails, no part of the shard remains."""
        if not texts:
            return
        tensors = {
            "numbers": torch.tensor([text.number for text in texts], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(text.prompt) for text in texts], dtype=torch.int32),
            "lengths": torch.tensor([len(text.token_ids) for text in texts], dtype=torch.int32),
            "token_ids": torch.tensor([token for text in texts for token in text.token_ids], dtype=torch.int32),
        }
        name = f"texts-{min(text.number for text in texts):06d}-{len(texts)}.safetensors"
        replace_file(self.folder / name, tensors, {"tasks": json.dumps([text.task for text in texts])})

    def all(self) -> list[WrittenText]:
        """Every text, by number. Raises ConfigError for a shard that is damaged."""
        found: dict[int, WrittenText] = {}
        for file in sorted(self.folder.glob("texts-*.safetensors")):
            for text in _read(file):
                found[text.number] = text
        return [found[number] for number in sorted(found)]


def replace_file(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically: a reader sees the old file or the new one. Raises ConfigError."""
    partial = file.with_suffix(".partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        partial.replace(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be written: {error}", hint="is the disk full?") from error


def read_file(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises ConfigError for one that is damaged."""
    try:
        with safe_open(file, framework="pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}, content.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="delete it: the run makes it again") from error


def _read(file: Path) -> Iterable[WrittenText]:
    tensors, metadata = read_file(file)
    token_ids = torch.split(tensors["token_ids"], tensors["lengths"].tolist())
    columns = tensors["numbers"].tolist(), tensors["prompt_lengths"].tolist(), json.loads(metadata["tasks"]), token_ids
    for number, num_prompt, task, ids in zip(*columns, strict=True):
        yield WrittenText(number, task, tuple(ids[:num_prompt].tolist()), tuple(ids[num_prompt:].tolist()))
