"""What the worker records of a server's reply, and that its counts are those of the rounds that were played."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import PREFILL, AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from worker.servers import draft_counts
from worker.servers.draft_counts import NOTHING, from_rounds, from_sums
from worker.servers.forms import ReplyDrafts, ServerTimes
from worker.servers.replies import Reply, SentRequest, drafts_of, generation_of

NGRAM = DrafterState("ngram", "vllm-0.32.0", 4, least_draft_tokens=4)
K3 = DrafterState("ngram", "llama_cpp-b11549-sums", 3, least_draft_tokens=3)
SENT = SentRequest("speculative", NGRAM, admitted_at=10.0, sent_at=11.0, ended_at=14.0, num_beside=2.0)
REPLY = Reply(
    text="one two",
    finish_reason="length",
    num_prompt_tokens=5,
    num_tokens=9,
    token_ids=tuple(range(9)),
    drafts=from_rounds([4, 4], [3, 2], 9),
    times=ServerTimes.model_validate({"queue_time_ms": 250, "prompt_ms": 500, "predicted_ms": 2000}),
    first_text_s=None,
    wall_s=3.0,
)


def test_rounds_and_times_are_the_servers_own() -> None:
    found = generation_of("job", REPLY, SENT)
    assert found.counts == AcceptanceCounts(4, 2, 0, (2, 2, 2, 2), (2, 2, 2, 1), (2, 2, 1, 0))
    (drafted,) = found.drafted
    assert (drafted.drafter, drafted.num_draft_tokens, drafted.counts.rounds) == ("ngram", 4, 3)
    assert found.num_vanilla_rounds == 1, "the round that read the prompt"
    assert found.time_to_first_token_s == 1.0 + 0.25 + 0.5, "from the admission on"
    assert found.wall_s == 4.0
    assert found.device_s == 1.5, "half of three seconds, because two were there"
    assert generation_of("job", REPLY, replace(SENT, share_s=0.7)).device_s == 0.7, "as measured, moment by moment"
    assert found.served.request_s == 3.0
    assert (found.served.num_rounds, found.served.decode_s, found.served.is_counted) == (4, 2.0, True)


def test_a_text_has_the_k_that_was_asked_for_and_obeyed() -> None:
    reply = replace(REPLY, drafts=from_rounds([2, 2, 1], [2, 1, 1], 9))
    for asked, k in ((2, 2), (None, 4)):
        found = generation_of("job", reply, replace(SENT, requested_k=asked))
        (drafted,) = found.drafted
        assert (drafted.num_draft_tokens, found.served.num_draft_tokens) == (k, k)
    untold = generation_of("job", replace(REPLY, drafts=NOTHING), replace(SENT, requested_k=2))
    assert (untold.served.num_draft_tokens, untold.served.is_counted) == (2, False)


def test_without_counts_it_says_how_many_tokens_there_are_and_that_no_more_is_known() -> None:
    for told in (NOTHING, from_sums(8, 5, 9, None), from_rounds([4, 4], [4, 4], 2)):
        found = generation_of("job", replace(REPLY, drafts=told), SENT)
        assert found.counts.num_tokens == 9
        assert found.drafted == ()
        assert (found.served.drafter, found.served.is_counted, found.served.num_rounds) == ("ngram", False, None)


def test_counts_of_a_server_that_drafts_though_it_should_not_are_not_believed() -> None:
    found = generation_of("job", REPLY, replace(SENT, drafter=None))
    assert not found.served.is_counted


def test_the_first_token_is_taken_to_come_with_the_text_where_nobody_tells() -> None:
    silent = replace(REPLY, times=ServerTimes())
    assert generation_of("job", silent, SENT).time_to_first_token_s == 4.0
    assert generation_of("job", replace(silent, first_text_s=0.5), SENT).time_to_first_token_s == 1.5


Played = tuple[tuple[int, int], ...]  #: of each round behind the first: tokens drafted, tokens accepted


@st.composite
def rounds(draw: st.DrawFn, *, fixed: int | None = None) -> Played:
    """Rounds of a text. With `fixed` every one drafts as many tokens, else from none to six."""
    lengths = st.just(fixed) if fixed is not None else st.integers(0, 6)
    return tuple(
        (proposed, draw(st.integers(0, proposed))) for proposed in draw(st.lists(lengths, min_size=1, max_size=12))
    )


def played(found: Played, num_cut: int = 0) -> AcceptanceCounts:
    """The counts as an engine of our own would have taken them."""
    counts = PREFILL
    for number, (proposed, accepted) in enumerate(found, start=1):
        cut = num_cut if number == len(found) else 0
        counts = counts.with_round(proposed, accepted, num_emitted=accepted + 1 - cut)
    return counts


@given(rounds())
def test_rounds_give_the_counts_that_were_played(found: Played) -> None:
    counts = played(found)
    drafted = [both for both in found if both[0]]
    said = draft_counts.from_rounds([both[0] for both in drafted], [both[1] for both in drafted], counts.num_tokens)
    longest = max((p for p, _ in drafted), default=0)
    assert said == draft_counts.DraftCounts(
        "rounds", sum(p for p, _ in drafted), sum(a for _, a in drafted), counts, longest
    )


@given(rounds(fixed=3), st.data())
def test_a_last_round_that_was_cut_is_censored(found: Played, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, found[-1][1]))
    counts = played(found, cut)
    said = draft_counts.from_rounds([p for p, _ in found], [a for _, a in found], counts.num_tokens)
    assert said.counts == counts


@given(rounds(fixed=3))
def test_lengths_give_the_same_where_every_round_drafts_as_many(found: Played) -> None:
    counts = played(found)
    lengths = Counter(accepted for _, accepted in found)
    said = draft_counts.from_lengths([lengths[i] for i in range(4)], 3 * len(found), counts.num_tokens, len(found))
    assert said.counts == counts


@given(rounds(fixed=2))
def test_lengths_of_a_shorter_draft_than_the_servers_tell_positions_too(found: Played) -> None:
    """vLLM's list is as long as the k of its start, whatever a request asked for."""
    counts = played(found)
    lengths = Counter(accepted for _, accepted in found)
    whole = ReplyDrafts.model_validate(
        {
            "num_spec_steps": len(found),
            "num_draft_tokens": 2 * len(found),
            "num_accepted_draft_tokens": sum(accepted for _, accepted in found),
            "acceptance_histogram": [lengths[i] for i in range(5)],
        }
    )
    said = drafts_of("vllm", whole, counts.num_tokens, 2)
    assert said.counts == counts
    assert said.longest_draft == 2
    ragged = drafts_of("vllm", whole, counts.num_tokens, 4)  # rounds of two, where four were asked for
    assert (ragged.granularity, ragged.counts.accepts) == ("sums", (*counts.accepts, 0, 0))
    assert sum(ragged.counts.proposed) == 2 * len(found)


