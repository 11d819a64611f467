"""Earlier results of a task: found where allowed, within bounds, and nowhere else."""

from __future__ import annotations

import random
import tracemalloc
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.lookup import BYTES_PER_TOKEN, MAX_OCCURRENCES, EarlierResults
from alphaloop.settings.models import LookupDrafterSettings
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.proposal import Ask
from worker.decoding.sampling import TokenChooser
from worker.engine import Sampling

GREEDY = Sampling(max_tokens=64, temperature=0.0)
NO_CHOICE = cast(TokenChooser, None)  # what followed before does not depend on how tokens are chosen

tokens = st.integers(0, 3)
results = st.lists(st.lists(tokens, max_size=12), max_size=20)


def sql_drafter(**settings: object) -> LookupDrafter:
    return LookupDrafter("lookup", LookupDrafterSettings.model_validate({"remember_tasks": ["sql"], **settings}))


def decode(
    drafter: LookupDrafter, prompt: list[int], output: list[int], task: str = "sql", job: str = "earlier"
) -> None:
    """A sequence from its beginning to its end."""
    text = list(prompt)
    drafter.open(job, text, GREEDY, task)
    text.extend(output)
    drafter.close(job)
    drafter.remember(task, output)


def proposed(drafter: LookupDrafter, text: list[int], task: str = "sql", num_tokens: int = 3) -> tuple[int, ...]:
    drafter.open("now", text, GREEDY, task)
    (proposal,) = drafter.propose([Ask("now", text, num_tokens, NO_CHOICE)])
    drafter.clear()
    return proposal.tokens


def held(drafter: LookupDrafter) -> tuple[int, ...]:
    return proposed(drafter, [10, 11, 12], num_tokens=1)


def test_a_job_finds_what_an_earlier_result_of_its_task_went_on_with() -> None:
    drafter = sql_drafter()
    decode(drafter, [1], [10, 11, 12, 13, 14, 15])
    assert proposed(drafter, [2, 10, 11, 12]) == (13, 14, 15)


def test_another_task_finds_nothing_and_leaves_nothing() -> None:
    drafter = sql_drafter()
    decode(drafter, [1], [10, 11, 12, 13], task="code")
    assert held(drafter) == ()
    decode(drafter, [1], [10, 11, 12, 13], task="sql")
    assert proposed(drafter, [10, 11, 12], task="code") == ()


def test_by_default_no_task_is_remembered() -> None:
    drafter = LookupDrafter("lookup", LookupDrafterSettings())
    decode(drafter, [1], [10, 11, 12, 13])
    assert held(drafter) == ()


def test_prompts_are_never_remembered() -> None:
    drafter = sql_drafter()
    decode(drafter, [10, 11, 12, 13], [20, 21])
    assert held(drafter) == ()


def test_a_continuation_ends_where_the_earlier_result_ended() -> None:
    drafter = sql_drafter()
    decode(drafter, [1], [10, 11, 12, 13])
    decode(drafter, [1], [14, 15])
    assert proposed(drafter, [10, 11, 12]) == (13,)


def test_a_sequence_that_is_closed_and_goes_on_is_remembered_once_it_ends() -> None:
    """Another drafter may go on with it; closing twice, or what never began, does nothing."""
    drafter = sql_drafter()
    drafter.close("nobody")
    drafter.open("job", [1, 10, 11, 12, 13], GREEDY, "sql")
    drafter.close("job")
    drafter.close("job")
    assert held(drafter) == ()
    drafter.remember("sql", [10, 11, 12, 13])
    assert held(drafter) == (13,)


@given(results, st.lists(tokens, min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 25), st.integers(1, 6))
def test_the_latest_results_that_fit_are_searched_and_no_others(
    given_results: list[list[int]], text: list[int], min_ngram: int, max_tokens: int, num_tokens: int
) -> None:
    earlier = EarlierResults(min_ngram, 5, max_tokens * BYTES_PER_TOKEN)
    kept: list[list[int]] = []
    for result in given_results:
        earlier.remember(result)
        if result and len(result) + 1 <= max_tokens:
            kept.append(result)
            while sum(len(one) + 1 for one in kept) > max_tokens:
                kept.pop(0)
    assert len(earlier) == sum(len(one) + 1 for one in kept)

    expected = []
    for result in reversed(kept):
        for behind in range(len(result), 0, -1):
            length = 0
            while length < min(5, behind, len(text)) and result[behind - 1 - length] == text[-1 - length]:
                length += 1
            if length >= min_ngram:
                expected.append((length, result[behind : behind + num_tokens]))
    expected = [(length, behind) for length, behind in expected[:MAX_OCCURRENCES] if behind]
    assert earlier.continuations(text, num_tokens) == expected


def test_what_is_forgotten_leaves_nothing_behind(rng: random.Random) -> None:
    # Shorter than an n-gram, a hundred times as many as fit: an entry left behind by each would be far too much.
    max_bytes = 80_000
    tracemalloc.start()
    earlier = EarlierResults(3, 16, max_bytes)
    for _ in range(100 * max_bytes // BYTES_PER_TOKEN // 3):
        earlier.remember([rng.randrange(100_000) for _ in range(2)])
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < max_bytes


def test_memory_stays_within_its_bytes(rng: random.Random) -> None:
    # Sizes on both sides of where a hash table doubles; tokens of which hardly any pair occurs twice, the dearest case.
    for max_bytes in (80_000, 170_000, 240_000, 350_000, 470_000):
        tracemalloc.start()
        earlier = EarlierResults(2, 16, max_bytes)
        for _ in range(3 * max_bytes // BYTES_PER_TOKEN // 50):
            earlier.remember([rng.randrange(100_000) for _ in range(50)])
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(earlier) > 0.7 * max_bytes / BYTES_PER_TOKEN
        assert peak_bytes < max_bytes
