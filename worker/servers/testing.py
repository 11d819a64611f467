"""Requests of our own, which show how a server is.

`Tests`: is it well, and still the same server? It must decode a text that every server can decode.
One that was away and drafts is asked again whether it obeys (`worker/servers/obedience.py`).
`Timing`: how long do its rounds and prompts take? These requests share the server with whatever runs there, so a
measurement of a busy server says what it takes beside that.
`check_server`: what does it report to alphaloop? It requests short texts, and puts the answers into words.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from alphaloop import page
from alphaloop.commands import ServerCheck
from alphaloop.engine import AnswerPiece, CheckFinding, Generation, Sampling, Verdict
from alphaloop.errors import AlphaloopError, DecodeFailed, ServerError, ServerFailed, ServerSilent, reason_of
from alphaloop.messages import Body, Job, Purpose
from alphaloop.messages.capabilities import Feature, served_by
from alphaloop.server_identity import ServerIdentity, ServerKind, change_between, differs
from alphaloop.settings.endpoints import EndpointSettings
from worker.servers.client import ServerClient
from worker.servers.counters import NOTHING_SENT, ask_counters, ask_present
from worker.servers.draft_counts import DraftCounts
from worker.servers.features import ask_lacking
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.identity import adapters_of, ask_identity, card_of
from worker.servers.obedience import ADAPTED_IN_TURN, GREEDY, PROMPTS, SAMPLED_IN_TURN, Obedience, obedience_of
from worker.servers.replies import Reply, SentRequest, generation_of
from worker.servers.request_body import AskedDrafts

log = logging.getLogger(__name__)

_JOB: Final = Job(job_id="self-test", task="self-test", body=Body(prompt=PROMPTS[0]), purpose=Purpose.CONTROL)
_NUM_TOKENS: Final = 24  #: of a text that is timed
_WORDS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "the", "and")
_TIMING_S: Final = 300.0  #: for the requests of one measurement
#: Enough rounds that a drafter drafts too.
_SHORT: Final = Sampling(max_tokens=8, temperature=0.0)
_MOST_S: Final = 60.0  #: a busy server has others to serve first
#: How a server is made to report more.
_HINTS: Final[dict[ServerKind, str]] = {
    "vllm": "if it speculates, start it with --enable-per-request-metrics --per-request-spec-decode-metrics detailed",
    "sglang": "it does not speculate, or a proxy takes the counts out",
    "llama_cpp": "no timings came: is the server a llama.cpp?",
    "tensorrt_llm": "start it with `per_request_spec_decode_stats: true` in its --extra_llm_api_options",
    "openai": "a server of a known kind reports more: name its kind",
}
#: How one that reports sums is made to report positions.
_POSITION_HINTS: Final[dict[ServerKind, str]] = {
    "vllm": _HINTS["vllm"],
    "llama_cpp": "started with --metrics, a build of late 2026 counts them: name that page as metrics_url",
}
#: How a server is made to report how many requests it has.
_LOAD_HINTS: Final[dict[ServerKind, str]] = {
    "vllm": "start it without --disable-log-stats, and let its /metrics through",
    "sglang": "versions of 2025 have no /v1/loads",
    "llama_cpp": "start it with --metrics",
    "tensorrt_llm": "alphaloop knows no page for it",
    "openai": "name its kind, if it is a known one",
}


#: What is shown of the features of a server, each by the one that stands for it.
_SHOWN: Final[Mapping[str, Feature]] = {
    "tools": Feature.TOOLS,
    "json": Feature.JSON_SCHEMA,
    "regex": Feature.REGEX,
    "choice": Feature.CHOICE,
    "prompts": Feature.PROMPT_CONSTRAINT,
    "logprobs": Feature.LOGPROBS,
    "n": Feature.N,
    "images": Feature.IMAGES,
}
_FEATURE_HINTS: Final[Mapping[tuple[ServerKind, str], str]] = {
    ("vllm", "tools"): "; start it with --enable-auto-tool-choice --tool-call-parser, of its model",
    ("sglang", "tools"): "; start it with --tool-call-parser, of its model",
    ("llama_cpp", "tools"): "; start it with --jinja and --chat-template-file, of a template that has tools",
    ("vllm", "prompts"): "; with --reasoning-parser, constraints are followed in conversations only",
    ("vllm", "logprobs"): "; start it with --max-logprobs 20",
    ("llama_cpp", "n"): "; start it with --parallel, as many slots as texts",
}


@dataclass(eq=False)
class Tests:
    """The tests that run, one of each endpoint at most. One event loop's thread uses it."""

    clients: Mapping[str, ServerClient]
    fleet: Fleet
    known: dict[str, ServerIdentity]  #: by endpoint, what each was when the worker began, or since when it first was

    def __post_init__(self) -> None:
        self._running: dict[str, asyncio.Task[AlphaloopError | None]] = {}
        self._to_identify: set[str] = set()  #: endpoints that are asked who they are although they were never away
        self._ended = asyncio.Event()

    def begin(self, name: str) -> asyncio.Task[AlphaloopError | None]:
        """The test of an endpoint that runs, or a new one."""
        if name not in self._running:
            self._running[name] = asyncio.create_task(self._test(name))
        return self._running[name]

    def identify(self, name: str) -> None:
        """Let the endpoint be asked who it is, in the next test that it passes."""
        self._to_identify.add(name)
        self.fleet.members[name].circuit.ask_for_test()

    async def of(self, name: str) -> AlphaloopError | None:
        """What the test found; None: the server is well. Cancelling the caller leaves the test to others."""
        return await asyncio.shield(self.begin(name))

    async def end(self) -> None:
        """Cancel those that run, and wait for their end."""
        running = tuple(self._running.values())
        for test in running:
            test.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def next_end(self) -> None:
        """Return when a test has ended."""
        await self._ended.wait()

    async def _test(self, name: str) -> AlphaloopError | None:
        circuit = self.fleet.members[name].circuit
        was_down = circuit.state == "down"
        try:
            await _is_well(self.clients[name])
            # A request may have found it gone meanwhile, and another server may have answered.
            was_down = was_down or circuit.state == "down"
            change = await self._changed(name) if was_down or name in self._to_identify else None
            self._to_identify.discard(name)
            server = self.fleet.servers[name]
            if was_down and (server.drafter is not None or server.adapters):
                await self._look_again(name)
        except AlphaloopError as error:
            self.fleet.tested(name, error)
            return error
        except Exception as error:
            # Without a verdict the endpoint would count as being tested for ever.
            log.error("a test of endpoint %s failed", name, exc_info=error, extra=_extra(name, "test_raised"))
            failure = ServerFailed(f"testing the server failed: {reason_of(error)}")
            self.fleet.tested(name, failure)
            return failure
        else:
            self.fleet.tested(name, None)
            if change is not None:
                hint = "start the worker again to take the new server in"
                what = "came back as another server" if was_down else "is another server by now"
                log.error("endpoint %s %s: %s; %s", name, what, change, hint, extra=_extra(name))
                circuit.retire(f"it {what}: {change}")
            return None
        finally:
            del self._running[name]
            self._ended.set()
            self._ended = asyncio.Event()

    async def _look_again(self, name: str) -> None:
        """See whether it still drafts as requests ask, and what neighbours do to texts: both are of its start."""
        may_switch = self.fleet.servers[name].endpoint.switches_drafts
        obedience = await obedience_of(self.clients[name], may_switch=may_switch)
        self.fleet.switches(name, obedience.fault is None)
        self.fleet.members[name].keeps_apart = obedience.keeps_apart
        if obedience.fault is not None:
            log.error("endpoint %s: %s", name, obedience.fault, extra=_extra(name, "drafts_not_switched"))
        for warning in obedience.warnings(name):
            log.error("%s", warning, extra=_extra(name, "greedy_texts_spoiled"))

    async def _changed(self, name: str) -> str | None:
        """What is other than before the server went away, in words.

        A server that was away at the worker's start must have the weights of the others, because a task may be sent to
        either.
        """
        identity = await ask_identity(self.fleet.servers[name].endpoint)
        if (before := self.known.get(name)) is not None:
            return differs(before, identity)
        first = next(iter(self.known.values()), identity)
        self.known[name] = identity
        change = change_between(first, identity)
        return change.sentence if change is not None and change.is_of_weights else None


