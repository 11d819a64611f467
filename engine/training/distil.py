"""A draft from a target: some of its layers, a head fitted to them, the tokens it proposes, training, and judging.

Training: the draft's layers learn the target's distribution at every position of its own texts. The loss at a position
mixes the cross-entropy with the target's likeliest tokens (forward KL up to a constant) and with the target's best
token, which decides greedy acceptance. All random choices follow from the seed and the step, so an interrupted run ends
with the same weights, bit for bit, as one without interruption.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.draft_card import MeasuredDraft
from alphaloop.errors import UnsupportedModel
from engine.models import attention_of
from engine.text_facts import text_config
from engine.training.data import Lesson, read_tensors, write_tensors
from engine.training.recipe import Recipe

_Taught = TypeVar("_Taught", bound=Sized)  #: what one text teaches
_BETAS: Final = (0.9, 0.95)
_MAX_NORM: Final = 1.0
_SAVE_INTERVAL_S: Final = 30.0
# `model.layers.7.…` of Llama, Qwen, Gemma, Mistral …, `transformer.h.7.…` of GPT-2.
_LAYER: Final = re.compile(r"^.*\.(?:layers|h)\.(\d+)\..+$")
#: Ridge, in units of the mean variance of a coordinate.
_RIDGE: Final = 1e-3


def cut_draft(target: Any, num_layers: int) -> Any:
    """A model of `target`'s kind with the first of its layers, and copies of everything else; in float32.

    Only the layers can be trained: embeddings, final norm and head require no gradient. The head is never tied to the
    embeddings, so that a map can be folded into it. Raises UnsupportedModel if the target's layers differ in kind.
    """
    if text_config(target.config) is not target.config:
        raise UnsupportedModel(
            f"layers of {target.config.model_type} cannot be taken out: expected a text model, found one of several "
            f"models in a checkpoint"
        )
    settings = {**target.config.to_dict(), "tie_word_embeddings": False}
    if kinds := settings.get("layer_types"):
        settings["layer_types"] = kinds[:num_layers]
    settings["num_hidden_layers"] = num_layers
    # Qwen2 stores the number of its first sliding layer. It must not make a layer of the draft slide.
    if settings.get("max_window_layers") is not None:
        settings["max_window_layers"] = num_layers
    try:
        draft = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            type(target.config)(**settings), dtype=torch.float32, attn_implementation=attention_of(target.config)
        )
        state = target.state_dict()
        left_out = [name for name in state if (match := _LAYER.match(name)) and int(match[1]) >= num_layers]
        draft.load_state_dict({name: tensor for name, tensor in state.items() if name not in left_out})
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"layers of {target.config.model_type} cannot be taken out: {error}") from error
    draft.generation_config = target.generation_config
    for name, parameter in draft.named_parameters():
        parameter.requires_grad_(_LAYER.match(name) is not None)
    return draft.eval()


def num_layers(model: Any) -> int:
    """Layers of a model."""
    return int(text_config(model.config).num_hidden_layers)


@torch.inference_mode()
def fit_map(draft: Any, lessons: Sequence[Lesson], on_text: Callable[[], None]) -> Tensor:
    """W [hidden, hidden], float32: the target's state is about W times the draft's, both after their final norm.

    The target's head reads states of the last of many layers. States of the first layers have another basis. The linear
    map W with least squares between W·h of the draft and the target's state at the same position has a closed form
    (Belrose et al., arXiv 2303.08112, train such a map for every layer). With W folded into the head, the first layers
    are a better draft than after an epoch of training. Training continues from there.

    Lessons without states are skipped.
    """
    hidden = draft.config.hidden_size
    seen = torch.zeros(hidden, hidden, dtype=torch.float64)
    shared = torch.zeros(hidden, hidden, dtype=torch.float64)
    for lesson in lessons:
        if lesson.states is None:
            continue
        # Without the head, which costs more than a few layers.
        output = draft.base_model(input_ids=lesson.token_ids[None, :-1].to(draft.device), use_cache=False)
        states = output.last_hidden_state[0].to("cpu", torch.float64)
        seen += states.T @ states
        shared += states.T @ lesson.states.double()
        on_text()
    ridge = _RIDGE * seen.trace() / hidden * torch.eye(hidden, dtype=torch.float64)
    mapping: Tensor = torch.linalg.solve(seen + ridge, shared)
    return mapping.T.to(torch.float32).contiguous()


@torch.no_grad()
def turn_head(draft: Any, mapping: Tensor) -> None:
    """Fold W into the head, in place: its logits for h become those of the old head for W·h. It must not be tied."""
    weight = draft.get_output_embeddings().weight
    weight.copy_((weight.float() @ mapping.to(weight.device)).to(weight.dtype))


def choose_vocabulary(
    lessons: Sequence[Lesson], num_tokens: int, vocabulary: int, always: Iterable[int]
) -> Tensor | None:
    """Token ids, ascending, int64: the `num_tokens` with the most probability in all lessons, `always` among them.

    None for the whole vocabulary: if `num_tokens` is 0, or as many as there are.
    """
    if num_tokens == 0 or num_tokens >= vocabulary:
        return None
    mass = torch.zeros(vocabulary, dtype=torch.float64)
    for lesson in lessons:
        mass.index_add_(0, lesson.top_ids.flatten(), lesson.top_log_probs.double().exp().flatten())
    mass[[token for token in always if token < vocabulary]] = torch.inf
    # A stable sort: of tokens with equal mass, which is zero for most, the lower id goes first. It is the same on every
    # machine, and a tokenizer that was made by merging has its frequent tokens there.
    return mass.argsort(descending=True, stable=True)[:num_tokens].sort().values


def columns_of(token_ids: Tensor | None, vocabulary: int) -> Tensor | None:
    """[vocabulary]: the place of each token in `token_ids`, -1 if it has none; None for None."""
    if token_ids is None:
        return None
    columns = torch.full((vocabulary,), -1, dtype=torch.long)
    columns[token_ids] = torch.arange(len(token_ids))
    return columns


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Some texts side by side, padded at their ends. The last column is only a label, never an input."""

    token_ids: Tensor  #: [texts, length]
    top_columns: Tensor  #: [positions, kept]: columns of the draft's head; 0 where the draft lacks the token
    top_shares: Tensor  #: [positions, kept]: the target's probabilities, 0 where the draft lacks the token
    weights: Tensor  #: [positions]: 0 for padding


