"""Scoring look-up on finished texts: what it may look at, what it may take, and which tokens count."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.settings.models import LookupDrafterSettings
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.proposal import NOTHING, Proposal
from worker.decoding.shadow import MAX_TOKENS, Shadows, replay
from worker.decoding.verification.chain import verify_greedy
from worker.decoding.verification.tree import tree_depths, verify_tree_greedy

PREFILL = AcceptanceCounts().with_round(0, 0, num_emitted=1)


@dataclass
class Ended:
    """A finished text."""

    job_id: str
    text: list[int]
    num_prompt: int = 1
    task: str = "code"
    drafter: str | None = None
    longest_draft: int = 0
    is_first_drafted: bool = False
    marks: Mapping[str, int] = field(default_factory=dict)
    device_s: float = 1.0
    max_tokens: int = 10_000


def lookup(**settings: object) -> LookupDrafter:
    return LookupDrafter("lookup", LookupDrafterSettings.model_validate({"min_probability": 0, **settings}))


def score(shadows: Shadows, ended: Ended) -> AcceptanceCounts:
    (found,) = shadows.score(ended)
    assert (found.drafter, found.num_draft_tokens) == ("lookup", 12)
    return found.counts


def ticking(step_s: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step_s


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
    found = replay(
        lambda room: next(proposals, NOTHING),
        [7],
        [*prefilled, *following],
        9,
        len(prefilled) + len(following) + room_behind,
        is_first_drafted=is_first_drafted,
    )
    assert found == expected


def test_a_proposal_is_never_asked_for_beyond_the_jobs_own_limit() -> None:
    asked = []

    def propose(room: int) -> Proposal:
        asked.append(room)
        return NOTHING

    replay(propose, [0], [1, 2, 3, 4], 2, 4)
    assert asked == [2, 1, 0]
    asked.clear()
    replay(propose, [0], [1, 2, 3, 4], 2, 4, is_first_drafted=True)
    assert asked == [2, 2, 1, 0]


def test_rounds_begin_in_the_first_tokens_of_a_long_text_only(rng: random.Random) -> None:
    text = [rng.randrange(5) for _ in range(MAX_TOKENS + 300)]
    counts = score(Shadows({"lookup": lookup()}), Ended("a", text))
    assert MAX_TOKENS <= counts.num_tokens <= MAX_TOKENS + 12
    assert counts.num_cropped == 0


def test_of_earlier_results_only_those_count_that_were_there_when_the_job_began() -> None:
    result = list(range(100, 120))
    drafter = lookup(remember_tasks=("code",))
    shadows = Shadows({"lookup": drafter}, clock=lambda: 0.0)
    begun_before = Ended("b", [0, *result], marks=shadows.marks("code"))
    first = score(shadows, Ended("a", [0, *result], marks=shadows.marks("code")))
    assert first.num_accepted == 0, "nothing repeats, and it does not find itself"
    assert score(shadows, begun_before).num_accepted == 0, "the first ended while it ran"
    begun_after = Ended("c", [0, *result], marks=shadows.marks("code"))
    assert score(shadows, begun_after).num_accepted > 15
    other_task = Ended("d", [0, *result], task="sql", marks=shadows.marks("sql"))
    assert score(shadows, other_task).num_accepted == 0


def test_results_that_were_dropped_since_spoil_no_mark(rng: random.Random) -> None:
    drafter = lookup(remember_tasks=("code",), max_remembered_bytes=1 << 16)
    shadows = Shadows({"lookup": drafter}, clock=lambda: 0.0)
    held = drafter.num_remembered("code")
    for number in range(20):
        result = [1000 * number + n for n in range(40)]
        before = Ended(f"{number}", [0, *result], marks={"lookup": held})
        held = drafter.num_remembered("code")
        assert score(shadows, before).num_accepted == 0
        again = Ended(f"{number} again", [0, *result], marks=shadows.marks("code"))
        assert score(shadows, again).num_accepted > 30


def test_what_decoded_a_text_and_what_is_no_traffic_is_not_scored() -> None:
    shadows = Shadows({"lookup": lookup(remember_tasks=("code",)), "other": lookup()})
    for longest, scored in ((12, ["lookup"]), (11, ["lookup", "other"])):
        ended = Ended("a", [1, 1, 1], drafter="other", longest_draft=longest)
        assert [found.drafter for found in shadows.score(ended)] == scored
    assert shadows.score(Ended("b", [1, 1, 1], task="")) == ()


def test_scoring_takes_its_share_of_the_time_and_chooses_by_nothing_in_the_text(rng: random.Random) -> None:
    """A score takes 10 ms and a job 1 s, so at a share of 0.2 % one text in five is scored, long or short."""
    num_jobs = 3000
    clock = ticking(0.01)
    shadows = Shadows({"lookup": lookup(shadow_share=0.002)}, clock=lambda: next(clock))
    scored: dict[int, int] = {2: 0, 40: 0}
    name = rng.randrange(2**40)
    for number in range(num_jobs):
        length = 2 if number % 2 else 40
        scored[length] += len(shadows.score(Ended(f"{name}-{number}", [0] * (length + 1))))
    # 600 of 3000 are expected, 300 of each length; six standard deviations of a binomial draw.
    assert abs(sum(scored.values()) - 600) < 6 * (3000 * 0.2 * 0.8) ** 0.5
    assert abs(scored[2] - scored[40]) < 6 * (3000 * 0.2 * 0.8) ** 0.5


def test_a_share_of_nothing_scores_nothing_and_still_remembers() -> None:
    drafter = lookup(shadow_share=0, remember_tasks=("code",))
    assert Shadows({"lookup": drafter}).score(Ended("a", [0, 1, 2])) == ()
    assert drafter.num_remembered("code") > 0
