"""Reads snapshots in order, day by day, decides them again and compares what their jobs cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alphaloop.cli.replaying.result import Replayed, Window
from alphaloop.deciding.decision import Decision
from alphaloop.deciding.replay import Compared, Decoded, Pricing, Replay, Rules, group_of, is_given
from alphaloop.deciding.snapshot import Snapshot
from alphaloop.messages import Purpose
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.snapshots import JobsAlike, SnapshotStore

_NO_COST = "no cost was known of how they were, or would have been, decoded"
_NO_SNAPSHOT = "no snapshot of their decision is stored"


def rules_of(was: Settings, would: Settings) -> Rules:
    """The settings to replay with; `was` are today's, which say what of the drafters was changed."""
    before, after = was.models.drafters, would.models.drafters
    longest = {
        name: after[name].max_draft_tokens
        for name in before.keys() & after.keys()
        if after[name].max_draft_tokens != before[name].max_draft_tokens
    }
    tasks = {name: task.rules() for name, task in would.tasks.items()}
    return Rules(would.policy.limits(), tasks, longest, frozenset(before.keys() - after.keys()))


def replay_history(
    database: Database, rules: Rules, window: Window, *, seed: int, tell: Callable[[int, int], None]
) -> Replayed:
    """Decide the window again under `rules`; `tell` is called with days done and jobs read. Only reads.

    Memory grows with the number of incumbents and with the decisions of a day, not with the number of jobs.
    """
    found, store, pricing = Replayed(window), SnapshotStore(database), Pricing(seed)
    replays: dict[str, Replay] = {}
    for number, (begin, end) in enumerate(window.days()):
        for stored, jobs in store.between(begin, end, task=window.task):
            past, facts = stored.snapshot, stored.facts
            found.num_recorded += 1
            found.num_reproduced += past.is_reproduced(past.decide(facts.limits))
            decisions = replays.setdefault(facts.owner, Replay(rules)).decide(past, facts)
            _compare(past, decisions, jobs, pricing, found)
            if found.num_recorded % 200 == 0:
                tell(number, sum(found.reasons.values()))
        found.left_out[_NO_SNAPSHOT] += store.num_without(begin, end, task=window.task)
        found.num_days = number + 1
        tell(number + 1, sum(found.reasons.values()))
    return found


def _compare(
    past: Snapshot, decisions: Sequence[Decision], jobs: Sequence[JobsAlike], pricing: Pricing, found: Replayed
) -> None:
    for its in jobs:
        number = group_of(past, its.segment, its.prompt_bucket)
        if its.purpose != Purpose.TRAFFIC or (number is not None and is_given(past, past.decisions[number])):
            found.num_given += its.num_jobs
            continue
        if number is None or not past.is_whole:
            found.left_out["their snapshot had no room for all drafters and groups of jobs"] += its.num_jobs
            continue
        decoded = Decoded(its.setting, its.num_jobs, its.num_tokens, its.num_prompt_tokens, its.device_s)
        compared = pricing.compare(past, past.groups[number], decoded, decisions[number].setting)
        if compared is None:
            found.left_out[_NO_COST] += its.num_jobs
            continue
        task = past.subject.task
        found.tasks[task] = found.tasks.get(task, Compared()) + compared
        found.reasons[decisions[number].reason] += its.num_jobs