def _extra(name: str, action: str = "server_changed") -> dict[str, str]:
    return {"action": action, "endpoint": name}


async def _is_well(client: ServerClient) -> None:
    """Return when the server has decoded the text. Raises ServerError."""
    try:
        async with asyncio.timeout(_MOST_S):
            await client.complete(_JOB, _SHORT)
    except TimeoutError:
        raise ServerSilent(f"the server did not finish a short text within {_MOST_S:g} s") from None


_WORDS_DRAWN: Final = random.Random(0)


def timing_job(number: int, num_tokens: int) -> Job:
    """A prompt that no cache of prefixes has: its words are drawn, about one token each."""
    words = " ".join(_WORDS_DRAWN.choices(_WORDS, k=max(1, num_tokens)))
    return Job(job_id=f"measuring-{number}", task="measuring", body=Body(prompt=words), purpose=Purpose.CONTROL)


class Timing:
    """Asks the first endpoint of each route. One event loop uses it."""

    def __init__(self, servers: Sequence[InferenceServer], clients: Mapping[str, ServerClient]) -> None:
        self._clients = clients
        self._by_drafter: dict[str | None, InferenceServer] = {}
        for server in servers:
            self._by_drafter.setdefault(server.drafter_name, server)
        for server in servers:  # rather one that never drafts
            for route in server.routes:
                self._by_drafter.setdefault(route, server)

    async def round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """Median milliseconds of a round of `batch` requests with `context` tokens before. Raises DecodeFailed.

        Where the server follows requests in that, with `width` - 1 draft tokens.
        """
        rounds_ms = []
        for _ in range(num_samples):
            for generation in await self._together(
                drafter, batch, max(1, context - _NUM_TOKENS // 2), _NUM_TOKENS, width - 1
            ):
                served = generation.served
                num_passes = served.num_passes(generation.counts.num_tokens) if served else None
                if served and served.decode_s is not None and num_passes is not None and num_passes > 1:
                    rounds_ms.append(1000 * served.decode_s / (num_passes - 1))
        if not rounds_ms:
            raise DecodeFailed(
                f"the server reports neither times nor rounds of its texts: {self._server(drafter).name}",
                hint=f"{page('guides/engines.md')} says what each kind of server has to be started with",
            )
        return statistics.median(rounds_ms)

    async def prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """Median milliseconds to the first token of a prompt of about `num_tokens`. Raises DecodeFailed."""
        prefills_ms = [
            1000 * (generation.served.prefill_s or generation.time_to_first_token_s)
            for _ in range(num_samples)
            for generation in await self._together(drafter, 1, num_tokens, 1)
            if generation.served
        ]
        return statistics.median(prefills_ms)

    async def _together(
        self, drafter: str | None, batch: int, num_prompt_tokens: int, num_tokens: int, k: int | None = None
    ) -> list[Generation]:
        server = self._server(drafter)
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0)
        jobs = [timing_job(number, num_prompt_tokens) for number in range(batch)]
        asked = server.asked(drafter, k)
        try:
            async with asyncio.timeout(_TIMING_S):
                return await asyncio.gather(*(self._ask(server, job, sampling, asked, batch) for job in jobs))
        except TimeoutError:
            raise DecodeFailed(f"{server.name}: {batch} texts took more than {_TIMING_S:g} s") from None
        except AlphaloopError as error:
            raise DecodeFailed(f"measuring {server.name} failed: {error.message}", hint=error.hint) from error

    async def _ask(
        self, server: InferenceServer, job: Job, sampling: Sampling, asked: AskedDrafts | None, batch: int
    ) -> Generation:
        client = self._clients[server.name]
        clock = asyncio.get_running_loop().time
        began = clock()
        on_piece = (lambda piece: None) if client.must_stream else None
        reply = await client.complete(job, sampling, on_piece=on_piece, asked=asked)
        k = None if asked is None else asked.num_draft_tokens
        sent = SentRequest(server.name, server.drafting(asked), began, began, clock(), float(batch), requested_k=k)
        return generation_of(job.job_id, reply, sent)

    def _server(self, drafter: str | None) -> InferenceServer:
        if drafter not in self._by_drafter:
            raise DecodeFailed(f"no endpoint {'drafts' if drafter is None else 'has'} {drafter or 'nothing'}")
        return self._by_drafter[drafter]


