"""Heads of a target: trained on states that were recorded while the target wrote, and judged on others.

The heads go through a text as they will draft: from the state at a position they step along the text's own tokens, and
at every step learn what the target says there. What it says follows from the recorded states alone, by its head, so the
target is not run again. Only the small network is trained; the head is the target's, cut to frequent tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from alphaloop.draft_card import MeasuredDraft
from alphaloop.errors import UnsupportedModel
from engine.drafters.head_files import SEQUENTIAL, refuse_left, take
from engine.drafters.heads import normed_inputs
from engine.training.data import write_tensors
from engine.training.distil import Judged, columns_of, measured_drafts, walk_rounds
from engine.training.recipe import Recipe
from engine.training.recording import RecordedText

_Lesson = TypeVar("_Lesson")
#: Weight of a step over that of the step before it: it is reached only where that one's token was accepted.
DECAY: Final = 0.8
#: Rows of the network's inner layer, in sizes of a state.
_WIDTH: Final = 2


class HeadsInTraining(torch.nn.Module, Generic[_Lesson]):
    """Heads over the target's states, from what was recorded to a folder that a worker loads."""

    def __init__(self, embeddings: Tensor, head: Tensor, token_ids: Tensor | None, recipe: Recipe) -> None:
        """`embeddings` and `head` [vocabulary, hidden] are the target's, and stay as they are.

        `token_ids` [columns]: what is drafted, to which the head is cut; None: every token.
        """
        super().__init__()
        self.embeddings, self.token_ids, self.recipe = embeddings.float(), token_ids, recipe
        self.head = (head if token_ids is None else head[token_ids]).float()
        self.vocabulary = len(head)
        self._columns = columns_of(token_ids, len(embeddings))
        self._generator = torch.Generator().manual_seed(recipe.seed)

    def lessons(self, recorded: Iterable[RecordedText]) -> list[_Lesson]:
        """Texts that are long enough to draft in."""
        raise NotImplementedError

    def loss(self, lessons: Sequence[_Lesson]) -> Tensor:
        """The weighted mean of `token_loss` over the positions and steps of a batch."""
        raise NotImplementedError

    def judged(self, recorded: Sequence[RecordedText]) -> Iterator[Judged]:
        """Rounds from steps along each text: up to its first wrong token a draft is the text."""
        raise NotImplementedError

    @torch.inference_mode()
    def judge(self, recorded: Sequence[RecordedText]) -> tuple[dict[str, MeasuredDraft], MeasuredDraft]:
        """Acceptance on held-out texts, by task and of all, without decoding: see `distil.judge`."""
        return measured_drafts(self.judged(recorded))

    def columns(self, tokens: Tensor) -> Tensor:
        """The column of each token, -1 where there is none."""
        return tokens if self._columns is None else self._columns[tokens]

    def logits(self, x: Tensor) -> Tensor:
        """[rows, columns]."""
        return functional.linear(x, self.head)

    def token_loss(self, logits: Tensor, taught: Tensor, wanted: Tensor) -> Tensor:
        """[rows], as `distillation_loss`: `taught` [rows, columns] is the target's, `wanted` the text's column."""
        log_q, share = logits.log_softmax(dim=-1), self.recipe.hard_label_share
        hard = -log_q.gather(-1, wanted.clamp(min=0)[:, None]).squeeze(-1) * (wanted >= 0)
        return (1 - share) * -(taught * log_q).sum(dim=-1) + share * hard

    def begin_with(self, tensors: dict[str, Tensor], *, with_head: bool = False) -> None:
        """Copy the network from the files of other heads, with `with_head` also their head and what it drafts.

        Raises UnsupportedModel where a tensor is missing, has another shape, or is not read here.
        """
        with torch.no_grad():
            for name, parameter in self.network().items():
                parameter.copy_(take(tensors, name, tuple(parameter.shape)))
        head = take(tensors, "lm_head.weight")
        token_ids = self.take_token_ids(tensors, len(head))
        refuse_left(tensors)
        if with_head:
            if tuple(head.shape)[1:] != tuple(self.head.shape)[1:]:
                raise UnsupportedModel(f"expected a head over {self.head.shape[1]} numbers, found {list(head.shape)}")
            self.head, self.token_ids = head.float(), token_ids
            self._columns = columns_of(token_ids, len(self.embeddings))

    def network(self) -> dict[str, Parameter]:
        """What is trained, by the names in the file."""
        raise NotImplementedError

    def take_token_ids(self, tensors: dict[str, Tensor], num_columns: int) -> Tensor | None:
        """Take out which tokens the columns of a head stand for; None: column i is token i."""
        raise NotImplementedError

    def save(self, folder: Path, dtype: torch.dtype, facts: dict[str, Any]) -> None:
        """Write the folder. `facts`: of the target, for config.json."""
        tensors = {
            name: x.detach().to(dtype if x.is_floating_point() else None).contiguous()
            for name, x in self.tensors().items()
        }
        write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config() | facts, indent=2) + "\n", encoding="utf-8")

    def tensors(self) -> dict[str, Tensor]:
        """The weights by their names in the file."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """What the file config.json says."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class HeadLesson:
    """One text: the state after each token from some position on, and the tokens that follow them."""

    task: str
    states: Tensor  #: [length, hidden], bfloat16
    token_ids: Tensor  #: [length]: token i follows state i

    @staticmethod
    def of(recorded: RecordedText) -> HeadLesson:
        """The lesson of a recorded text."""
        states, first = recorded.final, recorded.final_first
        tokens = torch.tensor(recorded.text.token_ids[first + 1 : first + 1 + len(states)])
        return HeadLesson(recorded.text.task, states[: len(tokens)], tokens)

    def __len__(self) -> int:
        return len(self.token_ids)


