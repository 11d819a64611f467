"""SGLang's own form, over real connections to a server that answers as its sources say: counts of every request."""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest

from alphaloop.engine import Sampling
from alphaloop.errors import ConfigError
from alphaloop.messages import Body, ChatMessage, Job
from tests.fixtures import server_replies
from tests.fixtures.inference_server import Answer, Asked, ask, of_version, stream, whole
from tests.fixtures.models import make_job
from tests.fixtures.server_replies import PROMPT, SGLANG_DETAILS, TEXT
from worker.servers.client import ServerClient
from worker.servers.replies import Reply

GREEDY: Final = Sampling(max_tokens=24, temperature=0.0)
NEW: Final = "0.5.19"


def asked(
    version: str,
    answer: Answer,
    texts: list[str] | None = None,
    *,
    job: Job | None = None,
    k: int | None = 4,
    varies_drafts: bool = False,
) -> tuple[Reply, Asked]:
    """The reply of such a server, and the request for it. With `texts` it is streamed into them."""
    on_piece = None if texts is None else lambda piece: texts.append(piece.text)
    complete = partial(ServerClient.complete, job=job or make_job(PROMPT), sampling=GREEDY, on_piece=on_piece)
    given = {"drafter": k and "d", "num_draft_tokens": k, "varies_drafts": varies_drafts}
    reply, server = ask(of_version(version, answer), complete, "sglang", **given)
    return reply, server.asked[-1]


def counted(reply: Reply) -> tuple[str, int, int, tuple[int, ...]]:
    told = reply.drafts
    assert told.counts is not None, told.doubt
    return told.granularity, told.num_proposed, told.num_accepted, told.counts.accepts


@pytest.mark.parametrize("version", ["0.5.18", "0.4.10.post2", "0.5.9"])
def test_a_server_that_is_too_old_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(ConfigError, match=r"expected SGLang 0\.5\.19 or newer, found 0\.\d") as caught:
        ask(of_version(version, whole(server_replies.sglang())), ServerClient.version, "sglang")
    assert "update the server" in (caught.value.hint or "")


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("version", [NEW, "0.6.0.dev3+g1234", "1.0.0", "unheard of"])
def test_a_new_server_tells_of_all_in_openais_form(version: str, is_chat: bool) -> None:
    sent = server_replies.sglang()
    if is_chat:
        sent |= {"choices": [{"index": 0, "message": {"content": TEXT}, "finish_reason": "length"}]}
    said = Body(messages=(ChatMessage(role="user", content=PROMPT),)) if is_chat else Body(prompt=PROMPT)
    job = Job(job_id="job-1", task="code", body=said)
    reply, request = asked(version, whole(sent), job=job)
    assert counted(reply) == ("lengths", 20, 20, (5, 5, 5, 5))
    assert request.path == ("/v1/chat/completions" if is_chat else "/v1/completions")
    assert request.body["return_spec_tokens_details"] is True
    events = [
        {"choices": [{"index": 0, "delta": {"content": TEXT}} if is_chat else {"index": 0, "text": TEXT}]},
        {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
        {"choices": [], "sglext": sent["sglext"]},
        {"choices": [], "usage": sent["usage"]},
    ]
    texts: list[str] = []
    reply, _ = asked(version, stream(events), texts, job=job)
    assert (counted(reply), texts) == (("lengths", 20, 20, (5, 5, 5, 5)), [TEXT])


def details(histogram: list[int], num_proposed: int, num_rounds: int) -> Answer:
    found = {
        "spec_verify_ct": num_rounds,
        "spec_num_proposed_drafts": num_proposed,
        "spec_num_correct_drafts": sum(length * rounds for length, rounds in enumerate(histogram)),
        "spec_correct_drafts_histogram": histogram,
    }
    return whole({**server_replies.sglang(), "sglext": {"spec_tokens_details": SGLANG_DETAILS | found}})


def test_a_list_that_ends_at_the_longest_accepted_is_a_list_of_k() -> None:
    """Texts none of whose drafts was accepted whole count like others: α would be too high without them."""
    reply, _ = asked(NEW, details([16, 2, 1], 76, 19))
    assert counted(reply) == ("lengths", 76, 4, (3, 1, 0, 0))
    assert reply.drafts.counts.trials == (19, 3, 1, 0)


@pytest.mark.parametrize("k", [3, None])
def test_a_tree_counts_by_level_where_its_depth_is_known(k: int | None) -> None:
    reply, _ = asked(NEW, details([16, 2, 1], 19 * 7, 19), k=k)  # three levels, eight tokens with the root
    depth = 7 if k is None else 3
    assert counted(reply) == ("lengths", 19 * depth, 4, (3, 1, *(0,) * (depth - 2)))


@pytest.mark.parametrize(
    ("histogram", "num_proposed", "k"), [([0, 0, 0, 0, 5], 20, 3), ([16, 2, 1], 76, 5), ([16, 2, 1], 75, 4)]
)
def test_drafts_of_another_length_than_was_said_are_doubted(histogram: list[int], num_proposed: int, k: int) -> None:
    reply, _ = asked(NEW, details(histogram, num_proposed, sum(histogram)), k=k)
    assert reply.drafts.counts is None
    assert reply.drafts.doubt is not None
    assert f"drafts are not of {k} tokens" in reply.drafts.doubt


#: SGLang 0.5.23 with --speculative-adaptive, started with `--speculative-num-steps 3`, candidates to 7. Its
#: `spec_num_proposed_drafts` is rounds times three whatever they drafted (managers/tokenizer_manager.py), and its list
#: grows to the longest (managers/schedule_batch.py, `update_spec_correct_drafts_histogram`).
ADAPTIVE: Final = details([2, 0, 0, 1, 0, 1], 4 * 3, 4)


def test_drafts_of_a_server_that_changes_k_count_by_the_positions_that_rounds_reached() -> None:
    reply, _ = asked("0.5.23", ADAPTIVE, k=7, varies_drafts=True)
    assert counted(reply) == ("reached", 28, 8, (2, 2, 2, 1, 1, 0, 0))
    assert reply.drafts.counts.trials == (4, 2, 2, 2, 1, 1, 0)
    assert reply.drafts.counts.rounds == 16, "24 tokens, 8 of them accepted"
    reply, _ = asked("0.5.23", ADAPTIVE, k=4, varies_drafts=True)
    assert "where drafts have at most 4" in (reply.drafts.doubt or "")


@pytest.mark.parametrize(("is_adaptive", "varies_drafts"), [(True, False), (False, True)])
def test_a_server_that_changes_k_and_settings_that_say_otherwise_are_refused(
    is_adaptive: bool, varies_drafts: bool
) -> None:
    """Its replies do not show it, and counts read as those of one k would be wrong."""
    answer = whole({"version": "0.5.23", "speculative_adaptive": is_adaptive})
    ask_version = partial(
        ask, answer, ServerClient.version, "sglang", drafter="eagle", num_draft_tokens=7, closes=False
    )
    with pytest.raises(ConfigError, match=f"varies_drafts: expected {str(is_adaptive).lower()}") as caught:
        ask_version(varies_drafts=varies_drafts)
    assert "num_draft_tokens" in (caught.value.hint or "")
    assert ask_version(varies_drafts=is_adaptive)[0] == "0.5.23"


def test_a_server_that_tells_of_no_round_tells_nothing() -> None:
    """It cannot be told from one that does not count: nothing says then that nothing was accepted."""
    assert asked(NEW, whole(server_replies.openai()))[0].drafts.granularity == "nothing"
