"""From a server's reply to the generation that the worker records."""

from __future__ import annotations

from dataclasses import dataclass

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from worker.engine import DrafterCounts, Generation, Served, ServerLoad, SliceCounts
from worker.servers import told
from worker.servers.reading import Reply
from worker.servers.told import Told


@dataclass(frozen=True, slots=True)
class Sent:
    """When a request went where, in seconds by one clock."""

    endpoint: str
    drafter: DrafterState | None  #: what drafts there
    admitted_at: float  #: to the engine
    sent_at: float  #: to this endpoint, the last one that it was sent to
    ended_at: float
    num_beside: float  #: our mean requests in flight there meanwhile, itself included
    slice_counts: SliceCounts | None = None  #: of the slice that it ended
    load: ServerLoad | None = None  #: of the whole fleet meanwhile; None where it is no job's request
    asked_length: int | None = None  #: k that the request asked for and got; None: that of the endpoint's start

    @property
    def num_draft_tokens(self) -> int:
        """The k that it was decoded with; 0 without a drafter."""
        if self.drafter is None:
            return 0
        return self.drafter.max_draft_tokens if self.asked_length is None else self.asked_length


def generation_of(job_id: str, reply: Reply, sent: Sent) -> Generation:
    """The text with its counts and times.

    Where the counts are not known they say one thing only, how many tokens the text has: `served.is_counted` is false.
    """
    known = _known(reply, sent.drafter)
    counts = known.counts or told.of_vanilla(known.granularity, reply.num_tokens).counts or AcceptanceCounts()
    is_counted = known.counts is not None
    num_rounds = counts.rounds if is_counted else None
    if num_rounds is None and sent.slice_counts is not None:
        num_rounds = sent.slice_counts.num_passes(reply.num_tokens)
    waited_s, wall_s = sent.sent_at - sent.admitted_at, sent.ended_at - sent.admitted_at
    return Generation(
        job_id=job_id,
        text=reply.text,
        token_ids=reply.token_ids,
        finish_reason=reply.finish_reason,
        num_prompt_tokens=reply.num_prompt_tokens,
        counts=counts,
        time_to_first_token_s=min(wall_s, waited_s + _first_token_s(reply)),
        wall_s=wall_s,
        device_s=(sent.ended_at - sent.sent_at) / max(1.0, sent.num_beside),
        batch_size=max(1, round(sent.num_beside)),
        drafted=_drafted(counts, sent.drafter, sent.num_draft_tokens) if is_counted and sent.drafter else (),
        num_vanilla_rounds=1 if sent.drafter else counts.rounds,
        served=Served(
            endpoint=sent.endpoint,
            drafter=sent.drafter.name if sent.drafter else None,
            draft_revision=sent.drafter.revision if sent.drafter else "",
            num_draft_tokens=sent.num_draft_tokens,
            num_beside=sent.num_beside,
            num_rounds=num_rounds,
            prefill_s=reply.times.prefill_s,
            decode_s=reply.times.decode_s if reply.times.decode_s is not None else _decode_s(reply),
            queue_s=reply.times.queue_s,
            granularity="counters" if sent.slice_counts is not None else known.granularity,
            num_proposed=known.num_proposed,
            num_accepted=known.num_accepted,
            is_counted=is_counted,
            slice_counts=sent.slice_counts,
            load=sent.load,
        ),
    )


def _known(reply: Reply, drafter: DrafterState | None) -> Told:
    """What is believed: where nothing drafts each round has one token, unless the server says that it drafted."""
    if drafter is None:
        return told.of_vanilla("rounds", reply.num_tokens) if not reply.told.num_proposed else told.NOTHING
    return reply.told


def _drafted(counts: AcceptanceCounts, drafter: DrafterState, num_draft_tokens: int) -> tuple[DrafterCounts, ...]:
    """The drafter's rounds: all behind the one that read the prompt."""
    behind = AcceptanceCounts(
        counts.rounds - 1,
        counts.num_empty_rounds - 1,
        min(counts.num_cropped, counts.rounds - 1 + counts.num_accepted),
        counts.proposed,
        counts.trials,
        counts.accepts,
    )
    return (DrafterCounts(drafter.name, drafter.revision, num_draft_tokens, behind, ()),)


def _first_token_s(reply: Reply) -> float:
    """From the request to the first token; to the whole text where neither the server nor a stream tells more."""
    if reply.times.prefill_s is not None:
        return (reply.times.queue_s or 0.0) + reply.times.prefill_s
    return reply.wall_s if reply.first_text_s is None else reply.first_text_s


def _decode_s(reply: Reply) -> float | None:
    return None if reply.first_text_s is None else reply.wall_s - reply.first_text_s
