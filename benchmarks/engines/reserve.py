"""What a batch costs the online requests of the server that it shares, with a reserve and without.

    python -m benchmarks.engines.reserve
    python -m benchmarks.engines.reserve --model TARGET --seconds 90 --cores 0

One vLLM server, and clients that send short requests to it directly, in bursts and valleys of a schedule that is drawn
once. Every contestant plays that schedule, in an order that is drawn:

    alone         nothing else is there
    no reserve    beside a batch through Kafka and a worker that fills the server
    reserve .25   the same, with that share of the places kept free; and with each other share of --reserves
    priority      without a reserve, at a vLLM with --scheduling-policy priority, where online requests go first

A place is a sequence of vLLM's batch (--max-num-seqs); the worker's max_requests is that number too. The batch always
has jobs left. Its tokens are those that the server counted in the schedule's time, less those of online requests. A
table goes to standard error. Last line: JSON. Exit status 1 where an online request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from alphaloop.embedded.process import free_ports
from alphaloop.engine import Sampling
from alphaloop.errors import AlphaloopError
from alphaloop.messages import Body, Job
from alphaloop.settings.endpoints import EndpointSettings
from benchmarks.engines.serve import (
    FOLDER,
    MODEL_NAME,
    Server,
    add_prompts,
    add_run,
    add_vllm,
    dense_folder,
    running,
    vllm,
)
from benchmarks.engines.setting_up import SHORT_CALIBRATION, conditions_of, prompts_for
from benchmarks.jobs import PromptJob
from benchmarks.paired import percentile
from benchmarks.reporting import REPOSITORY, console, parser_of, print_found, table_of
from benchmarks.servers import Servers, running_servers
from benchmarks.workers import started_worker
from worker.servers.client import ServerClient
from worker.servers.counters import ask_present, values

ALONE, NO_RESERVE, PRIORITY = "alone", "no reserve", "priority"
_TOKENS: Final = "vllm:generation_tokens_total"
_ONLINE_PRIORITY: Final = 9
_BUSY_S: Final = 120.0  #: most time until the worker has sent something
_DRAIN_S: Final = 1.0  #: the worker of a contestant that has played
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Arrival:
    """An online request."""

    at_s: float  #: from the schedule's begin
    prompt: str


def draw_schedule(prompts: Sequence[str], options: argparse.Namespace, rng: random.Random) -> list[Arrival]:
    """Valleys of 6 to 14 s and bursts of 3 to 7 s in turn; in each, requests come independently at its rate."""
    arrivals: list[Arrival] = []
    begin_s, is_burst = 0.0, False
    while begin_s < options.seconds:
        end_s = min(options.seconds, begin_s + (rng.uniform(3, 7) if is_burst else rng.uniform(6, 14)))
        rate = options.burst_rate if is_burst else options.valley_rate
        at_s = begin_s + rng.expovariate(rate)
        while at_s < end_s:
            arrivals.append(Arrival(at_s, rng.choice(prompts)))
            at_s += rng.expovariate(rate)
        begin_s, is_burst = end_s, not is_burst
    return arrivals


@dataclass(frozen=True, slots=True)
class Played:
    """One contestant's turn."""

    first_token_s: Sequence[float]  #: of each online request
    end_to_end_s: Sequence[float]
    num_failed: int  #: online requests
    num_batch_tokens: int
    seconds: float  #: in which these were decoded

    @property
    def batch_tokens_per_s(self) -> float:
        """Of the whole time, valleys and bursts."""
        return self.num_batch_tokens / self.seconds


