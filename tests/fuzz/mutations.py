"""Structure-aware mutations: a valid job, changed at random in its fields, its bytes and its record."""

from __future__ import annotations

import copy
import gzip
import random
from collections.abc import Callable
from typing import Any, Final

from alphaloop.kafka.offsets import Record
from alphaloop.messages.body import SHORTHAND
from alphaloop.messages.job import Job
from tests.fuzz.hostile import STRINGS, Pairs, any_scalar, any_value, write

TOPICS: Final = (*("jobs.code",) * 12, "jobs.sql", "jobs.unknown")
NAMES: Final = sorted(SHORTHAND | set(Job.model_fields) | {"user", "metadata", "tool_choice", "stream_options"})
VALID: Final[tuple[dict[str, Any], ...]] = (
    {"task": "code", "prompt": "Write a function that reverses a list."},
    {"prompt": "x", "max_tokens": 8, "temperature": 0.7, "stop": "\n", "n": 1},
    {"body": {"prompt": "def f():", "max_tokens": 3, "logit_bias": {"5": -100, "17": 2.5}, "seed": 7}},
    {
        "job_id": "order-4711",
        "task": "code",
        "custom_id": "4711",
        "batch_id": "monday",
        "segment": "gold",
        "priority": 3,
        "deadline": "2026-12-01T09:00:00Z",
        "decoding": "auto",
        "body": {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Write a function that reverses a list."},
            ],
            "max_tokens": 200,
            "temperature": 0.7,
            "top_p": 0.95,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.2,
            "presence_penalty": 0.0,
            "seed": 7,
            "stop": ["\n\n", "end"],
            "stop_token_ids": [2],
            "stream": True,
        },
    },
    {
        "job_id": "probe-1",
        "purpose": "probe",
        "probe_drafter": "lookup",
        "probe_num_draft_tokens": 4,
        "body": {"prompt": "a b c", "temperature": 0.0, "max_tokens": 48},
    },
    {"job_id": "control-1", "purpose": "control", "decoding": "vanilla", "body": {"prompt": "a b c"}},
    {
        "body": {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What is the weather?"}], "name": "ann"},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "A tool tells.",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "21 C"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "description": "Of a city.",
                        "parameters": {"type": "object", "properties": {"city": {"type": ["string", "null"]}}},
                    },
                }
            ],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
            "temperature": 0.7,
            "n": 3,
        },
    },
    {
        "body": {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
                    ],
                },
                {"role": "assistant", "content": "It is"},
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "place",
                    "schema": {"type": "object", "properties": {"a": {"enum": [1, None, "x"]}}, "required": ["a"]},
                    "strict": True,
                },
            },
            "logprobs": True,
            "top_logprobs": 3,
            "continue_final_message": True,
            "add_generation_prompt": False,
            "truncate_prompt_tokens": 100,
        },
    },
    {
        "prompt": "Yes or no?",
        "structured_outputs": {"choice": ["yes", "no"]},
        "min_tokens": 1,
        "max_tokens": 4,
        "bad_words": ["maybe"],
        "allowed_token_ids": [1, 2, 3],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    },
    {"prompt": "x", "guided_json": '{"type": "object", "properties": {"a": {"const": null}}}', "tool_choice": "auto"},
    {"body": {"prompt": "x", "guided_regex": "[a-z]+", "logprobs": 2, "presence_penalty": 0.5}},
    {"body": {"prompt": "x", "structured_outputs": {"grammar": "start: /a/"}, "stop": "END"}},
    {"body": {"prompt": "x", "ignore_eos": True, "max_completion_tokens": 9}},
    {
        "prompt": "x",
        "add_generation_prompt": False,
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function", "function": {"name": "f", "strict": None}}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
    },
)

MOST_CHARS: Final = 1_200_000  #: a little more than a job may have

Place = tuple[Any, Any]  # a container, and a name or number in it


def mutated(chance: random.Random, offset: int) -> Record:
    """One record: mostly a job with a few changes, sometimes something else entirely."""
    value = _bytes_of(chance, _mutated_job(chance))
    if chance.random() < 0.02:
        value = chance.choice([None, b"", b"null", b"[]", b'"job"', b"0", b"{}", b"{", b" ", b"\x00" * 100])
    return Record(
        topic=chance.choice(TOPICS),
        partition=chance.randrange(3),
        offset=offset,
        key=chance.choice([None, None, b"", b"key", b"\xff\xfe", b"k" * 10_000]),
        value=value and value[: 2 * MOST_CHARS],
        headers=_headers(chance),
        timestamp_ms=chance.choice([None, 0, 1, -1, 1_700_000_000_000, 1_700_000_000_001, 2**63 - 1]),
    )


def _mutated_job(chance: random.Random) -> Any:
    job = copy.deepcopy(chance.choice(VALID))
    if "job_id" in job and chance.random() < 0.9:
        job["job_id"] = f"{job['job_id']}-{chance.randrange(10**9)}"
    for _ in range(chance.choice([0, 1, 1, 1, 1, 2, 5])):
        chance.choice(_CHANGES)(chance, job)
    return _with_repeats(chance, job) if chance.random() < 0.1 else job


