"""The index against a scan of every result: longest matches, scopes, several writers, merging, forgetting."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.lookup import MAX_OCCURRENCES
from worker.task_memory import index as of_index
from worker.task_memory.index import BYTES_PER_TOKEN, DEPTH, MemoryIndex, MemoryView, RememberedText, ResultWriter, Run

SHORTER = of_index._SHORTER
writers = st.builds(ResultWriter, st.sampled_from(["a", "b"]), st.sampled_from(["", "x", "y"]))
results = st.lists(st.tuples(writers, st.lists(st.integers(0, 2), min_size=1, max_size=30)), max_size=12)
queries = st.lists(st.integers(0, 3), min_size=1, max_size=40)


NOBODY = ResultWriter("", "")


def remembered(text_id: int, tokens: Sequence[int], writer: ResultWriter = NOBODY) -> RememberedText:
    return RememberedText(text_id, writer, np.array(tokens, np.uint32))


def scan(texts: Sequence[RememberedText], query: Sequence[int], least: int, most: int) -> list[tuple[int, int, int]]:
    """(match length, text, place behind) of every occurrence of the query's end that something stands behind."""
    found = []
    for number, text in enumerate(texts):
        tokens = text.tokens.tolist()
        for place in range(1, len(tokens)):
            length = 0
            while length < min(most, place, len(query)) and tokens[place - 1 - length] == query[-1 - length]:
                length += 1
            if length >= least:
                found.append((length, number, place))
    return found


def behind(view: MemoryView, query: Sequence[int], num_tokens: int = 2) -> list[list[int]]:
    return [behind for _, behind in view.continuations(query, num_tokens)]


def filled(texts: Sequence[RememberedText], sizes: Sequence[int]) -> MemoryIndex:
    """An index that got the texts in portions of these sizes, each merged."""
    index, begin = MemoryIndex(), 0
    for size in [*sizes, len(texts)]:
        index.add(texts[begin : begin + size])
        index.merge()
        begin += size
    return index


@given(results, queries, st.integers(1, 3), st.integers(3, DEPTH), st.integers(1, 6), st.lists(st.integers(1, 4)))
def test_the_longest_matches_are_found_and_what_followed_them(
    given_results: list[tuple[ResultWriter, list[int]]],
    query: list[int],
    least: int,
    most: int,
    num_tokens: int,
    sizes: list[int],
) -> None:
    texts = [remembered(number, tokens, writer) for number, (writer, tokens) in enumerate(given_results)]
    index = filled(texts, sizes)
    assert index.num_tokens == sum(len(one.tokens) + 1 for one in texts)
    seen = MemoryView(lambda: index.runs, least, most).occurrences(query, num_tokens)
    found = [(length, behind) for length, _, behind in seen]

    every = scan(texts, query, least, most)
    longest = max((length for length, *_ in every), default=0)
    wanted = sorted((one for one in every if one[0] >= longest - SHORTER), reverse=True)
    assert [length for length, _ in found] == [length for length, *_ in wanted[:MAX_OCCURRENCES]]
    shortest = found[-1][0] if found else 0
    behind = [(length, texts[number].tokens[place : place + num_tokens].tolist()) for length, number, place in wanted]
    surely = sorted(one for one in behind if one[0] > shortest or len(wanted) <= MAX_OCCURRENCES)
    if len(wanted) <= MAX_OCCURRENCES:
        assert sorted(found) == surely
    else:
        assert all(one in behind for one in found), "of too many, some"


@given(results, queries, st.integers(1, 6))
def test_of_another_segment_only_what_two_writers_wrote_is_shown(
    given_results: list[tuple[ResultWriter, list[int]]], query: list[int], num_tokens: int
) -> None:
    texts = [remembered(number, tokens, writer) for number, (writer, tokens) in enumerate(given_results)]
    index = filled(texts, [])
    for length, _, behind in MemoryView(lambda: index.runs, 1, DEPTH, "a").occurrences(query, num_tokens):
        served = [query[-1], *behind]
        wrote = {
            text.writer
            for text in texts
            for place in range(len(text.tokens) - len(served) + 1)
            if text.tokens[place : place + len(served)].tolist() == served
        }
        assert length >= 1
        assert len(wrote) > 1 or {writer.segment for writer in wrote} == {"a"}


def test_two_jobs_without_a_batch_are_one_writer() -> None:
    secret, other = [5, 6, 7, 8], [1, 2, 3, 4]
    for second, shown in (
        (ResultWriter("b", ""), []),
        (ResultWriter("b", "x"), [(1, secret[1:])]),
        (ResultWriter("c", ""), [(1, secret[1:])]),
    ):
        texts = [remembered(0, secret, ResultWriter("b", "")), remembered(1, secret, second), remembered(2, other)]
        index = filled(texts, [])
        found = MemoryView(lambda: index.runs, 1, DEPTH, "a").occurrences([9, 5], 3)  # noqa: B023 - called here
        assert [(length, behind) for length, _, behind in found][:1] == shown


