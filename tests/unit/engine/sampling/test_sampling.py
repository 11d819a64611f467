"""One job's choices: the cuts and the noise against plain restatements, and where randomness comes from.

Bias and penalties against a restatement token by token, with the history growing from round to round. The likeliest
tokens by the kernel and by torch: the first of equals, none where logits cannot be compared.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from alphaloop.engine import Sampling
from alphaloop.errors import DecodeFailed
from engine.distribution import BLOCK, probabilities
from engine.network.operations import best_tokens
from engine.proposal import Proposal
from engine.sampling import Barred, TokenChooser, drawn_tokens, key_of, token_noise, tokens_of, uniforms
from tests.fixtures.enumeration import coupled_tokens
from tests.fixtures.logical_devices import logical_gpus
from tests.fixtures.models import adjusted, barred_behind

CPU = torch.device("cpu")
CUTS = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 50},
    {"top_k": 10**6},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1 - 1e-6},
    {"min_p": 1.0},
    {"min_p": 0.05},
    {"min_p": 1e-9},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 40, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 7, "top_p": 0.7, "min_p": 0.3},
    {},
]


def sampled(**settings: float) -> Sampling:
    return Sampling(max_tokens=1, **{"temperature": 1.0, **settings})  # type: ignore[arg-type]


def restated(logits: list[float], sampling: Sampling) -> list[float]:
    """The distribution of one position in plain Python: by sorting all tokens, of equal ones the lower id first."""
    best = max(logits)
    p = [math.exp((value - best) / sampling.temperature) for value in logits]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if 0 < sampling.top_k < len(p):
        order = [i for i in order if p[i] >= p[order[sampling.top_k - 1]]]
    total = sum(p[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        if reached >= sampling.top_p * total:
            break
        if p[i] >= sampling.min_p * p[order[0]]:
            kept.append(i)
        reached += p[i]
    mass = sum(p[i] for i in kept)
    found = dict.fromkeys(range(len(p)), 0.0) | {i: p[i] / mass for i in kept}
    return list(found.values())


@pytest.mark.parametrize("temperature", [0.1, 0.7, 2.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_probabilities_are_the_restated_ones(temperature: float, cut: dict[str, float], rng: random.Random) -> None:
    rows = [[rng.gauss(0, 3) for _ in range(12)] for _ in range(5)]
    sampling = sampled(temperature=temperature, **cut)
    found = probabilities(torch.tensor(rows, dtype=torch.float64), sampling)
    expected = torch.tensor([restated(row, sampling) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 4.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_no_token_is_lost_by_not_sorting_the_vocabulary(spread: float, cut: dict[str, float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # 16-bit scores have many ties, of which the sort keeps the lower ids; the last block is not full; one row has
    # tokens that are forbidden.
    scores = (torch.randn(4, 5 * BLOCK + 7, generator=generator) * spread).bfloat16()
    scores[1, ::3] = -torch.inf
    scores[2, :2] += 12
    sampling = sampled(temperature=0.8, **cut)
    found = probabilities(scores, sampling)
    expected = torch.tensor([restated(row, sampling) for row in scores.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(found.sum(-1), torch.ones(4, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_row_is_the_same_to_the_bit_beside_any_others(cut: dict[str, float], rng: random.Random) -> None:
    scores = torch.tensor([[rng.gauss(0, spread) for _ in range(3 * BLOCK)] for spread in (0.01, 1.0, 2.0, 6.0)])
    choice = TokenChooser("job", sampled(seed=1, **cut), 1)
    alone = torch.cat([choice.probabilities(row[None]) for row in scores])
    assert torch.equal(choice.probabilities(scores), alone)


@pytest.mark.parametrize("temperature", [1e-30, 1e-308, 5e-324])
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_least_temperatures_choose_as_greedy_does(
    temperature: float, cut: dict[str, float], dtype: torch.dtype, rng: random.Random
) -> None:
    scores = torch.tensor([[rng.gauss(0, 9) for _ in range(2 * BLOCK)] for _ in range(4)]).to(dtype)
    scores[torch.arange(4), torch.tensor([5, 70, 127, 64])] = 40.0
    sampling = sampled(temperature=temperature, seed=11, **cut)
    choice, greedy = TokenChooser("job", sampling, 1), TokenChooser("job", sampled(temperature=0.0), 1)
    expected = greedy.tokens(scores, range(4))
    assert choice.tokens(scores, range(4)) == expected == [5, 70, 127, 64]
    assert choice.probabilities(scores)[range(4), expected].tolist() == [1.0] * 4


@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_refused(cut: dict[str, float], broken: float) -> None:
    scores = torch.zeros(2, 10)
    scores[1, 3] = broken
    choice = TokenChooser("job", sampled(seed=1, **cut), 1)
    with pytest.raises(DecodeFailed, match="not finite"):
        choice.probabilities(scores)
    with pytest.raises(DecodeFailed, match="not finite"):
        choice.tokens(scores, [0, 1])


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch dispatches: on a GPU each call costs the host some microseconds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_as_many_calls_choose_the_tokens_of_32_jobs_as_that_of_one(cut: dict[str, float], seed: int | None) -> None:
    row = torch.linspace(-3, 2, 3 * BLOCK)
    nums = set()
    for num in (1, 32):
        jobs = [TokenChooser(f"job-{n}", Sampling(9, 0.8, seed=seed, **cut), 1) for n in range(num)]  # type: ignore[arg-type]
        with torch.inference_mode(), Calls() as calls:
            (drawn_tokens if seed is None else tokens_of)(row.expand(num, -1), [(job, 1) for job in jobs])
        nums.add(calls.num)
    assert max(nums) <= 60
    assert len(nums) == 1


def noise_of(choice: TokenChooser, position: int, vocabulary: int) -> torch.Tensor:
    """The noise of every token [vocabulary] at a position."""
    tokens = np.arange(vocabulary)
    return torch.from_numpy(token_noise(choice.noise_key(position), tokens // BLOCK, tokens % BLOCK, vocabulary))


@pytest.mark.parametrize("vocabulary", [5, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_token_is_that_of_the_whole_noise(
    vocabulary: int, spread: float, cut: dict[str, float], rng: random.Random
) -> None:
    scores = torch.tensor([[rng.gauss(0, spread) for _ in range(vocabulary)] for _ in range(6)])
    choice = TokenChooser("job", sampled(temperature=0.7, seed=rng.randrange(2**63), **cut), 3)
    positions = [7, 8, 8, 9, 10, 11]
    noise = torch.stack([noise_of(choice, position, vocabulary) for position in positions])
    assert choice.tokens(scores, positions) == coupled_tokens(choice.probabilities(scores), noise).tolist()


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}], ids=str)
def test_tokens_have_the_distribution(cut: dict[str, float], seed: int) -> None:
    """Pearson's χ² over 4,000 positions, in a vocabulary of more than one block; fails by chance once in 10^9."""
    num, vocabulary = 4000, BLOCK + 6
    scores = torch.linspace(-3, 2, vocabulary).expand(num, -1)
    choice = TokenChooser("job", sampled(seed=seed, **cut), 1)
    tokens = torch.tensor(choice.tokens(scores, range(num)))
    expected = num * choice.probabilities(scores[:1])[0]
    seen = tokens.bincount(minlength=vocabulary).double()
    assert not seen[expected == 0].any()
    # Rare tokens are counted together, as χ² wants at least 5 of each.
    rare = expected < 5
    seen = torch.cat((seen[~rare], seen[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None].clamp_min(1e-9)))
    statistic = ((seen - expected) ** 2 / expected).sum()
    # Wilson and Hilferty 1931; z = 6 is exceeded with probability 1e-9.
    freedom = len(seen) - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 6 * math.sqrt(2 / (9 * freedom))) ** 3


