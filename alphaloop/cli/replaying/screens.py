"""A replay as text, in a window of 80 columns or more, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from alphaloop.cli.replaying.result import Replayed
from alphaloop.cli.screen import out, paragraph, table
from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.replay import Compared, total
from alphaloop.moments import shown

_MAX_WAYS: Final = 3
HONESTLY: Final = (
    '"measured" is the device time that the jobs took. The other two columns are computed in the same way, from the '
    "posteriors and the costs of each decision's snapshot, so only their difference counts. Its bounds include the "
    "doubt about α only. No job was decoded with the replayed settings: the evidence is that of the decoded jobs, "
    "exploration of the past costs the replay nothing, and a job keeps one setting, however many sequences run."
)


def show(found: Replayed, changed: Sequence[str]) -> None:
    """Print what would have been chosen, and what that would have cost."""
    everything = total(found.tasks.values())
    paragraph(
        f"{everything.num_jobs} jobs from {shown(found.window.since)} to {shown(found.window.until)}, "
        f"{found.num_recorded} decisions, taken again with {', '.join(changed) or 'the settings of today'}.",
        style="bold",
    )
    if found.num_given:
        paragraph(f"{found.num_given} more were probes, controls, or fixed by the job or by the state of the engine.")
    if found.num_recorded:
        paragraph(
            f"{found.num_reproduced} of {found.num_recorded} decisions come out as they were, with the settings of "
            "their time."
        )
    for why, number in found.left_out.items():
        if number:
            paragraph(f"{number} more are left out: {why}.")
    if not everything.num_jobs:
        return
    out().print()
    columns = ("jobs", "same", "measured", "as it was", "replayed", "device time [95 %]")
    made = table("ms/token", *columns, right=columns[:-1])
    for task, its in sorted(found.tasks.items()):
        made.add_row(task, *_cells(its))
    if len(found.tasks) > 1:
        made.add_row("all tasks", *_cells(everything), style="bold")
    out().print(made)
    out().print()
    for task, its in sorted(found.tasks.items()):
        if named_changes := _ways(its):
            paragraph(f"{task}: {named_changes}.")
    reasons = ", ".join(f"{reason.replace('_', ' ')} {number}" for reason, number in found.reasons.most_common())
    paragraph(f"Reasons: {reasons} jobs.")
    gained = everything.was_s - everything.would_s
    verdict = f"saved {_time(gained)} of" if gained >= 0 else f"cost {_time(-gained)} more than"
    paragraph(
        f"It would have {verdict} {_time(everything.was_s)} of the device. "
        f"{_share(_num_changed_tokens(everything), everything.num_tokens)} of the tokens would change settings; "
        f"{_share(everything.num_untested_tokens, everything.num_tokens)} from drafts longer than any that were tested."
    )
    paragraph(HONESTLY, style="dim")


def document(found: Replayed, changed: Sequence[str]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "since": found.window.since,
        "until": found.window.until,
        "changed": list(changed),
        "num_recorded": found.num_recorded,
        "num_reproduced": found.num_reproduced,
        "num_given": found.num_given,
        "left_out": {why: number for why, number in found.left_out.items() if number},
        "reasons": dict(found.reasons),
        "tasks": {task: _compared(its) for task, its in sorted(found.tasks.items())},
        "total": _compared(total(found.tasks.values())),
        "modelled": HONESTLY,
    }


def _compared(its: Compared) -> dict[str, Any]:
    return {
        "num_jobs": its.num_jobs,
        "num_tokens": its.num_tokens,
        "num_same_jobs": its.num_same_jobs,
        "num_untested_tokens": its.num_untested_tokens,
        "measured_s": its.measured_s,
        "was_s": its.was_s,
        "would_s": its.would_s,
        "ratio": asdict(its.ratio) if its.ratio else None,
        "ways": [
            {"was": asdict(was), "would": asdict(would), "num_tokens": tokens}
            for (was, would), tokens in its.settings.most_common()
        ],
    }


def _cells(its: Compared) -> list[str]:
    per_token = [f"{1000 * seconds / its.num_tokens:.2f}" for seconds in (its.measured_s, its.was_s, its.would_s)]
    ratio = its.ratio
    gain = "-" if ratio is None else f"{ratio.mean - 1:+.1%} [{ratio.low - 1:+.1%} {ratio.high - 1:+.1%}]"
    return [str(its.num_jobs), f"{its.num_same_jobs / its.num_jobs:.0%}", *per_token, gain]


def _ways(its: Compared) -> str:
    other = Counter({ways: tokens for ways, tokens in its.settings.items() if ways[0] != ways[1]})
    named_changes = [
        f"{_named(was)} → {_named(would)} for {_share(tokens, its.num_tokens)} of the tokens"
        for (was, would), tokens in other.most_common(_MAX_WAYS)
    ]
    more = len(other) - _MAX_WAYS
    return "; ".join(named_changes) + (f"; {more} other changes" if more > 0 else "")


def _share(part: int, whole: int) -> str:
    return "under 1%" if 0 < part < 0.005 * whole else f"{part / whole:.0%}"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _num_changed_tokens(its: Compared) -> int:
    return sum(tokens for (was, would), tokens in its.settings.items() if was != would)


def _named(setting: DraftSetting) -> str:
    return f"{setting.drafter} k={setting.num_draft_tokens}" if setting.drafter else "vanilla"