def _places(node: Any) -> list[Place]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found: list[Place] = []
    for name, item in items:
        found += [(node, name), *_places(item)]
    return found


def _objects(node: Any) -> list[dict[str, Any]]:
    inner = [container[name] for container, name in _places(node)]
    return [one for one in (node, *inner) if isinstance(one, dict)]


def _replace(chance: random.Random, job: dict[str, Any]) -> None:
    if places := _places(job):
        container, name = chance.choice(places)
        container[name] = any_value(chance)


def _remove(chance: random.Random, job: dict[str, Any]) -> None:
    if places := _places(job):
        container, name = chance.choice(places)
        del container[name]


def _rename(chance: random.Random, job: dict[str, Any]) -> None:
    one = chance.choice(_objects(job))
    if one:
        one[chance.choice([*NAMES, *STRINGS])] = one.pop(chance.choice(sorted(one, key=str)))


def _add(chance: random.Random, job: dict[str, Any]) -> None:
    one = chance.choice(_objects(job))
    name = chance.choice(NAMES)
    one[name] = any_value(chance) if chance.random() < 0.5 else any_scalar(chance)


def _swap(chance: random.Random, job: dict[str, Any]) -> None:
    places = [place for place in _places(job) if not isinstance(place[0][place[1]], dict | list)]
    if len(places) > 1:
        (a, i), (b, j) = chance.sample(places, 2)
        a[i], b[j] = b[j], a[i]


def _wrap(chance: random.Random, job: dict[str, Any]) -> None:
    if places := _places(job):
        container, name = chance.choice(places)
        container[name] = chance.choice([[container[name]], {"value": container[name]}, {name: container[name]}])


def _lengthen(chance: random.Random, job: dict[str, Any]) -> None:
    texts = [place for place in _places(job) if isinstance(place[0][place[1]], str)]
    if texts:
        container, name = chance.choice(texts)
        container[name] = (container[name] * chance.choice([2, 2, 50, 50, 50, 50, 5_000]))[:MOST_CHARS]


def _repeat(chance: random.Random, job: dict[str, Any]) -> None:
    lists = [container for container, _ in _places(job) if isinstance(container, list)]
    if lists:
        one = chance.choice(lists)
        one.extend(copy.deepcopy(one) * chance.choice([1, 3, 70, 700]))
        del one[2000:]


_CHANGES: Final[tuple[Callable[[random.Random, dict[str, Any]], None], ...]] = (
    *(_replace, _replace, _replace, _replace, _add, _add, _add),
    *(_remove, _rename, _swap, _wrap, _repeat, _lengthen),
)


def _with_repeats(chance: random.Random, job: dict[str, Any]) -> Pairs:
    """The same object with some of its names twice."""
    pairs = list(job.items())
    pairs += [(name, chance.choice([item, any_value(chance)])) for name, item in pairs if chance.random() < 0.5]
    chance.shuffle(pairs)
    return Pairs(tuple(pairs))


def _bytes_of(chance: random.Random, job: Any) -> bytes:
    # Without escapes a lone surrogate becomes invalid UTF-8.
    value = write(job, is_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    return value if chance.random() < 0.85 else chance.choice(_DAMAGES)(chance, value)


def _flip(chance: random.Random, value: bytes) -> bytes:
    place = chance.randrange(len(value))
    return value[:place] + bytes([value[place] ^ 1 << chance.randrange(8)]) + value[place + 1 :]


def _cut(chance: random.Random, value: bytes) -> bytes:
    return value[: chance.randrange(len(value))]


def _insert(chance: random.Random, value: bytes) -> bytes:
    place = chance.randrange(len(value))
    return value[:place] + chance.choice(_FRAGMENTS) + value[place:]


def _encode(chance: random.Random, value: bytes) -> bytes:
    text = value.decode("utf-8", "replace")
    name = chance.choice(["utf-16", "utf-16-le", "utf-8-sig", "utf-7"])
    return text.encode(name, "replace")


_FRAGMENTS: Final = (
    *(b"\x00", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf", b"\xe2\x82", b"\x80"),
    *(b",", b":", b'"', b"{", b"}", b"[", b"]", b"\\", b"\\u", b"//", b"/* */", b"\n", b"1e999", b"-", b"null"),
)
_DAMAGES: Final[tuple[Callable[[random.Random, bytes], bytes], ...]] = (
    *(_flip, _flip, _cut, _insert, _insert, _encode),
    lambda chance, value: value + value,
    lambda chance, value: value + b"\n" + value,
    lambda chance, value: gzip.compress(value, mtime=0),
    lambda chance, value: b" " * chance.choice([1, 2**20]) + value,
    lambda chance, value: chance.randbytes(chance.randrange(1, 200)),
)


def _headers(chance: random.Random) -> tuple[tuple[str, bytes], ...]:
    names = ["traceparent", "tracestate", "content-type", "job_id", "", "__dlq.errors.message", "alphaloop-x", "ключ"]
    number = chance.choice([0, 0, 0, 0, 1, 2, 5, 500])
    return tuple(
        (chance.choice(names), chance.choice([b"", b"\xff", b"\x00", b"text", b"v" * 300])) for _ in range(number)
    )
