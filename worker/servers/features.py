"""What an endpoint serves of what its kind can. Start options decide, and no server reports them, so it is tried.

A server that refuses a request lacks its features. Some take a field and ignore it: they are seen by their texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from alphaloop.engine import Sampling
from alphaloop.errors import MessageError, ReplyInvalid, RequestRefused, ServerError, ServerFailed
from alphaloop.messages import Body, Job, Purpose
from alphaloop.messages.capabilities import Feature, served_by
from worker.servers.client import ServerClient
from worker.servers.replies import Reply

F = Feature
_NAME: Final = "features"
#: What a server answers that does not serve a request.
_REFUSALS: Final = (RequestRefused, ServerFailed, ReplyInvalid, MessageError)
_IGNORED: Final = "it took the request and did not do what it asks for"


#: 32 × 32 grey points, as PNG in an address.
_SQUARE: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAFklEQVR4nG"
    "NoIAAYRhWMKhhVMFIVAABCAAAfNUt+NwAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A request that shows some features. `is_served` looks at what came, of a text that was cut as far as it is."""

    features: frozenset[Feature]
    fields: Mapping[str, Any]
    is_served: Callable[[Reply], bool] = lambda reply: True


_QUESTION: Final = "How many legs has a dog?"
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "count_legs",
        "parameters": {
            "type": "object",
            "properties": {"of": {"enum": ["dog", "spider"]}},
            "required": ["of"],
            "additionalProperties": False,
        },
        "strict": True,  # vLLM lets the model write any arguments otherwise
    },
}
_CALL_ID: Final = "call00001"  #: templates of Mistral's take nine letters and digits, and no others
#: A call and what it gave: llama.cpp lets text stand before a call that has to be made, and a model without an example
#: might write such text up to its limit.
_AFTER_A_CALL: Final = [
    {"role": "user", "content": "How many legs has a spider?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": _CALL_ID,
                "type": "function",
                "function": {"name": "count_legs", "arguments": '{"of": "spider"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": _CALL_ID, "content": "8"},
    {"role": "user", "content": _QUESTION},
]
_SCHEMA: Final = {
    "type": "object",
    "properties": {"legs": {"type": "boolean"}},
    "required": ["legs"],
    "additionalProperties": False,
}
_ANSWERS: Final = ("seventeen", "eighteen")


def _calls(reply: Reply) -> bool:
    calls = any(choice.message is not None and choice.message.tool_calls for choice in reply.choices)
    return calls or not reply.text.strip()  # a call that was cut, or a thought before it


def _is_object(reply: Reply) -> bool:
    return not reply.text.strip() or reply.text.lstrip().startswith("{")


def _is_one_of(*answers: str) -> Callable[[Reply], bool]:
    return lambda reply: (
        not reply.text or any(answer.startswith(reply.text) or reply.text.startswith(answer) for answer in answers)
    )


_OF_TOOLS: Final = frozenset({F.TOOLS, F.ALLOWED_TOOLS, F.ONE_CALL})
_PROBES: Final = (
    _Probe(_OF_TOOLS, {"tools": [_TOOL], "max_tokens": 1}),
    # A llama.cpp whose chat template has no tools reads the request without them; then no text would call one.
    _Probe(
        frozenset({F.TOOL_CHOICE, *_OF_TOOLS}),
        {"messages": _AFTER_A_CALL, "tools": [_TOOL], "tool_choice": "required", "max_tokens": 64},
        _calls,
    ),
    _Probe(
        frozenset({F.JSON_SCHEMA, F.JSON_OBJECT}),
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}, "max_tokens": 48},
        _is_object,
    ),
    _Probe(
        frozenset({F.CHOICE, F.GRAMMAR}),
        {"structured_outputs": {"choice": list(_ANSWERS)}, "max_tokens": 4},
        _is_one_of(*_ANSWERS),
    ),
    _Probe(
        frozenset({F.REGEX}), {"structured_outputs": {"regex": "seventeen"}, "max_tokens": 4}, _is_one_of("seventeen")
    ),
    # A vLLM with a parser of reasoning waits for the end of a thought that no prompt begins.
    _Probe(
        frozenset({F.PROMPT_CONSTRAINT}),
        {"prompt": _QUESTION, "structured_outputs": {"json": _SCHEMA}, "max_tokens": 4},
        _is_object,
    ),
    _Probe(frozenset({F.LOGPROBS}), {"prompt": _QUESTION, "logprobs": 1, "max_tokens": 1}),
    _Probe(frozenset({F.N}), {"prompt": _QUESTION, "n": 2, "temperature": 1.0, "max_tokens": 1}),
    _Probe(
        frozenset({F.IMAGES}),
        {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _SQUARE}}]}],
            "max_tokens": 1,
        },
    ),
)


async def ask_lacking(client: ServerClient) -> dict[Feature, str]:
    """Features that its kind can serve and this server does not, each with why, in words.

    At most nine short requests, `max_requests` at once. What could not be asked, because the server was busy or away,
    counts as served: a job that it refuses later is sent elsewhere. Raises nothing of a server's.
    """
    endpoint = client.endpoint
    served = served_by(endpoint.kind, drafts=endpoint.drafter is not None).features
    places = asyncio.Semaphore(endpoint.max_requests)

    async def ask(probe: _Probe) -> str | None:
        async with places:
            return await _why_not(client, probe)

    probes = [probe for probe in _PROBES if probe.features & served]
    reasons = await asyncio.gather(*map(ask, probes))
    return {
        feature: why
        for probe, why in zip(probes, reasons, strict=True)
        if why is not None
        for feature in sorted(probe.features & served)
    }


async def _why_not(client: ServerClient, probe: _Probe) -> str | None:
    fields = dict(probe.fields)
    if "prompt" not in fields:
        fields.setdefault("messages", [{"role": "user", "content": _QUESTION}])
    body = Body.model_validate(fields)
    job = Job(job_id=_NAME, task=_NAME, body=body, purpose=Purpose.CONTROL)
    sampling = Sampling(
        max_tokens=body.max_tokens or 1,
        temperature=body.temperature or 0.0,
        n=body.n,
        num_logprobs=body.num_logprobs,
        constraint=body.constraint,
    )
    try:
        reply = await client.complete(job, sampling)
    except _REFUSALS as error:
        return error.message
    except ServerError:
        return None
    return None if probe.is_served(reply) else _IGNORED
