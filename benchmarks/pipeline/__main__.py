"""How fast the worker is as a pipeline: Kafka, claim, decode, record in Postgres, publish, offsets.

    python -m benchmarks.pipeline --peers FOLDER --num 20000 --rounds 3 --slots 64 256

The engine answers at once with one token, so that all the time is the pipeline's. All guarantees hold, and commits are
durable. Peers on the same broker, the same Postgres and the same messages, in an order that is drawn anew each round:
Confluent's Parallel Consumer with one committed row and one result a job, a bare consume-produce loop, and a loop that
inserts and commits a row a message. Every run is checked: a row and a result for each job. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from alphaloop.embedded.install import find_java, java_version
from alphaloop.errors import AlphaloopError
from benchmarks.pipeline.contestants import (
    RESULTS,
    Contestant,
    Loop,
    MissingPeer,
    OurWorker,
    ParallelConsumer,
    Race,
)
from benchmarks.pipeline.lone import NUM_WARM_UP, run_alone
from benchmarks.pipeline.report import Entry, Findings, jobs_per_s, print_findings, ratios
from benchmarks.pipeline.topics import Topics, check_outbox, check_results, check_rows, jobs
from benchmarks.reporting import console, machine, parser_of
from benchmarks.servers import Servers, running_servers

BULK, LONE = "bulk", "lone"
AT_ONCE = (16, 64)


class Track:
    """One broker and one database, on which contestants run one after the other."""

    def __init__(self, servers: Servers, num_jobs: int, log: Path) -> None:
        self._servers = servers
        self._topics = Topics(servers.broker)
        self._num_jobs = num_jobs
        self._log = log
        self._job_ids = [job_id for job_id, _ in jobs(num_jobs, prefix=BULK)]
        self._topics.create(RESULTS, f"jobs.{BULK}")
        self._topics.fill(f"jobs.{BULK}", jobs(num_jobs, prefix=BULK))

    def run(self, contestant: Contestant, entry: Entry) -> None:
        """One run, checked and added to `entry`."""
        with self._race(BULK, self._num_jobs, is_migrated=contestant.is_migrated) as race:
            begins, cpu_before = self._topics.ends(RESULTS), self._cpu_s()
            own = contestant.run(race)
            cpu = self._cpu_s()
            results = self._topics.read(RESULTS, begins)
            entry.num_repeated.append(check_results(contestant.name, self._job_ids, results.keys))
            if contestant.outcomes is not None:
                check_rows(contestant.name, race.database_url, contestant.outcomes, self._job_ids)
            if contestant.is_migrated:
                check_outbox(contestant.name, race.database_url)
        entry.jobs_per_s.append(jobs_per_s(results.appended_ms))
        entry.own.append({key: value for key, value in own.items() if key != "moments"})
        entry.cpu_us_per_job.append({who: 1e6 * (cpu[who] - cpu_before[who]) / self._num_jobs for who in cpu})
        console.print(f"  {contestant.name}: {entry.jobs_per_s[-1]:,.0f} jobs/s")

    def run_alone(self, num_slots: int, num_jobs: int, findings: Findings) -> None:
        """Jobs one at a time; after all other runs, because the worker reads every jobs topic that there is."""
        self._servers.delete_topics([f"jobs.{BULK}"])
        self._topics.create(f"jobs.{LONE}")
        with self._race(LONE, num_jobs + NUM_WARM_UP, is_migrated=True) as race:
            findings.lone, keys = run_alone(race, num_slots, seed=1)
            wanted = [job_id for job_id, _ in jobs(race.num_jobs, prefix=LONE)]
            check_results("lone jobs", wanted, keys)
            check_rows("lone jobs", race.database_url, "jobs", wanted)

    @contextmanager
    def _race(self, task: str, num_jobs: int, *, is_migrated: bool) -> Iterator[Race]:
        with self._servers.fresh_database(is_migrated=is_migrated) as url:
            yield Race(self._topics, task, num_jobs, url, f"pipeline-{url.rpartition('/')[2]}", self._log)

    def _cpu_s(self) -> dict[str, float]:
        """Processor seconds of the servers, and of all contestants that have ended, their start included."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return self._servers.cpu_s() | {"contestant": used.ru_utime + used.ru_stime}


def main() -> None:
    """Run all rounds, print the tables and the JSON line."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="pipeline-", dir=options.data_dir))
    folder.chmod(0o755)
    try:
        with running_servers(folder) as servers:
            found = _measure(options, servers, folder)
    except AlphaloopError as error:
        raise SystemExit(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_findings(console, found)
    print(json.dumps(found.as_json()))


def _measure(options: argparse.Namespace, servers: Servers, folder: Path) -> Findings:
    ours = [OurWorker(num_slots) for num_slots in options.slots]
    peers, missing = _parallel_consumers(options.peers, servers.kafka_home)
    contestants: list[Contestant] = [*ours, *peers, Loop(is_recording=False), Loop(is_recording=True)]
    log = Path(tempfile.gettempdir()) / f"{folder.name}.log"
    conditions = machine() | {"java": _java(), "file_system": _file_system(folder)} | servers.durability()
    found = Findings(options.num, conditions, missing, {one.name: Entry() for one in contestants})
    track, rng = Track(servers, options.num, log), random.Random(options.seed)
    console.print("the naive loop once, not counted: it warms broker and database up")
    track.run(contestants[-1], Entry())
    for number in range(options.rounds):
        console.print(f"round {number + 1} of {options.rounds}; what contestants say: {log}")
        for contestant in rng.sample(contestants, len(contestants)):
            track.run(contestant, found.entries[contestant.name])
    rates = {name: entry.jobs_per_s for name, entry in found.entries.items()}
    found.ratios = ratios(rates, [one.name for one in ours], [peer.name for peer in peers])
    if options.lone:
        track.run_alone(options.slots[0], options.lone, found)
    return found


def _parallel_consumers(folder: Path, home: Path) -> tuple[Sequence[ParallelConsumer], list[str]]:
    try:
        return [ParallelConsumer(folder, home, num_at_once) for num_at_once in AT_ONCE], []
    except MissingPeer as error:
        console.print(f"[yellow]goes on without the Parallel Consumer:[/] {error}")
        return [], [f"Parallel Consumer: {error}"]


def _java() -> int | None:
    java = find_java()
    return java_version(java) if java else None


def _file_system(folder: Path) -> str | None:
    """The type of the file system that holds `folder`; None where /proc does not tell."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return None
    folder = folder.resolve()
    found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    holding = [(point, kind) for point, kind in found if folder.is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else None


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder with PCBench.java and libs/")
    parser.add_argument("--num", type=int, default=20_000, help="jobs a run")
    parser.add_argument("--rounds", type=int, default=3, help="every contestant runs once a round")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 256], help="of our worker; 8, 64, 256 are usual")
    parser.add_argument(
        "--lone", type=int, default=200, help="jobs sent one at a time, with the first of --slots; 0: none"
    )
    parser.add_argument("--data-dir", type=Path, default=None, help="where servers keep data; unset: temporary files")
    parser.add_argument("--seed", type=int, default=1, help="of the contestants' order")
    return parser.parse_args()


if __name__ == "__main__":
    main()
