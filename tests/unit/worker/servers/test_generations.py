"""What the worker records of a server's reply."""

from __future__ import annotations

from dataclasses import replace

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from worker.servers.draft_counts import NOTHING, from_rounds, from_sums
from worker.servers.replies import Reply, SentRequest, ServerTimes, generation_of

NGRAM = DrafterState("ngram", "vllm-0.32.0", 4, least_draft_tokens=4)
SENT = SentRequest("speculative", NGRAM, admitted_at=10.0, sent_at=11.0, ended_at=14.0, num_beside=2.0)
REPLY = Reply(
    text="one two",
    finish_reason="length",
    num_prompt_tokens=5,
    num_tokens=9,
    token_ids=tuple(range(9)),
    drafts=from_rounds([4, 4], [3, 2], 9),
    times=ServerTimes(queue_s=0.25, prefill_s=0.5, decode_s=2.0),
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
    assert found.served is not None
    assert (found.served.num_rounds, found.served.decode_s, found.served.is_counted) == (4, 2.0, True)


def test_a_text_has_the_k_that_was_asked_for_and_obeyed() -> None:
    reply = replace(REPLY, drafts=from_rounds([2, 2, 1], [2, 1, 1], 9))
    for asked, k in ((2, 2), (None, 4)):
        found = generation_of("job", reply, replace(SENT, asked_length=asked))
        (drafted,) = found.drafted
        assert found.served is not None
        assert (drafted.num_draft_tokens, found.served.num_draft_tokens) == (k, k)
    untold = generation_of("job", replace(REPLY, drafts=NOTHING), replace(SENT, asked_length=2))
    assert untold.served is not None
    assert (untold.served.num_draft_tokens, untold.served.is_counted) == (2, False)


def test_without_counts_it_says_how_many_tokens_there_are_and_that_no_more_is_known() -> None:
    for told in (NOTHING, from_sums(8, 5, 9), from_rounds([4, 4], [4, 4], 2)):
        found = generation_of("job", replace(REPLY, drafts=told), SENT)
        assert found.counts.num_tokens == 9
        assert found.drafted == ()
        assert found.served is not None
        assert (found.served.drafter, found.served.is_counted, found.served.num_rounds) == ("ngram", False, None)


def test_where_nothing_drafts_each_round_has_a_token() -> None:
    found = generation_of("job", replace(REPLY, drafts=NOTHING), replace(SENT, drafter=None))
    assert found.counts == AcceptanceCounts(9, 9)
    assert (found.drafted, found.num_vanilla_rounds) == ((), 9)
    assert found.served is not None
    assert found.served.is_counted


def test_counts_of_a_server_that_drafts_though_it_should_not_are_not_believed() -> None:
    found = generation_of("job", REPLY, replace(SENT, drafter=None))
    assert found.served is not None
    assert not found.served.is_counted


def test_the_first_token_is_taken_to_come_with_the_text_where_nobody_tells() -> None:
    silent = replace(REPLY, times=ServerTimes())
    assert generation_of("job", silent, SENT).time_to_first_token_s == 4.0
    assert generation_of("job", replace(silent, first_text_s=0.5), SENT).time_to_first_token_s == 1.5