class SequentialHeadsInTraining(HeadsInTraining[HeadLesson]):
    """`engine.drafters.heads.SequentialHeads`, which `method = "heads"` loads."""

    def __init__(self, embeddings: Tensor, head: Tensor, token_ids: Tensor | None, recipe: Recipe) -> None:
        """As `HeadsInTraining`."""
        super().__init__(embeddings, head, token_ids, recipe)
        hidden = embeddings.shape[1]
        inner = torch.randn((_WIDTH * hidden, 2 * hidden), generator=self._generator) / (2 * hidden) ** 0.5
        self.inner = Parameter(inner)
        # At first a state stays as it is.
        self.outer = Parameter(torch.zeros(hidden, _WIDTH * hidden))

    def after(self, x: Tensor, tokens: Tensor) -> Tensor:
        """States [rows, hidden] after one more token of each row."""
        inner = functional.silu(functional.linear(normed_inputs(x, self.embeddings[tokens]), self.inner))
        return x + functional.linear(inner, self.outer)

    def lessons(self, recorded: Iterable[RecordedText]) -> list[HeadLesson]:
        """Those longer than a draft."""
        return [lesson for lesson in map(HeadLesson.of, recorded) if len(lesson) > self.recipe.num_unrolled]

    def loss(self, lessons: Sequence[HeadLesson]) -> Tensor:
        """Over positions that as many tokens follow as there are steps."""
        k = self.recipe.num_unrolled
        usable = [lesson for lesson in lessons if len(lesson) > k]
        states = torch.cat([lesson.states for lesson in usable]).float()
        tokens = torch.cat([lesson.token_ids for lesson in usable])
        begins, begin = [], 0
        for lesson in usable:
            begins.append(torch.arange(begin, begin + len(lesson) - k))
            begin += len(lesson)
        rows = torch.cat(begins)
        with torch.no_grad():
            taught = self.logits(states).softmax(dim=-1)
        wanted = self.columns(tokens)
        x, total, weights = states[rows], states.new_zeros(()), 0.0
        for step in range(1, k + 1):
            x = self.after(x, tokens[rows + step - 1])
            weight = DECAY ** (step - 1)
            total = total + weight * self.token_loss(self.logits(x), taught[rows + step], wanted[rows + step]).mean()
            weights += weight
        return total / weights

    def judged(self, recorded: Sequence[RecordedText]) -> Iterator[Judged]:
        """Over all texts of two tokens or more."""
        return self.judged_lessons(map(HeadLesson.of, recorded))

    def judged_lessons(self, lessons: Iterable[HeadLesson]) -> Iterator[Judged]:
        """The same of lessons."""
        for lesson in lessons:
            if len(lesson) < 2:
                continue
            states, tokens = lesson.states.float(), lesson.token_ids
            wanted, p = self.columns(tokens), self.logits(states).softmax(dim=-1)
            x, matches, overlap = states, [], states.new_zeros(0)
            for step in range(1, self.recipe.num_unrolled + 1):
                x = self.after(x[: len(tokens) - step], tokens[step - 1 : -1])
                logits = self.logits(x)
                matches.append((logits.argmax(dim=-1) == wanted[step:]).tolist())
                if step == 1:
                    overlap = torch.minimum(p[1:], logits.softmax(dim=-1)).sum(dim=-1)
            yield lesson.task, walk_rounds(matches, len(tokens)), overlap

    def network(self) -> dict[str, Parameter]:
        """The two layers of a step."""
        return {"inner.weight": self.inner, "outer.weight": self.outer}

    def take_token_ids(self, tensors: dict[str, Tensor], num_columns: int) -> Tensor | None:
        """A tensor of their own."""
        return take(tensors, "token_ids", (num_columns,)) if "token_ids" in tensors else None

    def tensors(self) -> dict[str, Tensor]:
        """As `SequentialHeads` takes them."""
        tensors = {**self.network(), "lm_head.weight": self.head}
        return tensors if self.token_ids is None else tensors | {"token_ids": self.token_ids}

    def config(self) -> dict[str, Any]:
        """As `head_files` reads it."""
        sizes = {"hidden_size": self.head.shape[1], "vocab_size": self.vocabulary}
        return {"model_type": SEQUENTIAL, "architectures": ["SequentialHeads"], **sizes}