_Finding: TypeAlias = tuple[Verdict, str]


async def check_server(endpoint: EndpointSettings) -> ServerCheck:
    """Ask the endpoint; where it names no model, the server's only one. Raises ConfigError and ServerError."""
    pieces: list[AnswerPiece] = []
    async with ServerClient(endpoint) as client:
        cards = await client.models()
        card = card_of(cards, endpoint.model)
        client.model, client.context_length = card.id, card.context_length
        client.adapters = frozenset(adapters := adapters_of(card, cards))
        version = await client.version()
        whole = await client.complete(_JOB, GREEDY)
        streamed = await client.complete(_JOB, GREEDY, on_piece=pieces.append)
        ending = _ending(whole)
        stopped = await client.complete(_JOB, replace(GREEDY, stop=(ending,))) if ending else None
        load = await _load(client)
        may_switch = endpoint.switches_drafts or (endpoint.kind == "vllm" and whole.drafts.num_proposed > 0)
        drafts = endpoint.drafter is not None or whole.drafts.num_proposed > 0
        is_tested = drafts or adapters
        obedience = await obedience_of(client, may_switch=may_switch, reads_counters=True) if is_tested else None
        counters = await _counters(client) if endpoint.counted == "counters" else None
        lacking = await ask_lacking(client)
    first = "" if streamed.first_text_s is None else f", the first after {streamed.first_text_s:.2f} s"
    findings: dict[str, _Finding] = {
        "server": ("ok", f"{endpoint.kind} {version}")
        if version is not None
        else ("warning", f"{endpoint.kind}; it does not say its version, so a change of it goes unseen"),
        "model": ("ok", f"{card.id}, {card.context_length} tokens of context")
        if card.context_length is not None
        else ("warning", f"{card.id}; the server does not say how long its context is"),
        "text": ("ok", f"{streamed.num_tokens} tokens in {streamed.wall_s:.2f} s{first}"),
        "stream": _stream(whole, streamed, len(pieces)),
        "counts": _counts(endpoint.kind, whole.drafts),
        "load": load,
    }
    if obedience is not None:
        findings |= _obedience(obedience, is_asked=may_switch, is_set=endpoint.switches_drafts)
    if counters is not None:
        findings["counters"] = counters
    if stopped is not None:
        findings["stop"] = _stop(whole, stopped, ending)
    findings |= _features(endpoint, lacking)
    if adapters and obedience is not None:
        findings["adapters"] = _adapters(adapters, obedience)
    rows = tuple(CheckFinding(name, *finding) for name, finding in findings.items())
    return ServerCheck(endpoint.url, endpoint.kind, card.id, whole.drafts.granularity, rows)


