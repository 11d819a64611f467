"""Real runs of a database as a file that the simulator replays: a JSON line for every job of traffic.

    python -m benchmarks.policy.export --database "$ALPHALOOP_DATABASE_URL" --days 2 runs.jsonl
    python -m benchmarks.policy.export --simulated two_producers --jobs 60 benchmarks/policy/sample_runs.jsonl

The file has counts and no text. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import SecretStr
from sqlalchemy import Row, select

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.messages import Purpose
from alphaloop.store.database import Database
from alphaloop.tables import decode_runs, evidence_rows
from benchmarks.policy.play import BEGINNING
from benchmarks.policy.scenario import DrafterRun, RealRun, Scenario, read_scenarios, write_runs
from benchmarks.policy.slots import draw_jobs


def main() -> None:
    """Read runs, write them, print how many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--database", help="URL of a Postgres database of alphaloop")
    source.add_argument("--simulated", metavar="SCENARIO", help="a scenario with slots instead of a database")
    parser.add_argument("--days", type=float, default=1.0, help="how far back a database is read")
    parser.add_argument("--jobs", type=int, default=60, help="how many jobs are simulated")
    parser.add_argument("--task", help="only this task of a database")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.database is not None:
        with Database(SecretStr(options.database)) as database:
            since = datetime.now(UTC) - timedelta(days=options.days)
            num_runs = write_runs(options.file, runs_of(database, since, task=options.task))
    else:
        num_runs = write_runs(options.file, simulated_runs(read_scenarios().named(options.simulated), options.jobs))
    print(json.dumps({"file": str(options.file), "runs": num_runs}))


def runs_of(database: Database, since: datetime, *, task: str | None = None) -> Iterator[RealRun]:
    """Jobs of traffic decoded since then, in the order of decoding; those of fewer than two tokens are left out.

    A drafter's counts are those of its row in evidence_rows, and without one those of the run itself.
    """
    run, row = decode_runs.c, evidence_rows.c
    runs = select(decode_runs).where(run.decoded_at >= since, run.purpose == Purpose.TRAFFIC.value, run.num_tokens > 1)
    rows = select(evidence_rows).where(row.decoded_at >= since)
    if task is not None:
        runs, rows = runs.where(run.task == task), rows.where(row.task == task)
    with database.begin() as connection:
        drafters: dict[str, dict[str, DrafterRun]] = {}
        for found in connection.execute(rows.order_by(row.ledger_id)):
            drafters.setdefault(found.job_id, {})[found.drafter] = _drafter_run(found)
        for found in connection.execute(runs.order_by(run.decoded_at, run.ledger_id)):
            its = drafters.get(found.job_id, {})
            if found.drafter and found.drafter not in its:
                its = {**its, found.drafter: _drafter_run(found)}
            yield _real_run(found, its)


def simulated_runs(scenario: Scenario, num_jobs: int, *, seed: int = 0) -> Iterator[RealRun]:
    """Jobs of a scenario with slots, each as every drafter would be counted on it at its longest drafts."""
    for job in draw_jobs(scenario, num_jobs, np.random.default_rng([seed, 2, *scenario.name.encode()])):
        counted = {
            drafter: _counted(job.counts_at(drafter, most), most, job.needed)
            for drafter, most in scenario.draft_tokens.items()
        }
        yield RealRun(
            task=job.cell.task,
            segment=job.cell.segment,
            sampling_bucket=job.cell.sampling,
            prompt_bucket=job.cell.prompt,
            num_prompt_tokens=job.cell.prompt_tokens,
            num_tokens=job.needed,
            drafters=counted,
        )


def _real_run(found: Row[Any], drafters: Mapping[str, DrafterRun]) -> RealRun:
    return RealRun(
        task=found.task,
        segment=found.segment,
        sampling_bucket=found.sampling_bucket,
        prompt_bucket=found.prompt_bucket,
        num_prompt_tokens=found.num_prompt_tokens,
        num_tokens=found.num_tokens,
        drafters=dict(drafters),
    )


def _drafter_run(found: Row[Any]) -> DrafterRun:
    counts = AcceptanceCounts(
        found.rounds,
        found.num_empty_rounds,
        found.num_cropped,
        tuple(found.proposed),
        tuple(found.trials),
        tuple(found.accepts),
    )
    return _counted(counts, found.num_draft_tokens, found.rounds, tuple(found.chances))


def _counted(
    counts: AcceptanceCounts, num_draft_tokens: int, num_tokens: int, chances: tuple[int, ...] = ()
) -> DrafterRun:
    """Chances that are not stored are those of a draft length that never changed."""
    sums = EvidenceSums.of_job(counts, num_draft_tokens, BEGINNING, num_tokens, chances=chances or None)
    return DrafterRun(
        proposed=counts.proposed,
        trials=counts.trials,
        accepts=counts.accepts,
        chances=tuple(map(round, sums.chances)),
    )


if __name__ == "__main__":
    main()
