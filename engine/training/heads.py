"""Sequential heads of a target: trained on states that were recorded while the target wrote, and judged on others.

The heads go through a text as they will draft: from the state at a position they step along the text's own tokens, and
at every step learn what the target says there. What it says follows from the recorded states alone, by its head, so the
target is not run again. Only the small network is trained; the head is the target's, cut to frequent tokens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.draft_card import MeasuredDraft
from engine.drafters.head_files import SEQUENTIAL
from engine.drafters.heads import normed_inputs
from engine.text_facts import text_config
from engine.training.data import write_tensors
from engine.training.distil import columns_of, measured_draft
from engine.training.recipe import Recipe
from engine.training.recording import RecordedText

#: Weight of a step over that of the step before it: it is reached only where that one's token was accepted.
DECAY: Final = 0.8
#: Rows of the network's inner layer, in sizes of a state.
_WIDTH: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class HeadLesson:
    """One text: the state behind each token from some position on, and the tokens behind them."""

    task: str
    states: Tensor  #: [length, hidden], bfloat16
    token_ids: Tensor  #: [length]: token i follows state i

    @staticmethod
    def of(recorded: RecordedText) -> HeadLesson:
        """Of what was recorded of a text."""
        states, first = recorded.final, recorded.final_first
        tokens = torch.tensor(recorded.text.token_ids[first + 1 : first + 1 + len(states)])
        return HeadLesson(recorded.text.task, states[: len(tokens)], tokens)

    def __len__(self) -> int:
        return len(self.token_ids)


class SequentialNetwork(torch.nn.Module):
    """`engine.drafters.heads.SequentialHeads`, to be trained."""

    def __init__(self, embeddings: Tensor, head: Tensor, token_ids: Tensor | None, *, seed: int = 0) -> None:
        """`embeddings` [vocabulary, hidden] and `head` [columns, hidden] are the target's, and stay as they are."""
        super().__init__()
        hidden = embeddings.shape[1]
        generator = torch.Generator().manual_seed(seed)
        inner = torch.randn((_WIDTH * hidden, 2 * hidden), generator=generator) / (2 * hidden) ** 0.5
        self.inner = Parameter(inner)
        # At first a state stays as it is.
        self.outer = Parameter(torch.zeros(hidden, _WIDTH * hidden))
        self.embeddings, self.head, self.token_ids = embeddings.float(), head.float(), token_ids
        self._columns = columns_of(token_ids, len(embeddings))

    def behind(self, x: Tensor, tokens: Tensor) -> Tensor:
        """States [rows, hidden] behind one more token of each row."""
        inner = functional.silu(functional.linear(normed_inputs(x, self.embeddings[tokens]), self.inner))
        return x + functional.linear(inner, self.outer)

    def logits(self, x: Tensor) -> Tensor:
        """[rows, columns]."""
        return functional.linear(x, self.head)

    def columns(self, tokens: Tensor) -> Tensor:
        """The column of each token, -1 where there is none."""
        return tokens if self._columns is None else self._columns[tokens]


def head_loss(network: SequentialNetwork, lessons: Sequence[HeadLesson], recipe: Recipe) -> Tensor:
    """Weighted mean over positions and steps of what `distillation_loss` says of one."""
    k = recipe.num_unrolled
    usable = [one for one in lessons if len(one) > k]
    states = torch.cat([one.states for one in usable]).float()
    tokens = torch.cat([one.token_ids for one in usable])
    begins, begin = [], 0
    for one in usable:
        begins.append(torch.arange(begin, begin + len(one) - k))
        begin += len(one)
    rows = torch.cat(begins)
    with torch.no_grad():
        taught = network.logits(states).softmax(dim=-1)
    wanted = network.columns(tokens)
    x, total, weights = states[rows], states.new_zeros(()), 0.0
    for step in range(1, k + 1):
        x = network.behind(x, tokens[rows + step - 1])
        log_q = network.logits(x).log_softmax(dim=-1)
        soft = -(taught[rows + step] * log_q).sum(dim=-1)
        column = wanted[rows + step]
        hard = -log_q.gather(-1, column.clamp(min=0)[:, None]).squeeze(-1) * (column >= 0)
        share, weight = recipe.hard_label_share, DECAY ** (step - 1)
        total = total + weight * ((1 - share) * soft + share * hard).mean()
        weights += weight
    return total / weights


