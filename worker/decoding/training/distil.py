"""Training: the draft's layers learn the target's distribution at every position of its own texts.

The loss at a position mixes the cross-entropy with the target's likeliest tokens (forward KL up to a constant) and with
the target's best token, which decides greedy acceptance. All random choices follow from the seed and the step, so an
interrupted run ends with the same weights, bit for bit, as one without interruption.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from worker.decoding.training.recipe import Recipe
from worker.decoding.training.teaching import Lesson
from worker.decoding.training.texts import read_file, replace_file

_BETAS: Final = (0.9, 0.95)
_MAX_NORM: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some texts side by side, padded at their ends. The last column is only a label, never an input."""

    token_ids: Tensor  #: [texts, length]
    top_columns: Tensor  #: [positions, kept]: columns of the draft's head; 0 where the draft lacks the token
    top_shares: Tensor  #: [positions, kept]: the target's probabilities, 0 where the draft lacks the token
    weights: Tensor  #: [positions]: 0 for padding

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


def make_batches(lessons: Sequence[Lesson], recipe: Recipe, epoch: int) -> list[list[Lesson]]:
    """The batches of one epoch: texts of similar length together, in an order that follows from seed and epoch."""
    rng = random.Random(f"{recipe.seed}-{epoch}")
    # Jittered lengths: neighbours differ from epoch to epoch without much padding.
    ordered = sorted(lessons, key=lambda lesson: len(lesson.token_ids) * rng.uniform(0.9, 1.1))
    batches: list[list[Lesson]] = [[]]
    longest = 0
    for lesson in ordered:
        longest = max(longest, len(lesson.token_ids))
        if batches[-1] and (len(batches[-1]) + 1) * longest > recipe.batch_tokens:
            batches.append([])
            longest = len(lesson.token_ids)
        batches[-1].append(lesson)
    rng.shuffle(batches)
    return batches


def collate(lessons: Sequence[Lesson], columns: Tensor | None, recipe: Recipe) -> Batch:
    """Lay texts side by side. `columns` [vocabulary] maps a token to its column of the draft's head, -1: none."""
    length = max(len(lesson.token_ids) for lesson in lessons)
    kept = lessons[0].top_ids.shape[-1]
    token_ids = torch.zeros(len(lessons), length, dtype=torch.long)
    top_ids = torch.zeros(len(lessons), length - 1, kept, dtype=torch.long)
    shares = torch.zeros(len(lessons), length - 1, kept)
    weights = torch.zeros(len(lessons), length - 1)
    for row, lesson in enumerate(lessons):
        num = len(lesson.token_ids)
        token_ids[row, :num] = lesson.token_ids
        top_ids[row, : num - 1] = lesson.top_ids
        shares[row, : num - 1] = lesson.top_log_probs.exp()
        weights[row, : num - 1] = 1.0
        weights[row, : max(0, lesson.first_answer - 1)] = recipe.prompt_weight
    if columns is not None:
        top_ids = columns[top_ids]
        shares = shares.masked_fill(top_ids < 0, 0.0)
        top_ids = top_ids.clamp(min=0)
    return Batch(token_ids, top_ids.flatten(0, 1), shares.flatten(0, 1), weights.flatten())


def distillation_loss(logits: Tensor, batch: Batch, hard_label_share: float) -> Tensor:
    """Weighted mean over positions. `logits` [positions, draft vocabulary].

    The weight of a position is the share of the target's probability that falls on tokens of the draft's vocabulary.
    Where all likely tokens are outside this vocabulary, there is nothing to learn.
    """
    log_q = logits.log_softmax(dim=-1).gather(-1, batch.top_columns)
    expressible = batch.top_shares.sum(dim=-1)
    soft = -(batch.top_shares * log_q).sum(dim=-1)
    # The first token is the best one; its share is 0 if the draft lacks it.
    hard = -log_q[:, 0] * (batch.top_shares[:, 0] > 0)
    loss = (1 - hard_label_share) * soft + hard_label_share * hard
    return (loss * batch.weights).sum() / (expressible * batch.weights).sum().clamp(min=1e-6)


class Distillation:
    """A draft in training: its optimiser, its place in the schedule, and its state on disk."""

    def __init__(
        self, draft: Any, lessons: Sequence[Lesson], columns: Tensor | None, recipe: Recipe, state_file: Path
    ) -> None:
        self._draft = draft
        self._columns = columns
        self._recipe = recipe
        self._file = state_file
        self._parameters = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self._optimiser = torch.optim.AdamW(
            self._parameters.values(), lr=recipe.learning_rate, betas=_BETAS, weight_decay=recipe.weight_decay
        )
        self._epochs = [make_batches(lessons, recipe, epoch) for epoch in range(recipe.num_epochs)]
        self.num_steps = sum(map(len, self._epochs))
        self.step = 0
        self.loss = math.nan
        if state_file.exists():
            self._restore()

    def run(
        self, should_save: Callable[[], bool], should_stop: Callable[[], bool], on_step: Callable[[], None]
    ) -> bool:
        """Train to the end; False if stopped before. In both cases the state is on disk afterwards."""
        schedule = [batch for epoch in self._epochs for batch in epoch]
        while self.step < self.num_steps and not should_stop():
            self._take_step(schedule[self.step])
            on_step()
            if should_save():
                self.save()
        self.save()
        return self.step == self.num_steps

    def save(self) -> None:
        """Write weights, optimiser state and step into one file, which is replaced atomically."""
        tensors, metadata = {}, {"step": str(self.step)}
        for name, parameter in self._parameters.items():
            tensors[f"weight/{name}"] = parameter.detach().contiguous()
            for moment in ("exp_avg", "exp_avg_sq") if self.step else ():
                tensors[f"{moment}/{name}"] = self._optimiser.state[parameter][moment].contiguous()
        replace_file(self._file, tensors, metadata)

    def trained(self) -> dict[str, Tensor]:
        """The trained weights, by their names in the model."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def _restore(self) -> None:
        tensors, metadata = read_file(self._file)
        self.step = int(metadata["step"])
        for name, parameter in self._parameters.items():
            parameter.data.copy_(tensors[f"weight/{name}"])
            if self.step:
                self._optimiser.state[parameter] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": tensors[f"exp_avg/{name}"].to(parameter.device),
                    "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(parameter.device),
                }

    def _take_step(self, lessons: Sequence[Lesson]) -> None:
        for group in self._optimiser.param_groups:
            group["lr"] = self._recipe.learning_rate * self._warmth(self.step)
        device = self._draft.device
        batch = collate(lessons, self._columns, self._recipe).to(device)
        recipe = self._recipe
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.precision != "float32"):
            logits = self._draft(input_ids=batch.token_ids[:, :-1], use_cache=False).logits
        loss = distillation_loss(logits.flatten(0, 1).float(), batch, recipe.hard_label_share)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), _MAX_NORM)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.loss = float(loss.detach())
        self.step += 1

    def _warmth(self, step: int) -> float:
        """Share of the learning rate: a linear rise, then half a cosine down to nothing."""
        num_warm = max(1, round(self._recipe.warmup_share * self.num_steps))
        if step < num_warm:
            return (step + 1) / num_warm
        return 0.5 * (1 + math.cos(math.pi * (step - num_warm) / max(1, self.num_steps - num_warm)))
