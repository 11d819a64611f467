"""What a server is, and what evidence calls it.

`ask_identity` asks for its names and its answers to a fixed set of prompts. `name_servers` gives it the names of an
earlier life where it answers as it did then, new ones otherwise. Cause and blame rest on these names: another target
revision says that the model changed, another engine that the server or its arithmetic did; the drift report names
either (docs/concepts/drift.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Final

from alphaloop.engine import Sampling
from alphaloop.errors import ConfigError, ModelNotServed, RequestRefused
from alphaloop.messages import Body, Job, Purpose
from alphaloop.server_identity import Continuation, ServerIdentity, change_between, differs, distance
from alphaloop.settings.endpoints import EndpointSettings
from alphaloop.store.workers import ServerIdentityStore, ServerLife
from worker.servers.client import ServerClient
from worker.servers.forms import ModelCard

log = logging.getLogger(__name__)

#: They stay as they are: answers to other prompts could not be compared with those that are stored.
PROMPTS: Final = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "SELECT name FROM users WHERE",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "La vie est",
    "Once upon a time there",
    "import numpy as",
    "The result of 17 plus 25 is",
    "Roses are red,",
    "To be or not to be,",
    "In conclusion, we",
    "Der schnelle braune",
    "<html><head><",
    '{"name": "',
    "Yesterday it rained, so today",
)
NUM_LIKELIEST: Final = 5  #: the most that OpenAI's form of a continued prompt allows
#: Later tokens follow from the first ones, which may differ at a near-tie.
GREEDY: Final = Sampling(max_tokens=2, temperature=0.0)
NAME: Final = "identity"
#: Shortest limit on seconds without an answer, where the endpoint's own is shorter.
_LEAST_ANSWER_S: Final = 60.0
_MOST_NAMED: Final = 8
_REVISION_CHARS: Final = 12  #: as many as the revision of a model that this process loads


async def ask_identity(endpoint: EndpointSettings) -> ServerIdentity:
    """Ask the names, and every prompt twice: one at a time, then together, to see how far its answers scatter.

    Takes 32 short requests, at most the endpoint's `max_requests` at once, beside what others ask of the server. Raises
    ConfigError where the endpoint names no model and the server lists several, and errors as `ServerClient` does.
    """
    # A busy server has others to serve first, however soon their requests are given up.
    endpoint = endpoint.model_copy(update={"answer_s": max(endpoint.answer_s, _LEAST_ANSWER_S)})
    async with ServerClient(endpoint) as client:
        cards = await client.models()
        card = card_of(cards, endpoint.model)
        client.model = card.id
        version = await client.version()
        asking = _Asking(client)
        answers = [await asking.answer(prompt) for prompt in PROMPTS]
        places = asyncio.Semaphore(endpoint.max_requests)

        async def beside_others(prompt: str) -> Continuation:
            async with places:
                return await asking.answer(prompt)

        together = await asyncio.gather(*map(beside_others, PROMPTS))
    return ServerIdentity(
        server=f"{endpoint.kind}-{version}" if version else endpoint.kind,
        model=card.id,
        root=card.root,
        context_length=card.context_length,
        answers=tuple(answers),
        scatter=distance(answers, together) or 0.0,
        adapters=adapters_of(card, cards),
    )


def adapters_of(card: ModelCard, cards: Sequence[ModelCard]) -> tuple[str, ...]:
    """Names of the model's adapters that the server lists: vLLM and SGLang name the model that each belongs to."""
    return tuple(sorted(other.id for other in cards if other.parent == card.id and other.id != card.id))


def card_of(cards: tuple[ModelCard, ...], model: str | None) -> ModelCard:
    """The card of `model`, or of the only one that is no adapter.

    Raises ConfigError where the server lists several or none and no model is named, and ModelNotServed.
    """
    cards = tuple(card for card in cards if card.parent is None or card.id == model)
    listed = ", ".join(card.id for card in cards[:_MOST_NAMED]) or "none"
    if not model and len(cards) != 1:
        raise ConfigError(
            f"expected the name of a model, because the server lists {len(cards)}",
            hint=f"name one of {listed}" if cards else None,
        )
    for card in cards:
        if model in (None, card.id):
            return card
    raise ModelNotServed(f"expected the model {model!r} at /models, found {listed}")


