"""Which drafts leave the decision because their target left them behind, and which come back.

The status of a draft holds for all its tasks, so it is judged over the probes of all of them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alphaloop.acceptance import Interval
from alphaloop.store.drafts import DraftStatus
from scheduler.causes import Judged
from scheduler.probe_history import PromptPair, Step, alpha_change, differences, shared_prompts

#: Drafter, draft revision, target revision.
Draft = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class StatusChange:
    """A draft revision that becomes stale or active."""

    drafter: str
    draft_revision: str
    target_revision: str
    status: DraftStatus
    reason: str


def status_changes(judged: Iterable[Judged], statuses: Mapping[Draft, DraftStatus], drop: float) -> list[StatusChange]:
    """Drafts whose α_1 fell by more than `drop` when they or their target were new, and those that recovered.

    A draft comes back when the interval excludes that so much of the fall is left. A fault or another engine makes no
    draft stale. Only active and stale change into each other here.
    """
    pairs: dict[Draft, dict[str, list[PromptPair]]] = {}
    for one in judged:
        for step in one.all_steps:
            if _is_new_match(step):
                setup = step.newest.setup
                draft = one.subject.drafter, setup.draft_revision, setup.target_revision
                pairs.setdefault(draft, {})[one.subject.task] = shared_prompts(step.before, step.newest)
    changes = []
    for draft, by_task in sorted(pairs.items()):
        change = alpha_change([pair for found in by_task.values() for pair in found])
        status = statuses.get(draft)
        if change is None:
            continue
        if status is DraftStatus.ACTIVE and change.mean < -drop and change.high < 0:
            changes.append(StatusChange(*draft, DraftStatus.STALE, _reason("fell by", change, by_task)))
        elif status is DraftStatus.STALE and change.low >= -drop:
            changes.append(StatusChange(*draft, DraftStatus.ACTIVE, _reason("is back within", change, by_task)))
    return changes


def _is_new_match(step: Step) -> bool:
    """Whether the newest measurement is of the draft and target that this step brought together."""
    newest = step.newest.setup
    after = step.across.after
    return (after.draft_revision, after.target_revision) == (newest.draft_revision, newest.target_revision) and (
        differences(step.across.before, after) in (("target",), ("draft",))
    )


def _reason(verb: str, change: Interval, by_task: Mapping[str, list[PromptPair]]) -> str:
    num_prompts = sum(len(found) for found in by_task.values())
    tasks = f"{len(by_task)} task{'s' if len(by_task) > 1 else ''}"
    bounds = f"({-change.high:.2f} to {-change.low:.2f})"
    return f"alpha_1 {verb} {max(0.0, -change.mean):.2f} {bounds} on {num_prompts} probe prompts of {tasks}"