def test_the_noise_is_gumbel_noise_and_independent(seed: int) -> None:
    """Kolmogorov and Smirnov at 1e-9, and correlations within a block, between blocks and between positions."""
    choice = TokenChooser("job", sampled(seed=seed), 1)
    vocabulary = 3 * BLOCK + 9
    noise = torch.stack([noise_of(choice, position, vocabulary) for position in range(600)])
    ordered = (-(-noise.flatten()).exp()).exp().sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    assert (ordered - steps).abs().max() < math.sqrt(math.log(2 / 1e-9) / (2 * len(ordered)))
    for a, b in ((noise[:, 0], noise[:, 1]), (noise[:, 3], noise[:, BLOCK + 3]), (noise[1:, 5], noise[:-1, 5])):
        assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 6.2 / math.sqrt(len(a))


def test_noise_follows_from_seed_and_position_alone() -> None:
    noise = noise_of(TokenChooser("any job", sampled(seed=-5, top_k=3), 2), 11, 100)
    assert torch.equal(noise, noise_of(TokenChooser("other", sampled(seed=-5, temperature=0.3), 7), 11, 100))
    # Another process, another machine, a later release: what a seed meant once it means for good.
    recorded = [-0.058276980213, 0.177761932995, 0.990476177483, 0.854357607188, 1.036845090622]
    assert noise[[0, 1, 63, 64, 99]].tolist() == pytest.approx(recorded, rel=1e-9)
    for seed, position in ((-5, 12), (5, 11), (2**32 - 5, 11)):
        assert not torch.equal(noise, noise_of(TokenChooser("any job", sampled(seed=seed), 2), position, 100))