async def play_online(
    server: Server, arrivals: Sequence[Arrival], options: argparse.Namespace, priority: int
) -> Played:
    """Send each request at its time, whatever became of those before; ends when the last one has."""
    first_token_s: list[float] = []
    end_to_end_s: list[float] = []
    sampling = Sampling(max_tokens=options.online_tokens, temperature=0.0, ignore_eos=True)
    num_failed = num_online_tokens = 0

    async def send(client: ServerClient, number: int, arrival: Arrival) -> None:
        nonlocal num_failed, num_online_tokens
        await asyncio.sleep(arrival.at_s)
        body = Body(prompt=arrival.prompt, stream=True)
        job = Job(job_id=f"online-{number}", task="online", body=body, priority=priority)
        try:
            reply = await client.complete(job, sampling, on_piece=lambda piece: None)
        except AlphaloopError as error:
            console.print(f"an online request failed: {error.message}")
            num_failed += 1
            return
        num_online_tokens += reply.num_tokens
        first_token_s.append(reply.wall_s if reply.first_text_s is None else reply.first_text_s)
        end_to_end_s.append(reply.wall_s)

    async with _client(server) as client:
        before, began = await _num_tokens(client), time.monotonic()
        sent = (send(client, number, arrival) for number, arrival in enumerate(arrivals))
        await asyncio.gather(asyncio.sleep(options.seconds), *sent)
        num_all, took_s = await _num_tokens(client) - before, time.monotonic() - began
    return Played(first_token_s, end_to_end_s, num_failed, max(0, num_all - num_online_tokens), took_s)


def _client(server: Server) -> ServerClient:
    return ServerClient(EndpointSettings(kind="vllm", url=server.url, model=MODEL_NAME))


async def _num_tokens(client: ServerClient) -> int:
    page = await client.page(f"{client.endpoint.root}/metrics")
    return sum(values(page.decode(), [_TOKENS], hint="is it a vLLM?")[_TOKENS].values())


async def _wait_until_busy(server: Server) -> None:
    """Until the worker has sent something. Raises TimeoutError."""
    async with asyncio.timeout(_BUSY_S), _client(server) as client:
        while (present := await ask_present(client)) is None or not present.num:
            await asyncio.sleep(_POLL_S)


def summary(played: Mapping[str, Played]) -> dict[str, Any]:
    """For the table and the JSON line."""
    alone, full = played[ALONE], played[NO_RESERVE]
    found = {}
    for name, turn in played.items():
        row: dict[str, float] = {}
        for what in ("first_token_s", "end_to_end_s"):
            for share in (0.5, 0.95):
                seconds = percentile(getattr(turn, what), share)
                row[f"{what}_p{100 * share:.0f}"] = round(seconds, 4)
                row[f"{what}_p{100 * share:.0f}_over_alone"] = round(
                    seconds / percentile(getattr(alone, what), share), 3
                )
        row["batch_tokens_per_s"] = round(turn.batch_tokens_per_s, 2)
        row["batch_share_kept"] = round(turn.batch_tokens_per_s / full.batch_tokens_per_s, 4)
        found[name] = row
    return {"contestants": found, "num_failed": sum(turn.num_failed for turn in played.values())}


def _show(found: Mapping[str, Any]) -> None:
    headings = ("first token p50", "p95", "end to end p50", "p95", "batch tokens/s", "kept")
    table = table_of("online requests beside a batch: seconds, and over alone", "contestant", *headings)
    for name, row in found["contestants"].items():
        times = (
            f"{row[f'{what}_{share}']:.2f} ({row[f'{what}_{share}_over_alone']:.2f})"
            for what in ("first_token_s", "end_to_end_s")
            for share in ("p50", "p95")
        )
        table.add_row(name, *times, f"{row['batch_tokens_per_s']:.1f}", f"{row['batch_share_kept']:.2f}")
    console.print(table)


