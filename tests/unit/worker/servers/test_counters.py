"""What a server's counters moved by, as counts: those of the rounds that were played."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import PREFILL, AcceptanceCounts
from alphaloop.errors import ReplyInvalid
from tests.fixtures.metrics_page import MetricsPage
from worker.servers.counters import Counters, counts_between, lags

K = 4
START = Counters(5, 300, 40, 160, (20, 10, 5, 1))
#: Three texts of twelve rounds, none of which was cut: 12 rounds, 10 of them with drafts, and 7 tokens accepted.
END = Counters(8, 300 + 3 + 12 + 7, 50, 200, (24, 12, 6, 1))


def between(before: Counters = START, after: Counters = END) -> AcceptanceCounts | None:
    return counts_between(before, after, 3, 22, K)


def test_they_are_counts_by_position() -> None:
    assert between() == AcceptanceCounts(13, 3, 0, (10,) * 4, (10, 4, 2, 1), (4, 2, 1, 0))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, K)), min_size=1, max_size=12), st.integers(1, 3))
def test_they_are_the_rounds_that_were_played(played: list[tuple[bool, int]], num_requests: int) -> None:
    """Each round drafts k tokens or none; a text's first token is of the round that reads its prompt."""
    counts, page = PREFILL, MetricsPage()
    for drafts, accepted in played:
        proposed, taken = (K, accepted) if drafts else (0, 0)
        counts = counts.with_round(proposed, taken, num_emitted=taken + 1)
    before = Counters.of_page(page.text())
    page.add(counts.num_tokens - 1 + num_requests, counts)
    page.num_requests = num_requests
    found = counts_between(before, Counters.of_page(page.text()), num_requests, page.num_tokens, K)
    assert found == (counts if sum(counts.proposed) else AcceptanceCounts(counts.rounds, counts.rounds))


def test_tokens_that_were_cut_at_the_end_are_censored() -> None:
    counts = counts_between(START, replace(END, num_tokens=318), 3, 18, K)
    assert counts is not None
    assert (counts.rounds, counts.num_empty_rounds, counts.num_cropped, counts.num_tokens) == (11, 1, 2, 16)
    assert counts_between(START, replace(END, num_tokens=303), 3, 3, 1) is None  # more than a round for each text


@given(st.lists(st.tuples(st.integers(0, K), st.integers(0, K)), min_size=1, max_size=12))
def test_of_ragged_drafts_all_but_the_trials_is_exact(played: list[tuple[int, int]]) -> None:
    counts, page = PREFILL, MetricsPage()
    for proposed, accepted in played:
        counts = counts.with_round(proposed, min(proposed, accepted), num_emitted=min(proposed, accepted) + 1)
    before = Counters.of_page(page.text())
    page.add(counts.num_tokens, counts)
    found = counts_between(before, Counters.of_page(page.text()), 1, page.num_tokens, K)
    assert found is not None
    padding = (0,) * (K - len(counts.accepts))
    assert (found.rounds, found.num_empty_rounds, found.num_tokens) == (
        counts.rounds,
        counts.num_empty_rounds,
        counts.num_tokens,
    )
    assert sum(found.proposed) == sum(counts.proposed)
    assert found.accepts == ((*counts.accepts, *padding) if counts.num_trials else ())


def test_drafts_shorter_than_k_are_taken_to_lack_the_last_positions() -> None:
    counts = between(after=replace(END, num_draft_tokens=190))
    assert counts == AcceptanceCounts(13, 3, 0, (10, 10, 10, 0), (10, 4, 2, 0), (4, 2, 1, 0))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (START, replace(END, num_requests=9)),  # another's request
        (START, replace(END, num_requests=7)),
        (START, replace(END, num_tokens=323)),
        (START, replace(END, num_present=1)),  # one that still runs
        (replace(START, num_present=1), END),  # one that ran at the beginning
        (START, Counters(3, 22, 10, 40, (4, 2, 1, 0))),  # a new server that has done as much
        (START, replace(END, num_drafts=39)),  # a new one whose other counters happen to fit
        (START, replace(END, accepts=(24, 12, 4, 1))),
        (START, replace(END, accepts=(24, 12, 6))),  # a server with another k
        (START, replace(END, num_draft_tokens=201)),  # more than k a round
        (START, replace(END, num_draft_tokens=172)),  # fewer than were accepted
        (START, replace(END, accepts=(22, 14, 6, 1))),  # later positions accept no more than earlier ones
    ],
)
def test_whatever_else_the_server_did_nothing_is_known(before: Counters, after: Counters) -> None:
    assert between(before, after) is None


def test_a_reading_before_the_server_has_counted_is_early() -> None:
    assert not lags(START, END, 3, 22)
    for early in (replace(END, num_requests=7), replace(END, num_tokens=321), replace(END, num_present=1)):
        assert lags(START, early, 3, 22)
    assert not lags(START, replace(END, num_requests=9), 3, 22)  # no later reading takes another's request away


def test_counters_of_all_engines_are_one() -> None:
    page = MetricsPage(num_requests=3, num_tokens=50, num_drafts=9, num_draft_tokens=36, accepts=[4, 3, 2, 1])
    one = page.text(num_present=2)
    both = one + one.replace('engine="0"', 'engine="1"')
    assert Counters.of_page(one) == Counters(3, 50, 9, 36, (4, 3, 2, 1), 2)
    assert Counters.of_page(both) == Counters(6, 100, 18, 72, (8, 6, 4, 2), 4)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html>not found</html>",
        MetricsPage().text().replace("vllm:request_success_total", "vllm:request_success"),
        MetricsPage().text().replace('position="0"', 'position="first"'),
        MetricsPage(num_drafts=3).text().replace(" 3.0", " three"),
        MetricsPage(num_drafts=3).text().replace(" 3.0", " NaN"),
        MetricsPage(num_drafts=3).text().replace(" 3.0", " +Inf"),
    ],
)
def test_a_page_that_lacks_a_counter_is_invalid(page: str) -> None:
    with pytest.raises(ReplyInvalid):
        Counters.of_page(page)
