"""Evidence from a server's own counters, where it reports no drafts of single requests: vLLM's and llama.cpp's.

    a request begins and ends → a slice ends → the page of metrics is read → SliceCounts, or nothing

A slice of one server's time begins with the first request to an idle server and ends when the server is idle again.
What its counters moved by is evidence of one evidence key of ours if all requests meanwhile had that key, ended well
and were alone there. Between two slices nothing of ours runs, so the reading at the end of one is the beginning of the
next.

`LoadWatch` asks each server twice a second how many requests it has, so that those of other clients are known. It asks
while jobs of this worker are at a server or were a moment ago, or wait for one with a reserve, and only where that
matters: where there are two routes, so that something is on trial, and where the endpoint has a reserve. SGLang is
asked at `/v1/loads`, which needs no option: its gauges for Prometheus are renewed only every 40 rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from alphaloop.acceptance import AcceptanceCounts, InconsistentCounts, prompt_bucket
from alphaloop.engine import PreparedJob, SliceCounts
from alphaloop.errors import AlphaloopError, ReplyInvalid, ServerUnavailable, ServerUnreachable
from alphaloop.server_identity import ServerKind
from alphaloop.settings.endpoints import EndpointSettings
from worker.servers.client import ServerClient
from worker.servers.draft_counts import proposed_by_position
from worker.servers.fleet import Fleet
from worker.servers.forms import Count, Form, read_form
from worker.servers.load import Present
from worker.servers.replies import Reply

log = logging.getLogger(__name__)

#: A server may answer a moment before it counts.
NUM_READINGS: Final = 6
BETWEEN_READINGS_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Names:
    """What a kind of server calls its counters."""

    drafts: str
    draft_tokens: str
    accepted_at: str  #: by the label `position`
    tokens: str  #: of texts, those of requests that were given up among them
    present: tuple[str, str]  #: requests that run and that wait
    requests: str | None = None  #: that ended, with every reason, `abort` too; None where it does not count them


_VLLM: Final = _Names(
    drafts="vllm:spec_decode_num_drafts_total",
    draft_tokens="vllm:spec_decode_num_draft_tokens_total",
    accepted_at="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    tokens="vllm:generation_tokens_total",
    present=("vllm:num_requests_running", "vllm:num_requests_waiting"),
    requests="vllm:request_success_total",
)
#: As of build 11549, which counts no requests: those of other clients are known by their tokens.
_LLAMA: Final = _Names(
    drafts="llamacpp:spec_decode_num_drafts_total",
    draft_tokens="llamacpp:spec_decode_num_draft_tokens_total",
    accepted_at="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
    tokens="llamacpp:tokens_predicted_total",
    present=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
)
_NAMES_OF: Final[Mapping[ServerKind, _Names]] = {"llama_cpp": _LLAMA}


class Counting:
    """The slices of all endpoints that have an address of metrics; does nothing for others. One loop uses it."""

    def __init__(self, clients: Mapping[str, ServerClient]) -> None:
        self._clients = clients
        self._slices = {
            name: CounterSlices(k)
            for name, client in clients.items()
            if client.endpoint.metrics_url is not None and (k := client.endpoint.num_draft_tokens) is not None
        }
        self._failing: set[str] = set()
        self._readings: set[asyncio.Task[SliceCounts | None]] = set()

    def counts(self, name: str) -> bool:
        """Whether that endpoint is counted by its counters."""
        return name in self._slices

    def began(self, name: str, prepared: PreparedJob) -> None:
        """The job is sent there now."""
        if (slices := self._slices.get(name)) is not None:
            job, sampling = prepared.job, prepared.sampling
            kind = sampling.bucket, sampling.form_bucket, job.body.model or ""
            slices.began((job.task, prepared.segment, *kind, job.purpose.value))

    def ended(self, name: str, reply: Reply | None) -> SliceEnd | None:
        """Its request ended, without a reply if it failed or was given up; what is to be read, if that left it idle.

        The result of such a request waits for the reading, because the next request would come into it. Where there is
        no result, or where readings fail, the counters are read beside.
        """
        if (slices := self._slices.get(name)) is None:
            return None
        num_tokens = reply.num_tokens if reply else 0
        num_texts = reply.num_texts if reply else 1
        due = slices.ended(reply.num_prompt_tokens if reply else 0, num_tokens, num_texts)
        if due is None or (num_tokens and name not in self._failing):
            return due
        reading = asyncio.create_task(self.read(name, due))
        self._readings.add(reading)
        reading.add_done_callback(self._readings.discard)
        return None

    async def read(self, name: str, due: SliceEnd) -> SliceCounts | None:
        """What the slice says; None where it says nothing."""
        slices = self._slices[name]
        counters = await self._counters(name)
        for _ in range(NUM_READINGS - 1):
            if counters is None or not slices.is_early(due, counters):
                break
            await asyncio.sleep(BETWEEN_READINGS_S)
            counters = await self._counters(name)
        return None if counters is None else slices.read(due, counters)

    async def _counters(self, name: str) -> Counters | None:
        try:
            counters = await ask_counters(self._clients[name])
        except AlphaloopError as error:
            if name not in self._failing:
                self._failing.add(name)
                extra = {"action": "counters_not_read", "endpoint": name, "code": error.code}
                log.warning("%s: its counters were not read: %s", name, error.message, extra=extra)
            return None
        self._failing.discard(name)
        return counters


#: What of a request's evidence key is known before it is sent: task, segment, sampling and form bucket, model, purpose.
SliceKey: TypeAlias = tuple[str, ...]


@dataclass(slots=True)
class SliceEnd:
    """A slice; once it is handed out the server is idle, and its counters are to be read."""

    key: SliceKey | None
    since: Counters | None  #: None: the reading only begins the next slice
    num_requests: int = 0
    num_prompt_tokens: int = 0  #: of all
    num_tokens: int = 0  #: of all texts
    prompt_bucket: str | None = None  #: of all prompts
    turn: int = 0


class CounterSlices:
    """The slices of one endpoint that drafts k = `num_draft_tokens`. Pure; one thread uses it."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._k = num_draft_tokens
        self._idle: Counters | None = None  #: as read since the last request ended; None: not known
        self._open = SliceEnd(None, None)  #: without `since` it will say nothing
        self._num_in_flight = 0
        self._turn = 0

    def began(self, key: SliceKey) -> None:
        """A request is sent there now."""
        if not self._num_in_flight:
            self._open = SliceEnd(key, self._idle)
        elif self._open.key != key:
            self._open.since = None
        self._idle = None
        self._num_in_flight += 1
        self._turn += 1

    def ended(self, num_prompt_tokens: int = 0, num_tokens: int = 0, num_texts: int = 1) -> SliceEnd | None:
        """A request ended; without tokens it failed or was given up. The counters are due if it was the last.

        vLLM counts each of several texts as a request.

        Requests of one slice also have prompts of one bucket.
        """
        self._num_in_flight -= 1
        due, bucket = self._open, prompt_bucket(num_prompt_tokens)
        if not num_tokens or due.prompt_bucket not in (None, bucket):
            due.since = None
        due.prompt_bucket = bucket
        due.num_requests += num_texts
        due.num_prompt_tokens += num_prompt_tokens
        due.num_tokens += num_tokens
        due.turn = self._turn
        return None if self._num_in_flight else due

    def is_early(self, due: SliceEnd, counters: Counters) -> bool:
        """Whether `counters` may lack some of the requests, which ended a moment ago: another reading may show more."""
        if due.turn != self._turn or (since := due.since) is None:
            return False
        num_ended = _moved(since.num_requests, counters.num_requests)
        has_requests = num_ended is None or num_ended >= due.num_requests
        has_tokens = counters.num_tokens - since.num_tokens >= due.num_tokens
        return not (has_requests and has_tokens) or counters.num_present > 0

    def read(self, due: SliceEnd, counters: Counters) -> SliceCounts | None:
        """The counters as they were read for `due`: what the slice says; None where it says nothing."""
        if due.turn != self._turn:
            return None  # another request began meanwhile, and may be in them
        self._idle = counters
        if due.since is None:
            return None
        if (counts := counts_between(due.since, counters, due.num_requests, due.num_tokens, self._k)) is None:
            return None
        return SliceCounts(due.num_requests, due.num_prompt_tokens, due.num_tokens, counts)


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals of all clients' requests since the server was started."""

    num_requests: int | None  #: that have ended; None where the server does not count them
    num_tokens: int  #: of their texts
    num_drafts: int  #: rounds that drafted
    num_draft_tokens: int
    accepts: tuple[int, ...]  #: tokens accepted at each position
    num_present: int = 0  #: requests that run or wait now

    @classmethod
    def of_page(cls, page: str, kind: ServerKind = "vllm", num_draft_tokens: int = 0) -> Counters:
        """From the page; any kind but llama.cpp has vLLM's names. Raises ReplyInvalid where it lacks a counter.

        `num_draft_tokens`: k of the server, of which llama.cpp's page may lack positions.
        """
        names, optional = _NAMES_OF.get(kind, _VLLM), []
        wanted = [names.drafts, names.draft_tokens, names.accepted_at, names.tokens, *names.present]
        if names.requests is not None:
            wanted.append(names.requests)
        if kind == "llama_cpp":  # before the first draft it has no line of any position
            optional = [wanted.pop(2)]
        hint = "only a vLLM that drafts, or a llama.cpp of late 2026 with --metrics, has all counters"
        by_name = values(page, wanted, optional, by="position", hint=hint)
        totals = {name: sum(by_label.values()) for name, by_label in by_name.items()}
        try:
            at = {int(position): number for position, number in by_name.get(names.accepted_at, {}).items()}
        except ValueError:
            raise ReplyInvalid(f"expected a number as position of {names.accepted_at}, found none") from None
        if kind == "llama_cpp":
            at = dict.fromkeys(range(num_draft_tokens), 0) | at
        return cls(
            num_requests=None if names.requests is None else totals[names.requests],
            num_tokens=totals[names.tokens],
            num_drafts=totals[names.drafts],
            num_draft_tokens=totals[names.draft_tokens],
            accepts=tuple(at[position] for position in sorted(at)),
            num_present=sum(totals[name] for name in names.present),
        )


