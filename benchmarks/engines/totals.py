"""Jobs of every task through Kafka to two real vLLM servers: do the sums in Postgres equal the servers' own totals?

    python -m benchmarks.engines.totals --prompts FOLDER
    python -m benchmarks.engines.totals --prompts FOLDER --model TARGET --draft DRAFT --jobs 4 --threads 2

One server drafts nothing, the other drafts with look-up or a draft model; the worker decides. What the servers counted
before the first job (tests and costs) is taken off. Where the end of a text cut its last round, Postgres has the part
before the cut and the server all of it. Tables go to standard error: α by task, where its jobs went, and why. Last
line: JSON. Exit status 1 where a job did not succeed or a sum differs. FOLDER holds TASK.jsonl files.
"""

from __future__ import annotations

import argparse
import sys
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

import psycopg
from rich.table import Table

from benchmarks.engines.serve import FOLDER, HOST, Server, add_pair, add_prompts, add_run, add_vllm
from benchmarks.engines.setting_up import DRAFTING, PLAIN, set_up
from benchmarks.jobs import PromptJob, prompts_of
from benchmarks.reporting import console, parser_of, print_found
from benchmarks.servers import wait_until_idle
from benchmarks.workers import Sent
from worker.servers.counters import values

_TOKENS: Final = "vllm:generation_tokens_total"
_DRAFTS: Final = "vllm:spec_decode_num_drafts_total"
_DRAFTED: Final = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_LLAMA_TOTALS: Final = tuple(
    f"llamacpp:{name}_total"
    for name in (
        "tokens_predicted",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
    )
)
_SUMS: Final = """
    SELECT
        coalesce(sum(num_tokens), 0)::int,
        coalesce(sum(rounds - num_empty_rounds), 0)::int,
        coalesce(sum(array_sum(proposed)), 0)::int,
        coalesce(sum(num_cropped), 0)::int
    FROM decode_runs WHERE starts_with(job_id, 'total-') AND (drafter <> '') = %s
"""
_ACCEPTS: Final = """
    SELECT position::int, sum(num)::int FROM decode_runs, unnest(accepts) WITH ORDINALITY AS at (num, position)
    WHERE starts_with(job_id, 'total-') GROUP BY position
"""


def main() -> int:
    """Set up, send, add up."""
    options = _options()
    return print_found(lambda: _measure(options), lambda found: not found["adds_up"])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(options.prompts, seed=options.seed, max_characters=options.max_characters)
    jobs = [
        PromptJob(f"total-{task}-{place}", task, prompt, options.max_tokens)
        for place in range(options.jobs)
        for task, found in sorted(prompts.items())
        for prompt in found[place : place + 1]
    ]
    with set_up(options, sorted(prompts), FOLDER / "totals") as running:
        servers = {PLAIN: running.plain, DRAFTING: running.drafting}
        wait_until_idle(running.processes.values())
        before = {name: counted_by(server) for name, server in servers.items()}
        played = running.client.play(jobs, decoding="auto", load=8)
        wait_until_idle(running.processes.values())
        counted = {name: counted_by(server) - before[name] for name, server in servers.items()}
        recorded, num_cut = _recorded(running.database_url, len(counted[DRAFTING].accepted))
        alpha = running.alpha_by_task()
    found = {
        "jobs": len(jobs),
        "tasks": len(prompts),
        "servers": {name: asdict(sums) for name, sums in counted.items()},
        "postgres": {name: asdict(sums) for name, sums in recorded.items()},
        "alpha": alpha,
        "routes": {task: dict(counts) for task, counts in _routes(played).items()},
        "rounds_cut_by_the_end_of_a_text": num_cut,
        "adds_up": all(adds_up(counted[name], recorded[name], num_cut) for name in counted),
    }
    _show(found)
    return found


@dataclass(frozen=True, slots=True)
class Sums:
    """Over all jobs of a route."""

    tokens: int
    drafts: int = 0  #: rounds that drafted
    drafted: int = 0
    accepted: tuple[int, ...] = ()  #: by position; of llama.cpp one number for all

    def __sub__(self, before: Sums) -> Sums:
        accepted = tuple(now - then for now, then in zip(self.accepted, before.accepted, strict=True))
        return Sums(self.tokens - before.tokens, self.drafts - before.drafts, self.drafted - before.drafted, accepted)


