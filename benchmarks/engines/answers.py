"""What jobs may say, through Kafka to real servers: tools, schemas, thoughts, logprobs, several texts, adapters.

    python -m benchmarks.engines.answers
    python -m benchmarks.engines.answers --servers vllm-ngram llama-cpp

One server after the other, each with a worker of its own: a vLLM that drafts with look-up, parses calls of tools and
has two adapters; such a vLLM that is counted by its page of metrics; a vLLM that parses thoughts; llama.cpp, which
drafts too. The models say nonsense in the right form. Each result is parsed by OpenAI's types and checked against what
its job asked for. What Postgres has by task is added up and compared with the server's own totals meanwhile: tokens,
and what was drafted and accepted. No server reports the drafts of a job of three texts, so there only tokens are
compared, but for the counted vLLM. Last line: JSON. Exit status 1 where an answer is not what was asked for, or a sum
differs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import psycopg
from openai.types import Completion
from openai.types.chat import ChatCompletion

from alphaloop.client import Client
from alphaloop.embedded.process import ChildProcess, free_ports
from alphaloop.messages import Result
from benchmarks.engines.serve import (
    FOLDER,
    HOST,
    LLAMA_PYTHON,
    MODEL_NAME,
    NGRAM,
    Server,
    add_run,
    add_vllm,
    dense_folder,
    llama_cpp,
    packaged_gguf,
    running,
    vllm,
)
from benchmarks.engines.setting_up import SHORT_CALIBRATION
from benchmarks.engines.small_models import END_THINK_ID, END_TURN_ID, TEMPLATE, adapter, with_thoughts
from benchmarks.engines.totals import Sums, adds_up, counted_by
from benchmarks.reporting import REPOSITORY, console, parser_of, print_found
from benchmarks.servers import Servers, running_servers, wait_until_idle
from benchmarks.workers import started_worker

TASKS: Final = ("extraction", "function_calling")
NAMES: Final = ("vllm-ngram", "vllm-counters", "vllm-thinking", "llama-cpp")
ADAPTERS: Final = ("tiny", "other")
N: Final = (1, 3)  #: texts of a job
SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOLS: Final = [
    {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "say_nothing", "parameters": {"type": "object", "properties": {}}}},
]
ASKED: Final = [{"role": "user", "content": "What is the weather in Paris? Is it warm in Paris?"}]
#: llama.cpp lets text stand before a call that has to be made: only an example brings a small model to one.
ASKED_AGAIN: Final = [
    {"role": "user", "content": "What is the weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"city": "Rome", "warm": true}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": "warm"},
    {"role": "user", "content": "What is the weather in Paris?"},
]
RESPONSE_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}

Said = Mapping[str, Any]  #: a choice of OpenAI's object


@dataclass(frozen=True, slots=True)
class Case:
    """A job and what its answer has to be."""

    name: str
    task: str
    body: Mapping[str, Any]
    is_right: Callable[[Sequence[Said]], bool]
    n: int = 1  #: texts


def _fits(text: str | None) -> bool:
    found = json.loads(text or "null")
    return isinstance(found, dict) and found.keys() == {"city", "warm"} and isinstance(found["warm"], bool)


def _calls(choices: Sequence[Said]) -> bool:
    calls = choices[0]["message"]["tool_calls"] or []
    return bool(calls) and all(
        call["function"]["name"] == "look_up" and _fits(call["function"]["arguments"]) for call in calls
    )


def _ranked(choices: Sequence[Said]) -> bool:
    tokens = choices[0]["logprobs"]["content"]
    return bool(tokens) and all(len(one["top_logprobs"]) == 2 and one["logprob"] <= 0 for one in tokens)


def cases(name: str) -> list[Case]:
    """The jobs of one server."""
    extraction, calling = TASKS
    chat: dict[str, Any] = {"messages": ASKED, "max_tokens": 96, "temperature": 0.0}
    named = {"type": "function", "function": {"name": "look_up"}}
    if name == "vllm-thinking":
        # A small model ends a thought where it saw others end: there alone the token lacks less than the bias.
        seen = [
            turn
            for city in ("Rome", "Oslo", "Bern")
            for turn in (
                {"role": "user", "content": f"What is the weather in {city}?"},
                {"role": "assistant", "content": f"<think>\nThe user asks for the weather.\n</think>\n{city} is warm."},
            )
        ]
        thinking = chat | {
            "messages": [*seen, {"role": "user", "content": "What is the weather in Paris?"}],
            "logit_bias": {str(END_THINK_ID): 13.0, str(END_TURN_ID): -100.0},
            "chat_template_kwargs": {"enable_thinking": True},
        }
        return [
            Case("reasoning", extraction, thinking, lambda said: bool(_thought(said))),
            Case(
                "reasoning and schema",
                extraction,
                thinking | {"response_format": RESPONSE_FORMAT},
                lambda said: bool(_thought(said)) and _fits(_content(said)),
            ),
        ]
    calls = chat | {"messages": ASKED_AGAIN, "tools": TOOLS}
    found = [
        Case(
            "json_schema", extraction, chat | {"response_format": RESPONSE_FORMAT}, lambda said: _fits(_content(said))
        ),
        Case("named tool", calling, calls | {"tool_choice": named}, _calls),
        Case("required tool", calling, calls | {"tools": TOOLS[:1], "tool_choice": "required"}, _calls),
        Case(
            "argument of no template",
            calling,
            chat | {"max_tokens": 8, "chat_template_kwargs": {"enable_thinking": False, "read_by_none": [1]}},
            lambda said: bool(_content(said)),
        ),
        Case("logprobs", extraction, chat | {"logprobs": True, "top_logprobs": 2, "max_tokens": 8}, _ranked),
        Case(
            "choice",
            extraction,
            {"prompt": "Paris is", "max_tokens": 8, "structured_outputs": {"choice": ["warm", "cold"]}},
            lambda said: said[0]["text"] in ("warm", "cold"),
        ),
        Case(
            "three texts",
            extraction,
            {"prompt": "one two three one two three one two", "max_tokens": 12, "temperature": 0.8, "n": 3},
            lambda said: [one["index"] for one in said] == [0, 1, 2],
            n=3,
        ),
    ]
    if name in ("vllm-ngram", "vllm-counters"):
        pattern = r"\d{3}-\d{2}"
        regex = chat | {"structured_outputs": {"regex": pattern}}
        found.append(
            Case("regex", extraction, regex, lambda said: re.fullmatch(pattern, _content(said) or "") is not None)
        )
        repeated = {"prompt": "one two three four one two three four one two three", "max_tokens": 24}
        found += [
            Case(f"adapter {model}", extraction, repeated | {"model": model}, lambda said: bool(said[0]["text"]))
            for model in ADAPTERS
        ]
    return found


def _thought(choices: Sequence[Said]) -> str | None:
    thought: str | None = choices[0]["message"].get("reasoning_content")
    return thought


def _content(said: Sequence[Said]) -> str | None:
    content: str | None = said[0]["message"]["content"]
    return content


def main() -> int:
    """Set up, send, check."""
    options = _options()
    return print_found(lambda: _measure(options), lambda found: not found["is_right"])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    folder = FOLDER / "answers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dense = dense_folder("bfloat16")
    model = with_thoughts(dense, folder / "model")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    adapters = {name: adapter(dense, folder / name, seed=seed) for seed, name in enumerate(ADAPTERS)}
    ports = free_ports(len(options.servers))
    servers = [
        _server(name, port, model, template, adapters, options)
        for name, port in zip(options.servers, ports, strict=True)
    ]
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        processes = stack.enter_context(running(servers, folder, options.cores))
        kafka = stack.enter_context(running_servers(folder))
        for server, process in zip(servers, processes, strict=True):
            found[server.name] = _walk(server, process, kafka, folder, options)
            console.print(found[server.name])
    is_right = all(one["is_right"] for one in found.values())
    return {"servers": found, "is_right": is_right}


def _server(
    name: str,
    port: int,
    model: Path,
    template: Path,
    adapters: Mapping[str, Path],
    options: argparse.Namespace,
) -> Server:
    if name == "llama-cpp":
        server = llama_cpp("llama", str(LLAMA_PYTHON), str(packaged_gguf()), port, drafts=True, max_requests=4)
        return replace(server, command=(*server.command, str(template)))
    python = str(options.vllm_python)
    if name == "vllm-thinking":
        server = vllm("thinking", python, str(model), port, max_requests=4)
        return replace(server, command=(*server.command, "--reasoning-parser", "deepseek_r1"))
    server = vllm(name.removeprefix("vllm-"), python, str(model), port, speculative=NGRAM, max_requests=4)
    modules = [f"{name}={path}" for name, path in adapters.items()]
    return replace(
        server,
        command=(
            *server.command,
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules),
        ),
    )


def _walk(
    server: Server, process: ChildProcess, kafka: Servers, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """All jobs of one server, with a worker of its own."""
    settings = {"ALPHALOOP_MODELS__TARGET__ENGINE": "server", "ALPHALOOP_MODELS__TARGET__NAME": MODEL_NAME}
    settings |= {f"ALPHALOOP_WORKER__{name}": value for name, value in SHORT_CALIBRATION.items()}
    is_by_counters = server.name == "counters"
    page = {"metrics_url": f"http://{HOST}:{server.port}/metrics"} if is_by_counters else {}
    settings |= server.settings(more={"model": MODEL_NAME} | page)
    told = cases("llama-cpp" if server.name == "llama" else f"vllm-{server.name}")
    with (
        started_worker(
            REPOSITORY,
            kafka,
            TASKS,
            num_slots=4,
            seed=options.seed,
            folder=folder,
            name=f"worker-{server.name}",
            timeout_s=options.timeout_s,
            settings=settings,
        ) as worker,
        Client(kafka.kafka) as client,
    ):
        answers: dict[str, dict[str, Any]] = {}
        sums: list[dict[str, Any]] = []
        # For a slice of one job the counters are the job's; the first reading begins the next slice.
        together = [[case] for case in told] if is_by_counters else [[case for case in told if case.n == n] for n in N]
        if is_by_counters:
            _send(client, [replace(told[0], name="before all")], server, options.timeout_s)
        for some in filter(None, together):
            wait_until_idle([process])
            before = counted_by(server)
            answers |= _send(client, some, server, options.timeout_s)
            wait_until_idle([process])
            is_counted = server.drafter is not None and (is_by_counters or some[0].n == 1)
            moved = counted_by(server) - before
            sums.append(_compare(server, moved, worker.database_url, some, is_counted=is_counted))
        with psycopg.connect(worker.database_url) as connection:
            evidence = connection.execute(_EVIDENCE).fetchall()
    return {
        "answers": answers,
        "sums": sums,
        "evidence": [list(row) for row in evidence],
        "is_right": all(one["is_right"] for one in answers.values()) and all(one["adds_up"] for one in sums),
    }


_EVIDENCE: Final = """
    SELECT task, regexp_replace(target_revision, '^[^+]*', ''), form_bucket, drafter, count(*)::int,
        sum(num_tokens)::int, sum(array_sum(trials))::int, sum(array_sum(accepts))::int
    FROM decode_runs WHERE starts_with(job_id, 'answers-') GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""
