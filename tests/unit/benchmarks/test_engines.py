"""The benchmark of routing: its blocks, its servers' commands and settings, and the ratio that it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alphaloop.inside_vllm.drafting import LookupSettings
from benchmarks.engines.__main__ import (
    POLICIES,
    Block,
    PlayedBlock,
    by_task,
    summary,
)
from benchmarks.engines.mixed import Played, best_by_task, over
from benchmarks.engines.serve import vllm_lookup
from benchmarks.engines.totals import Sums, adds_up
from benchmarks.workers import JobResult, Sent


def played(num_tokens: int, seconds: float, drafter: str | None = None) -> Sent:
    result = JobResult.model_validate(
        {
            "job_id": "a",
            "status": "succeeded",
            "usage": {"completion_tokens": num_tokens},
            "timings": {"queue_s": 0.1, "wall_s": seconds - 0.25},
            "decoding": {"drafter": drafter},
        }
    )
    return Sent(seconds, (result,), (seconds,))


def block(number: int, task: str, seconds: dict[str, float]) -> PlayedBlock:
    return PlayedBlock(
        Block(number, task, 1, ("x",)),
        {policy: played(100, seconds[policy], "ngram" if policy == "speculative" else None) for policy in POLICIES},
    )


#: Code is faster with drafts and math without; routing is as good as the better one each time.
BLOCKS = [
    block(n, "code", {"vanilla": 4, "speculative": 2, "routed": 2})
    if n % 2
    else block(n, "math", {"vanilla": 2, "speculative": 3, "routed": 2})
    for n in range(12)
]


def test_the_ratio_is_to_the_static_policy_that_is_better_on_the_whole() -> None:
    found = summary(BLOCKS)
    assert found["tokens_per_s"] == {"vanilla": 33.33, "speculative": 40.0, "routed": 50.0}
    assert found["routed_over_better_static"] == 1.25
    assert 1.0 < found["low"] < 1.25 < found["high"]
    assert by_task(BLOCKS)["code"] == {"vanilla": 25.0, "speculative": 50.0, "routed": 50.0, "routes": {"vanilla": 6}}


def test_our_look_up_inside_vllm_is_started_with_what_loads_it() -> None:
    server = vllm_lookup("a", "python", "/m", 1, k=6, remember_tasks=["sql"])
    assert (server.drafter, server.num_draft_tokens) == ("lookup_memory", 6)
    root = Path(server.environment["PYTHONPATH"])
    for option in ("--scheduler-cls", "--worker-cls"):
        # What imports vLLM cannot be imported here: the file stands where the option says, and names the class.
        path, _, name = server.command[server.command.index(option) + 1].rpartition(".")
        assert f"class {name}(" in (root / path.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    config = json.loads(server.command[server.command.index("--additional-config") + 1])
    assert LookupSettings.read(config) == LookupSettings(remember_tasks=("sql",))


@pytest.mark.parametrize(
    ("recorded", "num_cut", "is_same"),
    [
        (Sums(100, 30, 90, (20, 10, 5)), 0, True),
        (Sums(100, 30, 86, (20, 9, 3)), 2, True),
        (Sums(100, 30, 86, (20, 9, 3)), 1, False),
        (Sums(99, 30, 90, (20, 10, 5)), 9, False),
        (Sums(100, 29, 90, (20, 10, 5)), 9, False),
        (Sums(100, 30, 90, (19, 10, 5)), 9, False),
        (Sums(100, 30, 90, (20, 11, 5)), 9, False),
    ],
)
def test_sums_are_the_servers_but_for_what_the_end_of_a_text_cut(recorded: Sums, num_cut: int, is_same: bool) -> None:
    assert adds_up(Sums(100, 30, 90, (20, 10, 5)), recorded, num_cut) is is_same


def a_round(seconds: float, **per_token_ms: float) -> Played:
    """A round of 100 tokens."""
    return Played(seconds, 100, {task: ms / 1000 for task, ms in per_token_ms.items()})


STATIC = {
    0: [a_round(4, code=40, chat=40, sql=40), a_round(4, code=41, chat=39, sql=40)],
    2: [a_round(3, code=20, chat=39, sql=44), a_round(3, code=22, chat=38, sql=90)],
    4: [a_round(5, code=30, chat=60, sql=39), a_round(5, code=30, chat=60, sql=60)],
}


def test_the_ceiling_has_each_task_its_own_fastest_length() -> None:
    assert best_by_task(STATIC, least_gain=1.0) == {"chat": 2, "code": 2, "sql": 0}
    assert best_by_task(STATIC, least_gain=1.05) == {"chat": 0, "code": 2, "sql": 0}


def test_a_contestant_over_another_is_the_ratio_of_their_whole_times() -> None:
    rounds = [{"ours": a_round(1), "theirs": a_round(2)}, {"ours": a_round(3), "theirs": a_round(3)}]
    found = over("ours", "theirs", rounds)
    assert found["ratio"] == 1.25
    assert found["low"] == 1.0
    assert found["high"] == 2.0