@given(results, queries, st.sets(st.integers(0, 11)), st.lists(st.integers(1, 4)))
def test_what_is_forgotten_is_found_no_more_at_once_and_after_merging(
    given_results: list[tuple[ResultWriter, list[int]]], query: list[int], gone: set[int], sizes: list[int]
) -> None:
    texts = [
        remembered(number, [token + 10 * number for token in tokens])
        for number, (_, tokens) in enumerate(given_results)
    ]
    index = filled(texts, sizes)
    held = MemoryView(lambda: index.runs, 1, DEPTH).frozen()
    index.forget(gone)
    kept = [one for one in texts if one.text_id not in gone]
    shown = {token for one in kept for token in one.tokens.tolist()}
    for text in texts:
        for view in (MemoryView(lambda: index.runs, 1, DEPTH), held):
            found = view.continuations(text.tokens.tolist(), 4)
            assert {token for _, behind in found for token in behind} <= shown
    index.merge()
    assert index.is_merged
    assert index.num_tokens == sum(len(one.tokens) + 1 for one in kept)
    by_id = {one.text_id: one.tokens.tolist() for run in index.runs for one in run.texts()}
    assert by_id == {one.text_id: one.tokens.tolist() for one in kept}


def test_what_is_forgotten_while_it_is_merged_is_found_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    index = MemoryIndex()
    index.add([remembered(1, [5, 6, 7, 8]), remembered(2, [5, 6, 9, 9])])
    sort = of_index._order

    def forgetting(tokens: of_index.Tokens) -> object:
        index.forget({1})
        return sort(tokens)

    monkeypatch.setattr(of_index, "_order", forgetting)
    index.merge()
    view = MemoryView(lambda: index.runs, 1, DEPTH)
    assert not {7, 8} & {
        token for query in ([5, 6], [6], [7]) for _, behind in view.continuations(query, 2) for token in behind
    }
    assert not index.is_merged
    monkeypatch.undo()
    index.merge()
    assert (index.num_tokens, behind(view, [5, 6])) == (5, [[9, 9]])


def test_a_reader_that_is_frozen_sees_nothing_that_is_added_later() -> None:
    index = MemoryIndex()
    view = MemoryView(lambda: index.runs, 1, DEPTH)
    frozen = view.frozen()
    index.add([remembered(1, [5, 6, 7])])
    index.merge()
    assert (behind(view, [5]), behind(frozen, [5])) == ([[6, 7]], [])


@pytest.mark.parametrize("largest", [49_152, 2**21, 2**31])
def test_tokens_of_every_vocabulary_are_sorted_alike(largest: int, rng: random.Random) -> None:
    """The order of numbers and the order of bytes are the same."""
    texts = [remembered(n, [rng.choice((0, 1, largest - 1)) for _ in range(20)]) for n in range(40)]
    index = filled(texts, [])
    for text in texts:
        query = text.tokens[:10].tolist()
        found = behind(MemoryView(lambda: index.runs, 10, DEPTH), query, 10)
        assert text.tokens[10:].tolist() in found or len(found) == MAX_OCCURRENCES


def test_runs_stay_few_and_a_token_takes_its_bytes(rng: random.Random) -> None:
    index = MemoryIndex()
    for number in range(300):
        index.add([remembered(number, [rng.randrange(5000) for _ in range(400)])])
        index.merge()
        assert len(index.runs) <= 5
    num_bytes = sum(run.num_bytes for run in index.runs)
    assert num_bytes < index.num_tokens * (BYTES_PER_TOKEN + 0.2)


def test_a_match_that_occurs_often_is_sampled_over_all_that_followed_it() -> None:
    texts = [remembered(number, [1, 2, 3, 100 + number % 4]) for number in range(400)]
    run = Run(texts)
    found = MemoryView(lambda: (run,), 1, DEPTH).continuations([1, 2, 3], 1)
    assert len(found) == MAX_OCCURRENCES
    assert {behind[0] for _, behind in found} == {100, 101, 102, 103}


def test_many_alike_weigh_more_than_one_but_not_many_times_and_new_ones_more_than_old_ones() -> None:
    def weights(texts: list[list[int]]) -> dict[int, float]:
        run = Run([remembered(number, tokens) for number, tokens in enumerate(texts)])
        found: dict[int, float] = {}
        for length, tokens in MemoryView(lambda: (run,), 1, DEPTH).continuations([1, 2], 1):
            found[tokens[0]] = found.get(tokens[0], 0.0) + 2**length
        return found

    alone, sixteen = weights([[1, 2, 7]])[7], weights([[1, 2, 7]] * 16)[7]
    assert 2 * alone < sixteen < 6 * alone
    both = weights([[1, 2, 7], [3] * 60, [1, 2, 8]])
    assert both[8] > 1.7 * both[7]
