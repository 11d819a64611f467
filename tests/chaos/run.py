"""A whole run: servers up, the parts played, the ledger read and judged."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tests.chaos.collecting import chunks_of, letters_of, num_in_outbox, num_measured, read_rows
from tests.chaos.ledger import Ledger, Promise, Violation
from tests.chaos.log_search import leaks, num_bytes
from tests.chaos.oracle import judge, num_copies
from tests.chaos.part import Part, Say, play
from tests.chaos.phases import PhaseReport
from tests.chaos.plan import Plan, sending_s
from tests.chaos.reading import TopicReader
from tests.chaos.report import RunReport
from tests.chaos.setting_up import (
    GROUP,
    PLANTED_SECRET,
    PLANTED_URL_SECRET,
    null_fleet,
    real_fleet,
    running_servers,
    schedulers,
)
from tests.chaos.watcher import Watcher
from tests.chaos.work import PROMPT_MARK, TEXT_MARK, PlannedJob, null_jobs, real_jobs, undisturbed_texts

#: Resident memory that a process may need, by the beginning of its name.
MAX_BYTES: Final = {"null": 400 << 20, "real": 3 << 30, "scheduler": 400 << 20}


def run(plan: Plan, kafka_home: Path, folder: Path, say: Say) -> RunReport:
    """Carry out a plan in `folder`, which is left as it is: logs, and the servers' data."""
    size, rng, began = plan.size, random.Random(plan.seed), time.monotonic()
    load_before, jobs = os.getloadavg()[0], list[PlannedJob]()
    if size.num_real_jobs:
        say("decoding the real engine's prompts undisturbed")
        jobs += real_jobs(size.num_real_jobs, undisturbed_texts())
    with ExitStack() as stack:
        say(f"seed {plan.seed}; starting {size.num_brokers} brokers and Postgres")
        servers = stack.enter_context(running_servers(size, kafka_home, folder))
        watcher = Watcher(servers.brokers.addresses, [GROUP, f"{GROUP}-control"], servers.database_url)
        watcher.start()
        stack.callback(watcher.close)
        measuring = schedulers(size, folder, servers)
        stack.callback(measuring.close)
        measuring.start()
        watcher.fleets.append(measuring)
        played = []
        if jobs:
            real = Part(real_fleet(size, folder, servers), jobs, plan.real)
            played.append(play(real, size, servers, watcher, rng, say))
        nulls = list(null_jobs(size.num_null_jobs, size.planted, rng=rng, sending_s=sending_s(plan.null)))
        null = Part(null_fleet(size, folder, servers), nulls, plan.null)
        played.append(play(null, size, servers, watcher, rng, say))
        jobs = [*jobs, *nulls]
        exit_codes = measuring.stop()
        load_after = os.getloadavg()[0]
        say("reading the ledger")
        forbidden = {
            "a prompt": PROMPT_MARK,
            "a text": TEXT_MARK,
            "the planted secret": PLANTED_SECRET,
            "the planted secret of the URL": PLANTED_URL_SECRET,
            "the database's password": urlsplit(servers.database_url).password or "",
        }
        reader = TopicReader(servers.brokers.addresses, watcher.gone_ids)
        stack.callback(reader.close)
        members = [(f"{fleet.name}-{one.number}", one) for fleet in watcher.fleets for one in fleet.members]
        ledger = Ledger(
            rows=read_rows(servers.database_url),
            results=[*(record for one in played for record in one.earlier_results), *reader.results()],
            letters=letters_of(reader),
            chunks=chunks_of(reader),
            commits=list(watcher.commits),
            refused={place: key for one in played for place, key in one.refused.items()},
            may_be_gone={place for one in played for place in one.may_be_gone},
            lag=reader.lag(GROUP),
            num_in_outbox=num_in_outbox(servers.database_url),
            peak_bytes={name: one.peak_bytes for name, one in members},
            exit_codes=exit_codes | {name: code for one in played for name, code in one.exit_codes.items()},
            leaks=leaks(folder / "logs", forbidden),
        )
        violations = judge(jobs, ledger, max_bytes=MAX_BYTES)
        return RunReport(
            seed=plan.seed,
            size=size,
            seconds=time.monotonic() - began,
            phases=tuple(
                _judged(*one, violations) for part in played for one in zip(part.phases, part.sent, strict=True)
            ),
            violations=tuple(violations),
            has_small_disk=servers.disk is not None,
            settled_s=tuple(one.settled_s for one in played),
            num_jobs=len(jobs),
            num_rows=len(ledger.rows),
            num_results=len(ledger.results),
            num_repeated_results=num_copies(ledger.results),
            num_asked_again=sum(one.num_asked_again for one in played),
            num_letters=len(ledger.letters),
            num_by_status=dict(Counter(row.status for row in ledger.rows.values())),
            num_failures=sum(row.num_failures for row in ledger.rows.values()),
            num_chunks=len(ledger.chunks),
            num_ended_streams=len({chunk.job_id for chunk in ledger.chunks if chunk.is_final}),
            num_commits=len(ledger.commits),
            num_starts=sum(
                one.num_starts for fleet in watcher.fleets if fleet is not measuring for one in fleet.members
            ),
            num_measured=num_measured(servers.database_url),
            num_cut_connections=servers.proxy.num_cuts,
            peak_bytes=dict(ledger.peak_bytes),
            num_log_bytes=num_bytes(folder / "logs"),
            load=(load_before, load_after),
        )


def _judged(phase: PhaseReport, sent: Collection[str], violations: Iterable[Violation]) -> PhaseReport:
    """The phase, with what came of the jobs that were sent in it."""
    broken = Counter((one.promise, one.job_id) for one in violations if one.job_id in sent)
    num_jobs = Counter(promise for promise, _ in broken)
    return replace(phase, num_lost=num_jobs[Promise.NOTHING_LOST], num_twice=num_jobs[Promise.ONE_OUTCOME])
