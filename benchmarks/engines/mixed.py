"""One vLLM server with each request's own k, on a stream of mixed tasks.

    python -m benchmarks.engines.mixed --prompts FOLDER
    python -m benchmarks.engines.mixed --prompts FOLDER --model TARGET --draft DRAFT --tasks code chat math

Every contestant plays the same jobs of every round, in an order that is drawn, `--load` of them under way at a time:

    k=0 … k=K   requests sent straight to that server, all with one k
    by task     the same, each task with a k of its own: the ceiling. In rounds before, played with every static k, a
                task's k was the fastest for its own requests; a second choice gives those k=0 that gained less than 5 %
    decided     jobs through Kafka and a worker that decides for each, over that server alone
    forced      the same worker, whose jobs ask for vanilla: what Kafka, worker and Postgres take of the same cores
    routed      the same over two servers: one without drafts, and that one with its k of the start

The worker learns before the first measured round, from `--history` jobs a task. A step drafts as long as its longest
request wants, so neighbours pay too: that is why the ceiling is played and not added up. A table goes to standard
error. Last line: JSON. Exit status 1 where a text in float32 differs from the one with k=0; in bfloat16 texts depend on
their neighbours in every contestant.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from alphaloop.embedded.process import free_ports
from alphaloop.engine import Sampling
from alphaloop.experiment.observe import Slice, Treatment, TrialGroup
from alphaloop.experiment.rounds import subject_of
from alphaloop.settings.endpoints import EndpointSettings
from benchmarks.engines.serve import (
    FOLDER,
    MODEL_NAME,
    NGRAM,
    Server,
    add_pair,
    add_prompts,
    add_run,
    add_vllm,
    dense_folder,
    draft_model,
    following,
    running,
    vllm,
)
from benchmarks.engines.setting_up import SHORT_CALIBRATION, conditions_of, prompts_for
from benchmarks.jobs import PromptJob
from benchmarks.paired import bootstrap
from benchmarks.reporting import REPOSITORY, console, parser_of, print_found, table_of
from benchmarks.servers import running_servers
from benchmarks.workers import Client, started_worker
from worker.servers.client import ServerClient
from worker.servers.request_body import AskedDrafts, Measured

DECIDED, FORCED, ROUTED, BY_TASK = "decided", "forced", "routed", "by task"
#: A task whose drafts gain less than this goes without in the second choice of the ceiling: neighbours pay for them.
_LEAST_GAIN: Final = 1.05


@dataclass(frozen=True, slots=True)
class Played:
    """One round of one contestant."""

    seconds: float
    num_tokens: int
    per_token_s: Mapping[str, float] = field(default_factory=dict)  #: by task, the mean of its own requests
    texts: Mapping[str, str] = field(default_factory=dict)  #: by prompt
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)  #: by task, the k of each of its jobs
    slices: Sequence[Slice] = ()  #: that the server measured of its own rounds

    @property
    def tokens_per_s(self) -> float:
        """Of the whole round."""
        return self.num_tokens / self.seconds


async def straight(
    server: Server, jobs: Sequence[PromptJob], k_of: Mapping[str, int], load: int, *, control_share: float | None = None
) -> Played:
    """Send the jobs to the server itself, each with the k of its task.

    `control_share`: of the experiment over the server's own rounds, with all jobs on trial; None: as it was.
    """
    settings = EndpointSettings(
        kind=server.kind,
        url=server.url,
        model=MODEL_NAME,
        drafter=server.drafter,
        num_draft_tokens=server.num_draft_tokens,
        switches_drafts=True,
    )
    waiting, num_tokens = deque(jobs), 0
    walls: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    texts: dict[str, str] = {}
    slices: list[Slice] = []
    trial_of = {task: TrialGroup(subject_of(task, "greedy"), Treatment("draft", k)) for task, k in k_of.items() if k}

    async def send(client: ServerClient) -> None:
        nonlocal num_tokens
        while waiting:
            job = waiting.popleft()
            sampling = Sampling(max_tokens=job.max_tokens, temperature=0.0)
            measured = Measured(control_share, trial_of.get(job.task)) if control_share is not None else None
            reply = await client.complete(job.as_job(), sampling, asked=AskedDrafts(k_of[job.task]), measured=measured)
            slices.extend(reply.slices)
            num_tokens += reply.num_tokens
            walls[job.task].append((reply.wall_s, reply.num_tokens))
            texts[job.prompt] = reply.text

    async with ServerClient(settings) as client:
        began = time.monotonic()
        await asyncio.gather(*(send(client) for _ in range(load)))
        seconds = time.monotonic() - began
    per_token = {task: sum(wall for wall, _ in found) / sum(num for _, num in found) for task, found in walls.items()}
    return Played(seconds, num_tokens, per_token, texts, slices=slices)


def _through(client: Client, jobs: Sequence[PromptJob], load: int, decoding: str) -> Played:
    """Send the jobs through Kafka to the client's worker."""
    sent = client.play(jobs, decoding=decoding, load=load)
    by_id = {job.job_id: job for job in jobs}
    lengths: defaultdict[str, list[int]] = defaultdict(list)
    for result in sent.results:
        lengths[result.task].append(result.decided[1] if result.decided else 0)
    texts = {by_id[result.job_id].prompt: result.text or "" for result in sent.results}
    return Played(sent.seconds, sent.num_tokens, texts=texts, lengths=lengths)


