"""Draft models over tiny targets in float64: the target's text, whatever drafts; and all of it where the draft is it.

The loop here is the least that speculates: read the pending token with its drafts, keep the drafts that equal what the
target chooses. The engine's own loop is tested with every drafter in test_exactness_*.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

NUM_TOKENS: Final = 24
MOST: Final = 7
GREEDY: Final = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
FREQUENT: Final = torch.arange(0, 384, 3)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def target(tiny_models: dict[str, Path]) -> LanguageModel:
    return LanguageModel(load(tiny_models["llama"]), 512)


@pytest.fixture(scope="module")
def drafts(tiny_models: dict[str, Path]) -> dict[str, tuple[LanguageModel, torch.Tensor | None]]:
    """Draft models by what is special about them, with the ids of a head that was cut."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        small = transformers.LlamaForCausalLM(
            transformers.LlamaConfig.from_pretrained(tiny_models["llama"], num_hidden_layers=1, vocab_size=400)
        ).to(torch.float64)
    cut = load(tiny_models["llama"])
    restrict_head(cut, FREQUENT)
    return {
        "the target itself": (LanguageModel(load(tiny_models["llama"]), 512), None),
        "smaller, padded": (LanguageModel(small.eval(), 512), None),
        "another family": (LanguageModel(load(tiny_models["qwen3"]), 512), None),
        "a cut head": (LanguageModel(cut, 512), FREQUENT),
    }


Drafts = dict[str, tuple[LanguageModel, torch.Tensor | None]]


def drafter(drafts: Drafts, name: str, *, context: int = 512) -> DraftModelDrafter:
    model, token_ids = drafts[name]
    tokens = DraftTokens(384, 384, frozenset(), token_ids)
    state = DrafterState("small", "r", MOST, is_stale=False)
    return DraftModelDrafter(state, model, tokens, num_slots=8, context_length=context)


@dataclass(slots=True)
class Running:
    """One sequence of the loop."""

    text: list[int]
    choice: TokenChooser
    num_wanted: int
    k: int
    slot: int
    output: list[int] = field(default_factory=list)


class Loop:
    """Decodes over the target with a drafter; counts what was proposed and accepted."""

    def __init__(self, target: LanguageModel, made: DraftModelDrafter) -> None:
        self.drafter = made
        self.num_proposed = self.num_accepted = 0
        self.running: dict[str, Running] = {}
        self.texts: dict[str, list[int]] = {}
        self._target = target
        self._cache = target.new_cache(8)

    @torch.inference_mode()
    def join(self, job_id: str, prompt: list[int], sampling: Sampling, k: int) -> None:
        choice = TokenChooser(job_id, sampling, len(prompt))
        one = Running(list(prompt), choice, sampling.max_tokens, k, self._cache.acquire())
        logits = self._target.prefill(self._cache, one.slot, prompt)
        self.running[job_id] = one
        self.drafter.open(job_id, one.text, sampling, "code")
        self._append(job_id, choice.tokens(choice.scores(logits, prompt), [len(prompt)]).tolist())

    @torch.inference_mode()
    def round(self) -> None:
        jobs = list(self.running.items())
        asks = [Ask(name, one.text, min(one.k, one.num_wanted - len(one.output) - 1), one.choice) for name, one in jobs]
        proposals = self.drafter.propose(asks)
        reads = [
            Read(one.slot, [one.text[-1], *proposal.tokens], num_logits=1 + len(proposal.tokens))
            for (_, one), proposal in zip(jobs, proposals, strict=True)
        ]
        logits = self._target.read(self._cache, reads).split([read.num_logits for read in reads])
        for (name, one), proposal, own in zip(jobs, proposals, logits, strict=True):
            positions = range(len(one.text), len(one.text) + len(own))
            chosen = one.choice.tokens(one.choice.scores(own, one.text, proposal.tokens), positions).tolist()
            num = 0
            while num < len(proposal.tokens) and proposal.tokens[num] == chosen[num]:
                num += 1
            self.num_proposed, self.num_accepted = self.num_proposed + len(proposal.tokens), self.num_accepted + num
            self._cache.lengths[one.slot] += num + 1
            self._append(name, chosen[: num + 1])

    def _append(self, name: str, tokens: list[int]) -> None:
        one = self.running[name]
        one.text += tokens
        one.output += tokens
        if len(one.output) >= one.num_wanted:
            self.texts[name] = one.output
            self.drafter.close(name)
            self._cache.release(self.running.pop(name).slot)


def vanilla(target: LanguageModel, prompt: list[int], sampling: Sampling) -> list[int]:
    """The target alone, one token a pass."""
    cache, choice, text = target.new_cache(1), TokenChooser("v", sampling, len(prompt)), list(prompt)
    with torch.inference_mode():
        logits = target.prefill(cache, cache.acquire(), prompt)
        while len(text) < len(prompt) + sampling.max_tokens:
            text += choice.tokens(choice.scores(logits, text), [len(text)]).tolist()
            logits = target.read(cache, [Read(0, text[-1:])])
            cache.lengths[0] += 1
    return text[len(prompt) :]


def settings(number: int) -> Sampling:
    """Greedy and seeded in turn, some with penalties: all have one right text."""
    kinds: list[Callable[[Sampling], Sampling]] = [
        lambda one: one,
        lambda one: replace(one, temperature=0.7, seed=number),
        lambda one: replace(one, repetition_penalty=1.3),
        lambda one: replace(one, temperature=1.0, seed=number, top_p=0.9, frequency_penalty=0.5),
    ]
    return kinds[number % 4](GREEDY)


