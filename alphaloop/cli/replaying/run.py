"""Reads history in order, day by day, decides its jobs again and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

from alphaloop.cli.replaying.engines import ReplayedEngines, rules_of
from alphaloop.cli.replaying.recorded import RecordedReplay
from alphaloop.cli.replaying.result import Replayed, Window
from alphaloop.deciding.hindsight import Case, Tally
from alphaloop.deciding.replay import EngineName, PastJob
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import DecodeRun
from alphaloop.store.past import PastStore, Recorded

#: Decisions are read from so long before the window, because its first jobs were decided before.
_LONGEST_DECODING: Final = timedelta(hours=1)


def replay_history(
    database: Database,
    was: Settings,
    would: Settings,
    window: Window,
    *,
    seed: int,
    tell: Callable[[int, int], None],
) -> Replayed:
    """Decide the window again under `would`; `tell` is called with days done and jobs read. Only reads.

    Memory grows with the number of evidence keys and incumbents, not with the number of jobs.
    """
    found, past, rules = Replayed(window), PastStore(database), rules_of(would)
    engines = ReplayedEngines(database, was, would, rules, window, seed)
    decided = RecordedReplay(database, was, would, rules, window.task)
    num_told = 0
    for number, (begin, end) in enumerate(window.days()):
        engines.begin_day(end)
        decided.read_until(begin - _LONGEST_DECODING, end)
        cases: dict[EngineName, dict[Case, Tally]] = {}
        for recorded in past.recorded(begin, end, task=window.task):
            _replay_recorded(recorded, decided, engines, cases, found)
            if (num_jobs := sum(found.reasons.values())) >= num_told + 500:
                num_told = num_jobs
                tell(number, num_jobs)
        engines.compare(cases, end, found)
        tell(number + 1, sum(found.reasons.values()))
        found.num_days = number + 1
    found.num_batches = engines.num_batches + decided.num_recorded
    found.num_recorded, found.num_reproduced = decided.num_recorded, decided.num_reproduced
    return found


def _replay_recorded(
    recorded: Recorded,
    decided: RecordedReplay,
    engines: ReplayedEngines,
    cases: dict[EngineName, dict[Case, Tally]],
    found: Replayed,
) -> None:
    """Decide the jobs that were recorded together, then count them as evidence.

    A job whose decision is not stored is decided by the evidence from before it was recorded.
    """
    batches: dict[object, list[PastJob]] = {}
    for job in map(_job, recorded.runs):
        name = job.decode_batch_id, job.engine, job.key.task, job.key.sampling_bucket
        batches.setdefault(name, []).append(job)
    for batch in batches.values():
        _replay_batch(batch, decided, engines, cases, found)
    engines.add(recorded.evidence)
    for key in recorded.scored:
        engines.scored(key)


def _replay_batch(
    jobs: Sequence[PastJob],
    decided: RecordedReplay,
    engines: ReplayedEngines,
    cases: dict[EngineName, dict[Case, Tally]],
    found: Replayed,
) -> None:
    replay = engines.replay(jobs[0].engine)
    if replay is None:
        found.left_out["an engine that was never measured"] += len(jobs)
        return
    known = [decided.decided(job) for job in jobs]
    others = iter(replay.decide([job for job, its in zip(jobs, known, strict=True) if its is None]))
    for job, recorded in zip(jobs, known, strict=True):
        decision = recorded or next(others)
        if decision is None or not engines.is_free(job):
            found.num_given += 1
            continue
        if not engines.is_known(job):
            found.left_out["a draft revision that is not the newest, or not configured"] += 1
            continue
        found.reasons[decision.reason] += 1
        wanted = replace(job.key, drafter="", draft_revision="")
        case = Case(wanted, job.batch_size, job.setting, decision.setting)
        tally = cases.setdefault(job.engine, {}).setdefault(case, Tally())
        tally.add(job.num_tokens, job.num_prompt_tokens, job.device_s)


def _job(run: DecodeRun) -> PastJob:
    return PastJob(
        run.key,
        run.device,
        run.purpose,
        run.num_draft_tokens,
        run.reason,
        run.num_prompt_tokens,
        run.num_tokens,
        run.batch_size,
        run.device_s,
        run.decoded_at,
        run.evidence,
        run.is_evidence,
        run.decode_batch_id,
    )