def best_by_task(static: Mapping[int, Sequence[Played]], *, least_gain: float) -> dict[str, int]:
    """The k with which each task's own requests were fastest, in the median over rounds; 0 where that gains less."""
    medians: dict[str, dict[int, float]] = defaultdict(dict)
    for k, rounds in static.items():
        for task in rounds[0].per_token_s:
            medians[task][k] = statistics.median(played.per_token_s[task] for played in rounds)
    chosen = {task: min(by_k, key=lambda k: by_k[k]) for task, by_k in medians.items()}
    return {task: k if medians[task][0] / medians[task][k] >= least_gain else 0 for task, k in sorted(chosen.items())}


def over(ours: str, theirs: str, rounds: Sequence[Mapping[str, Played]]) -> dict[str, float]:
    """Tokens a second of one contestant over another's, of all rounds, with bounds by rounds."""

    def ratio(some: Sequence[Mapping[str, Played]]) -> float:
        first, second = (
            sum(played[name].num_tokens for played in some) / sum(played[name].seconds for played in some)
            for name in (ours, theirs)
        )
        return first / second

    low, high = bootstrap(rounds, ratio)
    return {"ratio": round(ratio(rounds), 4), "low": round(low, 4), "high": round(high, 4)}


def main() -> int:
    """Set up, play, print."""
    options = _options()
    return print_found(
        lambda: _measure(options), lambda found: options.dtype == "float32" and bool(found["texts_that_differ"])
    )


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_for(options)
    tasks = sorted(prompts)
    rng = random.Random(options.seed)
    draw = Draw(prompts, options.jobs, options.max_tokens, rng)
    conditions = _conditions(options, tasks)
    console.print(conditions)
    folder = FOLDER / "mixed"
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        following_server, plain = servers_of(options)
        stack.enter_context(running([following_server, plain], folder, options.cores))
        clients = {
            DECIDED: stack.enter_context(_worker(options, tasks, folder / DECIDED, [following_server], switches=True)),
            ROUTED: stack.enter_context(
                _worker(options, tasks, folder / ROUTED, [following_server, plain], switches=False)
            ),
        }
        for name, client in clients.items():
            client.play(draw.history(name, options.history), decoding="auto", load=options.load)
        lengths = range(options.k + 1)
        static: dict[int, list[Played]] = {k: [] for k in lengths}
        for number in range(options.choosing):
            jobs = draw.round(f"choose-{number}")
            for k in rng.sample(lengths, len(lengths)):
                static[k].append(asyncio.run(straight(following_server, jobs, dict.fromkeys(tasks, k), options.load)))
                console.print(f"choosing {number}: k={k} {static[k][-1].tokens_per_s:.1f} tokens/s")
        forced = {f"k={k}": dict.fromkeys(tasks, k) for k in lengths}
        ceilings = {
            BY_TASK: best_by_task(static, least_gain=1.0),
            f"{BY_TASK}, few": best_by_task(static, least_gain=_LEAST_GAIN),
        }
        console.print(ceilings)
        rounds = []
        for number in range(options.rounds):
            rounds.append(_play(f"{number}", draw, following_server, {**forced, **ceilings}, clients, options, rng))
    found = summary(rounds, forced, ceilings) | {"conditions": conditions, "ceilings": ceilings}
    _show(found)
    return found


