"""Exactness on tiny models in float64: neither company nor drafts change a text; sampling is the target's."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from alphaloop.policy import Decision
from tests.fixtures.models import FAMILIES, VANILLA, lookup_decision, make_job
from worker.decoding import engine as engine_module
from worker.decoding.sampling import probabilities
from worker.decoding.verify import Verdict
from worker.engine import Generation, Sampling

if TYPE_CHECKING:
    from worker.decoding.engine import TransformersEngine

Build = Callable[..., "TransformersEngine"]
GREEDY = Sampling(max_tokens=40, temperature=0.0)


def decode(engine: TransformersEngine, work: list[tuple[Any, Sampling, Decision]]) -> dict[str, Generation]:
    """Decode everything, admitting whenever a slot is free."""
    waiting, finished = list(work), {}
    while waiting or engine.load().num_running:
        while waiting and engine.load().num_free:
            job, sampling, decision = waiting.pop(0)
            engine.admit(engine.prepare(job, sampling), decision)
        finished |= {generation.job_id: generation for generation in engine.step().finished}
    return finished


def plain_greedy(engine: TransformersEngine, token_ids: tuple[int, ...], num: int) -> list[int]:
    """The model's own greedy text without any cache: the whole text is read again for every token."""
    tokens = list(token_ids)
    with torch.inference_mode():
        for _ in range(num):
            logits = engine._target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] in engine._target.end_tokens:
                break
    return tokens[len(token_ids) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_ragged_sequences_equal_the_models_own_greedy_text(
    tiny_engine: Build, family: str, rng: random.Random
) -> None:
    engine = tiny_engine(family, num_slots=8)
    prompts = ["a" + "".join(rng.choice("ab cd\n") for _ in range(rng.randint(0, 39))) for _ in range(14)]
    prompts += ["long " * 130, "longer than one chunk of the prefill " * 40]
    work = [
        (make_job(prompt, i), replace(GREEDY, max_tokens=rng.randint(1, 40)), lookup_decision(rng.randint(1, 8)))
        for i, prompt in enumerate(prompts)
    ]
    work[::3] = [(job, sampling, VANILLA) for job, sampling, _ in work[::3]]
    # Random weights promise no acceptance (`rigged` below does); this prompt's repetition promises proposals.
    work[14] = (work[14][0], replace(GREEDY, max_tokens=40), lookup_decision(4))
    finished = decode(engine, work)
    assert max(generation.batch_size for generation in finished.values()) == 8
    assert finished[work[14][0].job_id].counts.num_trials > 0
    for job, sampling, _ in work:
        token_ids = engine.prepare(job, sampling).token_ids
        assert list(finished[job.job_id].token_ids) == plain_greedy(engine, token_ids, sampling.max_tokens)


# Texts of four tokens out of the three likeliest each: at most 81, each of whose probability is known exactly.
SAMPLED = Sampling(max_tokens=4, temperature=1.0, top_k=3)
NUM_TEXTS = 1000
# Chance that a right engine fails one of these tests, from the normal quantile 4.75 (chi-square by Wilson-Hilferty).
SIGNIFICANCE, QUANTILE = 1e-6, 4.753424
REPEATING = "one two one two one two one"


def exact_distribution(engine: TransformersEngine, prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Probability of every text under the target alone, from plain passes without a cache."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(SAMPLED.max_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in found.items():
            if text and text[-1] in engine._target.end_tokens:
                longer[text] = probability
                continue
            with torch.inference_mode():
                logits = engine._target.model(input_ids=torch.tensor([[*prompt, *text]]), use_cache=False).logits
            p = probabilities(logits[:, -1], SAMPLED)[0]
            longer |= {(*text, int(token)): probability * float(p[token]) for token in p.nonzero().flatten()}
        found = longer
    return found


def chi_square_excess(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's statistic over its critical value at SIGNIFICANCE; cells expecting fewer than 5 are pooled."""
    assert set(seen) <= set(expected), "a text that the target alone never writes"
    total = sum(seen.values())
    cells = [(seen[text], total * p) for text, p in expected.items() if total * p >= 5]
    rest = [(seen[text], total * p) for text, p in expected.items() if total * p < 5]
    if rest:
        cells.append((sum(n for n, _ in rest), sum(e for _, e in rest)))
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    df = len(cells) - 1
    critical = df * (1 - 2 / (9 * df) + QUANTILE * math.sqrt(2 / (9 * df))) ** 3
    return statistic / critical


def sample(engine: TransformersEngine, prompt: str, decision: Decision, seed: int) -> tuple[Counter[Any], int]:
    """NUM_TEXTS sampled texts, and how many drafts were tested for them."""
    work = [(make_job(prompt, i), replace(SAMPLED, seed=seed * NUM_TEXTS + i), decision) for i in range(NUM_TEXTS)]
    finished = decode(engine, work)
    counts = [generation.counts for generation in finished.values()]
    return Counter(generation.token_ids for generation in finished.values()), sum(c.num_trials for c in counts)


@pytest.fixture
def rigged(tiny_engine: Build, monkeypatch: pytest.MonkeyPatch) -> TransformersEngine:
    """An engine whose drafts are always the target's second likeliest token: half right, so every rule is exercised."""
    engine = tiny_engine("llama", num_slots=8)
    guesses: dict[tuple[int, ...], int] = {}
    texts = exact_distribution(engine, engine.prepare(make_job(REPEATING), SAMPLED).token_ids)
    for text in texts:
        for n in range(1, len(text)):
            likeliest = Counter[int]()
            for other, p in texts.items():
                if other[:n] == text[:n] and len(other) > n:
                    likeliest[other[n]] += p  # type: ignore[assignment]
            guesses[text[:n]] = likeliest.most_common(2)[-1][0]

    def propose(sequence: Any) -> list[int]:
        output = tuple(sequence.output)
        room = sequence.sampling.max_tokens - len(output) - 1
        drafts: list[int] = []
        while len(drafts) < min(room, sequence._num_draft_tokens):
            drafts.append(guesses.get((*output, *drafts), 0))
        return drafts

    monkeypatch.setattr(engine_module.Sequence, "propose", propose)
    return engine


def test_sampled_texts_have_the_targets_distribution_whatever_is_drafted(rigged: TransformersEngine, seed: int) -> None:
    expected = exact_distribution(rigged, rigged.prepare(make_job(REPEATING), SAMPLED).token_ids)
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-9)
    assert len([p for p in expected.values() if p * NUM_TEXTS >= 5]) >= 4, "the test needs a spread of texts"
    for decision in (VANILLA, lookup_decision(1), lookup_decision(2)):
        texts, num_trials = sample(rigged, REPEATING, decision, seed % 2**20)
        assert (num_trials > 0) == (decision is not VANILLA)
        excess = chi_square_excess(texts, expected)
        assert excess < 1, f"seed {seed}, k={decision.num_draft_tokens}: {excess:.2f} of the critical value"


def test_a_verifier_that_is_too_generous_is_caught(
    rigged: TransformersEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above must see a lossy rule: here a draft is accepted with the root of its probability."""
    right = engine_module.verify_deterministic

    def generous(p: torch.Tensor, draft: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
        return right(p, draft, torch.cat((uniforms[:-1] ** 2, uniforms[-1:])))

    monkeypatch.setattr(engine_module, "verify_deterministic", generous)
    expected = exact_distribution(rigged, rigged.prepare(make_job(REPEATING), SAMPLED).token_ids)
    texts, num_trials = sample(rigged, REPEATING, lookup_decision(2), seed % 2**20)
    assert num_trials > 0
    assert chi_square_excess(texts, expected) > 1


def test_every_draft_length_gives_the_same_greedy_text(tiny_engine: Build) -> None:
    engine = tiny_engine("qwen3", num_slots=1)
    texts = set()
    for k in range(9):
        (generation,) = decode(engine, [(make_job("ab ab ab"), GREEDY, lookup_decision(k) if k else VANILLA)]).values()
        texts.add((generation.token_ids, generation.text, generation.finish_reason))
    assert len(texts) == 1
