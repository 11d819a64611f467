"""Real vLLM servers are killed, hung and restarted with other weights under 1,000 jobs: is every job recorded once?

    python -m benchmarks.engines.faults
    python -m benchmarks.engines.faults --jobs 200 --cores 2,3

Each fault comes while a quarter of the jobs is under way. The drafting server is killed with SIGKILL and started again;
all processes of the plain server are stopped for a while (SIGSTOP) and go on; and both servers are killed and come back
with other weights under the same name. The worker sends them nothing then, and ends once both have; it is started
again, as a supervisor would do. Last line: JSON. Exit status 1 where a job has no result, two different ones, or one
that did not succeed, and where the change of weights was not written down.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psycopg

from alphaloop.embedded.process import ChildProcess
from benchmarks.engines.serve import (
    FOLDER,
    Server,
    add_prompts,
    add_run,
    add_vllm,
    dense_folder,
    running,
    wait_until_ready,
    with_other_weights,
)
from benchmarks.engines.setting_up import DRAFTING, PLAIN, Running, set_up
from benchmarks.jobs import PromptJob, prompts_of
from benchmarks.reporting import console, parser_of, print_found
from benchmarks.servers import on_cores

_JOBS: Final = """
    SELECT status, count(*) FROM jobs WHERE job_id LIKE 'fault-%' GROUP BY status
"""
_RUNS: Final = "SELECT count(*), count(DISTINCT job_id) FROM decode_runs WHERE job_id LIKE 'fault-%'"
_LIVES: Final = """
    SELECT endpoint, left(target_revision, 12), engine, changed FROM server_identities ORDER BY first_seen_at
"""


def main() -> int:
    """Set up, break, count."""
    options = _options()
    return print_found(lambda: _measure(options), lambda found: not found["is_sound"])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(options.prompts, seed=options.seed, max_characters=options.max_characters)
    every = [(task, prompt) for task, found in sorted(prompts.items()) for prompt in found]
    jobs = [
        PromptJob(f"fault-{number:04d}", *every[number % len(every)], options.max_tokens)
        for number in range(options.jobs)
    ]
    other = str(with_other_weights(dense_folder("bfloat16"), FOLDER / "other-weights"))
    endpoint = {"ANSWER_S": str(options.answer_s)}
    with ExitStack() as stack:
        up = stack.enter_context(set_up(options, sorted(prompts), FOLDER / "faults", endpoint=endpoint))
        first, second, third, last = (jobs[place::4] for place in range(4))
        _send(up, first)
        console.print("the drafting server is killed and started again")
        _kill(up.processes[DRAFTING])
        _start(up.processes[DRAFTING], up.drafting, options.cores)
        _wait(up, first)
        _send(up, second)
        console.print(f"the plain server hangs for {options.hang_s:g} s")
        _hang(up.processes[PLAIN], options.hang_s)
        _wait(up, second)
        _send(up, third)
        console.print("both servers are killed, and come back with other weights")
        for name in (PLAIN, DRAFTING):
            _kill(up.processes[name])
        again = [_with_model(server, other) for server in (up.plain, up.drafting)]
        stack.enter_context(running(again, FOLDER / "faults" / "other", options.cores))
        up.restart_worker()
        _wait(up, third)
        _send(up, last)
        _wait(up, last)
        return _counted(up, jobs)


def _send(up: Running, jobs: list[PromptJob]) -> None:
    """Send them, and wait until a tenth has a result: the others are in flight or in line when the fault comes."""
    up.client.send_all(jobs, decoding="auto")
    _wait(up, jobs, share=0.1)


def _wait(up: Running, jobs: list[PromptJob], *, share: float = 1.0) -> None:
    """Until that share of the jobs has a result, or none has come for the time-out."""
    began, enough = time.monotonic(), math.ceil(share * len(jobs))

    def num_ended() -> int:
        return sum(job.job_id in up.client.num_results for job in jobs)

    up.client.read(lambda: num_ended() >= enough)
    console.print(f"{num_ended()} of {len(jobs)} results after {time.monotonic() - began:.0f} s")


def _counted(up: Running, jobs: list[PromptJob]) -> dict[str, Any]:
    again = [job_id for job_id, count in up.client.num_results.items() if count > 1]
    missing = [job.job_id for job in jobs if job.job_id not in up.client.num_results]
    with psycopg.connect(up.database_url) as connection:
        statuses: dict[str, int] = dict(connection.execute(_JOBS).fetchall())
        num_runs, num_decoded = connection.execute(_RUNS).fetchone() or (0, 0)
        lives = connection.execute(_LIVES).fetchall()
    changed = [changed for _, _, _, changed in lives if changed]
    is_sound = (
        not missing
        and not up.client.contradicted
        and statuses == {"succeeded": len(jobs)}
        and num_runs == num_decoded == len(jobs)
        and bool(changed)
    )
    return {
        "jobs": len(jobs),
        "without_a_result": len(missing),
        "with_two_different_results": len(up.client.contradicted),
        "with_the_same_result_again": len(again),
        "status": statuses,
        "decode_runs": num_runs,
        "jobs_with_a_run": num_decoded,
        "results_by_count": dict(Counter(up.client.num_results.values())),
        "servers": [list(life) for life in lives],
        "is_sound": is_sound,
    }


def _with_model(server: Server, model: str) -> Server:
    """The same server, name and port, with another model."""
    command = list(server.command)
    command[command.index("--model") + 1] = model
    return replace(server, command=tuple(command))


def _kill(process: ChildProcess) -> None:
    """All its processes at once, as the machine's failure does."""
    for pid in _tree(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.kill()


def _start(process: ChildProcess, server: Server, cores: Sequence[int]) -> None:
    with on_cores(cores):
        process.start()
    wait_until_ready(server, process)


def _hang(process: ChildProcess, seconds: float) -> None:
    tree = _tree(process.pid)
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in tree:
        os.kill(pid, signal.SIGCONT)


def _tree(pid: int | None) -> list[int]:
    """A process and all below it; only Linux shows them."""
    if pid is None:
        return []
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    return [pid, *(below for child in children for below in _tree(int(child)))]


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--hang-s", type=float, default=40.0)
    parser.add_argument("--answer-s", type=float, default=20.0, help="after which a silent server counts as away")
    add_prompts(parser, max_tokens=24, max_characters=800)
    add_vllm(parser)
    parser.set_defaults(model=None, draft=None, threads=1)
    add_run(parser, timeout_s=600.0)
    return parser.parse_args()


if __name__ == "__main__":
    shutil.rmtree(FOLDER / "other-weights", ignore_errors=True)
    sys.exit(main())
