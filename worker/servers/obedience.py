"""Does a server draft as each request asks, and are its greedy texts right beside other requests? Test texts show both.

    the test texts, drafted as the server was started           are the reference
    one of them with k = 0, 1, half and full, in one batch       may a request ask for its number of draft tokens?
    … and with look-up, where it drafts beside another drafter   may a request ask for look-up?
    all of them beside a sampled text                            has each the tokens of the reference?
    all of them beside a text of each adapter                    has each the tokens of the reference?

vLLM follows requests with alphaloop's scheduler class (docs/decisions/0053-a-scheduler-class-inside-vllm.md). Any other
vLLM takes the field and ignores it. vLLM's CPU build gives drafted greedy texts other tokens beside a sampled one
(docs/decisions/0024-look-up-in-vllm.md), and decodes texts without an adapter with the adapter that is in their batch
(docs/decisions/0054-a-vllm-of-the-workers-own.md). So a server's word is not enough. The worker tests each server that
drafts or has adapters when it starts, and again after each restart of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from alphaloop.engine import Sampling
from alphaloop.errors import ServerError, ServerSilent
from alphaloop.inside_vllm import SCHEDULER
from alphaloop.inside_vllm.drafting import KEY
from alphaloop.messages import Body, Job, Purpose
from worker.servers.client import ServerClient
from worker.servers.counters import BETWEEN_READINGS_S, NUM_READINGS, Counters, load_url
from worker.servers.draft_counts import DraftCounts
from worker.servers.load import RequestKind
from worker.servers.replies import Reply
from worker.servers.request_body import AskedDrafts

#: They repeat themselves, so that a drafter that looks texts up has something to draft.
PROMPTS: Final = (
    "one two three four one two three four one two three four one two",
    "apple pear plum apple pear plum apple pear plum apple pear plum",
    "red green blue red green blue red green blue red green",
    "a b c d e f g a b c d e f g a b c d e f g a b c",
)
_JOBS: Final = tuple(
    Job(job_id=f"self-test-{number}", task="self-test", body=Body(prompt=prompt), purpose=Purpose.CONTROL)
    for number, prompt in enumerate(PROMPTS)
)
GREEDY: Final = Sampling(max_tokens=24, temperature=0.0)
#: Longer than the greedy texts beside them; given up when they have ended.
_LONG: Final = Sampling(max_tokens=48, temperature=0.0, ignore_eos=True)
_SAMPLED: Final = replace(_LONG, temperature=1.0, seed=0)
_MOST_ADAPTERS: Final = 8  #: in one batch
#: Greedy texts that have to differ: on one alone another batch may have rounded two near logits the other way.
_NUM_SPOILED: Final = 2
_NO_LOOKUP: Final = (
    "it drafted nothing for a text that repeats itself and asked for look-up; start it with --additional-config "
    f"'{{\"{KEY}\": {{}}}}'"
)
#: What a server gets in turn where its texts are other ones beside such a request.
SAMPLED_IN_TURN: Final = "greedy and sampled requests"
ADAPTED_IN_TURN: Final = "requests with and without an adapter"
_MOST_S: Final = 120.0  #: a busy server has others to serve first


@dataclass(frozen=True, slots=True)
class Obedience:
    """What test texts showed of a server."""

    fault: str | None = None  #: why a request cannot ask for its number of draft tokens; None: it can, or was not asked
    spoiled: str | None = None  #: how greedy texts are other ones beside a sampled one; None: they are not
    adapted: str | None = None  #: how texts without an adapter are other ones beside texts with one
    asked: tuple[AskedDrafts, ...] = ()  #: for one text, in one batch
    differing: tuple[AskedDrafts, ...] = ()  #: of those, whose greedy text was not that of the request without drafts
    by_lookup: DraftCounts | None = None  #: of the text for which look-up was asked; None: no request asks for look-up
    miscounted: str | None = None  #: how the server's counters disagree with the replies to these
    num_drafted_beside: int = 0  #: draft tokens of the greedy texts beside the sampled one

    @property
    def keeps_apart(self) -> RequestKind:
        """Beside which kinds of requests test texts changed."""
        return RequestKind(is_sampled=self.spoiled is not None, is_adapted=self.adapted is not None)

    def warnings(self, name: str) -> tuple[str, ...]:
        """What a log says of an endpoint beside whose requests texts were other ones, and what follows from it."""
        return tuple(
            f"endpoint {name}: {shown}; this worker sends it {kinds} in turn, never both at once"
            for shown, kinds in ((self.spoiled, SAMPLED_IN_TURN), (self.adapted, ADAPTED_IN_TURN))
            if shown is not None
        )


async def obedience_of(client: ServerClient, *, may_switch: bool, reads_counters: bool = False) -> Obedience:
    """Test a server that drafts, or that has adapters, which `client` knows.

    `may_switch`: requests are asked for their number of draft tokens, too. `reads_counters`: what replies report is
    compared with vLLM's page of metrics. Raises what a request does.
    """
    reference = await _together(client)
    obedience = Obedience()
    if may_switch:
        why = _why_not_seen(reference[0])
        full = client.endpoint.num_draft_tokens or reference[0].drafts.longest_draft
        obedience = await _follows(client, full, reads_counters) if why is None else Obedience(why)
    beside = await _together(client, client.complete(_JOBS[0], _SAMPLED))
    adapted = None
    if adapters := sorted(client.adapters)[:_MOST_ADAPTERS]:
        jobs = [_JOBS[0].model_copy(update={"body": Body(prompt=PROMPTS[0], model=adapter)}) for adapter in adapters]
        with_adapters = await _together(client, *(client.complete(job, _LONG) for job in jobs))
        adapted = await _why_other(client, reference, with_adapters, f"a request of {' or '.join(adapters)}")
    return replace(
        obedience,
        spoiled=await _why_other(client, reference, beside, "a sampled request"),
        adapted=adapted,
        num_drafted_beside=sum(reply.drafts.num_proposed for reply in beside),
    )


async def _why_other(
    client: ServerClient, reference: Sequence[Reply], beside: Sequence[Reply], neighbour: str
) -> str | None:
    """How texts were other ones beside a neighbour, in words.

    Texts of a server that differ from one batch to the next are not the neighbour's fault.
    """
    if (num_other := _num_other(reference, beside)) < _NUM_SPOILED:
        return None
    if num_other <= _num_other(reference, await _together(client)):
        return None
    return f"{num_other} of {len(reference)} greedy texts were other ones beside {neighbour}"


async def _follows(client: ServerClient, full: int, reads_counters: bool) -> Obedience:
    """One text with no draft tokens, one, half as many as the server drafts, and as many, in one batch.

    Where look-up drafts beside another drafter, also one by look-up and as many.
    """
    asked = [AskedDrafts(k) for k in sorted({0, min(1, full), full // 2, full})]
    has_lookup = client.endpoint.lookup_drafter is not None
    asked += [AskedDrafts(k, is_lookup=True) for k in sorted({min(1, full), full}) if has_lookup]
    before = await _counters(client) if reads_counters else None
    replies = await _within(*(client.complete(_JOBS[0], GREEDY, asked=each) for each in asked))
    faults = [why_not_obeyed(reply, each.num_draft_tokens) for each, reply in zip(asked, replies, strict=True)]
    if has_lookup and not replies[-1].drafts.num_proposed:
        faults.append(_NO_LOOKUP)
    return Obedience(
        fault=next((reason for reason in faults if reason is not None), None),
        asked=tuple(asked),
        differing=tuple(each for each, reply in zip(asked, replies, strict=True) if not _is_same(reply, replies[0])),
        by_lookup=replies[-1].drafts if has_lookup else None,
        miscounted=None if before is None else await _why_not_counted(client, replies, before),
    )


def why_not_obeyed(reply: Reply, num_draft_tokens: int) -> str | None:
    """Why a text had longer drafts than its request asked for, in words.

    None where it had not, as far as the server reports.
    """
    drafts = reply.drafts
    if num_draft_tokens:
        if drafts.longest_draft <= num_draft_tokens:
            return None
        fault = f"it drafted {drafts.longest_draft} tokens in a round for a request that asked for {num_draft_tokens}"
    elif drafts.doubt is None and not drafts.num_proposed:
        return None
    else:
        fault = "it drafted for a request that asked for no drafts"
    return f"{fault}; start it with --scheduler-cls {SCHEDULER}"


async def _counters(client: ServerClient) -> Counters | None:
    """vLLM's counters, where the server shows them."""
    if client.endpoint.kind != "vllm" or (url := load_url(client.endpoint)) is None:
        return None
    try:
        return Counters.of_page((await client.page(url)).decode(errors="replace"))
    except ServerError:
        return None