@torch.inference_mode()
def judge_heads(
    network: SequentialNetwork, lessons: Iterable[HeadLesson], num_draft_tokens: int
) -> tuple[dict[str, MeasuredDraft], MeasuredDraft]:
    """Acceptance on held-out texts, by task and of all, without decoding: see `distil.judge`.

    A draft up to its first wrong token is the text itself, so every round follows from steps along the text.
    """
    found: defaultdict[str, list[tuple[AcceptanceCounts, Tensor]]] = defaultdict(list)
    for lesson in lessons:
        if len(lesson) < 2:
            continue
        states, tokens = lesson.states.float(), lesson.token_ids
        wanted, p = network.columns(tokens), network.logits(states).softmax(dim=-1)
        x, matches = states, []
        overlap = states.new_zeros(0)
        for step in range(1, num_draft_tokens + 1):
            x = network.behind(x[: len(tokens) - step], tokens[step - 1 : -1])
            logits = network.logits(x)
            matches.append((logits.argmax(dim=-1) == wanted[step:]).tolist())
            if step == 1:
                overlap = torch.minimum(p[1:], logits.softmax(dim=-1)).sum(dim=-1)
        found[lesson.task].append((walk_drafts(matches, len(tokens)), overlap))
    by_task = {task: measured_draft(texts) for task, texts in sorted(found.items())}
    return by_task, measured_draft([text for texts in found.values() for text in texts])


def walk_drafts(matches: Sequence[Sequence[bool]], num_tokens: int) -> AcceptanceCounts:
    """Counts of greedy rounds over a text; `matches[i][place]`: draft token i of a round at that place is the text's.

    A round at a place has the state there; the token behind it is pending.
    """
    counts, place = AcceptanceCounts(), 0
    while place < num_tokens - 1:
        num_proposed = min(len(matches), num_tokens - place - 2)
        num_accepted = 0
        while num_accepted < num_proposed and matches[num_accepted][place]:
            num_accepted += 1
        counts = counts.with_round(max(num_proposed, 0), num_accepted, num_emitted=num_accepted + 1)
        place += num_accepted + 1
    return counts


class SequentialHeadsInTraining:
    """Sequential heads of a target, from what was recorded to the folder that `method = "heads"` loads."""

    def __init__(self, target: Any, token_ids: Tensor | None, taps: tuple[int, ...], recipe: Recipe) -> None:
        """`target`: a transformers model; `token_ids`: what is drafted, None: all."""
        del taps  # the final state is all that they read
        embeddings = target.get_input_embeddings().weight.detach().cpu()
        head = target.get_output_embeddings().weight.detach().cpu()
        self._num_layers, self._vocabulary = int(text_config(target.config).num_hidden_layers), len(head)
        self.network = SequentialNetwork(
            embeddings, head if token_ids is None else head[token_ids], token_ids, seed=recipe.seed
        )
        self._recipe = recipe

    def lessons(self, recorded: Sequence[RecordedText]) -> list[HeadLesson]:
        """Texts that are long enough to draft in."""
        found = (HeadLesson.of(one) for one in recorded)
        return [one for one in found if len(one) > self._recipe.num_unrolled]

    def loss(self, lessons: Sequence[HeadLesson]) -> Tensor:
        """Of a batch."""
        return head_loss(self.network, lessons, self._recipe)

    def judge(self, recorded: Sequence[RecordedText]) -> tuple[dict[str, MeasuredDraft], MeasuredDraft]:
        """On held-out texts."""
        return judge_heads(self.network, map(HeadLesson.of, recorded), self._recipe.num_unrolled)

    def save(self, folder: Path, dtype: torch.dtype, facts: dict[str, Any]) -> None:
        """Write the folder. `facts`: of the target, for config.json."""
        network = self.network
        tensors = {
            "inner.weight": network.inner.detach().to(dtype),
            "outer.weight": network.outer.detach().to(dtype),
            "lm_head.weight": network.head.to(dtype),
        }
        if network.token_ids is not None:
            tensors["token_ids"] = network.token_ids
        config = {
            "model_type": SEQUENTIAL,
            "architectures": ["SequentialHeads"],
            "hidden_size": network.head.shape[1],
            "vocab_size": self._vocabulary,
            "num_target_layers": self._num_layers,
            **facts,
        }
        write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
