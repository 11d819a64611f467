"""What a round tells of drafters with the same weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

from alphaloop.acceptance import PREFILL, AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from worker.decoding.counts import RoundCounts, SharedWeightDrafter
from worker.decoding.proposal import Proposal

#: Of a draft token: the probability that its draft gives it, how often that is, and how often it is then accepted.
KINDS = ((0.9, 0.7, 0.95), (0.5, 0.3, 0.4))
GATE = 0.7


def shared_weights(longest: int, gate: float, name: str = "other") -> SharedWeightDrafter:
    return SharedWeightDrafter(DrafterState(name, "r", longest), gate)


def proposal(*probabilities: float) -> Proposal:
    together, product_ = [], 1.0
    for p in probabilities:
        product_ *= p
        together.append(product_)
    return Proposal(tuple(range(len(probabilities))), together=tuple(together))


def counted(
    other: SharedWeightDrafter, own_gate: float, drafted: Proposal, num_accepted: int, *, num_asked: int
) -> tuple[AcceptanceCounts, tuple[int, ...]]:
    counts = RoundCounts()
    counts.sharing["own"] = (own_gate, [other])
    counts.take_shared("own", drafted, num_accepted, num_emitted=num_accepted + 1, num_asked=num_asked, num_possible=99)
    (shadow,) = counts.shared
    assert DrafterState(shadow.drafter, shadow.draft_revision, shadow.num_draft_tokens) == other.state
    return shadow.counts, shadow.chances


def test_a_gate_would_have_ended_the_draft_behind_its_first_doubtful_token() -> None:
    counts, chances = counted(shared_weights(4, 0.6), 0.0, proposal(0.9, 0.5, 0.9), 3, num_asked=3)
    assert counts == PREFILL.with_round(2, 2, num_emitted=3)
    assert chances == (1, 1, 1, 0), "that nothing stood at the third place is the gate's doing"


def test_a_gate_between_none_and_the_decoding_one_is_not_judged() -> None:
    counts = RoundCounts()
    counts.sharing["own"] = (0.6, [shared_weights(3, 0.3), shared_weights(3, 0.7, "strict")])
    counts.take_shared("own", proposal(0.9), 1, num_emitted=2, num_asked=1, num_possible=9)
    assert [shadow.drafter for shadow in counts.shared] == ["strict"]


def rounds(longest: int, gate: float) -> Iterator[tuple[float, Proposal, int]]:
    """Every round of a drafter whose positions are alike and independent: (probability, proposal, accepted)."""
    for kinds in product(range(2), repeat=longest):
        for outcome in product(range(2), repeat=longest):
            chance, drafted, through = 1.0, 0, 1.0
            for kind, is_right in zip(kinds, outcome, strict=True):
                p, share, right = KINDS[kind]
                chance *= share * (right if is_right else 1 - right)
                if not gate or through >= gate:
                    through *= p
                    drafted += 1
            accepted = next((i for i in range(drafted) if not outcome[i]), drafted)
            yield chance, proposal(*(KINDS[kind][0] for kind in kinds[:drafted])), accepted


def survival(longest: int, gate: float) -> list[float]:
    """s_i of real rounds: a token is proposed and accepted at i, of those accepted through i - 1."""
    reached: Counter[int] = Counter()
    accepts: Counter[int] = Counter()
    for chance, _, accepted in rounds(longest, gate):
        for position in range(min(accepted + 1, longest)):
            reached[position] += chance  # type: ignore[assignment]
            accepts[position] += chance * (position < accepted)  # type: ignore[assignment]
    return [accepts[i] / reached[i] for i in range(longest)]


@pytest.mark.parametrize(
    ("own", "asked", "other", "longest"),
    [(0.0, 4, GATE, 4), (0.0, 3, GATE, 5), (GATE, 4, 0.0, 4), (GATE, 4, 0.8, 4), (0.0, 2, 0.0, 4), (GATE, 2, GATE, 4)],
)
def test_alike_positions_are_counted_as_its_own_rounds_would_count_them(
    own: float, asked: int, other: float, longest: int
) -> None:
    """By enumeration: where no round's beginning differs from another's, nothing is left out that would matter."""
    chances: Counter[int] = Counter()
    accepts: Counter[int] = Counter()
    for probability, drafted, accepted in rounds(asked, own):
        counts, allowed = counted(shared_weights(longest, other), own, drafted, accepted, num_asked=asked)
        for position, chance in enumerate(allowed):
            chances[position] += probability * chance  # type: ignore[assignment]
        for position, accept in enumerate(counts.accepts):
            accepts[position] += probability * accept  # type: ignore[assignment]
    known = [i for i in range(longest) if chances[i] > 0]
    assert known == list(range(min(asked, longest))), "every position that was drafted, and none behind"
    expected = survival(longest, other)
    assert [accepts[i] / chances[i] for i in known] == pytest.approx([expected[i] for i in known])