def _play(
    number: str,
    draw: Draw,
    server: Server,
    forced: Mapping[str, Mapping[str, int]],
    clients: Mapping[str, Client],
    options: argparse.Namespace,
    rng: random.Random,
) -> dict[str, Played]:
    names = [*forced, *clients, FORCED]
    jobs = draw.round(number)
    played: dict[str, Played] = {}
    for name in rng.sample(names, len(names)):
        if name in forced:
            played[name] = asyncio.run(straight(server, jobs, forced[name], options.load))
        else:
            by, decoding = (DECIDED, "vanilla") if name == FORCED else (name, "auto")
            played[name] = _through(clients[by], draw.named(jobs, name), options.load, decoding)
        console.print(f"round {number}: {name} {played[name].tokens_per_s:.1f} tokens/s")
    return played


def summary(
    rounds: Sequence[Mapping[str, Played]], forced: Mapping[str, object], ceilings: Mapping[str, object]
) -> dict[str, Any]:
    """For the table and the JSON line."""

    def speed(name: str) -> float:
        return sum(played[name].num_tokens for played in rounds) / sum(played[name].seconds for played in rounds)

    best, ceiling = max(forced, key=speed), max((*ceilings, *forced), key=speed)
    chosen: defaultdict[str, list[int]] = defaultdict(list)
    for played in rounds:
        for task, lengths in played[DECIDED].lengths.items():
            chosen[task] += lengths
    vanilla = {prompt: text for played in rounds for prompt, text in played["k=0"].texts.items()}
    differing = {
        name: sum(text != vanilla[prompt] for played in rounds for prompt, text in played[name].texts.items())
        for name in rounds[0]
    }
    return {
        "tokens_per_s": {name: round(speed(name), 2) for name in rounds[0]},
        "best_static": best,
        "ceiling": ceiling,
        "ceiling_over_best_static": over(ceiling, best, rounds),
        "decided_over_ceiling": over(DECIDED, ceiling, rounds),
        "decided_over_best_static": over(DECIDED, best, rounds),
        "decided_over_vanilla": over(DECIDED, "k=0", rounds),
        "decided_over_forced": over(DECIDED, FORCED, rounds),
        "forced_over_vanilla": over(FORCED, "k=0", rounds),
        "decided_over_routed": over(DECIDED, ROUTED, rounds),
        "mean_k_decided": {task: round(statistics.mean(lengths), 2) for task, lengths in sorted(chosen.items())},
        "num_rounds": len(rounds),
        "texts_that_differ": {name: num for name, num in differing.items() if num},
    }


def _show(found: Mapping[str, Any]) -> None:
    table = table_of("one server, a mixed stream", "contestant", "tokens/s")
    for name, speed in found["tokens_per_s"].items():
        table.add_row(name, f"{speed:.1f}")
    console.print(table)
    for name in (key for key in found if "_over_" in key):
        ratio = found[name]
        words = name.replace("_", " ")
        console.print(f"{words}: {ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]")
    console.print(
        f"best static {found['best_static']}, ceiling {found['ceiling']}, k decided {found['mean_k_decided']}"
    )