def adds_up(told: Sums, recorded: Sums, num_cut: int) -> bool:
    """Whether what is recorded is what the server counted.

    A server counts drafts whole. A row is censored where the end of its text cut the last round, so each of `num_cut`
    rounds may have fewer positions there, but the first.
    """
    missing = [whole - kept for whole, kept in zip(told.accepted, recorded.accepted, strict=True)]
    return (
        (told.tokens, told.drafts, told.accepted[:1]) == (recorded.tokens, recorded.drafts, recorded.accepted[:1])
        and all(0 <= number <= num_cut for number in missing)
        and 0 <= told.drafted - recorded.drafted <= num_cut * max(0, len(told.accepted) - 1)
    )


def counted_by(server: Server) -> Sums:
    """What a vLLM or a llama.cpp counted since its start."""
    with urllib.request.urlopen(f"http://{HOST}:{server.port}/metrics", timeout=30) as reply:
        page = reply.read().decode()
    if server.kind == "llama_cpp":
        found = values(page, _LLAMA_TOTALS, hint="llama.cpp of 2026 tells them, with --metrics")
        tokens, drafts, drafted, all_accepted = (sum(found[name].values()) for name in _LLAMA_TOTALS)
        return Sums(tokens, drafts, drafted, (all_accepted,))
    names = (_TOKENS,) if server.drafter is None else (_TOKENS, _DRAFTS, _DRAFTED, _ACCEPTED)
    found = values(page, names, by="position", hint="a vLLM server tells them")
    accepted = found.get(_ACCEPTED, {})
    tokens, drafts, drafted = (sum(found.get(name, {}).values()) for name in (_TOKENS, _DRAFTS, _DRAFTED))
    return Sums(tokens, drafts, drafted, tuple(accepted[position] for position in sorted(accepted, key=int)))


def _recorded(database_url: str, num_positions: int) -> tuple[dict[str, Sums], int]:
    """By the rows of the jobs; and how many drafting rounds the ends of their texts cut."""
    with psycopg.connect(database_url) as connection:
        (plain, *_), (tokens, drafts, drafted, num_cut) = (
            connection.execute(_SUMS, (drafts,)).fetchone() or (0,) * 4 for drafts in (False, True)
        )
        at: dict[int, int] = dict(connection.execute(_ACCEPTS).fetchall())
    accepted = tuple(at.get(position, 0) for position in range(1, num_positions + 1))
    return {PLAIN: Sums(plain), DRAFTING: Sums(tokens, drafts, drafted, accepted)}, num_cut


def _routes(played: Sent) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for result in played.results:
        reason = result.decoding.reason if result.decoding else ""
        found.setdefault(result.task, Counter())[f"{result.drafter or 'vanilla'}: {reason}"] += 1
    return dict(sorted(found.items()))


def _show(found: dict[str, Any]) -> None:
    table = Table("task", "alpha", "jobs by route and reason")
    for task, counts in found["routes"].items():
        alpha = found["alpha"].get(task, {}).get("alpha")
        where = ", ".join(f"{route} {num}" for route, num in sorted(counts.items()))
        table.add_row(task, "no drafts yet" if alpha is None else f"{alpha:.2f}", where)
    console.print(table)
    sums = Table("", "tokens", "drafting rounds", "drafted", "accepted by position")
    for name, counted in found["servers"].items():
        for teller, told in ((f"{name}, by the server", counted), (f"{name}, in Postgres", found["postgres"][name])):
            numbers = (str(told[key]) for key in ("tokens", "drafts", "drafted"))
            sums.add_row(teller, *numbers, " ".join(map(str, told["accepted"])))
    console.print(sums)
    num_cut = found["rounds_cut_by_the_end_of_a_text"]
    said = "they add up" if found["adds_up"] else "they differ"
    console.print(
        f"{said}; {num_cut} drafting rounds were cut by the end of a text, and are censored there in Postgres"
    )


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=6, help="of each task")
    add_prompts(parser, max_tokens=48, max_characters=1500)
    add_pair(parser)
    add_vllm(parser)
    add_run(parser, timeout_s=900.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