def test_uniforms_are_splitmix64s() -> None:
    mask, key = 2**64 - 1, key_of("job", "a")
    expected = []
    for counter in range(-3, 50):
        z = (key + counter * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        expected.append((((z ^ (z >> 31)) >> 12) + 0.5) * 2.0**-52)
    assert uniforms(key, torch.arange(-3, 50)).tolist() == expected


def test_a_job_draws_the_same_numbers_each_time_however_they_are_asked_for() -> None:
    first, again, other = (TokenChooser(job_id, sampled(), 1) for job_id in ("job-1", "job-1", "job-2"))
    drawn = first.uniforms(8, CPU)
    assert torch.equal(drawn, torch.cat((again.uniforms(3, CPU), again.uniforms(5, CPU))))
    assert not torch.equal(drawn, first.uniforms(8, CPU))
    assert not torch.equal(drawn, other.uniforms(8, CPU))


def test_only_jobs_with_a_seed_have_noise() -> None:
    greedy = TokenChooser("job", sampled(temperature=0, seed=3), 1)
    assert greedy.is_greedy
    assert not greedy.is_reproducible
    assert greedy.tokens(torch.tensor([[1.0, 2.0, 2.0], [3.0, 0.0, 0.0]]), [1, 2]) == [1, 0]
    unseeded = TokenChooser("job", sampled(), 1)
    assert not unseeded.is_reproducible
    for choice in (greedy, unseeded):
        with pytest.raises(ValueError, match="seed"):
            choice.noise_key(1)
    with pytest.raises(ValueError, match="seed"):
        unseeded.tokens(torch.zeros(1, 3), [1])


VOCABULARY = 23
#: Few tokens, so that words begin often; what is barred by the text, the path or both, word by word.
WORDS = ((4,), (1, 2), (1, 2, 3), (2, 2), (7, 7, 7), (5, 6))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"repetition_penalty": 1.3}, ()),
        ({"repetition_penalty": 0.8}, ()),
        ({"frequency_penalty": 0.7}, ()),
        ({"presence_penalty": -1.5}, ()),
        ({"logit_bias": ((3, 5.0), (22, -100.0))}, ()),
        ({}, WORDS),
        ({"allowed_token_ids": (0, 1, 2, 3, 5, 7, 9)}, WORDS),
        ({"min_tokens": 6}, WORDS),
        ({"min_tokens": 9, "allowed_token_ids": tuple(range(1, 12)), "logit_bias": ((4, 100.0),)}, WORDS),
        ({"repetition_penalty": 1.2, "frequency_penalty": -0.3, "logit_bias": ((0, 1.5), (4, 9.0))}, WORDS),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_tree", [False, True])