@pytest.mark.parametrize("name", ["the target itself", "smaller, padded", "another family", "a cut head"])
def test_a_ragged_batch_has_the_targets_texts(
    target: LanguageModel, drafts: Drafts, name: str, rng: random.Random
) -> None:
    loop = Loop(target, drafter(drafts, name))
    waiting = {
        f"j{number}": ([rng.randrange(3, 384) for _ in range(rng.randint(1, 40))], settings(number), rng.randint(0, 9))
        for number in range(14)
    }
    expected = {job: vanilla(target, prompt, sampling) for job, (prompt, sampling, _) in waiting.items()}
    while waiting or loop.running:
        while waiting and len(loop.running) < 8 and rng.random() < 0.7:
            job = next(iter(waiting))
            loop.join(job, *waiting.pop(job))
        if loop.running:
            loop.round()
    assert loop.texts == expected
    assert loop.num_proposed > 0
    if name == "the target itself":
        assert loop.num_accepted == loop.num_proposed


@pytest.mark.parametrize(
    "more",
    [
        {"num_branches": 2},
        {"min_probability": 0.2},
        {"num_branches": 3},
        {"max_prompt_tokens": 16},
    ],
    ids=str,
)
def test_the_engine_writes_the_same_with_branches_early_ends_and_half_read_prompts(
    tiny_models: dict[str, Path], tiny_engine: Callable[..., Any], rng: random.Random, more: dict[str, Any]
) -> None:
    """The draft is a distorted target, so that it is right at times, and second-best is right at others."""
    distorted = load(tiny_models["llama"])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        for weight in distorted.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    dials = dict(more)
    most = dials.pop("max_prompt_tokens", None)
    made = DraftModelDrafter(
        DrafterState("distorted", "r", 8, is_stale=False, max_prompt_tokens=most),
        LanguageModel(distorted, 512),
        DraftTokens(384, 384, frozenset({0})),
        num_slots=4,
        context_length=512,
        **dials,
    )
    engine = tiny_engine(num_slots=4, drafters={"distorted": made})
    jobs = [make_job(f"{rng.randrange(10**6)} lines of text", number, max_tokens=30) for number in range(6)]
    prepared = [engine.prepare(job, GREEDY) for job in jobs]
    texts = []
    num_accepted = 0
    for decided in (VANILLA, decision("distorted", 6)):
        written = {}
        waiting = list(prepared)
        while waiting or engine.load().num_running:
            while waiting and engine.has_room(waiting[0]):
                engine.admit(waiting.pop(), decided)
            for done in engine.step().finished:
                written[done.job_id] = done.token_ids
                num_accepted += done.counts.num_accepted
        texts.append(written)
    assert texts[0] == texts[1]
    assert num_accepted > 0 or most is not None, "who has read less of a random model's prompt may guess nothing right"


def test_a_draft_with_a_short_context_falls_silent(target: LanguageModel, drafts: Drafts, rng: random.Random) -> None:
    prompt = [rng.randrange(3, 384) for _ in range(12)]
    loop = Loop(target, drafter(drafts, "the target itself", context=20))
    loop.join("j", prompt, GREEDY, 3)
    while loop.running:
        loop.round()
    assert loop.texts["j"] == vanilla(target, prompt, GREEDY)
    # Positions 12 to 20: whatever the draft proposes there is right, and the target adds the token behind.
    assert 0 < loop.num_proposed <= 9


def test_sampled_drafts_are_drawn_from_the_stated_distribution_of_the_text(
    drafts: Drafts, rng: random.Random, seed: int
) -> None:
    made = drafter(drafts, "smaller, padded")
    sampling = replace(GREEDY, temperature=0.8)
    text = [rng.randrange(3, 384) for _ in range(9)]
    made.open(f"s{seed}", text, sampling, "code")
    model, _ = drafts["smaller, padded"]
    for _ in range(3):
        choice = TokenChooser(f"s{seed}", sampling, 9)
        (proposal,) = made.propose([Ask(f"s{seed}", text, 4, choice)])
        assert proposal.q is not None
        with torch.inference_mode():
            read = Read(0, [*text, *proposal.tokens[:-1]], num_logits=4)
            own = choice.probabilities(model.read(model.new_cache(1), [read])[:, :384])
        assert torch.allclose(proposal.q, own, atol=1e-9)
        assert all(proposal.q[place, token] > 0 for place, token in enumerate(proposal.tokens))
        text += [*proposal.tokens[: rng.randint(0, 4)], rng.randrange(3, 384)]


def test_memory_is_taken_for_texts_and_given_back(target: LanguageModel, drafts: Drafts) -> None:
    made = drafter(drafts, "smaller, padded")
    cache = made._cache
    assert cache.num_bytes == 0
    loop = Loop(target, made)
    for number in range(8):
        loop.join(f"j{number}", [5 + number] * 30, GREEDY, 4)
    loop.round()
    held = cache.num_bytes
    assert held == 8 * cache.capacity * made.model.kv_shape.bytes_per_token
    while loop.running:
        loop.round()
    assert cache.num_bytes == 0
    loop.join("again", [1, 2], GREEDY, 4)
    loop.round()
    made.clear()
    assert cache.num_bytes == 0