def make_schedule(lessons: Sequence[_Taught], recipe: Recipe) -> list[list[_Taught]]:
    """The batch of every step, epoch by epoch."""
    return [batch for epoch in range(recipe.num_epochs) for batch in make_batches(lessons, recipe, epoch)]


def make_batches(lessons: Sequence[_Taught], recipe: Recipe, epoch: int) -> list[list[_Taught]]:
    """The batches of one epoch: texts of similar length together, in an order that follows from seed and epoch."""
    rng = random.Random(f"{recipe.seed}-{epoch}")
    # Jittered lengths: neighbours differ from epoch to epoch without much padding.
    ordered = sorted(lessons, key=lambda lesson: len(lesson) * rng.uniform(0.9, 1.1))
    batches: list[list[_Taught]] = [[]]
    longest = 0
    for lesson in ordered:
        longest = max(longest, len(lesson))
        if batches[-1] and (len(batches[-1]) + 1) * longest > recipe.batch_tokens:
            batches.append([])
            longest = len(lesson)
        batches[-1].append(lesson)
    rng.shuffle(batches)
    return batches


def collate(
    lessons: Sequence[Lesson], columns: Tensor | None, recipe: Recipe, device: torch.device | None = None
) -> _Batch:
    """Lay texts side by side on a device. `columns` [vocabulary]: a token's column of the draft's head, -1: none."""
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
    parts = (token_ids, top_ids.flatten(0, 1), shares.flatten(0, 1), weights.flatten())
    return _Batch(*(part.to(device) for part in parts))


def distillation_loss(logits: Tensor, batch: _Batch, hard_label_share: float) -> Tensor:
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


def draft_training(
    draft: Any, lessons: Sequence[Lesson], columns: Tensor | None, recipe: Recipe, state_file: Path
) -> Distillation[Lesson]:
    """The training of a draft model."""

    def loss(batch: Sequence[Lesson]) -> Tensor:
        texts = collate(batch, columns, recipe, draft.device)
        with torch.autocast(draft.device.type, dtype=torch.bfloat16, enabled=recipe.precision != "float32"):
            logits = draft(input_ids=texts.token_ids[:, :-1], use_cache=False).logits
        return distillation_loss(logits.flatten(0, 1).float(), texts, recipe.hard_label_share)

    return Distillation(draft, make_schedule(lessons, recipe), loss, recipe, state_file)


