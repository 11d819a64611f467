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
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from alphaloop.embedded.install import find_kafka_home
from alphaloop.settings import Settings
from benchmarks.pipeline.conditions import conditions
from benchmarks.pipeline.contestants import RESULTS, Contestant, Loop, OurWorker, ParallelConsumerPeer, Race
from benchmarks.pipeline.figures import jobs_per_s, ratios
from benchmarks.pipeline.lone import NUM_WARM_UP, run_alone
from benchmarks.pipeline.messages import jobs
from benchmarks.pipeline.parallel_consumer import MissingPeer, ParallelConsumer
from benchmarks.pipeline.report import Entry, Findings, print_findings
from benchmarks.pipeline.servers import Servers, running_servers
from benchmarks.pipeline.topics import Topics
from benchmarks.pipeline.verifying import check_outbox, check_results, check_rows

console = Console(stderr=True)
if not console.is_terminal:
    console = Console(stderr=True, width=140)
BULK, LONE = "bulk", "lone"
AT_ONCE = (16, 64)


class Track:
    """One broker and one database, on which contestants run one after the other."""

    def __init__(self, servers: Servers, num_jobs: int, log: Path) -> None:
        self._servers = servers
        self._topics = Topics(servers.kafka)
        self._num_jobs = num_jobs
        self._log = log
        self._num_runs = 0
        self._job_ids = [job_id for job_id, _ in jobs(num_jobs, prefix=BULK)]
        self._topics.create(RESULTS, f"jobs.{BULK}")
        self._topics.fill(f"jobs.{BULK}", jobs(num_jobs, prefix=BULK))

    def run(self, contestant: Contestant, entry: Entry) -> None:
        """One run, checked and added to `entry`."""
        race, name = self._race(BULK, self._num_jobs, is_migrated=contestant.is_migrated)
        begins, cpu_before = self._topics.ends(RESULTS), self._servers.cpu_s() | {"contestant": _children_cpu_s()}
        own = contestant.run(race)
        cpu = self._servers.cpu_s() | {"contestant": _children_cpu_s()}
        results = self._topics.read(RESULTS, begins)
        entry.num_repeated.append(check_results(contestant.name, self._job_ids, results.keys))
        if contestant.outcomes is not None:
            check_rows(contestant.name, race.database_url, contestant.outcomes, self._job_ids)
        if contestant.is_migrated:
            check_outbox(contestant.name, race.database_url)
        self._servers.drop(name)
        entry.jobs_per_s.append(jobs_per_s(results.appended_ms))
        entry.own.append({key: value for key, value in own.items() if key != "moments"})
        entry.cpu_us_per_job.append({who: 1e6 * (cpu[who] - cpu_before[who]) / self._num_jobs for who in cpu})
        console.print(f"  {contestant.name}: {entry.jobs_per_s[-1]:,.0f} jobs/s")

    def run_alone(self, num_slots: int, num_jobs: int, findings: Findings) -> None:
        """Jobs one at a time; behind all other runs, because the worker reads every jobs topic that there is."""
        self._topics.delete(f"jobs.{BULK}")
        self._topics.create(f"jobs.{LONE}")
        race, name = self._race(LONE, num_jobs + NUM_WARM_UP, is_migrated=True)
        findings.lone, keys = run_alone(race, num_slots, seed=1)
        wanted = [job_id for job_id, _ in jobs(race.num_jobs, prefix=LONE)]
        check_results("lone jobs", wanted, keys)
        check_rows("lone jobs", race.database_url, "jobs", wanted)
        self._servers.drop(name)

    def _race(self, task: str, num_jobs: int, *, is_migrated: bool) -> tuple[Race, str]:
        self._num_runs += 1
        name = f"run_{self._num_runs}"
        url = self._servers.database(name, is_migrated=is_migrated)
        return Race(self._topics, task, num_jobs, url, f"pipeline-{name}", self._log), name


def main() -> None:
    """Run all rounds, print the tables and the JSON line."""
    options = _options()
    home = find_kafka_home(Settings())
    if home is None:
        raise SystemExit("expected an Apache Kafka, found none: set KAFKA_HOME, or run `alphaloop kafka install`")
    ours = [OurWorker(num_slots) for num_slots in options.slots]
    peers, missing = _parallel_consumers(options.peers, home)
    contestants: list[Contestant] = [*ours, *peers, Loop(is_recording=False), Loop(is_recording=True)]
    folder = Path(tempfile.mkdtemp(prefix="pipeline-", dir=options.data_dir))
    folder.chmod(0o755)
    log = Path(tempfile.gettempdir()) / f"{folder.name}.log"
    found = Findings(options.num, conditions(folder), missing, {one.name: Entry() for one in contestants})
    with running_servers(home, folder) as servers:
        found.conditions |= servers.durability()
        track, rng = Track(servers, options.num, log), random.Random(options.seed)
        console.print("the naive loop once, not counted: it warms broker and database up")
        track.run(contestants[-1], Entry())
        for number in range(options.rounds):
            console.print(f"round {number + 1} of {options.rounds}; what contestants say: {log}")
            for contestant in rng.sample(contestants, len(contestants)):
                track.run(contestant, found.entries[contestant.name])
        rates = {name: entry.jobs_per_s for name, entry in found.entries.items()}
        found.ratios = ratios(rates, [one.name for one in ours], [peer.name for peer in peers])
        for one in ours:
            sampled = Entry()
            track.run(OurWorker(one.num_slots, is_sampled=True), sampled)
            found.sampled[one.name] = sampled.own[0]["sampled"]
        if options.lone:
            track.run_alone(options.slots[0], options.lone, found)
    print_findings(console, found, num_functions=options.functions)
    print(json.dumps(found.as_json()))


def _parallel_consumers(folder: Path, home: Path) -> tuple[Sequence[ParallelConsumerPeer], list[str]]:
    try:
        peer = ParallelConsumer.find(folder, home)
    except MissingPeer as error:
        console.print(f"[yellow]goes on without the Parallel Consumer:[/] {error}")
        return [], [f"Parallel Consumer: {error}"]
    return [ParallelConsumerPeer(peer, num_at_once) for num_at_once in AT_ONCE], []


def _children_cpu_s() -> float:
    """Processor seconds of all contestants that have ended, their start included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, help="folder with PCBench.java and libs/")
    parser.add_argument("--num", type=int, default=20_000, help="jobs a run")
    parser.add_argument("--rounds", type=int, default=3, help="every contestant runs once a round")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 256], help="of our worker; 8, 64, 256 are usual")
    parser.add_argument(
        "--lone", type=int, default=200, help="jobs sent one at a time, with the first of --slots; 0: none"
    )
    parser.add_argument("--functions", type=int, default=0, help="functions shown of the sampled runs")
    parser.add_argument("--data-dir", type=Path, default=None, help="where servers keep data; unset: temporary files")
    parser.add_argument("--seed", type=int, default=1, help="of the contestants' order")
    return parser.parse_args()


if __name__ == "__main__":
    main()