async def ask_counters(client: ServerClient) -> Counters:
    """What the page of metrics says; the endpoint has its address. Raises ServerError."""
    endpoint = client.endpoint
    page = await client.page(endpoint.metrics_url or "")
    return Counters.of_page(page.decode(errors="replace"), endpoint.kind, endpoint.num_draft_tokens or 0)


def counts_between(
    before: Counters, after: Counters, num_requests: int, num_tokens: int, num_draft_tokens: int
) -> AcceptanceCounts | None:
    """The rounds of `num_requests` texts with `num_tokens` together; one round stands for all prompts.

    What was accepted at each position is the server's. What was tried there is too if every round drafted k =
    `num_draft_tokens`; where some drafted less, the last positions are taken to have lacked. None where the server did
    anything else meanwhile, was started again, or counts what cannot be.
    """
    # Counters that fell were not all of ours: a new server would have to begin at zero, as `before` then did too.
    num_ended = _moved(before.num_requests, after.num_requests)
    if num_ended not in (None, num_requests) or after.num_tokens - before.num_tokens != num_tokens:
        return None
    if before.num_present or after.num_present or len(before.accepts) != len(after.accepts):
        return None
    accepts = tuple(now - then for then, now in zip(before.accepts, after.accepts, strict=True))
    num_drafts = after.num_drafts - before.num_drafts
    num_proposed = after.num_draft_tokens - before.num_draft_tokens
    if min(num_drafts, num_proposed, *accepts) < 0 or num_tokens < num_requests:
        return None
    num_later = num_tokens - num_requests  # each text's first token is of the round that read its prompt
    if not num_drafts:
        return AcceptanceCounts(rounds=num_later + 1, num_empty_rounds=num_later + 1)
    proposed = proposed_by_position(num_drafts, num_proposed, accepts)
    if proposed is None or len(accepts) != num_draft_tokens:
        return None
    num_vanilla = num_later - num_drafts - sum(accepts)
    num_cropped = max(0, -num_vanilla)  # the last round of a text that was cut at its limit
    if num_cropped > num_requests * num_draft_tokens:
        return None
    num_vanilla = max(0, num_vanilla)
    try:
        return AcceptanceCounts(
            rounds=1 + num_vanilla + num_drafts,
            num_empty_rounds=1 + num_vanilla,
            num_cropped=num_cropped,
            proposed=proposed,
            trials=(num_drafts, *map(min, accepts[:-1], proposed[1:])),
            accepts=accepts,
        )
    except InconsistentCounts:
        return None


