"""The engines of a replay: their drafters, their costs, and their evidence as the replay goes through the days."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from alphaloop.acceptance import EvidenceKey
from alphaloop.cli.replaying.result import Replayed, Window
from alphaloop.cost import CostTable
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.hindsight import Case, Hindsight, Tally
from alphaloop.deciding.replay import EngineName, PastJob, Replay, Rules, is_free
from alphaloop.explaining.explanation import serving
from alphaloop.settings import Settings
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.past import PastStore


def rules_of(settings: Settings) -> Rules:
    """The settings that decisions depend on."""
    return Rules(settings.policy.limits(), {name: task.rules() for name, task in settings.tasks.items()})


class ReplayedEngines:
    """The engines that history and the cost store know, and their evidence."""

    def __init__(
        self, database: Database, was: Settings, would: Settings, rules: Rules, window: Window, seed: int
    ) -> None:
        self._registry, self._store = DraftRegistry(database), CostStore(database)
        self._rules_before = rules_of(was)
        self._was, self._would, self._rules, self._window, self._seed = was, would, rules, window, seed
        self._past = PastStore(database)
        # Runs do not record their host, so the host that was calibrated last stands for all hosts of a device.
        self._hosts = {
            EngineName(e.device, e.engine, e.target_revision): e.host for e in CostStore(database).measured()[::-1]
        }
        self._replays: dict[EngineName, Replay] = {}
        self._snapshots: dict[tuple[str, str], tuple[EvidenceSnapshot, EvidenceSnapshot]] = {}
        self._hindsights: dict[tuple[str, str], Hindsight] = {}
        self._costs: dict[EngineName, tuple[Sequence[DrafterState], CostTable]] = {}
        self._day_ends = window.since

    @property
    def num_batches(self) -> int:
        """The number of batches decided."""
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
            deciding, _ = self._snapshot_pair(name.target_revision, name.engine)
            _, costs = self._measured(name)
            replay = Replay(name, deciding, costs, self._rules, was=rules_of(self._was))
            self._serve(name, replay)
            self._replays[name] = replay
        return self._replays[name]

    def add(self, jobs: Iterable[tuple[EvidenceKey, EvidenceSums]]) -> None:
        """Count jobs that ended together, under engines that are replayed."""
        by_engine: dict[tuple[str, str], list[tuple[EvidenceKey, EvidenceSums]]] = {}
        for key, evidence in jobs:
            by_engine.setdefault((key.target_revision, key.engine), []).append((key, evidence))
        known = {(name.target_revision, name.engine) for name in self._hosts}
        for name, its in by_engine.items():
            if name in known:
                for snapshot in dict.fromkeys(self._snapshot_pair(*name)):
                    snapshot.add(its)

    def scored(self, key: EvidenceKey) -> None:
        """A drafter was scored on texts that others decoded."""
        for engine, replay in self._replays.items():
            if (engine.target_revision, engine.engine) == (key.target_revision, key.engine):
                replay.scored(key)

    def compare(self, cases: dict[EngineName, dict[Case, Tally]], at: datetime, found: Replayed) -> None:
        """Add a day's cases with the evidence at its end."""
        for name, its in cases.items():
            subject = name.target_revision, name.engine
            if subject not in self._hindsights:
                _, inferred = self._snapshot_pair(*subject)
                self._hindsights[subject] = Hindsight(inferred, self._was.policy.limits(), self._seed)
            drafters, costs = self._measured(name)
            left = self._hindsights[subject].compare(its, drafters, costs, at, found.tasks)
            found.left_out["no cost was measured of how they were, or would have been, decoded"] += left

    def is_known(self, job: PastJob) -> bool:
        """Whether costs were measured of the job's drafter."""
        drafters, _ = self._measured(job.engine)
        mine = job.key.drafter, job.key.draft_revision
        return not job.key.drafter or mine in {(drafter.name, drafter.revision) for drafter in drafters}

    def is_free(self, job: PastJob) -> bool:
        """Whether rules had a say in how it was decoded."""
        return is_free(job, self._rules_before)

    def _snapshot_pair(self, target_revision: str, engine: str) -> tuple[EvidenceSnapshot, EvidenceSnapshot]:
        """For deciding, with the half-life of the replayed settings, and for hindsight, with that of today's."""
        subject = target_revision, engine
        if subject not in self._snapshots:
            halves = [timedelta(days=s.worker.history_half_life_days) for s in (self._would, self._was)]
            made = [
                EvidenceSnapshot(
                    half, self._past.evidence_by_key(*subject, self._window.since, half, task=self._window.task)
                )
                for half in dict.fromkeys(halves)
            ]
            self._snapshots[subject] = made[0], made[-1]
        return self._snapshots[subject]

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
        return serving(self._registry, settings, name.target_revision, at)
