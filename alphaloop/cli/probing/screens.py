"""What `alphaloop probes` shows: never the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from alphaloop.cli.screen import FittedTable, table
from alphaloop.probe_plan import Measurement, ProbePlan
from alphaloop.probes import ProbeSet
from alphaloop.store.probes import ProbeSetVersion


def version_as_json(version: ProbeSetVersion) -> dict[str, Any]:
    """One version for machines."""
    return {
        "task": version.task,
        "version": version.version,
        "in_use": version.is_active,
        "num_prompts": version.num_prompts,
        "num_draft_tokens": version.num_draft_tokens,
        "source": version.source.value,
        "created_at": version.created_at.isoformat(),
    }


def versions_table(versions: Sequence[ProbeSetVersion]) -> FittedTable:
    """All versions."""
    shown = table("task", "version", "in use", "prompts", "k", "source", "registered", right=["prompts", "k"])
    for one in versions:
        in_use, registered = "yes" if one.is_active else "", f"{one.created_at:%Y-%m-%d %H:%M}"
        shown.add_row(
            one.task, one.version, in_use, str(one.num_prompts), str(one.num_draft_tokens), one.source.value, registered
        )
    return shown


def prompt_lines(shown: ProbeSet, other: ProbeSet | None) -> list[dict[str, Any]]:
    """The prompts of a set; with `other`, whether that version has them too."""
    theirs = {prompt.prompt_id for prompt in other.prompts.values()} if other else set()
    return [
        {"position": position, "prompt_id": prompt.prompt_id, "num_chars": _num_chars(prompt.body)}
        | ({"is_shared": prompt.prompt_id in theirs} if other else {})
        for position, prompt in sorted(shown.prompts.items())
    ]


def prompts_table(shown: ProbeSet, lines: Sequence[Mapping[str, Any]]) -> FittedTable:
    """The prompts by id."""
    is_compared = any("is_shared" in line for line in lines)
    columns = ["position", "prompt", "characters", *(["in both"] if is_compared else [])]
    title = f"{shown.task} {shown.version}, k={shown.num_draft_tokens}, from {shown.source.value}"
    found = table(*columns, right=["position", "characters"], title=title)
    for line in lines:
        both = ["yes" if line["is_shared"] else "no"] if is_compared else []
        found.add_row(str(line["position"]), line["prompt_id"], str(line["num_chars"]), *both)
    return found


def difference(shown: ProbeSet, other: ProbeSet) -> str:
    """One sentence: what the versions have in common, and whether their runs can be compared."""
    ours = {prompt.prompt_id for prompt in shown.prompts.values()}
    theirs = {prompt.prompt_id for prompt in other.prompts.values()}
    told = f"{len(ours & theirs)} prompts in both, {len(ours - theirs)} only here, {len(theirs - ours)} only there"
    if shown.num_draft_tokens != other.num_draft_tokens:
        return f"{told}; not compared, because k is {shown.num_draft_tokens} here and {other.num_draft_tokens} there"
    return told


def plan_as_json(plan: ProbePlan) -> dict[str, Any]:
    """The plan for machines; times in seconds."""
    return {
        "budget_device_s": round(plan.budget_device_s, 3),
        "measurements": [_measurement_as_json(one) for one in plan.measurements],
    }


def plan_table(plan: ProbePlan) -> FittedTable:
    """The measurements in their order."""
    numbers = ["k", "decoded", "scored", "device s", "at stake s"]
    found = table("task", "drafter", "k", "why", *numbers[1:], "last measured", "sent", right=numbers)
    for one in plan.measurements:
        due = one.due
        found.add_row(
            due.task,
            due.drafter,
            str(due.num_draft_tokens),
            due.why.value,
            str(one.num_decoded),
            str(one.num_prompts - one.num_decoded),
            f"{one.device_s:.1f}",
            f"{due.at_stake_device_s:.1f}",
            f"{due.last_probed:%Y-%m-%d %H:%M}" if due.last_probed else "never",
            "yes" if one.is_sent else "waits",
        )
    return found


def plan_sentence(plan: ProbePlan) -> str:
    """What the next run sends, and what it may take."""
    if not plan.measurements:
        return "nothing is due: every task and drafter has fresh evidence"
    needed = sum(one.device_s for one in plan.measurements if one.is_sent)
    told = f"the next run sends {len(plan.chosen)} of {len(plan.measurements)} measurements"
    return f"{told}, {needed:.1f} of {plan.budget_device_s:.1f} device seconds"


def _measurement_as_json(one: Measurement) -> dict[str, Any]:
    due = one.due
    return {
        "task": due.task,
        "drafter": due.drafter,
        "num_draft_tokens": due.num_draft_tokens,
        "why": due.why.value,
        "num_prompts": one.num_prompts,
        "num_decoded": one.num_decoded,
        "device_s": round(one.device_s, 3),
        "at_stake_device_s": round(due.at_stake_device_s, 3),
        "last_probed": due.last_probed.isoformat() if due.last_probed else None,
        "is_sent": one.is_sent,
    }


def _num_chars(body: Mapping[str, Any]) -> int:
    asked = body.get("prompt")
    return len(asked) if isinstance(asked, str) else len(json.dumps(body.get("messages"), ensure_ascii=False))