@dataclass(eq=False)
class Draw:
    """Draws the jobs of each round: as many of each task, shuffled."""

    prompts: Mapping[str, list[str]]
    num_each: int
    max_tokens: int
    rng: random.Random

    def __post_init__(self) -> None:
        self._left: dict[str, list[str]] = {}

    def round(self, name: str) -> list[PromptJob]:
        """A prompt comes again when all of its task were used."""
        return self._jobs(name, self.num_each)

    def history(self, name: str, num_each: int) -> list[PromptJob]:
        """Jobs that are not measured."""
        return self._jobs(f"history-{name}", num_each)

    def named(self, jobs: Sequence[PromptJob], name: str) -> list[PromptJob]:
        """The same jobs under ids of their own."""
        return [PromptJob(f"{name}-{job.job_id}", job.task, job.prompt, job.max_tokens) for job in jobs]

    def _jobs(self, name: str, num_each: int) -> list[PromptJob]:
        jobs = []
        for task in sorted(self.prompts):
            for number in range(num_each):
                if not self._left.get(task):
                    self._left[task] = self.rng.sample(self.prompts[task], len(self.prompts[task]))
                jobs.append(PromptJob(f"{name}-{task}-{number:03d}", task, self._left[task].pop(), self.max_tokens))
        self.rng.shuffle(jobs)
        return jobs


def servers_of(options: argparse.Namespace) -> tuple[Server, Server]:
    """One that drafts as each request asks, and one without drafts, of the same model."""
    model = options.model or str(dense_folder(options.dtype))
    speculative = (
        draft_model(options.draft, options.k) if options.draft else NGRAM | {"num_speculative_tokens": options.k}
    )
    drafting, plain = (
        vllm(
            name,
            str(options.vllm_python),
            model,
            port,
            speculative=method,
            dtype=options.dtype,
            max_requests=options.load,
            num_threads=options.threads,
        )
        for name, port, method in zip(("following", "plain"), free_ports(2), (speculative, None), strict=True)
    )
    return following(drafting), plain


@contextmanager
def _worker(
    options: argparse.Namespace, tasks: Sequence[str], folder: Path, endpoints: Sequence[Server], *, switches: bool
) -> Iterator[Client]:
    """A worker over these servers, with a Kafka and a PostgreSQL of its own."""
    folder.mkdir(parents=True)
    settings = {"ALPHALOOP_MODELS__TARGET__ENGINE": "server", "ALPHALOOP_MODELS__TARGET__NAME": MODEL_NAME}
    if not switches:
        settings |= {f"ALPHALOOP_WORKER__{name}": value for name, value in SHORT_CALIBRATION.items()}
    for server in endpoints:
        is_switch = switches and server.drafter is not None
        settings |= server.settings(more={"switches_drafts": "true"} if is_switch else None)
    with (
        running_servers(folder) as servers,
        started_worker(
            REPOSITORY,
            servers,
            tasks,
            num_slots=options.load,
            seed=options.seed,
            folder=folder,
            name="worker",
            timeout_s=options.timeout_s,
            settings=settings,
        ) as started,
    ):
        yield started.client


def _conditions(options: argparse.Namespace, tasks: Sequence[str]) -> dict[str, Any]:
    return {
        **conditions_of(options),
        "drafts": f"draft model {Path(options.draft).name}" if options.draft else "n-grams",
        "k": options.k,
        "tasks": list(tasks),
        "jobs_a_task_and_round": options.jobs,
        "load": options.load,
    }


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", default=[], help="only these")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--k", type=int, default=4, help="longest draft")
    parser.add_argument("--load", type=int, default=4, help="jobs under way at a time")
    parser.add_argument("--jobs", type=int, default=3, help="of each task in a round")
    parser.add_argument("--rounds", type=int, default=6, help="measured")
    parser.add_argument("--choosing", type=int, default=2, help="rounds before, from which the ceiling's k are chosen")
    parser.add_argument("--history", type=int, default=12, help="jobs of each task that each worker learns from")
    add_prompts(parser, max_tokens=64, max_characters=3000)
    add_pair(parser)
    add_vllm(parser)
    add_run(parser, timeout_s=900.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