#: Evidence stands in the job's own row, or beside it where a server reported only sums, or a slice.
_STORED: Final = """
    SELECT task, num_tokens::int, (rounds - num_empty_rounds)::int, array_sum(proposed)::int, accepts,
        array_sum(trials)::int, num_cropped::int
    FROM decode_runs WHERE job_id = ANY(%(ids)s)
    UNION ALL
    SELECT task, 0, (rounds - num_empty_rounds)::int, array_sum(proposed)::int, accepts, array_sum(trials)::int, 0
    FROM evidence_rows WHERE job_id = ANY(%(ids)s) AND source <> 'scored'
"""


def _send(client: Client, some: Sequence[Case], server: Server, timeout_s: float) -> dict[str, dict[str, Any]]:
    jobs = [
        {"job_id": _id(server, case), "task": case.task, "decoding": _decoding(server), "body": dict(case.body)}
        for case in some
    ]
    by_id = {_id(server, case): case for case in some}
    batch = client.submit(jobs)
    return {
        by_id[result.job_id].name: _checked(result, by_id[result.job_id])
        for result in client.results(batch, timeout_s=timeout_s)
    }


def _decoding(server: Server) -> str:
    return "speculative" if server.drafter else "vanilla"


def _id(server: Server, case: Case) -> str:
    return f"answers-{server.name}-{case.name.replace(' ', '-')}"