@given(rounds())
def test_no_round_drafted_less_than_is_said_of_the_longest(found: Played) -> None:
    drafted = [both for both in found if both[0]]
    lengths = Counter(accepted for _, accepted in drafted)
    num_proposed = sum(proposed for proposed, _ in drafted)
    said = draft_counts.from_lengths(
        [lengths[i] for i in range(7)], num_proposed, played(found).num_tokens, len(drafted)
    )
    assert said.longest_draft <= max((proposed for proposed, _ in drafted), default=0)
    if drafted:
        assert said.longest_draft >= max(num_proposed / len(drafted), *(accepted for _, accepted in drafted))


def test_positions_of_ragged_drafts_are_estimated_from_their_sums() -> None:
    said = draft_counts.from_lengths([1, 0, 1], 3, 6, 2)
    assert (said.granularity, said.num_proposed, said.num_accepted, said.doubt) == ("sums", 3, 2, None)
    assert (said.counts.proposed, said.counts.accepts, said.counts.num_tokens) == ((2, 1), (1, 1), 6)


def test_the_sums_of_a_text_are_in_its_counts() -> None:
    """54 of 72 drafted tokens, as llama.cpp reports them: no round is said to have drafted nothing without reason."""
    found = generation_of(
        "job", replace(REPLY, num_tokens=80, drafts=from_sums(72, 54, 80, 3)), replace(SENT, drafter=K3)
    )
    assert (sum(found.counts.proposed), found.counts.num_accepted, found.counts.num_tokens) == (72, 54, 80)
    assert (found.counts.rounds, found.counts.num_empty_rounds) == (26, 2)
    assert (found.served.granularity, found.served.is_counted, found.served.num_rounds) == ("sums", True, 26)
    (drafted,) = found.drafted
    assert (drafted.counts.rounds, drafted.counts.num_accepted) == (25, 54)


def test_where_counters_are_the_evidence_a_text_keeps_its_own_counts() -> None:
    found = generation_of("job", REPLY, replace(SENT, is_counted_apart=True))
    assert found.counts == REPLY.drafts.counts
    assert (found.drafted, found.served.is_counted, found.served.num_rounds) == ((), False, 4)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_of_drafts_whose_length_the_server_changes_what_was_accepted_is_exact(found: Played) -> None:
    """SGLang's list ends at the longest; how many tokens a round drafted is not in it."""
    found = tuple((proposed, min(proposed, accepted)) for proposed, accepted in found)
    counts = played(found)
    lengths = Counter(accepted for _, accepted in found)
    said = draft_counts.from_reached([lengths[i] for i in range(max(lengths) + 1)], counts.num_tokens, len(found), 5)
    assert said.granularity == "reached"
    assert (said.counts.rounds, said.counts.num_tokens) == (counts.rounds, counts.num_tokens)
    assert said.counts.accepts == (*counts.accepts, *(0,) * (5 - len(counts.accepts)))
    assert said.counts.trials == (len(found), *said.counts.accepts[:-1])


@pytest.mark.parametrize(
    "said",
    [
        draft_counts.from_rounds((3, 3), (1,), 9),  # a round was verified that did not draft
        draft_counts.from_rounds((2,), (3,), 9),  # more accepted than drafted
        draft_counts.from_rounds((3, 3), (3, 1), 3),  # more tokens are missing than the last round yields
        draft_counts.from_lengths((0, 2), 2, 5, 3),  # rounds are missing
        draft_counts.from_lengths((0, 0, 2), 3, 6, 2),  # more accepted than drafted
        draft_counts.from_lengths((0, 2), 2, 1, 2),  # more tokens are missing than a round yields
        draft_counts.from_sums(3, 4, 9, 3),
        draft_counts.from_sums(3, 4, 9, None),
        draft_counts.from_sums(9, 8, 4, 3),  # more accepted than the text has
        draft_counts.from_sums(30, 29, 30, 1),  # more rounds than a text of so few tokens can have
        draft_counts.from_reached((1, 0, 0, 2), 9, 3, 2),  # three tokens of drafts that have two
        draft_counts.from_reached((1, 0, 2), 8, 4, 2),  # rounds are missing
    ],
)
def test_counts_that_contradict_themselves_are_doubted(said: draft_counts.DraftCounts) -> None:
    assert said.counts is None
    assert said.doubt