@dataclass(frozen=True, slots=True)
class NamedServers:
    """The servers of one worker, as its evidence calls them."""

    target_revision: str  #: of all of them
    engine: str  #: of those that differ, all, joined by +
    context_length: int | None  #: the shortest that a server reports
    changed: Mapping[str, str]  #: by endpoint, what is other than in its last life, in words
    adapters: tuple[str, ...]  #: of the model, that some server has


def name_servers(servers: Mapping[str, ServerIdentity], store: ServerIdentityStore | None) -> NamedServers:
    """Name the servers of a worker, by endpoint, and remember what they were; without a store every life is the first.

    Raises ConfigError where two of them serve different models: their texts would be two, and their evidence one.
    """
    refuse_different_models(servers)
    engines: dict[str, str] = {}
    changed: dict[str, str] = {}
    with store.naming() if store is not None else nullcontext() as naming:
        known = naming.known() if naming is not None else ()
        revision = revision_of(servers, known)
        for endpoint, identity in servers.items():
            engines[endpoint] = engine_of(identity, revision, known)
            last = next((life for life in known if life.endpoint == endpoint), None)
            change = differs(last.identity, identity) if last is not None else None
            if change is not None:
                changed[endpoint] = change
            if naming is not None:
                naming.saw(endpoint, identity, target_revision=revision, engine=engines[endpoint], changed=change)
    for endpoint, change in changed.items():
        log.warning("endpoint %s: %s", endpoint, change, extra={"action": "server_changed", "endpoint": endpoint})
    lengths = [server.context_length for server in servers.values() if server.context_length is not None]
    adapters = tuple(sorted({name for server in servers.values() for name in server.adapters}))
    engine = "+".join(sorted(set(engines.values())))
    return NamedServers(revision, engine, min(lengths, default=None), changed, adapters)


def refuse_different_models(servers: Mapping[str, ServerIdentity]) -> None:
    """Every server of a worker answers as the first does, or a ConfigError says which does not."""
    (first, identity), *others = servers.items()
    for name, other in others:
        if (change := change_between(identity, other)) is not None and change.is_of_weights:
            raise ConfigError(
                f"models.endpoints.{name}: expected the model of {first}, because a task may be sent to either; "
                f"found another: {change.sentence}",
                hint="serve the same weights at both, or give one of them a worker of its own",
            )
        if change is not None:
            log.warning(
                "endpoints %s and %s: the second %s, so texts of one job may differ at near-ties",
                first,
                name,
                change.sentence.removeprefix("it "),
                extra={"action": "servers_differ", "endpoint": name},
            )


def revision_of(servers: Mapping[str, ServerIdentity], known: Sequence[ServerLife]) -> str:
    """The revision of an earlier life with the same weights under the same name, else a new one."""
    for life in known:
        if any(_is_same_model(life.identity, identity) for identity in servers.values()):
            return life.target_revision
    return next(iter(servers.values())).sha256()[:_REVISION_CHARS]


def engine_of(identity: ServerIdentity, revision: str, known: Sequence[ServerLife]) -> str:
    """Kind and version, followed by a number of the arithmetic where it is not the first of this model."""
    lives = [life for life in known if life.target_revision == revision and life.identity.server == identity.server]
    for life in lives:
        if change_between(life.identity, identity) is None:
            return life.engine
    numbered = {life.engine for life in lives}
    return identity.server if not numbered else f"{identity.server}-arithmetic-{len(numbered) + 1}"


def _is_same_model(before: ServerIdentity, after: ServerIdentity) -> bool:
    """Whether nothing says that the weights are others. A moved folder holds the same ones if it answers the same."""
    change = change_between(before, after)
    return before.model == after.model and (change is None or not change.is_of_weights)


class _Asking:
    """Asks one server for answers, with log-probabilities as long as it reports them."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._sampling = replace(GREEDY, num_logprobs=NUM_LIKELIEST)

    async def answer(self, prompt: str) -> Continuation:
        """Continue a prompt. A server that reports no log-probabilities is not asked for them again."""
        job = Job(job_id=NAME, task=NAME, body=Body(prompt=prompt), purpose=Purpose.CONTROL)
        try:
            reply = await self._client.complete(job, self._sampling)
        except RequestRefused:
            if self._sampling == GREEDY:
                raise
            self._sampling = GREEDY
            reply = await self._client.complete(job, GREEDY)
        tokens = reply.choices[0].logprobs if reply.choices else None
        likeliest = tokens[0].top_logprobs if tokens else ()
        return Continuation(reply.text, {rank.token: rank.logprob for rank in likeliest})