def _stream(whole: Reply, streamed: Reply, num_pieces: int) -> _Finding:
    if streamed.text != whole.text:
        return "warning", "the same greedy request gave another text: this server's texts differ"
    if streamed.drafts.granularity != whole.drafts.granularity:
        return "warning", "the server reports less about the drafts of a streamed text than of a whole one"
    return "ok", f"the same text in {num_pieces} pieces"


def _counts(kind: ServerKind, drafts: DraftCounts) -> _Finding:
    if drafts.doubt is not None:
        return "warning", f"not to be believed: {drafts.doubt}"
    if drafts.granularity == "nothing":
        return "warning", f"the server reports nothing about drafts; {_HINTS[kind]}"
    if not drafts.num_proposed:
        return "ok", "nothing was drafted: the server does not speculate, or found nothing to draft"
    if drafts.granularity == "reached":
        return "ok", f"{drafts.num_accepted} drafted tokens accepted, by position; how many were drafted is not known"
    accepted = f"{drafts.num_accepted} of {drafts.num_proposed} drafted tokens accepted"
    if drafts.counts is None or drafts.granularity == "sums":
        hint = _POSITION_HINTS.get(kind)
        return "warning", f"{accepted}, positions not reported{f'; {hint}' if hint else ''}"
    return "ok", f"{accepted}, positions reported"


async def _load(client: ServerClient) -> _Finding:
    """Whether it reports its load: a reserve needs it, and speed-ups while other workers ask the server too."""
    why = ""
    endpoint = client.endpoint
    try:
        if (present := await ask_present(client)) is not None:
            wait = f", {present.num_waiting} of them wait" if present.num_waiting else ""
            kept = f"; {endpoint.num_kept} of {endpoint.max_requests} places stay free for others"
            return "ok", f"it has {present.num} requests now{wait}{kept if endpoint.reserve else ''}"
    except ServerError as error:
        why = f": {error.message}"
    effect = NOTHING_SENT if endpoint.reserve else ""
    return "warning", f"it does not report how many requests it has{why}{effect}; {_LOAD_HINTS[endpoint.kind]}"