async def _why_not_counted(client: ServerClient, replies: Sequence[Reply], before: Counters) -> str | None:
    """Why what the replies report of drafts is not what the server's counters rose by, in words.

    None where both agree, and where requests of others ended between the two readings.
    """
    after = await _counters(client)
    for _ in range(NUM_READINGS - 1):
        if after is None or _num_ended(before, after) >= len(replies):
            break
        await asyncio.sleep(BETWEEN_READINGS_S)
        after = await _counters(client)
    if after is None or _num_ended(before, after) != len(replies):
        return None
    proposed = sum(reply.drafts.num_proposed for reply in replies)
    accepted = sum(reply.drafts.num_accepted for reply in replies)
    counted = after.num_draft_tokens - before.num_draft_tokens, sum(after.accepts) - sum(before.accepts)
    if counted == (proposed, accepted):
        return None
    reported = f"its replies report {accepted} of {proposed} drafted tokens accepted"
    return f"{reported}, its counters {counted[1]} of {counted[0]}"


def _num_ended(before: Counters, after: Counters) -> int:
    return (after.num_requests or 0) - (before.num_requests or 0)  # vLLM counts them always


async def _together(client: ServerClient, *beside: Coroutine[Any, Any, Reply]) -> list[Reply]:
    """The greedy test texts in one batch, with these neighbours, which are given up at their end."""
    neighbours = [asyncio.create_task(request) for request in beside]
    try:
        return await _within(*(client.complete(job, GREEDY) for job in _JOBS))
    finally:
        for neighbour in neighbours:
            neighbour.cancel()
        await asyncio.gather(*neighbours, return_exceptions=True)


async def _within(*requests: Coroutine[Any, Any, Reply]) -> list[Reply]:
    tasks = [asyncio.create_task(request) for request in requests]
    try:
        async with asyncio.timeout(_MOST_S):
            return await asyncio.gather(*tasks)
    except TimeoutError:
        raise ServerSilent(f"the server did not finish short texts within {_MOST_S:g} s") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _why_not_seen(reply: Reply) -> str | None:
    if reply.drafts.granularity == "nothing":
        return (
            "it reports nothing about drafts, so whether it leaves them out cannot be seen; "
            "start it with --enable-per-request-metrics --per-request-spec-decode-metrics detailed"
        )
    if not reply.drafts.num_proposed:
        return "it drafted nothing for a text that repeats itself, so whether it would leave drafts out cannot be seen"
    return None


def _num_other(before: Sequence[Reply], after: Sequence[Reply]) -> int:
    return sum(not _is_same(*pair) for pair in zip(before, after, strict=True))


def _is_same(reply: Reply, other: Reply) -> bool:
    return (reply.text, reply.token_ids) == (other.text, other.token_ids)
