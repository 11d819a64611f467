"""Sequential heads in training: the loss by hand, and a judgement that walks as rounds would."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from engine.drafters.heads import SequentialHeads
from engine.training.distil import measured_drafts
from engine.training.heads import HeadLesson, SequentialHeadsInTraining
from engine.training.recipe import Recipe

HIDDEN: Final = 8
NUM: Final = 12
KNOWN: Final = torch.tensor([0, 2, 3, 5, 7, 11])
K: Final = 3


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def network() -> SequentialHeadsInTraining:
    """One whose weights are not those of the beginning."""
    recipe = Recipe(num_unrolled=K)
    made = SequentialHeadsInTraining(noise(NUM, HIDDEN, seed=1), noise(NUM, HIDDEN, seed=2), KNOWN, recipe)
    with torch.no_grad():
        made.outer += 0.3 * noise(*made.outer.shape, seed=3)
    return made


def lesson(length: int, seed: int) -> HeadLesson:
    tokens = torch.randint(0, NUM, (length,), generator=torch.Generator().manual_seed(seed))
    return HeadLesson("code", noise(length, HIDDEN, seed=seed).bfloat16(), tokens)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_loss_is_the_sum_by_hand(network: SequentialHeadsInTraining, share: float) -> None:
    network.recipe = Recipe(num_unrolled=K, hard_label_share=share)
    lessons = [lesson(7, 10), lesson(2, 11), lesson(5, 12)]
    by_step = [[0.0, 0] for _ in range(K)]
    for one in lessons:
        for begin in range(len(one) - K):
            x = one.states[begin : begin + 1].float()
            for step in range(1, K + 1):
                x = network.after(x, one.token_ids[begin + step - 1 : begin + step])
                log_q = network.logits(x).log_softmax(-1)[0]
                p = network.logits(one.states[begin + step].float()).softmax(-1)
                token = int(one.token_ids[begin + step])
                hard = -float(log_q[KNOWN.tolist().index(token)]) if token in KNOWN.tolist() else 0.0
                by_step[step - 1][0] += (1 - share) * -float((p * log_q).sum()) + share * hard
                by_step[step - 1][1] += 1
    weights = [0.8**step for step in range(K)]
    expected = sum(weight * total / num for weight, (total, num) in zip(weights, by_step, strict=True)) / sum(weights)
    assert float(network.loss(lessons)) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_a_judgement_is_that_of_rounds_played_one_by_one(network: SequentialHeadsInTraining) -> None:
    """Over texts in which the heads' own drafts follow at times."""
    tensors = {"inner.weight": network.inner.detach(), "outer.weight": network.outer.detach()}
    heads = SequentialHeads({**tensors, "lm_head.weight": network.head, "token_ids": KNOWN}, network.embeddings)
    lessons, rounds, accepts, tokens = [], 0, [0] * K, 0
    for seed in range(20):
        one = lesson(12, 100 + seed)
        for place in range(1, len(one)):
            if (seed + place) % 3:
                x = heads.after(one.states[place - 1 : place].float(), [int(one.token_ids[place - 1])])
                one.token_ids[place] = KNOWN[heads.logits(x, 0).argmax()]
        lessons.append(one)
        place = 0
        while place < len(one) - 1:
            x, pending, num = one.states[place : place + 1].float(), int(one.token_ids[place]), 0
            while num < min(K, len(one) - place - 2):
                x = heads.after(x, [pending])
                pending = int(KNOWN[heads.logits(x, 0).argmax()])
                if pending != int(one.token_ids[place + 1 + num]):
                    break
                accepts[num] += 1
                num += 1
            place, rounds, tokens = place + num + 1, rounds + 1, tokens + num + 1
    by_task, total = measured_drafts(network.judged_lessons(lessons))
    assert set(by_task) == {"code"}
    assert (total.rounds, total.num_tokens) == (rounds, tokens)
    assert total.accepts == tuple(accepts)
    assert accepts[1] > 0