def test_scores_are_the_restated_ones_in_every_round(
    settings: dict[str, object], words: tuple[tuple[int, ...], ...], is_tree: bool, rng: random.Random
) -> None:
    sampling = Sampling(max_tokens=99, temperature=0.0, **settings)  # type: ignore[arg-type]
    barred = Barred(words, frozenset({11, 12}) if sampling.min_tokens else frozenset())
    prompt = [1, 2, 7, 7]  # no word begins in the prompt
    text = list(prompt)
    choice = TokenChooser("job", sampling, len(prompt), barred=barred)
    assert choice.is_barring == bool(words)
    assert not choice.is_plain
    for _ in range(12):
        drafts = [rng.choice([1, 1, 2, 2, 3, 5, 7, 7, 20]) for _ in range(rng.randrange(7))]
        parents = tuple(rng.randrange(-1, i) for i in range(len(drafts))) if is_tree else None
        paths = Proposal(tuple(drafts), parents).paths
        logits = torch.tensor([[rng.gauss(0, 3) for _ in range(VOCABULARY)] for _ in paths], dtype=torch.float64)
        before = logits.clone()
        scores = choice.scores(logits, text, paths)
        assert torch.equal(logits, before)
        for row, path in enumerate(paths):
            expected = adjusted(logits[row], [*text, *path], len(prompt), sampling)
            expected[[*barred_behind([*text[len(prompt) :], *path], sampling, barred, VOCABULARY)]] = -math.inf
            torch.testing.assert_close(scores[row], expected, rtol=1e-12, atol=1e-12)
        # A drafter asks for one row, after what it has drafted so far.
        if not is_tree:
            assert torch.equal(choice.scores(logits[-1:], text, [drafts]), scores[-1:])
        text += [rng.choice([1, 2, 7, 19]) for _ in range(rng.randrange(1, 3))]


def test_settings_that_bar_nothing_leave_a_job_plain() -> None:
    for sampling in (Sampling(9, 0.0, min_tokens=3), Sampling(9, 0.0, ignore_eos=True, skip_special_tokens=False)):
        assert TokenChooser("job", sampling, 1).is_plain
    kept_apart = [Sampling(9, 0.0, bad_words=("a",)), Sampling(9, 0.0, allowed_token_ids=(1,))]
    assert all(one.is_adjusted and one.bucket != Sampling(9, 0.0).bucket for one in kept_apart)
    assert Sampling(9, 0.0, min_tokens=3, ignore_eos=True).bucket == Sampling(9, 0.0).bucket


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


DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 2048, 2049, 5000])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 9])
def test_the_first_of_the_largest(dtype: torch.dtype, size: int, num_rows: int, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    for spread in (0.01, 3.0):  # with many equals, and with few
        logits = (torch.randn((num_rows, size), generator=generator) * spread - 1).to(dtype)
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert best_tokens(logits) == (expected, True)
    whole = torch.randn((size, num_rows), generator=generator).to(dtype)
    assert best_tokens(whole.T) == best_tokens(whole.T.contiguous())


@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_of_any_numbers(numbers: list[float]) -> None:
    logits = torch.tensor([numbers]).bfloat16()
    ((token,), are_finite) = best_tokens(logits)
    assert are_finite
    row = logits.tolist()[0]
    assert row[token] == max(row)
    assert all(number < max(row) or math.copysign(1, number) < 0 for number in row[:token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf])
def test_logits_that_are_not_finite(dtype: torch.dtype, broken: float, rng: random.Random) -> None:
    logits = torch.zeros((3, 5000), dtype=dtype)
    assert best_tokens(logits)[1]
    logits[rng.randrange(3), rng.randrange(5000)] = broken
    assert not best_tokens(logits)[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_are_ruled_out(dtype: torch.dtype) -> None:
    """A logit of minus infinity is a token that cannot be, unless there is no other."""
    logits = torch.full((2, 300), -math.inf, dtype=dtype)
    assert not best_tokens(logits)[1]
    logits[:, 7] = torch.tensor([-3e38, 2.0]).to(dtype)
    assert best_tokens(logits) == ([7, 7], True)
