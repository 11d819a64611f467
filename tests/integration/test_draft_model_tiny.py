"""Draft models over tiny targets in float64: the target's text, whatever drafts, and what their drafts are drawn from.

A draft that is the target itself, and one of another family, are in test_exactness_tiny.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from alphaloop.deciding.goodput import DrafterState
from tests.fixtures.models import VANILLA, decision, make_job
from worker.decoding.drafters.draft_model import DraftModelDrafter
from worker.decoding.drafters.draft_vocabulary import DraftTokens, restrict_head
from worker.decoding.network.language_model import LanguageModel
from worker.decoding.network.passes import Read
from worker.decoding.proposal import Ask
from worker.decoding.sampling import TokenChooser
from worker.engine import Sampling

GREEDY: Final = Sampling(max_tokens=30, temperature=0.0)
FREQUENT: Final = torch.arange(0, 384, 3)
Drafts = dict[str, tuple[LanguageModel, torch.Tensor | None]]


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def drafts(tiny_models: dict[str, Path]) -> Drafts:
    """Draft models by what is special about them, with the ids of a head that was cut."""
    cut, distorted = load(tiny_models["llama"]), load(tiny_models["llama"])
    restrict_head(cut, FREQUENT)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        for weight in distorted.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
        small = transformers.LlamaForCausalLM(
            transformers.LlamaConfig.from_pretrained(tiny_models["llama"], num_hidden_layers=1, vocab_size=400)
        ).to(torch.float64)
    return {
        "smaller, padded": (LanguageModel(small.eval(), 512), None),
        "a cut head": (LanguageModel(cut, 512), FREQUENT),
        # Right at times, and second-best is right at others.
        "distorted": (LanguageModel(distorted, 512), None),
    }


def drafter(
    drafts: Drafts, name: str, *, num_slots: int = 8, max_prompt_tokens: int | None = None, **dials: Any
) -> DraftModelDrafter:
    model, token_ids = drafts[name]
    state = DrafterState("made", "r", 8, is_stale=False, max_prompt_tokens=max_prompt_tokens)
    tokens = DraftTokens(384, 384, frozenset({0}), token_ids)
    return DraftModelDrafter(state, model, tokens, num_slots=num_slots, context_length=512, **dials)


def ask(name: str, text: list[int], sampling: Sampling) -> Ask:
    return Ask(name, text, 4, TokenChooser(name, sampling, len(text)))


@pytest.mark.parametrize(
    ("name", "dials"),
    [
        ("smaller, padded", {}),
        ("a cut head", {}),
        ("distorted", {"num_branches": 2}),
        ("distorted", {"num_branches": 3}),
        ("distorted", {"min_probability": 0.2}),
        ("distorted", {"max_prompt_tokens": 16}),
    ],
    ids=str,
)
def test_the_engine_writes_the_same_with_branches_early_ends_and_half_read_prompts(
    tiny_engine: Callable[..., Any], drafts: Drafts, rng: random.Random, name: str, dials: dict[str, Any]
) -> None:
    engine = tiny_engine(num_slots=4, drafters={"made": drafter(drafts, name, num_slots=4, **dials)})
    jobs = [make_job(f"{rng.randrange(10**6)} lines of text", number) for number in range(6)]
    prepared = [engine.prepare(job, GREEDY) for job in jobs]
    texts = []
    num_trials = num_accepted = 0
    for decided in (VANILLA, decision("made", 6)):
        written = {}
        waiting = list(prepared)
        while waiting or engine.load().num_running:
            while waiting and engine.has_room(waiting[0]):
                engine.admit(waiting.pop(), decided)
            for done in engine.step().finished:
                written[done.job_id] = done.token_ids
                num_trials += done.counts.num_trials
                num_accepted += done.counts.num_accepted
        texts.append(written)
    assert texts[0] == texts[1]
    # One of other weights, or who has read less of a random model's prompt, may guess nothing right.
    assert num_trials > 0
    assert num_accepted > 0 or name == "smaller, padded" or "max_prompt_tokens" in dials


def test_sampled_drafts_are_drawn_from_the_stated_distribution_of_the_text(
    drafts: Drafts, rng: random.Random, seed: int
) -> None:
    made = drafter(drafts, "smaller, padded")
    sampling = replace(GREEDY, temperature=0.8)
    text = [rng.randrange(3, 384) for _ in range(9)]
    made.open(f"s{seed}", text, sampling, "code")
    for _ in range(3):
        choice = TokenChooser(f"s{seed}", sampling, 9)
        (proposal,) = made.propose([Ask(f"s{seed}", text, 4, choice)])
        assert proposal.q is not None
        with torch.inference_mode():
            read = Read(0, [*text, *proposal.tokens[:-1]], num_logits=4)
            own = choice.probabilities(made.model.read(made.model.new_cache(1), [read])[:, :384])
        assert torch.allclose(proposal.q, own, atol=1e-9)
        assert all(proposal.q[place, token] > 0 for place, token in enumerate(proposal.tokens))
        text += [*proposal.tokens[: rng.randint(0, 4)], rng.randrange(3, 384)]


def test_memory_is_taken_for_texts_and_given_back(drafts: Drafts) -> None:
    made = drafter(drafts, "smaller, padded")
    cache, texts = made._cache, {f"j{number}": [5 + number] * 30 for number in range(8)}
    assert cache.num_bytes == 0
    for name, text in texts.items():
        made.open(name, text, GREEDY, "code")
    made.propose([ask(name, text, GREEDY) for name, text in texts.items()])
    assert cache.num_bytes == 8 * cache.capacity * made.model.kv_shape.bytes_per_token > 0
    for name in texts:
        made.close(name)
    assert cache.num_bytes == 0
    made.open("again", [1, 2], GREEDY, "code")
    made.propose([ask("again", [1, 2], GREEDY)])
    made.clear()
    assert cache.num_bytes == 0