def _moved(before: int | None, after: int | None) -> int | None:
    """By how much a counter grew; None where there is none."""
    return None if before is None or after is None else after - before


def values(
    page: str, names: Sequence[str], optional: Sequence[str] = (), *, by: str = "", hint: str
) -> Mapping[str, Mapping[str, int]]:
    """Values by name and by the label `by`, summed over all other labels, such as a server's engines.

    Other metrics are not parsed: they are many. Raises ReplyInvalid, with the hint, where the page lacks one of
    `names`.
    """
    # A name is followed by labels or a value; others may begin alike.
    heads = tuple(f"{name}{mark}" for name in (*names, *optional) for mark in "{ ")
    lines = [line for line in page.splitlines() if line.startswith(heads)]
    by_name: dict[str, dict[str, int]] = {}
    try:
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                by_label, label = by_name.setdefault(sample.name, {}), sample.labels.get(by, "")
                by_label[label] = by_label.get(label, 0) + int(sample.value)
    except (ValueError, OverflowError):
        raise ReplyInvalid("expected a page of metrics in Prometheus' form, found another") from None
    for name in names:
        if name not in by_name:
            raise ReplyInvalid(f"expected {name} on the page of metrics, found none", hint=hint)
    return by_name


#: In simulation intervals of the trial are too narrow with one answer a second, and as wide as they should be with two.
EVERY_S: Final = 0.5
#: Between two requests to a server that does not report its load: it may be started again with another option.
SELDOM_S: Final = 60.0


