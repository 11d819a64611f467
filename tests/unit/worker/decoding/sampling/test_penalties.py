"""Bias and penalties against a restatement token by token, with the history growing from round to round."""

from __future__ import annotations

import random

import pytest
import torch

from tests.fixtures.logical_devices import logical_gpus
from worker.decoding.proposal import Proposal
from worker.decoding.sampling import TokenChooser
from worker.engine import Sampling

VOCABULARY = 23


def restated(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """One position's scores in plain Python."""
    bias = dict(sampling.logit_bias)
    scores = []
    for token, logit in enumerate(logits):
        score = logit + bias.get(token, 0.0)
        if token in prompt or token in output:
            r = sampling.repetition_penalty
            score = score / r if score > 0 else score * r
        score -= sampling.frequency_penalty * output.count(token)
        score -= sampling.presence_penalty * (token in output)
        scores.append(score)
    return scores


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.5},
        {"logit_bias": ((3, 5.0), (22, -100.0))},
        {"repetition_penalty": 1.2, "frequency_penalty": -0.3, "presence_penalty": 0.9, "logit_bias": ((0, 1.5),)},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_tree", [False, True])
def test_scores_are_the_restated_ones_in_every_round(
    settings: dict[str, object], is_tree: bool, rng: random.Random
) -> None:
    sampling = Sampling(max_tokens=99, temperature=0.0, **settings)  # type: ignore[arg-type]
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))]
    text = list(prompt)
    choice = TokenChooser("job", sampling, len(prompt))
    assert not choice.is_plain
    for _ in range(6):
        drafts = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(6))]
        parents = tuple(rng.randrange(-1, i) for i in range(len(drafts))) if is_tree else None
        logits = torch.tensor(
            [[rng.gauss(0, 3) for _ in range(VOCABULARY)] for _ in range(1 + len(drafts))], dtype=torch.float64
        )
        before = logits.clone()
        expected = []
        for row in range(1 + len(drafts)):
            ahead, node = [], row - 1
            while node >= 0:
                ahead.append(drafts[node])
                node = node - 1 if parents is None else parents[node]
            expected.append(restated(logits[row].tolist(), sampling, prompt, text[len(prompt) :] + ahead))
        scores = choice.scores(logits, text, Proposal(tuple(drafts), parents).paths)
        torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
        assert torch.equal(logits, before)
        # A drafter asks for one row, behind what it has drafted so far.
        if not is_tree:
            last = choice.scores(logits[-1:], text, [drafts])
            assert torch.equal(last, scores[-1:])
        text += [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 4))]


def test_a_rounds_width_does_not_change_a_score(rng: random.Random) -> None:
    """What stands in the text by one long round or by many short ones is penalised to the same bits."""
    sampling = Sampling(9, 0.0, repetition_penalty=1.1, frequency_penalty=0.1, logit_bias=((5, 0.3),))
    text = [rng.randrange(VOCABULARY) for _ in range(30)]
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(rng.randrange(2**31))).bfloat16()
    wide = TokenChooser("job", sampling, 20).scores(logits, text[:23], Proposal(tuple(text[23:])).paths)
    one_by_one = TokenChooser("job", sampling, 20)
    narrow = [one_by_one.scores(logits[i : i + 1], text[: 23 + i], [()]) for i in range(8)]
    assert wide.dtype == torch.float32
    assert torch.equal(wide, torch.cat(narrow))


def test_logits_of_a_plain_job_are_its_scores() -> None:
    choice = TokenChooser("job", Sampling(9, 0.7, top_k=3, seed=1), 1)
    logits = torch.zeros(2, 5)
    assert choice.is_plain
    assert choice.scores(logits, [1], [(), (2,)]) is logits


def test_a_draft_on_another_device_keeps_counts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and draft adjust in turn, for one text. Numbers that both used would cross with every token."""
    sampling = Sampling(max_tokens=9, temperature=0.0, frequency_penalty=0.5, logit_bias=((1, 2.0),))
    with logical_gpus(monkeypatch, 2) as gpus:
        penalties, alone = TokenChooser("job", sampling, 1), TokenChooser("job", sampling, 1)
        text = [1]
        for token in (3, 3, 1, 4):
            scores = [
                penalties.scores(torch.zeros(2, 6, device=device), text, [(), (5,)]).tolist()
                for device in ("cuda:0", "cuda:1", "cuda:0")
            ]
            expected = alone.scores(torch.zeros(2, 6), text, [(), (5,)]).tolist()
            assert scores == [expected] * 3
            text.append(token)
        assert gpus.from_gpus == []