async def _counters(client: ServerClient) -> _Finding:
    try:
        counters = await ask_counters(client)
    except ServerError as error:
        return "warning", f"not read: {error.message}"
    return "ok", f"{sum(counters.accepts)} of {counters.num_draft_tokens} drafted tokens accepted since its start"


def _obedience(obedience: Obedience, *, is_asked: bool, is_set: bool) -> dict[str, _Finding]:
    """Whether requests have the drafts they ask for, and greedy texts stay right beside a sampled one."""
    findings: dict[str, _Finding] = {}
    if is_asked:
        findings["switch"] = _switching(obedience, is_set=is_set)
    if (by_lookup := obedience.by_lookup) is not None and by_lookup.num_proposed:
        accepted = f"{by_lookup.num_accepted} of {by_lookup.num_proposed} drafted tokens accepted"
        findings["look-up"] = ("ok", f"{accepted} of a request that asked for look-up")
    if obedience.spoiled is not None:
        findings["neighbour"] = ("warning", f"{obedience.spoiled}; {_in_turn(SAMPLED_IN_TURN)}")
    elif obedience.num_drafted_beside:
        findings["neighbour"] = ("ok", "greedy texts are the same beside a sampled request")
    else:
        findings["neighbour"] = ("ok", "greedy texts are the same beside a sampled request, where nothing is drafted")
    return findings


def _adapters(names: Sequence[str], obedience: Obedience) -> _Finding:
    named = f"jobs may name {', '.join(names)} as their model"
    if obedience.adapted is None:
        return "ok", named
    return "warning", f"{named}, but {obedience.adapted}; {_in_turn(ADAPTED_IN_TURN)}"


def _in_turn(kinds: str) -> str:
    return f"a worker sends {kinds} in turn, other clients may not"


def _switching(obedience: Obedience, *, is_set: bool) -> _Finding:
    """Whether a request can ask for its number of draft tokens. Most servers do not follow it, which is no fault."""
    if obedience.fault is not None:
        no_switch: _Finding = ("ok", "every request is drafted for")
        return ("warning", f"switches_drafts is set, but {obedience.fault}") if is_set else no_switch
    asked = f"requests for {', '.join(map(str, obedience.asked))} draft tokens in one batch"
    if obedience.differing:
        which = ", ".join(map(str, obedience.differing))
        return "warning", f"{asked} got no more, but with {which} the greedy text is another than with 0"
    if obedience.miscounted is not None:
        return "warning", f"{asked} got no more, but {obedience.miscounted}"
    hint = "" if is_set else "; one endpoint with switches_drafts = true serves both routes"
    return "ok", f"{asked} got no more, and the same text{hint}"


def _features(endpoint: EndpointSettings, lacking: Mapping[Feature, str]) -> dict[str, _Finding]:
    """What a job may ask for there; where its kind serves it and it does not, how it is started so that it does."""
    of_kind = served_by(endpoint.kind, drafts=endpoint.drafter is not None).features
    findings: dict[str, _Finding] = {}
    for name, feature in _SHOWN.items():
        if feature not in of_kind:
            findings[name] = ("ok", f"{endpoint.kind} has no form of it")
        elif (why := lacking.get(feature)) is not None:
            hint = _FEATURE_HINTS.get((endpoint.kind, name), "")
            findings[name] = ("warning" if hint else "ok", f"not served: {why}{hint}")
        else:
            findings[name] = ("ok", "served")
    return findings


def _ending(reply: Reply) -> str:
    """A word inside the text that can end it; empty where there is none."""
    words = reply.text.split()
    return words[len(words) // 2] if len(words) > 2 else ""


def _stop(whole: Reply, stopped: Reply, ending: str) -> _Finding:
    if stopped.finish_reason != "stop" or stopped.text != whole.text[: whole.text.index(ending)]:
        return "warning", "a stop string does not end the text where it stands"
    if stopped.drafts.granularity != whole.drafts.granularity:
        return "warning", "the server reports nothing about the drafts of a text that a stop string ended"
    return "ok", "a stop string ends the text"