def _checked(result: Result, case: Case) -> dict[str, Any]:
    response = result.response
    if response is None:
        return {"is_right": False, "error": result.error.message if result.error else result.status.value}
    parsed = (Completion if "prompt" in case.body else ChatCompletion).model_validate(response, strict=True)
    try:
        is_right = case.is_right(response["choices"])
    except (KeyError, TypeError, ValueError):
        is_right = False
    found: dict[str, Any] = {"is_right": is_right, "tokens": parsed.usage.completion_tokens if parsed.usage else None}
    if not is_right:
        found["choices"] = response["choices"]
    return found


def _compare(
    server: Server, told: Sums, database_url: str, some: Sequence[Case], *, is_counted: bool
) -> dict[str, Any]:
    """What the server counted and what is stored of these jobs, by task; where drafts are not reported, the tokens."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(_STORED, {"ids": [_id(server, case) for case in some]}).fetchall()
    tasks = {task: _sums([row[1:5] for row in rows if row[0] == task]) for task in sorted({row[0] for row in rows})}
    stored, num_cut = _sums([row[1:5] for row in rows]), sum(row[6] for row in rows)
    if server.kind == "llama_cpp":  # it reports no positions, and rounds are as few as its drafts fit in
        stored = Sums(stored.tokens, told.drafts, stored.drafted, (sum(stored.accepted),))
    else:
        stored = replace(stored, accepted=(stored.accepted + (0,) * len(told.accepted))[: len(told.accepted)])
    num_tested = {task: sum(row[5] for row in rows if row[0] == task) for task in tasks}
    return {
        "jobs": [case.name for case in some],
        "server": asdict(told),
        "postgres": asdict(stored),
        "by_task": {
            task: asdict(sums) | {"alpha": sum(sums.accepted) / num_tested[task] if num_tested[task] else None}
            for task, sums in tasks.items()
        },
        "cut": num_cut,
        "adds_up": adds_up(told, stored, num_cut) if is_counted else told.tokens == stored.tokens,
    }


def _sums(rows: Sequence[tuple[int, int, int, list[int]]]) -> Sums:
    accepted = tuple(map(sum, zip_longest(*(row[3] for row in rows), fillvalue=0)))
    tokens, drafts, drafted = map(sum, zip(*(row[:3] for row in rows), strict=True)) if rows else (0, 0, 0)
    return Sums(tokens, drafts, drafted, accepted)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--servers", nargs="+", choices=NAMES, default=list(NAMES))
    add_vllm(parser)
    add_run(parser, timeout_s=900.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
