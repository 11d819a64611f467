"""Lessons: the target's last hidden state and likeliest tokens at every position of its texts, on disk.

Computed once, so that training needs neither the target's memory nor its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from worker.decoding.training.texts import WrittenText, read_file, replace_file

_SHARD: Final = 32  # texts a file
_PASS_TOKENS: Final = 1024  # logits of a pass over a large vocabulary must stay small


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """One text, and the target's output behind each of its tokens except the last."""

    text: WrittenText
    token_ids: Tensor  #: [length], int64: the text's last tokens, at most `max_length`
    first_answer: int  #: index in `token_ids` of the first token of the answer
    top_ids: Tensor  #: [length - 1, kept], int64, likeliest first
    top_log_probs: Tensor  #: [length - 1, kept], float32, of the whole vocabulary's softmax
    states: Tensor | None  #: [length - 1, hidden], bfloat16: what the target's head reads; None: not read again


def plain_lesson(text: WrittenText, *, max_length: int, num_kept: int) -> Lesson:
    """A text that the target did not read again: each of its tokens is the only one to learn at its position."""
    token_ids = torch.tensor(text.token_ids[-max_length:])
    top_ids = torch.zeros(len(token_ids) - 1, num_kept, dtype=torch.long)
    top_log_probs = torch.full(top_ids.shape, -torch.inf)
    top_ids[:, 0], top_log_probs[:, 0] = token_ids[1:], 0.0
    return Lesson(text, token_ids, max(0, len(token_ids) - len(text.output)), top_ids, top_log_probs, None)


class TeacherNotes:
    """A folder of the target's top log-probabilities for a list of texts that does not change."""

    def __init__(self, folder: Path, texts: Sequence[WrittenText], *, max_length: int, num_kept: int) -> None:
        self._folder = folder
        self._num_kept = num_kept
        # Texts of similar length share a pass; shorter ones come first.
        ordered = sorted(texts, key=lambda text: (min(len(text.token_ids), max_length), text.number))
        self._shards = [ordered[begin : begin + _SHARD] for begin in range(0, len(ordered), _SHARD)]
        self._max_length = max_length
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def num_missing(self) -> int:
        """Texts that the target has yet to read."""
        return sum(len(shard) for i, shard in enumerate(self._shards) if not self._file(i).exists())

    def write(self, target: Any, should_stop: Callable[[], bool], on_texts: Callable[[int], None]) -> bool:
        """Read what is missing with `target`; False when stopped before. `on_texts` gets the number just read."""
        for i, shard in enumerate(self._shards):
            if should_stop():
                return False
            if self._file(i).exists():
                continue
            read: list[dict[str, Tensor]] = []
            for group in self._groups(shard):
                read += _read(target, group, self._num_kept)
                on_texts(len(group))
            replace_file(self._file(i), {name: torch.cat([notes[name] for notes in read]) for name in read[0]})
        return True

    def lessons(self) -> list[Lesson]:
        """The lesson of every text, by number."""
        found = []
        for i, shard in enumerate(self._shards):
            tensors, _ = read_file(self._file(i))
            lengths = [len(self._tokens(text)) - 1 for text in shard]
            whole = tensors["top_ids"].long(), tensors["top_log_probs"].float(), tensors["states"]
            for text, *parts in zip(shard, *(torch.split(tensor, lengths) for tensor in whole), strict=True):
                token_ids = torch.tensor(self._tokens(text))
                first = max(0, len(token_ids) - len(text.output))
                found.append(Lesson(text, token_ids, first, *parts))
        return sorted(found, key=lambda lesson: lesson.text.number)

    def _file(self, shard: int) -> Path:
        return self._folder / f"teacher-{shard:05d}.safetensors"

    def _tokens(self, text: WrittenText) -> tuple[int, ...]:
        return text.token_ids[-self._max_length :]

    def _groups(self, shard: Sequence[WrittenText]) -> Iterator[list[tuple[int, ...]]]:
        group: list[tuple[int, ...]] = []
        for tokens in map(self._tokens, shard):
            if group and (len(group) + 1) * len(tokens) > _PASS_TOKENS:
                yield group
                group = []
            group.append(tokens)
        yield group


@torch.inference_mode()
def _read(target: Any, group: Sequence[tuple[int, ...]], num_kept: int) -> Iterator[dict[str, Tensor]]:
    """The lessons of a group, whose last text is the longest. Padding is at the end, where no token sees it."""
    padded = torch.zeros(len(group), len(group[-1]), dtype=torch.long)
    for row, tokens in enumerate(group):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    output = target(input_ids=padded.to(target.device), use_cache=False, output_hidden_states=True)
    for row, tokens in enumerate(group):
        scores = output.logits[row, : len(tokens) - 1].float()
        top = scores.topk(min(num_kept, scores.shape[-1]), dim=-1)
        yield {
            "top_ids": top.indices.to("cpu", torch.int32),
            "top_log_probs": (top.values - scores.logsumexp(dim=-1, keepdim=True)).to("cpu", torch.float16),
            "states": output.hidden_states[-1][row, : len(tokens) - 1].to("cpu", torch.bfloat16),
        }
