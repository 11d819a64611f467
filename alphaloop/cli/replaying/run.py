"""Reads history in order, a day at a time, and has it decided again and compared."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, timedelta
from typing import Final

from alphaloop.acceptance import EvidenceKey
from alphaloop.cli.explaining.explanation import objective_of, serving
from alphaloop.cost import CostTable
from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.hindsight import Case, Compared, Hindsight, Tally
from alphaloop.deciding.replay import EngineName, PastJob, Replay, Rules, TaskRules
from alphaloop.settings import Settings
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import DecodeRun
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.engines import EngineStore
from alphaloop.store.past import PastStore

_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Window:
    """What is replayed: jobs decoded in [since, until), of one task or all."""

    since: datetime
    until: datetime
    task: str | None

    def days(self) -> Iterator[tuple[datetime, datetime]]:
        """Its parts by UTC day; each begins where the one before ended."""
        begin = self.since
        while begin < self.until:
            end = min(self.until, datetime.combine(begin.astimezone(UTC).date(), time(), UTC) + _DAY)
            yield begin, end
            begin = end


@dataclass(slots=True)
class Replayed:
    """What came of it."""

    window: Window
    tasks: dict[str, Compared] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)  #: jobs by the reason that they would have had
    num_batches: int = 0
    num_given: int = 0  #: probes, controls, and what jobs or circumstances had fixed
    left_out: Counter[str] = field(default_factory=Counter)  #: jobs by why nothing can be said of them
    num_days: int = 0


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

    What is held in memory grows with the number of keys and of kinds of batches, not with that of jobs.
    """
    found, past, rules = Replayed(window), PastStore(database), rules_of(would)
    engines = _Engines(database, was, would, rules, window, seed)
    for number, (begin, end) in enumerate(window.days()):
        engines.begin_day(end)
        cases: dict[EngineName, dict[Case, Tally]] = {}
        runs = past.runs(begin, end, task=window.task)
        shadows = list(past.shadows(begin, end, task=window.task))
        for _, key, evidence, run in heapq.merge(_events(runs), _scored(shadows), key=lambda event: event[0]):
            if run is None:
                engines.add(key, evidence, is_shadow=True)
                continue
            _replay_job(_job(run), engines, cases, found)
            if run.is_evidence:
                engines.add(key, evidence)
            if sum(found.reasons.values()) % 500 == 0:
                tell(number, sum(found.reasons.values()))
        engines.compare(cases, end, found)
        tell(number + 1, sum(found.reasons.values()))
        found.num_days = number + 1
    found.num_batches = engines.num_batches
    return found


def rules_of(settings: Settings) -> Rules:
    """What the settings say of decisions."""
    return Rules(
        settings.policy.limits(),
        {
            name: TaskRules(float(task.max_tokens), task.decoding, objective_of(task))
            for name, task in settings.tasks.items()
        },
    )


