"""What the demo shows, rendered for a terminal of 100 columns."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from alphaloop.cli.outcomes import Refusal
from alphaloop.deciding.policy import Reason
from alphaloop.demo.display import TrafficProgress, final_table
from alphaloop.demo.prompts import TASKS
from alphaloop.messages import DecodingReport, Mode, Result, Status, Timings, Usage


def rendered(what: Any) -> list[str]:
    screen = Console(file=io.StringIO(), width=100)
    screen.print(what)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def result(job_id: str, mode: Mode, tokens: int = 48, status: Status = Status.SUCCEEDED) -> Result:
    return Result(
        job_id=job_id,
        status=status,
        task="code",
        attempt=1,
        recorded_at=datetime.now(UTC),
        usage=Usage(prompt_tokens=9, completion_tokens=tokens, total_tokens=9 + tokens),
        timings=Timings(queue_s=0.0, wall_s=2.0, device_s=0.5),
        decoding=DecodingReport(
            mode=mode,
            target_revision="t",
            engine="e",
            num_draft_tokens=0,
            reason="faster",
            rounds=tokens,
            num_empty_rounds=tokens,
            batch_size=1,
        ),
    )


def test_progress_counts_what_came_back() -> None:
    progress = TrafficProgress.of({"code": 3, "legal": 2})
    progress.add("code", result("a", Mode.SPECULATIVE))
    progress.add("code", result("b", Mode.VANILLA))
    progress.add("legal", Refusal("c", "unknown_task", "no such task"))
    assert (progress.done, progress.failed) == (3, 1)
    code, legal = (line.split() for line in rendered(progress)[1:3])
    assert code[:2] == ["code", "2/3"]
    assert code[-3:] == ["1", "96", "96.0"]  # speculative jobs, tokens, tokens a device second
    assert legal[:2] == ["legal", "1/2"]
    assert legal[-3:] == ["0", "0", "-"]


def line(task: str, **over: Any) -> dict[str, Any]:
    estimate = {"mean": 0.712, "low": 0.634, "high": 0.778}
    return {
        "task": task,
        "num_jobs": 100,
        "mode": "speculative",
        "drafter": "lookup",
        "num_draft_tokens": 8,
        "reason": max((reason.value for reason in Reason), key=len),
        "alpha_1": estimate,
        "alpha": estimate,
        "measured": {"speedup": {"mean": 1.423, "low": 1.314, "high": 1.541}, "verdict": "faster"},
        **over,
    }


def test_the_table_fits_and_names_every_task() -> None:
    lines = rendered(final_table([line(task) for task in TASKS] + [line("sql")], dict.fromkeys(TASKS, 8)))
    assert len(lines) == 1 + len(TASKS)  # a header, no folded row, and no task that was not sent
    assert lines[1].split()[:6] == ["code", "100", "lookup", "8", ".71", "[.63"]


def test_a_task_without_evidence_shows_dashes() -> None:
    shown = rendered(
        final_table(
            [line("code", mode="vanilla", num_draft_tokens=0, alpha_1=None, alpha=None, measured=None)], {"code": 8}
        )
    )
    assert shown[1].split()[:7] == ["code", "100", "vanilla", "-", "-", "-", "-"]


def test_a_speed_up_is_shown_once_there_is_a_verdict() -> None:
    thin = {"speedup": None, "verdict": "no_verdict_yet"}
    wide = {"speedup": {"mean": 1.1, "low": 0.8, "high": 1.5}, "verdict": "no_verdict_yet"}
    lines = [line("code"), line("sql", measured=thin), line("math", measured=wide)]
    code, sql, math = rendered(final_table(lines, dict.fromkeys(("code", "sql", "math"), 8)))[1:4]
    assert "1.42 [1.31 1.54]" in code
    assert "no verdict yet" in sql
    assert "no verdict yet" in math
