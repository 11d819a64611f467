"""Whether a server drafts for each request as it asks: so many tokens a round, or none.

vLLM does with alphaloop's look-up and its worker class (docs/decisions/0024-look-up-in-vllm.md). Any other vLLM takes
the field of the request and ignores it, so its word is not enough: a text that repeats itself shows it.
"""

from __future__ import annotations

from typing import Final

from alphaloop.messages import Body, Job, Purpose
from worker.engine import Sampling
from worker.servers.client import ServerClient
from worker.servers.reading import Reply

#: It repeats itself, so that a drafter that looks texts up has something to draft.
REPETITIVE_PROMPT: Final = "one two three four one two three four one two three four one two"
_JOB: Final = Job(
    job_id="switching-drafts", task="self-test", body=Body(prompt=REPETITIVE_PROMPT), purpose=Purpose.CONTROL
)
_SAMPLING: Final = Sampling(max_tokens=24, temperature=0.0)


async def why_not(client: ServerClient) -> str | None:
    """Why the server cannot be asked for a text without drafts, in words; None: it can. Raises what a request does."""
    drafting = await client.complete(_JOB, _SAMPLING)
    if drafting.told.granularity == "nothing":
        return (
            "it tells nothing of drafts, so nobody can see whether it leaves them out; "
            "start it with --enable-per-request-metrics --per-request-spec-decode-metrics detailed"
        )
    if not drafting.told.num_proposed:
        return "it drafted nothing of a text that repeats itself, so nobody can see whether it would leave drafts out"
    return why_not_obeyed(await client.complete(_JOB, _SAMPLING, num_draft_tokens=0), 0)


def why_not_obeyed(reply: Reply, num_draft_tokens: int) -> str | None:
    """Why a text was not decoded with at most so many draft tokens a round, which it asked for, in words.

    None where it was, as far as the server tells.
    """
    told = reply.told
    if num_draft_tokens:
        if told.longest_draft <= num_draft_tokens:
            return None
        found = f"it drafted {told.longest_draft} tokens in a round for a request that asked for {num_draft_tokens}"
    elif told.doubt is None and not told.num_proposed:
        return None
    else:
        found = "it drafted for a request that asked for no drafts"
    return f"{found}; start it with --worker-cls alphaloop.inside_vllm.worker.LookupWorker"