class Distillation(Generic[_Taught]):
    """A network in training: its optimiser, its place in the schedule, and its state on disk."""

    def __init__(
        self,
        network: torch.nn.Module,
        schedule: Sequence[Sequence[_Taught]],
        loss: Callable[[Sequence[_Taught]], Tensor],
        recipe: Recipe,
        state_file: Path,
    ) -> None:
        """`schedule`: the batch of each step; `loss` of one, to be lowered by the parameters that require gradients."""
        self._loss = loss
        self._recipe = recipe
        self._file = state_file
        self._parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self._optimiser = torch.optim.AdamW(
            self._parameters.values(), lr=recipe.learning_rate, betas=_BETAS, weight_decay=recipe.weight_decay
        )
        self._schedule = schedule
        self.num_steps = len(self._schedule)
        self.step = 0
        self.loss = math.nan
        if state_file.exists():
            self._restore()

    def run(self, should_stop: Callable[[], bool], on_step: Callable[[], None]) -> bool:
        """Train to the end; False if stopped before. In both cases the state is on disk afterwards."""
        saved = time.monotonic()
        while self.step < self.num_steps and not should_stop():
            self._take_step(self._schedule[self.step])
            on_step()
            if time.monotonic() - saved > _SAVE_INTERVAL_S:
                self.save()
                saved = time.monotonic()
        self.save()
        return self.step == self.num_steps

    def save(self) -> None:
        """Write weights, optimiser state and step into one file, which is replaced atomically."""
        tensors, metadata = {}, {"step": str(self.step)}
        for name, parameter in self._parameters.items():
            tensors[f"weight/{name}"] = parameter.detach().contiguous()
            for moment in ("exp_avg", "exp_avg_sq") if self.step else ():
                tensors[f"{moment}/{name}"] = self._optimiser.state[parameter][moment].contiguous()
        write_tensors(self._file, tensors, metadata)

    def trained(self) -> dict[str, Tensor]:
        """The trained weights, by their names in the model."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def _restore(self) -> None:
        tensors, metadata = read_tensors(self._file)
        self.step = int(metadata["step"])
        for name, parameter in self._parameters.items():
            parameter.data.copy_(tensors[f"weight/{name}"])
            if self.step:
                self._optimiser.state[parameter] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": tensors[f"exp_avg/{name}"].to(parameter.device),
                    "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(parameter.device),
                }

    def _take_step(self, batch: Sequence[_Taught]) -> None:
        for group in self._optimiser.param_groups:
            group["lr"] = self._recipe.learning_rate * self._warmth(self.step)
        loss = self._loss(batch)
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


#: A text's task, the counts of its rounds, and Σ min(p, q) by position.
Judged = tuple[str, AcceptanceCounts, Tensor]


@torch.inference_mode()
def judge(
    draft: Any, lessons: Iterable[Lesson], columns: Tensor | None, num_draft_tokens: int
) -> tuple[dict[str, MeasuredDraft], MeasuredDraft]:
    """A draft's acceptance on held-out texts, by task and of all, without speculative decoding.

    Greedy decoding accepts a drafted token where it is the target's own next token, so one pass of the draft over the
    target's text gives every acceptance (teacher forcing): the rounds are simulated over it. Sampled decoding at
    temperature 1 accepts with probability Σ min(p, q) at each position.

    `columns` [vocabulary]: column of the draft's head for each token, -1: none; None: it has all.
    """

    def judged() -> Iterator[Judged]:
        for lesson in lessons:
            logits = draft(input_ids=lesson.token_ids[None, :-1].to(draft.device), use_cache=False).logits[0]
            # Position i predicts token i + 1: the prompt's last position predicts the answer's first token.
            answer = slice(max(0, lesson.first_answer - 1), None)
            q = logits[answer].float().softmax(dim=-1).cpu()
            wanted, top = lesson.token_ids[1:][answer], lesson.top_ids[answer]
            if columns is not None:
                wanted, top = columns[wanted], columns[top]
            p = lesson.top_log_probs[answer].exp().masked_fill(top < 0, 0.0)
            overlap = torch.minimum(p, q.gather(-1, top.clamp(min=0))).sum(dim=-1)
            # The prefill yields the first token; rounds begin after it.
            matches = (q.argmax(dim=-1) == wanted).tolist()[1:]
            by_place = [matches[place:] for place in range(num_draft_tokens)]
            yield lesson.text.task, walk_rounds(by_place, len(matches) + 1), overlap

    return measured_drafts(judged())


def measured_drafts(judged: Iterable[Judged]) -> tuple[dict[str, MeasuredDraft], MeasuredDraft]:
    """The figures of texts by task, and of all. The overlap is a lower bound, without the target's tail."""
    by_task: defaultdict[str, list[tuple[AcceptanceCounts, Tensor]]] = defaultdict(list)
    for task, counts, overlap in judged:
        by_task[task].append((counts, overlap))
    every_text = [text for texts in by_task.values() for text in texts]
    return {task: _measured(texts) for task, texts in sorted(by_task.items())}, _measured(every_text)


def _measured(texts: Sequence[tuple[AcceptanceCounts, Tensor]]) -> MeasuredDraft:
    total = sum((counts for counts, _ in texts), AcceptanceCounts())
    return MeasuredDraft(
        num_texts=len(texts),
        num_tokens=total.num_tokens,
        rounds=total.rounds,
        proposed=total.proposed,
        trials=total.trials,
        accepts=total.accepts,
        num_positions=sum(len(overlap) for _, overlap in texts),
        overlap_sum=round(sum(float(overlap.double().sum()) for _, overlap in texts), 3),
    )


def walk_rounds(matches: Sequence[Sequence[bool]], num_tokens: int) -> AcceptanceCounts:
    """Counts of greedy rounds over a text; `matches[i][place]`: draft token i of a round at that place is the text's.

    A round at a place has read the tokens before it; the token there is pending. The longest draft is len(matches).
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
