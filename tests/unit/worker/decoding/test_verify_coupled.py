"""The reproducible coupling: its marginal is p, by an exact argument; and no draft of any shape changes the text."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from tests.fixtures.enumeration import Language, Text
from worker.decoding.coupling import coupled_tokens
from worker.decoding.verify import verify_greedy
from worker.decoding.verify_tree import verify_tree_greedy

VOCABULARY = 4
LENGTH = 24


def noise_at(seed: int, position: int) -> Tensor:
    """Gumbel noise [vocabulary] keyed by seed and position."""
    rng = random.Random(f"noise {seed} {position}")
    return torch.tensor([-math.log(rng.expovariate(1)) for _ in range(VOCABULARY)], dtype=torch.float64)


@pytest.mark.parametrize("num_impossible", [0, 1])
def test_the_marginal_is_p(seed: int, num_impossible: int) -> None:
    """Exact, by geometry.

    exp(-g) is exponential, so exp(-g) over its sum is uniform on the simplex with corners e_j. The point p cuts it into
    the simplices S_i = conv(p, e_j for all j ≠ i), which share no inner point and fill it; the volume of S_i is p_i of
    the whole (its determinant). So the marginal is p if i is chosen everywhere inside S_i, whatever the sum was.
    """
    p = Language(f"target {seed}", VOCABULARY, num_impossible=num_impossible).behind(())
    generator = torch.Generator().manual_seed(seed)
    for i in range(VOCABULARY):
        corners = torch.eye(VOCABULARY, dtype=torch.float64)
        corners[i] = p
        assert float(torch.linalg.det(corners)) == pytest.approx(float(p[i]), abs=1e-15)
        if p[i] == 0:
            continue  # flat: no inner points
        spread = torch.rand((500, VOCABULARY), generator=generator, dtype=torch.float64).pow(4) + 1e-9
        inside = spread / spread.sum(dim=1, keepdim=True) @ corners
        total = torch.rand((500, 1), generator=generator, dtype=torch.float64) * 20 + 0.01
        assert coupled_tokens(p.expand(500, -1), -(inside * total).log()).eq(i).all()


def test_an_impossible_token_is_never_chosen() -> None:
    p = torch.tensor([[0.0, 0.4, 0.6]], dtype=torch.float64)
    for noise in ([torch.inf, 0.0, 0.0], [1e300, -1e300, -1e300], [torch.inf, -700.0, torch.inf]):
        assert coupled_tokens(p, torch.tensor([noise], dtype=torch.float64))[0] != 0


def test_agreement_of_target_and_drafter_is_what_the_theory_says(seed: int) -> None:
    """Relative frequency over 40 000 draws within 5.5 standard deviations: a false alarm once in 2 × 10^7 runs."""
    p, q = (Language(f"{name} {seed}", VOCABULARY).behind(()) for name in ("target", "drafter"))
    expected = float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(dim=1)).sum())
    variation = float((p - q).abs().sum()) / 2
    assert (1 - variation) / (1 + variation) - 1e-12 < expected < 1 - variation + 1e-12
    num = 40_000
    uniforms = torch.rand((num, VOCABULARY), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    noise = -(-uniforms.clamp_min(1e-300).log()).log()
    agreed = float(
        (coupled_tokens(p.expand(num, -1), noise) == coupled_tokens(q.expand(num, -1), noise)).double().mean()
    )
    assert abs(agreed - expected) < 5.5 * math.sqrt(expected * (1 - expected) / num) + 1e-12


def test_neither_drafts_nor_their_shape_change_the_text(seed: int, rng: random.Random) -> None:
    target, drafter = Language(f"target {seed}", VOCABULARY), Language(f"drafter {seed}", VOCABULARY)
    vanilla: Text = ()
    while len(vanilla) < LENGTH:
        vanilla += (chosen(target, vanilla, seed),)
    num_accepted = 0
    for _ in range(30):
        text: Text = ()
        while len(text) < LENGTH:
            begun = rounds(target, drafter, text, seed, rng)
            num_accepted += len(begun) - 1
            text += begun
        assert text[:LENGTH] == vanilla
    assert num_accepted > 0, "nothing was accepted, so nothing was shown"


def chosen(language: Language, prefix: Text, seed: int) -> int:
    return int(coupled_tokens(language.behind(prefix)[None], noise_at(seed, len(prefix))[None])[0])


def rounds(target: Language, drafter: Language, text: Text, seed: int, rng: random.Random) -> Text:
    """What one round with a random tree or chain writes: random tokens, the drafter's coupled ones, or the target's."""
    parents: list[int] = []
    prefixes: list[Text] = []
    is_chain = rng.random() < 0.4
    for i in range(rng.randrange(8)):
        parent = i - 1 if is_chain else rng.randrange(-1, i)
        prefix = prefixes[parent] if parent >= 0 else text
        language = rng.choice([None, drafter, target])
        token = rng.randrange(VOCABULARY) if language is None else chosen(language, prefix, seed)
        parents.append(parent)
        prefixes.append((*prefix, token))
    tokens = [prefix[-1] for prefix in prefixes]
    rows = [text, *prefixes]
    p = torch.stack([target.behind(prefix) for prefix in rows])
    best = coupled_tokens(p, torch.stack([noise_at(seed, len(prefix)) for prefix in rows]))
    if is_chain:
        (verdict,) = verify_greedy(best[None], torch.tensor([tokens], dtype=torch.long), torch.tensor([len(tokens)]))
    else:
        verdict = verify_tree_greedy(best, tokens, parents)
    return (*(tokens[i] for i in verdict.path), verdict.next_token)
