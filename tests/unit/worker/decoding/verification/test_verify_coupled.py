"""The reproducible coupling: its marginal is p, by an exact argument; and no draft of any shape changes the text.

That a job's own choices are `coupled_tokens` of its noise, and that its noise is Gumbel noise: test_sampling.py.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.fixtures.enumeration import Fixed, Language, Text, coupled_tokens
from worker.decoding.proposal import tree_depths
from worker.decoding.sampling import TokenChooser
from worker.decoding.verification import verify_greedy, verify_tree_greedy
from worker.engine import Sampling

VOCABULARY = 4
LENGTH = 24
NUM = 10_000


def choice_of(seed: int, **settings: float) -> TokenChooser:
    return TokenChooser("job", Sampling(max_tokens=LENGTH, temperature=1.0, seed=seed, **settings), 0)  # type: ignore[arg-type]


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
        spread = torch.rand((500, VOCABULARY), generator=generator, dtype=torch.float64).pow(4) + 1e-6
        inside = spread / spread.sum(dim=1, keepdim=True) @ corners
        total = torch.rand((500, 1), generator=generator, dtype=torch.float64) * 20 + 0.01
        assert coupled_tokens(p.expand(500, -1), -(inside * total).log()).eq(i).all()


def test_an_impossible_token_is_never_chosen() -> None:
    p = torch.tensor([[0.0, 0.4, 0.6]], dtype=torch.float64)
    for noise in ([torch.inf, 0.0, 0.0], [1e300, -1e300, -1e300], [torch.inf, -700.0, torch.inf]):
        assert coupled_tokens(p, torch.tensor([noise], dtype=torch.float64))[0] != 0


def test_tokens_of_neighbouring_positions_are_independent_draws_from_p(seed: int) -> None:
    """The noise itself.

    Pearson's χ² over pairs of neighbours, 15 degrees of freedom: above 64 about once in 10^7 runs.
    """
    p = Fixed(0.4, 0.3, 0.2, 0.1).behind(())
    tokens = choice_of(seed).tokens(p.log().expand(NUM, -1), range(NUM)).view(-1, 2).tolist()
    observed = Counter(map(tuple, tokens))
    expected = {(i, j): float(p[i] * p[j]) * len(tokens) for i in range(4) for j in range(4)}
    assert sum((observed[pair] - num) ** 2 / num for pair, num in expected.items()) < 64


def test_agreement_of_target_and_drafter_is_what_the_theory_says(seed: int) -> None:
    """Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i), between (1 - TV) / (1 + TV) and 1 - TV (Daliri, Musco, Suresh 2025).

    Relative frequency within 5.5 standard deviations: a false alarm once in 2 × 10^7 runs.
    """
    p, q = (Language(f"{name} {seed}", VOCABULARY).behind(()) for name in ("target", "drafter"))
    expected = float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(dim=1)).sum())
    variation = float((p - q).abs().sum()) / 2
    assert (1 - variation) / (1 + variation) - 1e-12 < expected < 1 - variation + 1e-12
    choice = choice_of(seed)
    one, other = (choice.tokens(row.log().expand(NUM, -1), range(NUM)) for row in (p, q))
    agreed = float((one == other).double().mean())
    assert abs(agreed - expected) < 5.5 * math.sqrt(expected * (1 - expected) / NUM) + 1 / NUM


@pytest.mark.parametrize("settings", [{}, {"top_k": 3, "top_p": 0.9}], ids=str)
def test_neither_drafts_nor_their_shape_change_the_text(
    seed: int, settings: dict[str, float], rng: random.Random
) -> None:
    target, drafter = Language(f"target {seed}", VOCABULARY), Language(f"drafter {seed}", VOCABULARY)
    choice = choice_of(seed, **settings)
    vanilla: Text = ()
    while len(vanilla) < LENGTH:
        vanilla += tuple(chosen(choice, target, [vanilla]).tolist())
    num_accepted = 0
    for _ in range(8):
        text: Text = ()
        while len(text) < LENGTH:
            begun = one_round(choice, target, drafter, text, rng)
            num_accepted += len(begun) - 1
            text += begun
        assert text[:LENGTH] == vanilla
    assert num_accepted > 0, "nothing was accepted, so nothing was shown"


def chosen(choice: TokenChooser, language: Language, prefixes: list[Text]) -> Tensor:
    """The coupled token behind each prefix."""
    return choice.tokens(
        torch.stack([language.behind(prefix) for prefix in prefixes]).log(), [len(prefix) for prefix in prefixes]
    )


def one_round(choice: TokenChooser, target: Language, drafter: Language, text: Text, rng: random.Random) -> Text:
    """What a random tree or chain leads to: of random tokens, the drafter's coupled ones, and the target's."""
    parents: list[int] = []
    prefixes: list[Text] = [text]
    is_chain = rng.random() < 0.4
    for i in range(rng.randrange(8)):
        parent = i - 1 if is_chain else rng.randrange(-1, i)
        language = rng.choice([None, drafter, target])
        prefix = prefixes[parent + 1]
        token = rng.randrange(VOCABULARY) if language is None else int(chosen(choice, language, [prefix])[0])
        parents.append(parent)
        prefixes.append((*prefix, token))
    assert [len(prefix) - len(text) for prefix in prefixes[1:]] == tree_depths(parents)
    tokens = [prefix[-1] for prefix in prefixes[1:]]
    best = chosen(choice, target, prefixes).tolist()
    verdict = verify_greedy(best, tokens) if is_chain else verify_tree_greedy(best, tokens, parents)
    return (*(tokens[i] for i in verdict.path), verdict.next_token)
