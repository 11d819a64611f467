"""Asking a server what it is: its names, and its answers to a fixed set of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pydantic import Field

from alphaloop.errors import RequestRefused
from alphaloop.messages import Body, Job, Purpose
from alphaloop.server_identity import Answer, ServerIdentity, distance
from worker.engine import Sampling
from worker.servers.asking import Body as RequestBody
from worker.servers.asking import body_of, path_of
from worker.servers.client import ServerClient
from worker.servers.endpoint import Endpoint, Limits
from worker.servers.forms import Form, read_form
from worker.servers.model_card import card_of

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
#: A question is given up after so many seconds without an answer, where the endpoint's own limit is shorter.
_LEAST_ANSWER_S: Final = 60.0


class _Likely(Form):
    token: str
    logprob: float


class _Place(Form):
    top_logprobs: tuple[_Likely, ...] = ()


class _Logprobs(Form):
    """vLLM, SGLang and TensorRT-LLM list mappings; llama.cpp answers in the form of chats."""

    top_logprobs: tuple[Mapping[str, float] | None, ...] | None = None
    content: tuple[_Place, ...] | None = None

    @property
    def first(self) -> dict[str, float]:
        """Log-probabilities of the likeliest first tokens."""
        if self.content:
            return {one.token: one.logprob for one in self.content[0].top_logprobs}
        return dict(self.top_logprobs[0] or {}) if self.top_logprobs else {}


class _Choice(Form):
    text: str
    logprobs: _Logprobs | None = None


class _Reply(Form):
    choices: tuple[_Choice, ...] = Field(min_length=1)


class _AskingClient(ServerClient):
    """A client that asks for probabilities beside a text."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._asked_of = endpoint
        self._num_likeliest = NUM_LIKELIEST

    async def answer(self, prompt: str) -> Answer:
        """Go on with a prompt. A server that tells no probabilities is not asked for them again."""
        try:
            return await self._answer(prompt)
        except RequestRefused:
            if not self._num_likeliest:
                raise
            self._num_likeliest = 0
            return await self._answer(prompt)

    async def _answer(self, prompt: str) -> Answer:
        endpoint = self._asked_of
        job = Job(job_id=NAME, task=NAME, body=Body(prompt=prompt), purpose=Purpose.CONTROL)
        body: RequestBody = body_of(endpoint.kind, endpoint.model, job, GREEDY, stream=False)
        if self._num_likeliest:
            body["logprobs"] = self._num_likeliest
        async with self._http.asked("POST", f"{endpoint.api}{path_of(job)}", body) as content:
            choice = read_form(_Reply, await content.whole()).choices[0]
        return Answer(choice.text, choice.logprobs.first if choice.logprobs else {})


async def ask_identity(endpoint: Endpoint, *, max_requests: int) -> ServerIdentity:
    """Ask the names, and every prompt twice: one at a time, then together, to see how far its answers scatter.

    Takes 32 short requests, at most `max_requests` at once, beside what others ask of the server. Raises ConfigError
    where the endpoint names no model and the server lists several, and errors as `ServerClient` does.
    """
    endpoint = replace(endpoint, limits=_patient(endpoint.limits))
    async with _AskingClient(endpoint) as client:
        card = card_of(await client.models(), endpoint.model)
        version = await client.version()
    async with _AskingClient(replace(endpoint, model=card.id)) as client:
        answers = [await client.answer(prompt) for prompt in PROMPTS]
        together = await _together(client, max_requests)
    return ServerIdentity(
        server=f"{endpoint.kind}-{version}" if version else endpoint.kind,
        model=card.id,
        root=card.root,
        context_length=card.context_length,
        answers=tuple(answers),
        scatter=distance(answers, together) or 0.0,
    )


def _patient(limits: Limits) -> Limits:
    """A busy server has others to serve first, however soon their requests are given up."""
    return replace(limits, answer_s=max(limits.answer_s, _LEAST_ANSWER_S))


async def _together(client: _AskingClient, max_requests: int) -> list[Answer]:
    places = asyncio.Semaphore(max_requests)

    async def answer(prompt: str) -> Answer:
        async with places:
            return await client.answer(prompt)

    return await asyncio.gather(*(answer(prompt) for prompt in PROMPTS))
