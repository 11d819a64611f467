"""What a server can tell alphaloop: three short texts are asked for, and what came is put into words."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from alphaloop.commands import CheckFinding, ServerCheck
from alphaloop.errors import ServerError
from alphaloop.messages import Body, Job, Purpose
from alphaloop.server_kind import ServerKind
from worker.engine import Sampling
from worker.servers.client import ServerClient
from worker.servers.endpoint import Endpoint
from worker.servers.forms import ModelCard
from worker.servers.model_card import card_of
from worker.servers.reading import Reply
from worker.servers.switching import REPETITIVE_PROMPT, why_not

_NAME: Final = "check-server"
_JOB: Final = Job(job_id=_NAME, task=_NAME, body=Body(prompt=REPETITIVE_PROMPT), purpose=Purpose.CONTROL)
_GREEDY: Final = Sampling(max_tokens=24, temperature=0.0)
#: How a server is made to tell more.
_HINTS: Final[dict[ServerKind, str]] = {
    "vllm": "if it speculates, start it with --enable-per-request-metrics --per-request-spec-decode-metrics detailed",
    "sglang": "it does not speculate, or it is too old to count",
    "llama_cpp": "no timings came: is the server a llama.cpp?",
    "tensorrt_llm": "start it with `per_request_spec_decode_stats: true` in its --extra_llm_api_options",
    "openai": "a server of a known kind tells more: name its kind",
}
#: How a server is made to tell how many requests it has.
_LOAD_HINTS: Final[dict[ServerKind, str]] = {
    "vllm": "start it without --disable-log-stats, and let its /metrics through",
    "sglang": "versions of 2025 have no /v1/loads",
    "llama_cpp": "start it with --metrics",
    "tensorrt_llm": "alphaloop knows no page for it",
    "openai": "name its kind, if it is a known one",
}


async def check_server(endpoint: Endpoint) -> ServerCheck:
    """Ask the endpoint; where it names no model, the server's only one. Raises ConfigError and ServerError."""
    async with ServerClient(endpoint) as client:
        card = card_of(await client.models(), endpoint.model)
        version = await client.version()
    asked = replace(endpoint, model=card.id)
    pieces: list[str] = []
    async with ServerClient(asked, context_length=card.context_length) as client:
        whole = await client.complete(_JOB, _GREEDY)
        streamed = await client.complete(_JOB, _GREEDY, on_text=pieces.append)
        ending = _ending(whole)
        stopped = await client.complete(_JOB, replace(_GREEDY, stop=(ending,))) if ending else None
        may_switch = endpoint.switches_drafts or (endpoint.kind == "vllm" and whole.told.num_proposed > 0)
        load = await _load(client)
        switching = [_switching(await why_not(client), is_set=endpoint.switches_drafts)] if may_switch else []
    findings = [
        _server(endpoint.kind, version),
        _model(card),
        _text(streamed),
        _stream(whole, streamed, len(pieces)),
        _counts(endpoint.kind, whole),
        load,
        *switching,
    ]
    if endpoint.metrics_url is not None:
        findings.append(await _counters(asked))
    if stopped is not None:
        findings.append(_stop(whole, stopped, ending))
    return ServerCheck(endpoint.url, endpoint.kind, card.id, whole.told.granularity, tuple(findings))


def _server(kind: ServerKind, version: str | None) -> CheckFinding:
    if version is None:
        return CheckFinding("server", "warning", f"{kind}; it does not say its version, so a change of it goes unseen")
    return CheckFinding("server", "ok", f"{kind} {version}")


def _model(card: ModelCard) -> CheckFinding:
    if card.context_length is None:
        return CheckFinding("model", "warning", f"{card.id}; the server does not say how long its context is")
    return CheckFinding("model", "ok", f"{card.id}, {card.context_length} tokens of context")


def _text(reply: Reply) -> CheckFinding:
    first = "" if reply.first_text_s is None else f", the first after {reply.first_text_s:.2f} s"
    return CheckFinding("text", "ok", f"{reply.num_tokens} tokens in {reply.wall_s:.2f} s{first}")


def _stream(whole: Reply, streamed: Reply, num_pieces: int) -> CheckFinding:
    if streamed.text != whole.text:
        return CheckFinding(
            "stream", "warning", "the same greedy request gave another text: this server's texts differ"
        )
    if streamed.told.granularity != whole.told.granularity:
        return CheckFinding(
            "stream", "warning", "of a streamed text the server tells less of drafts than of a whole one"
        )
    return CheckFinding("stream", "ok", f"the same text in {num_pieces} pieces")


def _counts(kind: ServerKind, reply: Reply) -> CheckFinding:
    told = reply.told
    if told.doubt is not None:
        return CheckFinding("counts", "warning", f"not to be believed: {told.doubt}")
    if told.granularity == "nothing":
        return CheckFinding("counts", "warning", f"the server tells nothing of drafts; {_HINTS[kind]}")
    if not told.num_proposed:
        return CheckFinding(
            "counts", "ok", "nothing was drafted: the server does not speculate, or found nothing to draft"
        )
    found = f"{told.num_accepted} of {told.num_proposed} drafted tokens accepted"
    if told.counts is None:
        hint = f"; {_HINTS[kind]}" if kind == "vllm" else ""
        return CheckFinding("counts", "warning", f"{found}, and at which positions is not told{hint}")
    return CheckFinding("counts", "ok", f"{found}, at which positions is told")


async def _load(client: ServerClient) -> CheckFinding:
    """Whether it tells how many requests it has: while other workers ask it too, speed-ups are measured only then."""
    hint = _LOAD_HINTS[client.endpoint.kind]
    try:
        num_present = await client.num_present()
    except ServerError as error:
        return CheckFinding("load", "warning", f"how many requests it has is not told: {error.message}; {hint}")
    if num_present is None:
        return CheckFinding("load", "warning", f"how many requests it has is not told; {hint}")
    return CheckFinding("load", "ok", f"it has {num_present} requests now")


async def _counters(endpoint: Endpoint) -> CheckFinding:
    try:
        async with ServerClient(endpoint) as client:
            found = await client.counters()
    except ServerError as error:
        return CheckFinding("counters", "warning", f"not read: {error.message}")
    return CheckFinding(
        "counters", "ok", f"{sum(found.accepts)} of {found.num_draft_tokens} drafted tokens accepted since its start"
    )


def _switching(told: str | None, *, is_set: bool) -> CheckFinding:
    """Whether a request can ask for no drafts; `told`: why not. Most servers cannot, which is no fault of theirs."""
    if told is not None:
        words = f"switches_drafts is set, but {told}" if is_set else "every request is drafted for"
        return CheckFinding("switch", "warning" if is_set else "ok", words)
    hint = "" if is_set else ": one endpoint with switches_drafts = true serves both routes"
    return CheckFinding("switch", "ok", f"a request that asks for no drafts gets none{hint}")


def _ending(reply: Reply) -> str:
    """A word inside the text that can end it; empty where there is none."""
    words = reply.text.split()
    return words[len(words) // 2] if len(words) > 2 else ""


def _stop(whole: Reply, stopped: Reply, ending: str) -> CheckFinding:
    if stopped.finish_reason != "stop" or stopped.text != whole.text[: whole.text.index(ending)]:
        return CheckFinding("stop", "warning", "a stop string does not end the text where it stands")
    if stopped.told.granularity != whole.told.granularity:
        return CheckFinding("stop", "warning", "of a text that a stop string ended, the server tells nothing of drafts")
    return CheckFinding("stop", "ok", "a stop string ends the text")
