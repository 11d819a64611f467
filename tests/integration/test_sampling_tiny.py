"""Sampled jobs without a seed have the target's distribution, whatever is drafted; and a lossy rule is caught.

Texts of five tokens out of the three likeliest each: at most 243, each of whose probability is known exactly.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from alphaloop.deciding.decision import Decision
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling
from alphaloop.settings.models import HybridDrafterSettings, LayerSkipDrafterSettings
from engine import verification
from engine.drafters.hybrid import HybridDrafter
from engine.drafters.layer_skip import load_layer_skip
from engine.own import TransformersEngine
from engine.proposal import Ask, DraftDistributions, Drafter, Proposal
from engine.sampling import probabilities
from engine.verification import DraftVerdict, draw
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import NUM_TOKENS, VANILLA, Reference, decision, make_job

Build = Callable[..., TransformersEngine]
Distribution = dict[tuple[int, ...], float]
SAMPLED: Final = Sampling(max_tokens=5, temperature=1.0, top_k=3)
NUM_TEXTS: Final = 400
# Chance that a right engine fails one of these tests, and its normal quantile.
SIGNIFICANCE, QUANTILE = 1e-6, 4.753424
KINDS: Final = ("chain", "tree", "drawn-chain", "drawn-tree", "hybrid")
#: Branches that follow from the text beside a drawn chain.
HYBRID: Final = HybridDrafterSettings(
    sources=("chain", "drawn-chain"), rule="tree", max_draft_tokens=6, most_tokens={"chain": 1}
)
PROMPT: Final = "one two one two one two one"


class GuessingDrafter(Drafter):
    """Proposes for one prompt, from what the target itself thinks: half right, so that every rule is exercised.

    `kind`: a "chain" of each second likeliest token, a "tree" with the likeliest behind it as its sibling, or a
    "drawn-chain": every token from a distribution that likes what the target does not. A "drawn-tree" has siblings
    drawn from it.
    """

    def __init__(self, kind: str, num_prompt: int, expected: Distribution) -> None:
        self.state = DrafterState(kind, "test", 6)
        self._num_prompt = num_prompt
        self._next: dict[tuple[int, ...], Counter[int]] = {}
        for text, p in expected.items():
            for n in range(len(text)):
                self._next.setdefault(text[:n], Counter())[text[n]] += p  # type: ignore[assignment]

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
        """Nothing to know."""

    def close(self, job_id: str) -> None:
        """Nothing to forget."""

    def clear(self) -> None:
        """Nothing to forget."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """By kind."""
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Proposal:
        output = tuple(ask.text[self._num_prompt :])
        is_chain, is_drawn = "chain" in self.state.name, "drawn" in self.state.name
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[Tensor] = []
        paths = {-1: output}
        for index in range(ask.num_tokens):
            parent = index - 1 if is_chain else index // 2 - 1
            if is_drawn:
                rows.append(self._drawn_from(paths[parent]))
                before = [token for token, of in zip(tokens, parents, strict=True) if of == parent]
                left = rows[-1].index_fill(0, torch.tensor(before, dtype=torch.long), 0.0)
                token = draw(left, ask.choice.uniforms(1, left.device)[0])
            else:
                token = self._likeliest(paths[parent])[0 if index % 2 and not is_chain else 1]
            tokens.append(token)
            parents.append(parent)
            paths[index] = (*paths[parent], token)
        q = DraftDistributions(torch.stack(rows)) if rows else None
        return Proposal(tuple(tokens), None if is_chain else tuple(parents), q)

    def _likeliest(self, path: tuple[int, ...]) -> list[int]:
        """Two tokens, the likelier first; any two behind a text that has ended."""
        known = [token for token, _ in self._next.get(path, Counter()).most_common(2)]
        return [*known, *(token for token in (1, 2) if token not in known)][:2]

    def _drawn_from(self, path: tuple[int, ...]) -> Tensor:
        q = torch.full((NUM_TOKENS,), 0.1 / NUM_TOKENS, dtype=torch.float64)
        for (token, _), weight in zip(self._next.get(path, Counter()).most_common(), (0.1, 0.2, 0.6), strict=False):
            q[token] += weight
        return q / q.sum()


def exact_distribution(reference: Reference, prompt: tuple[int, ...]) -> Distribution:
    """Probability of every text under the target alone, from plain passes without a cache."""
    found: Distribution = {(): 1.0}
    for _ in range(SAMPLED.max_tokens):
        longer: Distribution = {}
        for text, probability in found.items():
            if text and text[-1] == reference.end_token:
                longer[text] = probability
                continue
            p = probabilities(reference.logits([*prompt, *text])[-1:], SAMPLED)[0]
            longer |= {(*text, int(token)): probability * float(p[token]) for token in p.nonzero().flatten()}
        found = longer
    return found


def chi_square_excess(seen: Counter[tuple[int, ...]], expected: Distribution) -> float:
    """Pearson's statistic over its critical value at SIGNIFICANCE; cells expecting fewer than 5 are pooled."""
    assert set(seen) <= set(expected), "a text that the target alone never writes"
    total = sum(seen.values())
    cells = [(seen[text], total * p) for text, p in expected.items() if total * p >= 5]
    rest = [(seen[text], total * p) for text, p in expected.items() if total * p < 5]
    if rest:
        cells.append((sum(n for n, _ in rest), sum(e for _, e in rest)))
    return sum((n - e) ** 2 / e for n, e in cells) / critical(len(cells) - 1)


def critical(df: int) -> float:
    """What a sum of that many squares exceeds with probability SIGNIFICANCE (Wilson and Hilferty)."""
    return df * (1 - 2 / (9 * df) + QUANTILE * math.sqrt(2 / (9 * df))) ** 3


