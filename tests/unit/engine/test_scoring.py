"""Scoring look-up on texts that others decode: which texts, what it may look at and take, and its virtual rounds.

What a round tells of drafters with the same weights.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import PREFILL, AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling, ShadowCounts
from alphaloop.settings.models import LookupDrafterSettings
from engine.drafters.lookup import LookupDrafter
from engine.proposal import NOTHING, Proposal, RoundCounts, SharedWeightDrafter, tree_depths
from engine.scoring import ADVANCE_S, MAX_TOKENS, Shadows, VirtualRounds
from engine.verification import verify_greedy, verify_tree_greedy
from tests.fixtures.memory import ScopedMemory

GREEDY = Sampling(max_tokens=10_000, temperature=0.0)


@dataclass(eq=False)
class KnownText:
    """What is asked of a sequence here, with a text that is known beforehand."""

    job_id: str
    text: list[int]
    num_prompt: int = 1
    task: str = "code"
    segment: str = ""
    drafter: str | None = None
    shortest_draft: int = 0
    is_first_drafted: bool = False
    finish_reason: Literal["stop", "length"] | None = None
    device_s: float = 1.0
    max_tokens: int = 10_000
    has_begun: bool = True
    constrained: None = None
    sampling: Sampling = GREEDY

    @property
    def owner(self) -> str:
        return self.job_id

    @property
    def spec(self) -> KnownText:
        return self

    @property
    def drafting(self) -> KnownText:
        return self

    def has_drafted_throughout(self, drafter: str, num_draft_tokens: int) -> bool:
        return self.drafter == drafter and self.shortest_draft >= num_draft_tokens


Text: Any = KnownText


def lookup(name: str = "lookup", **settings: object) -> LookupDrafter:
    return LookupDrafter(name, LookupDrafterSettings.model_validate({"min_probability": 0, **settings}))


def decode(shadows: Shadows, text: Any) -> tuple[ShadowCounts, ...]:
    shadows.begin(text)
    text.finish_reason = "stop"
    return shadows.end(text)


def counts(found: tuple[ShadowCounts, ...]) -> AcceptanceCounts:
    (one,) = found
    assert (one.drafter, one.num_draft_tokens) == ("lookup", 12)
    return one.counts


class Clock:
    """Goes on by `tick_s` whenever it is looked at."""

    def __init__(self, tick_s: float) -> None:
        self.now, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


def test_of_earlier_results_only_those_count_that_were_there_when_the_job_began() -> None:
    result = list(range(100, 120))
    drafter, memory = lookup(memory=True), ScopedMemory()
    drafter.use_memory(memory.view)
    shadows = Shadows({"lookup": drafter}, clock=lambda: 0.0)
    begun_before = Text("b", [0, *result])
    shadows.begin(begun_before)
    first = counts(decode(shadows, Text("a", [0, *result])))
    assert first.num_accepted == 0, "nothing repeats, and it does not find itself"
    memory.remember("code", result)
    begun_before.finish_reason = "stop"
    assert counts(shadows.end(begun_before)).num_accepted == 0, "the first ended while it ran"
    assert counts(decode(shadows, Text("c", [0, *result]))).num_accepted > 15
    assert counts(decode(shadows, Text("d", [0, *result], task="sql"))).num_accepted == 0


def test_what_decoded_a_text_throughout_and_what_is_no_traffic_is_not_scored() -> None:
    shadows = Shadows({"lookup": lookup(memory=True), "other": lookup("other")}, clock=lambda: 0.0)
    for shortest, scored in ((12, ["lookup"]), (11, ["lookup", "other"]), (0, ["lookup", "other"])):
        text = Text("a", [1, 1, 1], drafter="other", shortest_draft=shortest)
        assert [found.drafter for found in decode(shadows, text)] == scored
    assert decode(shadows, Text("b", [1, 1, 1], task="")) == ()


def test_a_lookup_that_is_paused_in_the_middle_is_scored_on_the_whole_text(rng: random.Random) -> None:
    text = [rng.randrange(3) for _ in range(60)]
    shadows = Shadows({"lookup": lookup()}, clock=lambda: 0.0)
    whole = counts(decode(shadows, Text("a", text)))
    paused = Text("b", text[:30], drafter="lookup", shortest_draft=12)
    shadows.begin(paused)
    shadows.advance()
    paused.shortest_draft = 0
    for token in text[30:]:
        paused.text.append(token)
        shadows.advance()
    paused.finish_reason = "stop"
    assert counts(shadows.end(paused)) == whole
    assert whole.num_tokens == 59


def test_readings_take_turns_within_their_time_and_leave_little_to_the_end() -> None:
    """A round takes a quarter of what a step may take, and each text grows by a token a step."""
    clock = Clock(ADVANCE_S / 4)
    drafter = lookup(shadow_share=1)
    shadows = Shadows({"lookup": drafter}, clock=clock)
    texts = [Text(f"{number}", [0], device_s=1e9) for number in range(3)]
    for text in texts:
        shadows.begin(text)
    for token in range(200):
        for number, text in enumerate(texts):
            text.text.append(1000 * number + token)
        before = clock.now
        shadows.advance()
        assert clock.now - before <= ADVANCE_S + 2 * clock.tick_s
    read = [reading.rounds.counts.num_tokens for reading in shadows._readings]
    assert len(read) == 3
    assert min(read) >= 200 - 12 - 3, "what a round could accept, and some steps"
    for text in texts:
        text.finish_reason = "stop"
        assert counts(shadows.end(text)).num_tokens == 200


def test_scoring_takes_its_share_of_the_time_and_chooses_by_nothing_in_the_text(rng: random.Random) -> None:
    """A score takes 10 ms and a job 1 s, so at a share of 0.2 % one text in five is scored, long or short."""
    shadows = Shadows({"lookup": lookup(shadow_share=0.002)}, clock=Clock(0.01))
    scored: dict[int, int] = {2: 0, 40: 0}
    name = rng.randrange(2**40)
    for number in range(3000):
        length = 2 if number % 2 else 40
        scored[length] += len(decode(shadows, Text(f"{name}-{number}", [0] * (length + 1))))
    # 600 of 3000 are expected, 300 of each length; six standard deviations of a binomial draw.
    assert abs(sum(scored.values()) - 600) < 6 * (3000 * 0.2 * 0.8) ** 0.5
    assert abs(scored[2] - scored[40]) < 6 * (3000 * 0.2 * 0.8) ** 0.5


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents, siblings different."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(-1, len(tokens) - 1))
        token = draw(st.integers(0, 2))
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(0, 3), st.booleans(), st.data())
def test_a_virtual_round_accepts_what_the_target_would_and_is_cropped_where_the_text_ends(
    following: list[int], room_behind: int, is_first_drafted: bool, data: st.DataObject
) -> None:
    """One round over a text known beforehand, against the verification of real rounds, whatever would follow it."""
    is_chain = data.draw(st.booleans())
    tokens, parents = data.draw(trees())
    if is_chain:
        parents = list(range(-1, len(tokens) - 1))
    beyond = data.draw(st.lists(st.integers(0, 2), min_size=9, max_size=9))
    depths = tree_depths(parents)
    real = [*following, *beyond]
    best = [real[0], *(real[depth] for depth in depths)]
    verdict = verify_greedy(best, tokens) if is_chain else verify_tree_greedy(best, tokens, parents)
    num_emitted = min(verdict.num_accepted + 1, len(following))
    prefilled = [] if is_first_drafted else [7]
    expected = (PREFILL if prefilled else AcceptanceCounts()).with_round(
        max(depths), verdict.num_accepted, num_emitted=num_emitted, num_tested=verdict.num_tested
    )
    for _ in range(len(following) - num_emitted):
        expected = expected.with_round(0, 0, num_emitted=1)
    proposals = iter([Proposal(tuple(tokens), None if is_chain else tuple(parents))])
    text = [7, *prefilled, *following]
    rounds = VirtualRounds(lambda room: next(proposals, NOTHING), [7], 9, len(text) - 1 + room_behind)
    while rounds.take_round(text, has_ended=True, is_first_drafted=is_first_drafted):
        pass
    assert rounds.counts == expected


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), min_size=1),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 5),
)
def test_reading_along_counts_what_reading_at_the_end_counts(
    output: list[int], pieces: list[int], k: int, is_first_drafted: bool, room_behind: int
) -> None:
    """However many tokens the text grows by between two readings."""
    settings = LookupDrafterSettings(min_probability=0, max_draft_tokens=k)
    prompt, max_tokens = [0, 1, 0], len(output) + room_behind

    def reading() -> VirtualRounds:
        seen = list(prompt)
        return VirtualRounds(LookupDrafter("lookup", settings).rereading(seen, ""), seen, k, max_tokens)

    along, at_end = reading(), reading()
    text = list(prompt)
    for number in range(len(output)):
        piece = pieces[number % len(pieces)]
        text += output[len(text) - len(prompt) :][:piece]
        while along.take_round(text, has_ended=False, is_first_drafted=is_first_drafted):
            assert along.counts.num_tokens <= len(text) - len(prompt)
    for rounds in (along, at_end):
        while rounds.take_round(text, has_ended=True, is_first_drafted=is_first_drafted):
            pass
    assert along.counts == at_end.counts
    assert at_end.counts.num_tokens == len(output)


def test_rounds_begin_in_the_first_tokens_of_a_long_text_only(rng: random.Random) -> None:
    output = [rng.randrange(5) for _ in range(MAX_TOKENS + 300)]
    seen = [0]
    propose = LookupDrafter("lookup", LookupDrafterSettings(min_probability=0)).rereading(seen, "")
    rounds = VirtualRounds(propose, seen, 12, 10_000)
    while rounds.take_round([0, *output], has_ended=True):
        pass
    assert MAX_TOKENS <= rounds.counts.num_tokens <= MAX_TOKENS + 12
    assert rounds.counts.num_cropped == 0


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
