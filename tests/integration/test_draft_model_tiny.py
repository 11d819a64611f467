"""Draft models over tiny targets in float64: the target's text, whatever drafts.

A draft that is the target itself, and one of another family, are in test_exactness_tiny.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling
from engine.drafters.draft_model import DraftModelDrafter
from engine.drafters.draft_vocabulary import DraftTokens, restrict_head
from engine.network.language_model import LanguageModel
from tests.fixtures.models import VANILLA, decision, finish, make_job

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
    (model, token_ids), more = drafts[name], dict(dials)
    state = DrafterState("made", "r", 8, is_stale=False, max_prompt_tokens=more.pop("max_prompt_tokens", None))
    tokens = DraftTokens(384, 384, frozenset({0}), token_ids)
    made = DraftModelDrafter(state, model, tokens, num_slots=4, context_length=512, **more)
    engine = tiny_engine(num_slots=4, drafters={"made": made})
    jobs = [make_job(f"{rng.randrange(10**6)} lines of text", number) for number in range(6)]
    plain, drafted = (finish(engine, ((job, GREEDY, way) for job in jobs)) for way in (VANILLA, decision("made", 6)))
    assert {one: its.token_ids for one, its in drafted.items()} == {one: its.token_ids for one, its in plain.items()}
    # One of other weights, or who has read less of a random model's prompt, may guess nothing right.
    assert sum(its.counts.num_trials for its in drafted.values()) > 0
    num_accepted = sum(its.counts.num_accepted for its in drafted.values())
    assert num_accepted > 0 or name == "smaller, padded" or "max_prompt_tokens" in dials
