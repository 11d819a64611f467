"""What the demo shows, rendered for a terminal of 80 columns."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from alphaloop.cli.demo import TrafficProgress, final_table
from alphaloop.deciding.policy import Reason
from alphaloop.demo_prompts import TASKS
from alphaloop.messages import DecodingReport, Mode, Result, Status, Timings, Usage
from alphaloop.outcomes.reading import RefusedJob


def rendered(what: Any, width: int = 80) -> list[str]:
    screen = Console(file=io.StringIO(), width=width)
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
    progress.add("legal", RefusedJob("c", "unknown_task", "no such task"))
    assert (progress.done, progress.failed) == (3, 1)
    code, legal = (line.split() for line in rendered(progress)[1:3])
    assert code[:2] == ["code", "2/3"]
    assert code[-2:] == ["96", "96.0"]  # tokens, tokens a device second
    assert legal[:2] == ["legal", "1/2"]
    assert legal[-2:] == ["0", "-"]


def measured(verdict: str, *bounds: float) -> dict[str, Any]:
    return {
        "speedup": dict(zip(("mean", "low", "high"), bounds, strict=True)) if bounds else None,
        "drafter": "lookup",
        "verdict": verdict,
        "min_num_draft_tokens": 3,
        "max_num_draft_tokens": 12,
        "mean_running": 4.0,
    }


def line(task: str, **over: Any) -> dict[str, Any]:
    estimate = {"mean": 0.712, "low": 0.634, "high": 0.778}
    return {
        "task": task,
        "num_jobs": 100,
        "mode": "speculative",
        "drafter": "lookup",
        "num_draft_tokens": 8,
        "explanation": "",
        "next_running": 4,
        "decoded": {
            "num_jobs": 96,
            "by_load": [
                {"least_running": 1, "most_running": 2, "num_rounds": 900, "num_drafted_rounds": 855},
                {"least_running": 3, "most_running": 4, "num_rounds": 100, "num_drafted_rounds": 5},
            ],
            "drafters": ["lookup"],
            "num_draft_tokens": [3, 8],
            "running": 4,
            "sampling_bucket": "greedy",
        },
        "reason": max((reason.value for reason in Reason), key=len),
        "alpha_1": estimate,
        "alpha": estimate,
        "alpha_num_draft_tokens": [3, 8],
        "acceptance_from": "traffic",
        "measured": measured("faster", 1.423, 1.314, 1.541),
        **over,
    }


def test_the_table_fits_and_names_every_task() -> None:
    lines = rendered(final_table([line(task) for task in TASKS] + [line("sql")], dict.fromkeys(TASKS, 8)))
    assert len(lines) <= 2 + 5 * len(TASKS)  # at most five lines a task, and no task that was not sent
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if not line.startswith(" ")][-len(TASKS) :] == list(TASKS)
    first = next(line for line in lines if line.startswith(f"{TASKS[0]} "))
    assert first.split()[:5] == [TASKS[0], "100", "86%", "3-8", "0.71"]


def test_a_task_without_evidence_shows_dashes() -> None:
    shown = rendered(
        final_table(
            [line("code", mode=None, decoded=None, num_draft_tokens=0, alpha_1=None, alpha=None, measured=None)],
            {"code": 8},
        )
    )
    assert shown[-1].split() == ["code", "100", "-", "-", "-", "-", "-"]


def test_a_speed_up_is_shown_once_there_is_a_verdict() -> None:
    thin, wide = measured("no_verdict_yet"), measured("no_verdict_yet", 1.1, 0.8, 1.5)
    lines = [line("code"), line("sql", measured=thin), line("math", measured=wide)]
    shown = " ".join(" ".join(rendered(final_table(lines, dict.fromkeys(("code", "sql", "math"), 8)), 200)).split())
    assert shown.count("1.42 [1.31 1.54]") == 1
    assert "lookup, k 3-12, 4.0 running" in shown
    assert shown.count("no verdict yet") == 2


def test_a_table_never_says_faster_beside_a_speed_up_that_is_slower() -> None:
    slower = line("code", reason="faster", measured=measured("slower", 0.8, 0.7, 0.9))
    unknown = line("sql", reason="faster", measured=None)
    faster = line("math", reason="faster")
    found = rendered(final_table([slower, unknown, faster], dict.fromkeys(("code", "sql", "math"), 8)))
    code, sql, math = " ".join(" ".join(found).split()).split("100 86%")[1:]
    assert "expected" in code
    assert "slower" in code
    assert "expected faster" in sql
    assert "faster" in math
    assert "expected" not in math
