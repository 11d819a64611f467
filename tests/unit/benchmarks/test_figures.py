"""Figures of the pipeline and engine benchmarks: ratios, percentiles, bounds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from benchmarks.paired import paired_ratio, percentile
from benchmarks.pipeline.lone import LoneJob, overheads
from benchmarks.pipeline.report import (
    Overhead,
    jobs_per_s,
    ratios,
)
from benchmarks.workers import JobResult, Sent


@given(burst=st.integers(1, 300), gap_ms=st.integers(1, 500), num_bursts=st.integers(40, 80))
def test_bursts_win_nothing(burst: int, gap_ms: int, num_bursts: int) -> None:
    appended = [gap_ms * number for number in range(num_bursts) for _ in range(burst)]
    true_rate = 1000 * burst / gap_ms
    assert jobs_per_s(appended) == pytest.approx(true_rate, rel=1.5 / (0.9 * (num_bursts - 1)))


def test_a_slow_beginning_is_left_out() -> None:
    slow, fast = range(0, 100, 20), range(100, 1001)
    assert jobs_per_s([*slow, *fast]) == pytest.approx(1000, rel=0.01)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


def test_the_99th_of_200_is_the_third_from_the_top() -> None:
    overhead = Overhead.of([number / 1000 for number in range(1, 201)])
    assert (overhead.p50_ms, overhead.p99_ms, overhead.max_ms) == pytest.approx((100.0, 198.0, 200.0))


def test_ratios_are_by_round_and_against_the_best_peer_of_each() -> None:
    rates = {"ours": [20.0, 30.0, 40.0], "few": [10.0, 10.0, 10.0], "many": [5.0, 15.0, 20.0]}
    found = ratios(rates, ["ours"], ["few", "many"])
    assert found["ours / few"][0] == [2.0, 3.0, 4.0]
    assert found["ours / best parallel consumer"][0] == [2.0, 2.0, 2.0]
    assert found["ours / few"][1].median == 3.0
    assert ratios(rates, ["ours"], []) == {}


def test_a_lone_jobs_overheads_are_on_both_sides_of_its_step() -> None:
    sent = [LoneJob("a", 10.000, 10.050), LoneJob("b", 20.000, 20.030)]
    found = overheads(sent, {"a": (10.020, 10.021), "b": (20.010, 20.012), "warm-up": (1.0, 2.0)})
    assert found["arrival to first step"].max_ms == pytest.approx(20)
    assert found["last token to result"].max_ms == pytest.approx(29)
    assert found["last token to result"].num_jobs == 2


def test_a_machine_that_slows_down_leaves_the_ratio_alone(rng: random.Random) -> None:
    speeds = [rng.uniform(1, 100) for _ in range(9)]
    ratio = paired_ratio([1.5 * speed for speed in speeds], speeds)
    assert [ratio.median, ratio.low, ratio.high] == pytest.approx([1.5] * 3)
    assert ratio.num_pairs == 9


def test_bounds_hold_the_median_and_widen_with_the_noise(rng: random.Random) -> None:
    theirs = [1.0] * 25
    noise = [rng.uniform(-0.1, 0.1) for _ in theirs]
    quiet = paired_ratio([2 + error for error in noise], theirs)
    loud = paired_ratio([2 + 10 * error for error in noise], theirs)
    assert quiet.low < quiet.median < quiet.high
    assert loud.low < loud.median < loud.high
    assert loud.high - loud.low == pytest.approx(10 * (quiet.high - quiet.low))


def test_two_pairs_bound_nothing() -> None:
    ratio = paired_ratio([2.0, 3.0], [1.0, 1.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.5, None, None)
    assert str(ratio) == "2.50 [no bounds]"


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
