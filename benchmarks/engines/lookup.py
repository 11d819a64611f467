"""Look-up of ours inside vLLM beside vLLM's own n-grams and beside no drafts, one server at a time.

    python -m benchmarks.engines.lookup --prompts FOLDER [--dtype float32] [--load 8] [--cores 2,3]

Every server decodes the same prompts greedily, task by task. Reported by task: tokens a round, a second and a second of
the processor; then in how many texts a server differs from the one without drafts. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from alphaloop.inside_vllm.proposer import TASK
from benchmarks.engines.serve import (
    FOLDER,
    MODEL_NAME,
    NGRAM,
    Server,
    add_prompts,
    add_vllm,
    dense_folder,
    read_json,
    running,
    vllm,
    vllm_lookup,
)
from benchmarks.jobs import prompts_of
from benchmarks.reporting import parser_of
from benchmarks.servers import cpu_seconds

_ANSWER_S: Final = 900.0
_NAMES: Final = ("plain", "ngram", "lookup", "lookup_memory")


@dataclass(frozen=True, slots=True)
class Text:
    """One prompt, decoded by one server."""

    server: str
    task: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]  #: of each round that drafted
    accepted: tuple[int, ...]

    @property
    def num_rounds(self) -> int:
        """Passes that yielded tokens, the one that read the prompt among them. The last one may have been cut."""
        return max(len(self.token_ids) - sum(self.accepted), len(self.drafted) + 1)

    def parts_from(self, other: Text) -> int | None:
        """The first place at which the tokens differ; None where they do not."""
        pairs = zip(self.token_ids, other.token_ids, strict=False)
        return next((place for place, (one, two) in enumerate(pairs) if one != two), None)


class _Took(NamedTuple):
    wall_s: float
    cpu_s: float


def main() -> int:
    """Play every server, print a table and the line of JSON."""
    options = _options()
    prompts = prompts_of(options.prompts, seed=0, max_characters=options.max_characters)
    chosen = {task: found[: options.jobs] for task, found in sorted(prompts.items())}
    folder = FOLDER / "lookup"
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[Text] = []
    seconds: dict[str, dict[str, _Took]] = {}
    for server in _servers(options, list(chosen)):
        with running([server], folder, options.cores) as (process,):
            _ask(server, next(iter(chosen.values()))[0], "", options)  # the first pass compiles
            for task, found in chosen.items():
                wall_s, cpu_s = time.perf_counter(), cpu_seconds(process.pid or 0)
                with ThreadPoolExecutor(options.load) as pool:
                    written = list(pool.map(lambda prompt, s=server, t=task: _ask(s, prompt, t, options), found))
                texts += written
                seconds.setdefault(server.name, {})[task] = _Took(
                    time.perf_counter() - wall_s, cpu_seconds(process.pid or 0) - cpu_s
                )
    _report(texts, seconds, list(chosen))
    return 0


def _servers(options: argparse.Namespace, tasks: Sequence[str]) -> list[Server]:
    model, python = options.model or str(dense_folder(options.dtype)), str(options.vllm_python)
    given: dict[str, Any] = {"dtype": options.dtype, "max_requests": options.load}
    made = {
        "plain": lambda: vllm("plain", python, model, options.port, **given),
        "ngram": lambda: vllm(
            "ngram", python, model, options.port, speculative={**NGRAM, "num_speculative_tokens": options.k}, **given
        ),
        "lookup": lambda: vllm_lookup("lookup", python, model, options.port, k=options.k, **given),
        "lookup_memory": lambda: vllm_lookup(
            "lookup_memory", python, model, options.port, k=options.k, remember_tasks=tasks, **given
        ),
    }
    return [made[name]() for name in options.servers]


def _ask(server: Server, prompt: str, task: str, options: argparse.Namespace) -> Text:
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    if task:
        body["vllm_xargs"] = {TASK: task}
    reply = read_json(f"{server.url}/chat/completions", body, timeout_s=_ANSWER_S)
    choice = reply["choices"][0]
    told = (reply.get("metrics") or {}).get("speculative_decoding") or {}
    return Text(
        server.name,
        task,
        tuple(reply["prompt_token_ids"]),
        tuple(choice["token_ids"]),
        tuple(told.get("per_step_drafted") or ()),  # null where no round drafted
        tuple(told.get("per_step_accepted") or ()),
    )


def _report(texts: Sequence[Text], seconds: dict[str, dict[str, _Took]], tasks: Sequence[str]) -> None:
    names = list(seconds)
    figures: dict[str, Any] = {}
    print(f"{'task':18}" + "".join(f"{name:>32}" for name in names))
    print(f"{'tokens a':18}" + f"{'round':>12}{'second':>10}{'CPU s':>10}" * len(names))
    for task in [*tasks, "all"]:
        line = f"{task:18}"
        for name in names:
            found = [one for one in texts if one.server == name and task in (one.task, "all")]
            took = [moment for one, moment in seconds[name].items() if task in (one, "all")]
            num_tokens = sum(len(one.token_ids) for one in found)
            a_round = num_tokens / sum(one.num_rounds for one in found)
            a_second = num_tokens / sum(one.wall_s for one in took)
            a_cpu_second = num_tokens / sum(one.cpu_s for one in took)
            told = {"tokens_a_round": a_round, "tokens_a_s": a_second, "tokens_a_cpu_s": a_cpu_second}
            figures.setdefault(name, {})[task] = {key: round(value, 3) for key, value in told.items()}
            line += f"{a_round:>12.3f}{a_second:>10.1f}{a_cpu_second:>10.1f}"
        print(line)
    plain = {one.prompt_ids: one for one in texts if one.server == "plain"}
    for name in names if plain else []:
        found = [one for one in texts if one.server == name]
        num_apart = sum(one.parts_from(plain[one.prompt_ids]) is not None for one in found)
        figures[name] |= {"texts": len(found), "other": num_apart}
        print(f"{name}: {num_apart} of {len(found)} texts are other than without drafts")
    print(json.dumps(figures))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--servers", type=lambda text: text.split(","), default=list(_NAMES))
    parser.add_argument("--jobs", type=int, default=8, help="prompts a task")
    parser.add_argument("--load", type=int, default=1, help="requests at once")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--port", type=int, default=8011)
    add_prompts(parser, max_tokens=96, max_characters=5000)
    add_vllm(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