#: What follows for an endpoint with a reserve where the server does not report its load.
NOTHING_SENT: Final = "; with a reserve nothing is sent there until it does"


class LoadWatch:
    """The pages of all servers of a fleet. One event loop uses it."""

    def __init__(self, clients: Mapping[str, ServerClient], fleet: Fleet, *, clock: Callable[[], float]) -> None:
        has_choice = len({route for server in fleet.servers.values() for route in server.routes}) > 1
        self._clients = {name: client for name, client in clients.items() if has_choice or client.endpoint.reserve}
        self._fleet, self._clock = fleet, clock
        self._failing: set[str] = set()

    async def run(self) -> None:
        """Ask until it is cancelled; servers do not wait for each other."""
        await asyncio.gather(*(self._watch(name) for name in self._clients))

    async def _watch(self, name: str) -> None:
        while True:
            began_s, pause_s = self._clock(), EVERY_S
            if self._fleet.is_load_wanted():
                pause_s = await self._ask(name)
            await asyncio.sleep(max(0.0, pause_s - (self._clock() - began_s)))

    async def _ask(self, name: str) -> float:
        """Ask once; seconds from its beginning until it is asked again."""
        client, places = self._clients[name], self._fleet.members[name].places
        before = places.num_texts
        try:
            present = await ask_present(client)
        except AlphaloopError as error:
            return self._failed(name, error)
        except Exception as error:
            log.error("asking %s for its load failed", name, exc_info=error, extra={"action": "load_raised"})
            return SELDOM_S
        if present is None:
            return SELDOM_S
        # It counted at some moment in between.
        places.reported(present, (before + places.num_texts) / 2)
        if name in self._failing:
            self._failing.discard(name)
            log.info("%s reports its load", name, extra={"action": "load_told", "endpoint": name})
        return EVERY_S

    def _failed(self, name: str, error: AlphaloopError) -> float:
        endpoint = self._clients[name].endpoint
        if isinstance(error, ServerUnreachable) and endpoint.has_own_metrics:
            self._fleet.members[name].places.reported(Present(0, 0), 0)  # what takes no connection has no requests
        elif name not in self._failing:
            self._failing.add(name)
            extra = {"action": "load_not_told", "endpoint": name, "code": error.code}
            level, effect = (logging.WARNING, NOTHING_SENT) if endpoint.reserve else (logging.INFO, "")
            log.log(level, "%s does not report its load: %s%s", name, error.message, effect, extra=extra)
        return EVERY_S if isinstance(error, ServerUnavailable) else SELDOM_S


async def ask_present(client: ServerClient) -> Present | None:
    """Requests of all clients that run or wait there now; None for a server that has no page for it.

    Raises ServerError, which is RequestRefused where the page was not turned on.
    """
    url = load_url(client.endpoint)
    return None if url is None else present_on(client.endpoint, await client.page(url))


def load_url(endpoint: EndpointSettings) -> str | None:
    """The address of the page; None of a server that has none."""
    match endpoint.kind:
        case "vllm":
            return endpoint.metrics_url or f"{endpoint.root}/metrics"
        case "sglang":
            return f"{endpoint.root}/v1/loads?include=core"
        case "llama_cpp":
            return f"{endpoint.root}/metrics"
        case _:
            return endpoint.metrics_url  # in vLLM's form, as its counters are


def present_on(endpoint: EndpointSettings, page: bytes) -> Present:
    """Requests of all clients that run or wait there. Raises ReplyInvalid."""
    if endpoint.kind == "sglang":
        if not (loads := read_form(_Loads, page).loads):
            raise ReplyInvalid("expected the load of at least one rank, found none")
        return Present(sum(rank.num_running_reqs for rank in loads), sum(rank.num_waiting_reqs for rank in loads))
    names = _NAMES_OF.get(endpoint.kind, _VLLM).present
    by_name = values(page.decode(errors="replace"), names, hint="is the server of the kind that was named?")
    return Present(*(sum(by_name[name].values()) for name in names))


class _RankLoad(Form):
    """The load of one of SGLang's data-parallel ranks."""

    num_running_reqs: Count
    num_waiting_reqs: Count


class _Loads(Form):
    """SGLang's `/v1/loads`."""

    loads: tuple[_RankLoad, ...]