class _Engines:
    """The engines that history knows and costs are known of, and what is remembered under them."""

    def __init__(
        self, database: Database, was: Settings, would: Settings, rules: Rules, window: Window, seed: int
    ) -> None:
        self._registry, self._store = DraftRegistry(database), CostStore(database)
        self._was, self._would, self._rules, self._window, self._seed = was, would, rules, window, seed
        self._past = PastStore(database)
        # Runs do not say on which host they were decoded: the one that was calibrated last speaks for all of a device.
        self._hosts = {
            EngineName(e.device, e.engine, e.target_revision): e.host for e in EngineStore(database).measured()[::-1]
        }
        self._replays: dict[EngineName, Replay] = {}
        self._recollections: dict[tuple[str, str], tuple[EvidenceSnapshot, EvidenceSnapshot]] = {}
        self._hindsights: dict[tuple[str, str], Hindsight] = {}
        self._costs: dict[EngineName, tuple[Sequence[DrafterState], CostTable]] = {}
        self._day_ends = window.since

    @property
    def num_batches(self) -> int:
        """Batches decided."""
        return sum(replay.num_batches for replay in self._replays.values())

    def begin_day(self, ends: datetime) -> None:
        """Drafters serve from the day on which they were registered."""
        self._day_ends = ends
        for name, replay in self._replays.items():
            self._serve(name, replay)

    def replay(self, name: EngineName) -> Replay | None:
        """The engine's; None where its costs were never measured."""
        if name not in self._hosts:
            return None
        if name not in self._replays:
            deciding, _ = self._evidence_cache(name.target_revision, name.engine)
            _, costs = self._measured(name)
            replay = Replay(
                deciding, costs, self._rules, random.Random(f"{self._seed} {name}"), was=rules_of(self._was)
            )
            self._serve(name, replay)
            self._replays[name] = replay
        return self._replays[name]

    def add(self, key: EvidenceKey, evidence: EvidenceSums, *, is_shadow: bool = False) -> None:
        """Count what was seen, under engines that are replayed."""
        name = key.target_revision, key.engine
        if not any((known.target_revision, known.engine) == name for known in self._hosts):
            return
        deciding, inferred = self._evidence_cache(*name)
        deciding.add(key, evidence)
        if inferred is not deciding:
            inferred.add(key, evidence)
        if is_shadow:
            for engine, replay in self._replays.items():
                if (engine.target_revision, engine.engine) == name:
                    replay.seen(key)

    def compare(self, cases: dict[EngineName, dict[Case, Tally]], at: datetime, found: Replayed) -> None:
        """Add a day's cases as they are known at its end."""
        for name, its in cases.items():
            subject = name.target_revision, name.engine
            if subject not in self._hindsights:
                _, inferred = self._evidence_cache(*subject)
                self._hindsights[subject] = Hindsight(inferred, self._was.policy.limits(), self._seed)
            drafters, costs = self._measured(name)
            left = self._hindsights[subject].compare(its, drafters, costs, at, found.tasks)
            found.left_out["no cost was measured of how they were, or would have been, decoded"] += left

    def is_known(self, job: PastJob) -> bool:
        """Whether costs were measured of what it was decoded with."""
        drafters, _ = self._measured(job.engine)
        mine = job.key.drafter, job.key.draft_revision
        return not job.key.drafter or mine in {(drafter.name, drafter.revision) for drafter in drafters}

    def _evidence_cache(self, target_revision: str, engine: str) -> tuple[EvidenceSnapshot, EvidenceSnapshot]:
        """For deciding, as fast as the replayed settings forget, and for hindsight, as today's do."""
        subject = target_revision, engine
        if subject not in self._recollections:
            halves = [timedelta(days=s.worker.history_half_life_days) for s in (self._would, self._was)]
            made = [
                EvidenceSnapshot(
                    half, self._past.evidence_by_key(*subject, self._window.since, half, task=self._window.task)
                )
                for half in dict.fromkeys(halves)
            ]
            self._recollections[subject] = made[0], made[-1]
        return self._recollections[subject]

    def _measured(self, name: EngineName) -> tuple[Sequence[DrafterState], CostTable]:
        """The newest revision of every drafter of today's or the replayed settings, and their costs."""
        if name not in self._costs:
            drafters = {
                drafter.name: drafter
                for settings in (self._was, self._would)
                for drafter in self._serving(settings, name, self._window.until)
            }
            revisions = {drafter.name: drafter.revision for drafter in drafters.values()}
            costs = self._store.load(self._hosts[name], name.device, name.engine, name.target_revision, revisions)
            self._costs[name] = tuple(drafters.values()), costs
        return self._costs[name]

    def _serve(self, name: EngineName, replay: Replay) -> None:
        """Of the replayed settings, those whose newest revision was there by the end of the day."""
        newest = {(drafter.name, drafter.revision) for drafter in self._measured(name)[0]}
        there = self._serving(self._would, name, self._day_ends)
        replay.drafters = [drafter for drafter in there if (drafter.name, drafter.revision) in newest]

    def _serving(self, settings: Settings, name: EngineName, at: datetime) -> list[DrafterState]:
        """Without kin: hours do not hold what rounds of one showed of another, so each is tried for itself."""
        return [replace(one, shared_weights="") for one in serving(self._registry, settings, name.target_revision, at)]


def _replay_job(job: PastJob, engines: _Engines, cases: dict[EngineName, dict[Case, Tally]], found: Replayed) -> None:
    replay = engines.replay(job.engine)
    if replay is None:
        found.left_out["an engine that was never measured"] += 1
        return
    decision = replay.decide(job)
    if decision is None:
        found.num_given += 1
        return
    if not engines.is_known(job):
        found.left_out["a draft revision that is not the newest, or not configured"] += 1
        return
    found.reasons[decision.reason] += 1
    would = DraftSetting(decision.drafter, decision.num_draft_tokens)
    wanted = replace(job.key, drafter="", draft_revision="")
    case = Case(wanted, job.batch_size, job.choice, would)
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


_Event = tuple[datetime, EvidenceKey, EvidenceSums, DecodeRun | None]


def _events(runs: Iterator[DecodeRun]) -> Iterator[_Event]:
    for run in runs:
        yield run.decoded_at, run.key, run.evidence, run


def _scored(shadows: Iterable[tuple[EvidenceKey, EvidenceSums]]) -> Iterator[_Event]:
    for key, evidence in shadows:
        yield evidence.as_of, key, evidence, None