@pytest.fixture(scope="module")
def expected(tiny_engine: Build, references: Callable[[str], Reference]) -> Distribution:
    prompt = tiny_engine("llama").prepare(make_job(PROMPT), SAMPLED).token_ids
    found = exact_distribution(references("llama"), prompt)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    assert len([p for p in found.values() if p * NUM_TEXTS >= 5]) >= 4, "the test needs a spread of texts"
    return found


@pytest.fixture(scope="module")
def engine(tiny_engine: Build, tiny_models: dict[str, Path], expected: Distribution) -> TransformersEngine:
    plain = tiny_engine("llama")
    num_prompt = len(plain.prepare(make_job(PROMPT), SAMPLED).token_ids)
    skipping = LayerSkipDrafterSettings(skip_layers=(1,))
    guessing = {kind: GuessingDrafter(kind, num_prompt, expected) for kind in KINDS if kind != "hybrid"}
    return tiny_engine(
        "llama",
        num_slots=32,
        drafters={
            "another model": draft_model("another model", tiny_models["qwen2"], num_slots=32),
            "the target itself": draft_model("the target itself", tiny_models["llama"], num_slots=32),
            "one of its layers": load_layer_skip("one of its layers", skipping, plain._target, num_slots=32),
            **guessing,
            "hybrid": HybridDrafter("hybrid", HYBRID, {kind: guessing[kind] for kind in HYBRID.sources}),
        },
    )


def sample(
    engine: TransformersEngine, decided: Decision, seed: int, schedule: random.Random | None = None
) -> tuple[Counter[tuple[int, ...]], int, int]:
    """NUM_TEXTS texts, and how many drafts were tested and accepted for them.

    With a `schedule`, half of the sequences change their drafter and k before each round.
    """
    texts: Counter[tuple[int, ...]] = Counter()
    running: set[str] = set()
    num_waiting, num_trials, num_accepted = NUM_TEXTS, 0, 0
    while num_waiting or engine.load().num_running:
        while num_waiting and engine.load().num_free:
            num_waiting -= 1
            # A job's randomness follows from its job_id.
            job = make_job(PROMPT, seed % 2**40 * NUM_TEXTS + num_waiting)
            engine.admit(engine.prepare(job, SAMPLED), decided)
            running.add(job.job_id)
        for job_id in sorted(running) if schedule is not None else ():
            if schedule.random() < 0.5:
                drafter = schedule.choice((None, "another model", "the target itself", *KINDS))
                engine.redraft(job_id, drafter, schedule.randint(0, 3))
        for generation in engine.step().finished:
            running.discard(generation.job_id)
            texts[generation.token_ids] += 1
            num_trials += generation.counts.num_trials
            num_accepted += generation.counts.num_accepted
    return texts, num_trials, num_accepted


@pytest.mark.parametrize(
    ("drafter", "k"),
    [
        ("", 0),
        ("chain", 1),
        *((kind, 3) for kind in KINDS),
        ("another model", 3),
        ("the target itself", 2),
        ("one of its layers", 3),
    ],
)
def test_sampled_texts_have_the_targets_distribution_whatever_is_drafted(
    engine: TransformersEngine, expected: Distribution, drafter: str, k: int, seed: int
) -> None:
    texts, num_trials, num_accepted = sample(engine, decision(drafter, k) if k else VANILLA, seed)
    assert (num_trials > 0) == (k > 0)
    if drafter in KINDS:
        assert 0 < num_accepted < num_trials, "both rules are exercised"
    excess = chi_square_excess(texts, expected)
    assert excess < 1, f"seed {seed}: {excess:.2f} of the critical value"


def test_sampled_texts_have_the_targets_distribution_when_drafting_changes_between_rounds(
    engine: TransformersEngine, expected: Distribution, seed: int
) -> None:
    """From vanilla to any drafter and back at random, with any k: drawn apart from the tokens, as load and lot are."""
    schedule = random.Random(seed)
    texts, num_trials, num_accepted = sample(engine, VANILLA, seed, schedule)
    assert 0 < num_accepted < num_trials
    excess = chi_square_excess(texts, expected)
    assert excess < 1, f"seed {seed}: {excess:.2f} of the critical value"


#: The rule that settles each kind, where the engine finds it, and the place of the uniforms among its arguments.
RULES: Final = {
    "chain": ("verify_deterministic", 2),
    "drawn-chain": ("verify_block", 3),
    "tree": ("verify_tree", 3),
    "drawn-tree": ("verify_drawn_tree", 4),
    "hybrid": ("verify_drawn_tree", 4),
}


@pytest.mark.parametrize(("kind", "power"), [("chain", 3), ("tree", 3), *((kind, math.inf) for kind in KINDS)])
def test_a_rule_that_is_too_generous_is_caught(
    engine: TransformersEngine,
    expected: Distribution,
    seed: int,
    kind: str,
    power: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above must see a lossy rule: a draft is accepted with the cube root of its probability, or always where
    it is among the target's likely tokens ("typical acceptance")."""
    name, place = RULES[kind]
    right = getattr(verification, name)

    def generous(*args: Any, **more: Any) -> DraftVerdict:
        uniforms = args[place]
        spoiled = torch.cat((uniforms[:-1] ** power, uniforms[-1:]))
        verdict: DraftVerdict = right(*args[:place], spoiled, *args[place + 1 :], **more)
        return verdict

    monkeypatch.setattr(verification, name, generous)
    texts, num_trials, _ = sample(engine, decision(kind, 3), seed)
    assert num_trials > 0
    excess = chi_square_excess(texts, expected)
    print(f"seed {seed}, {kind}: {excess:.1f} times the critical value")
    assert excess > 1