def main() -> int:
    """Set up, play, print."""
    options = _options()
    return print_found(lambda: _measure(options), lambda found: bool(found["num_failed"]))


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    prompts = prompts_for(options)
    tasks = sorted(prompts)
    batch = []
    for number in range(options.jobs):
        task = tasks[number % len(tasks)]
        batch.append(PromptJob(f"batch-{number}", task, rng.choice(prompts[task]), options.max_tokens))
    online = [prompt[: options.online_characters] for task in tasks for prompt in prompts[task]]
    arrivals = draw_schedule(online, options, rng)
    conditions = _conditions(options, len(arrivals))
    console.print(conditions)
    folder = FOLDER / "reserve"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reserves = {f"reserve {share:g}": share for share in options.reserves}
    contestants = [ALONE, NO_RESERVE, *reserves, PRIORITY]
    played: dict[str, Played] = {}
    with ExitStack() as stack:
        server, by_priority = _servers(options)
        stack.enter_context(running([server, by_priority], folder, options.cores))
        both = stack.enter_context(running_servers(folder))
        for name in rng.sample(contestants, len(contestants)):
            asked, priority = (by_priority, _ONLINE_PRIORITY) if name == PRIORITY else (server, 0)
            with ExitStack() as turn:
                if name != ALONE:
                    label = name.replace(" ", "-")
                    settings = asked.settings(more={"reserve": str(reserves.get(name, 0.0))})
                    turn.enter_context(_working(options, both, folder, label, tasks, batch, settings))
                    asyncio.run(_wait_until_busy(asked))
                played[name] = asyncio.run(play_online(asked, arrivals, options, priority))
            console.print(f"{name}: batch {played[name].batch_tokens_per_s:.1f} tokens/s")
            if not played[name].first_token_s or (name == NO_RESERVE and not played[name].num_batch_tokens):
                raise RuntimeError(f"{name}: expected tokens, found none: is the machine busy with something else?")
    found = {"conditions": conditions, **summary({name: played[name] for name in contestants})}
    _show(found)
    return found


def _servers(options: argparse.Namespace) -> tuple[Server, Server]:
    """One that serves first come, first served, and one that serves by priority; one of them works at a time."""
    model = options.model or str(dense_folder(options.dtype))
    server, by_priority = (
        vllm(
            name,
            str(options.vllm_python),
            model,
            port,
            dtype=options.dtype,
            max_requests=options.places,
            num_threads=options.threads,
        )
        for name, port in zip(("shared", "ordered"), free_ports(2), strict=True)
    )
    return server, replace(by_priority, command=(*by_priority.command, "--scheduling-policy", "priority"))


@contextmanager
def _working(
    options: argparse.Namespace,
    servers: Servers,
    folder: Path,
    name: str,
    tasks: Sequence[str],
    batch: Sequence[PromptJob],
    endpoint: Mapping[str, str],
) -> Iterator[None]:
    """A worker that decodes the batch at this endpoint, until the block ends: then it gives the rest back."""
    settings = {"ALPHALOOP_MODELS__TARGET__ENGINE": "server", "ALPHALOOP_MODELS__TARGET__NAME": MODEL_NAME}
    settings |= {f"ALPHALOOP_WORKER__{key}": value for key, value in SHORT_CALIBRATION.items()}
    settings["ALPHALOOP_WORKER__DRAIN_S"] = str(_DRAIN_S)
    with started_worker(
        REPOSITORY,
        servers,
        tasks,
        num_slots=options.places,
        seed=options.seed,
        folder=folder,
        name=name,
        timeout_s=options.timeout_s,
        settings=settings | dict(endpoint),
    ) as started:
        started.client.send_all(batch)
        yield


def _conditions(options: argparse.Namespace, num_arrivals: int) -> dict[str, Any]:
    return {
        **conditions_of(options),
        "places": options.places,
        "seconds_a_contestant": options.seconds,
        "online_requests": num_arrivals,
        "online_tokens": options.online_tokens,
        "requests_a_second": {"burst": options.burst_rate, "valley": options.valley_rate},
    }


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", default=[], help="only these")
    parser.add_argument("--model", default=None, help="folder of the target; SmolLM2 if not given")
    parser.add_argument("--threads", type=int, default=1, help="of the server")
    parser.add_argument("--dtype", default="float32", help="CPUs without AVX-512 emulate bfloat16")
    parser.add_argument("--reserves", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--places", type=int, default=16, help="sequences of the server at once")
    parser.add_argument("--seconds", type=float, default=90.0, help="of the schedule")
    parser.add_argument("--burst-rate", type=float, default=3.0, help="online requests a second")
    parser.add_argument("--valley-rate", type=float, default=0.3, help="the same between bursts")
    parser.add_argument("--online-tokens", type=int, default=16, help="of an online text")
    parser.add_argument("--online-characters", type=int, default=100, help="of an online prompt, at most")
    parser.add_argument("--jobs", type=int, default=1500, help="of the batch: more than can end in the schedule's time")
    add_prompts(parser, max_tokens=96, max_characters=300)
    add_vllm(parser)
    add_run(parser, timeout_s=300.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
