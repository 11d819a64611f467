"""Verification by exact enumeration: every draw of every uniform number, weighted by its probability."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from worker.decoding.verify import Verdict, draw, verify_deterministic, verify_greedy, verify_sampled

VOCABULARY = 3
NUM_DRAFTS = 2
Distribution = dict[tuple[int, ...], float]
#: The verdict on `drafts`, given the target's and the drafter's probabilities, and the uniforms.
Verify = Callable[[Tensor, Tensor, Tensor, Tensor], Verdict]


class Chain:
    """A random language over three tokens: p(next | tokens so far), and a drafter's q."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        prefixes = [prefix for n in range(NUM_DRAFTS + 1) for prefix in itertools.product(range(VOCABULARY), repeat=n)]
        logits = 2 * torch.randn(2, len(prefixes), VOCABULARY, generator=generator, dtype=torch.float64)
        self.p = dict(zip(prefixes, logits[0].softmax(-1), strict=True))
        self.q = dict(zip(prefixes, logits[1].softmax(-1), strict=True))

    def along(self, table: dict[tuple[int, ...], Tensor], drafts: tuple[int, ...], num: int) -> Tensor:
        """The rows of `table` behind each of the first `num` prefixes of `drafts`."""
        return torch.stack([table[drafts[:i]] for i in range(num)])

    def target(self) -> Distribution:
        """Probability of every text of three tokens when the target alone writes it."""
        return {text: self._probability(text, 0) for text in itertools.product(range(VOCABULARY), repeat=3)}

    def _probability(self, text: tuple[int, ...], begin: int) -> float:
        probability = 1.0
        for i in range(begin, len(text)):
            probability *= float(self.p[text[:i]][text[i]])
        return probability

    def emitted(self, drafters: Iterator[tuple[tuple[int, ...], float]], verify: Verify) -> Distribution:
        """The same with one round of verification, the rest of the text written by the target alone."""
        found: Counter[tuple[int, ...]] = Counter()
        for drafts, weight in drafters:
            p, q = self.along(self.p, drafts, NUM_DRAFTS + 1), self.along(self.q, drafts, NUM_DRAFTS)
            for uniforms, share in cells(p, q):
                verdict = verify(p, q, torch.tensor(drafts), uniforms)
                begun = (*drafts[: verdict.num_accepted], verdict.next_token)
                for rest in itertools.product(range(VOCABULARY), repeat=3 - len(begun)):
                    text = (*begun, *rest)
                    found[text] += weight * share * self._probability(text, len(begun))
        return dict(found)

    def greedy_drafts(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """A deterministic drafter: the likeliest token under q, each time."""
        drafts: tuple[int, ...] = ()
        for _ in range(NUM_DRAFTS):
            drafts = (*drafts, int(self.q[drafts].argmax()))
        yield drafts, 1.0

    def drawn_drafts(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """A drafter that draws from q: every draft with its probability."""
        for drafts in itertools.product(range(VOCABULARY), repeat=NUM_DRAFTS):
            yield drafts, float(self.q[()][drafts[0]] * self.q[drafts[:1]][drafts[1]])


def cells(p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, float]]:
    """One point of every cell of the unit cube in which no rule's verdict changes, with the cell's volume.

    A test of draft i can only turn at p_i(x) or p_i(x) / q_i(x), and the final draw at a partial sum of the weights
    left at some position: p, p without a token, or max(p - q, 0).
    """
    edges = []
    for i in range(NUM_DRAFTS):
        edges.append({*p[i].tolist(), *(p[i] / q[i]).tolist()})
    sums: set[float] = set()
    for i in range(NUM_DRAFTS + 1):
        left = [p[i], *(p[i].index_fill(0, torch.tensor([x]), 0.0) for x in range(VOCABULARY))]
        left += [(p[i] - q[i]).clamp_min(0)] if i < NUM_DRAFTS else []
        for weights in left:
            sums.update((weights.cumsum(0) / weights.sum()).tolist())
    for segments in itertools.product(*(_segments(found) for found in [*edges, sums])):
        volume = 1.0
        for low, high in segments:
            volume *= high - low
        yield torch.tensor([(low + high) / 2 for low, high in segments], dtype=torch.float64), volume


def _segments(edges: set[float]) -> list[tuple[float, float]]:
    inside = sorted({0.0, 1.0, *(edge for edge in edges if 0 < edge < 1)})
    return [(low, high) for low, high in pairwise(inside) if high - low > 1e-15]


def l1(one: Distribution, other: Distribution) -> float:
    """Sum of the absolute differences of two distributions."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys())


@pytest.fixture(params=range(2))
def chain(request: pytest.FixtureRequest, seed: int) -> Chain:
    return Chain(seed + request.param)


def test_a_deterministic_draft_leaves_the_targets_distribution(chain: Chain) -> None:
    found = chain.emitted(chain.greedy_drafts(), lambda p, _, drafts, u: verify_deterministic(p, drafts, u))
    assert l1(found, chain.target()) < 1e-12


def test_a_drawn_draft_leaves_the_targets_distribution(chain: Chain) -> None:
    found = chain.emitted(chain.drawn_drafts(), verify_sampled)
    assert l1(found, chain.target()) < 1e-11


def test_a_deterministic_draft_judged_by_p_over_q_is_caught() -> None:
    """Rule (e) of the literature's errors: q was not what the draft was drawn from."""
    chain = Chain(1)
    assert l1(chain.emitted(chain.greedy_drafts(), verify_sampled), chain.target()) > 0.01


def test_a_drawn_draft_dropped_when_unlikely_is_caught() -> None:
    """Rule (f): a confidence gate that looks at the token it drops leaves the likely tokens over-represented."""

    def gated(p: Tensor, q: Tensor, drafts: Tensor, uniforms: Tensor) -> Verdict:
        kept = 0
        while kept < NUM_DRAFTS and q[kept, drafts[kept]] > 0.3:
            kept += 1
        return verify_sampled(p[: kept + 1], q[:kept], drafts[:kept], torch.cat((uniforms[:kept], uniforms[-1:])))

    chain = Chain(1)
    assert l1(chain.emitted(chain.drawn_drafts(), gated), chain.target()) > 0.01


def test_acceptance_of_a_deterministic_draft_is_its_probability() -> None:
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    for uniform, num_accepted in ((0.0, 1), (0.249, 1), (0.25, 0), (0.9, 0)):
        verdict = verify_deterministic(p, torch.tensor([0]), torch.tensor([uniform, 0.0], dtype=torch.float64))
        assert verdict.num_accepted == num_accepted
        assert verdict.next_token == (0 if num_accepted else 1), "the rejected token has no weight left"


def test_greedy_keeps_drafts_up_to_the_first_difference_and_never_the_padding() -> None:
    best = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 0, 7], [9, 6, 7], [5, 6, 7]])
    draft = torch.tensor([[5, 6], [5, 8], [5, 0], [5, 6], [5, 6]])
    verdicts = verify_greedy(best, draft, torch.tensor([2, 2, 1, 2, 0]))
    assert verdicts == [Verdict(2, 7), Verdict(1, 6), Verdict(1, 0), Verdict(0, 9), Verdict(0, 5)]


def test_greedy_without_any_draft_is_vanilla() -> None:
    assert verify_greedy(torch.tensor([[3], [4]]), torch.empty(2, 0), torch.zeros(2)) == [Verdict(0, 3), Verdict(0, 4)]


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.5, 1 - 2**-53])
def test_an_index_without_weight_is_never_drawn(uniform: float) -> None:
    weights = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.1, 0.0], dtype=torch.float64)
    assert draw(weights, torch.tensor(uniform, dtype=torch.float64)) == (1 if uniform < 0.5 else 4)


def test_equal_distributions_that_differ_by_rounding_still_yield_a_token() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5 + 2**-52, 0.5 + 2**-52]], dtype=torch.float64)
    almost_one = torch.tensor([1 - 2**-53, 0.1], dtype=torch.float64)
    assert verify_sampled(p, q, torch.tensor([0]), almost_one) == Verdict(0, 0)
