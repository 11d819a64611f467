from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.experiment.assign import Arm, RoundDesign, RoundSchedule
from alphaloop.experiment.observe import Phase, RoundFacts, Slice, TaskRound, Treatment

LOOKUP = Treatment("lookup", 4)
DESIGN = RoundDesign(control_share=0.05, num_control_rounds=8, num_washout_rounds=2, num_window_rounds=8)
START = datetime(2026, 1, 1, tzinfo=UTC)


def facts(
    index: int, tasks: Mapping[str, int], *, wall_s: float = 0.01, has_prompt: bool = False, tokens: int = 1
) -> RoundFacts:
    own = {task: TaskRound(num, num * tokens) for task, num in tasks.items()}
    return RoundFacts(START + timedelta(seconds=index), wall_s, sum(tasks.values()), 100.0, has_prompt, own)


def play(
    schedule: RoundSchedule, rounds: Iterator[tuple[Mapping[str, Treatment], RoundFacts]]
) -> tuple[list[Mapping[str, Arm]], list[Slice]]:
    """The arms of every round, and the slices."""
    arms, slices = [], []
    for running, one in rounds:
        arms.append(dict(schedule.next_round(running)))
        slices += schedule.observe(one)
    return arms, [*slices, *schedule.close()]


def steady(num_rounds: int, *tasks: str) -> Iterator[tuple[Mapping[str, Treatment], RoundFacts]]:
    return (({task: LOOKUP for task in tasks}, facts(i, dict.fromkeys(tasks, 2))) for i in range(num_rounds))


@given(
    seed=st.integers(0, 2**32),
    share=st.floats(0.03, 0.2),
    slower=st.floats(0.3, 3.0),
    others=st.integers(0, 6),
    prompts=st.floats(0.0, 0.4),
)
@settings(max_examples=10, deadline=None)
def test_the_share_of_control_is_the_one_asked_for(
    seed: int, share: float, slower: float, others: int, prompts: float
) -> None:
    design = RoundDesign(share, num_control_rounds=8, num_washout_rounds=2, num_window_rounds=8)
    rng = random.Random(seed)
    schedule = RoundSchedule(design, random.Random(seed))
    control_s = whole_s = block_s = largest_block_s = 0.0
    for i in range(3000):
        arm = schedule.next_round({"sql": LOOKUP})["sql"]
        is_charged = schedule.is_charged
        wall_s = rng.uniform(0.01, 0.02) * (slower if arm is None else 1.0)
        one = facts(i, {"sql": rng.randint(1, 4), "chat": others}, wall_s=wall_s, has_prompt=rng.random() < prompts)
        schedule.observe(one)
        block_s = (block_s + one.device_s("sql")) * is_charged
        largest_block_s = max(largest_block_s, block_s)
        control_s += one.device_s("sql") * is_charged
        whole_s += one.device_s("sql")
    # Whatever rounds take, the ledger is never further off than what it saves up for a block, or than a block took.
    saved_s = 1.5 * design.num_charged_rounds * 0.02
    assert abs(control_s - share * whole_s) <= max(largest_block_s, saved_s)


def test_a_block_is_a_sandwich_and_its_washouts_are_not_counted() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(1))
    stretches: list[tuple[Arm, int]] = []
    slices: list[Slice] = []
    for i in range(2000):
        arm = schedule.next_round({"sql": LOOKUP})["sql"]
        if stretches and stretches[-1][0] == arm:
            stretches[-1] = (arm, stretches[-1][1] + 1)
        else:
            stretches.append((arm, 1))
        slices += schedule.observe(facts(i, {"sql": 2}, tokens=1 if arm is None else 3))
    assert {num for arm, num in stretches if arm is None} == {8 + 2}  # the slice, and the washout before it
    blocks = defaultdict(dict)
    for one in slices:
        if one.phase is not Phase.BETWEEN:
            blocks[one.block_id][one.phase] = one
    assert len(blocks) > 3
    for block in blocks.values():
        before, control, after = (block[phase] for phase in (Phase.BEFORE, Phase.CONTROL, Phase.AFTER))
        assert [one.num_rounds for one in (before, control, after)] == [8, 8, 8]
        assert [one.num_sequence_rounds for one in (before, control, after)] == [16, 16, 16]
        # Rounds are a second apart here: two lie between a window and the slice on both sides.
        assert control.started_at - before.started_at == timedelta(seconds=8 + 2)
        assert after.started_at - control.started_at == timedelta(seconds=8 + 2)
        assert control.num_tokens == 16  # vanilla rounds alone
        assert before.num_tokens == after.num_tokens == 48


@given(seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_a_slow_first_round_does_not_put_the_first_block_off(seed: int) -> None:
    """The first round reads prompts: twenty times as long as the others, it says nothing of what a block takes."""
    schedule = RoundSchedule(DESIGN, random.Random(seed))
    for i in range(2000):
        if schedule.next_round({"sql": LOOKUP})["sql"] is None:
            break
        schedule.observe(facts(i, {"sql": 2}, wall_s=0.2 if i == 0 else 0.01))
    # Control takes 12 rounds of a block's time at most one and a half times, of which a round earns 1 / 19.
    mean = (0.2 + 15 * 0.01) / 16 / 0.01
    assert i <= 16 + 1.5 * mean * DESIGN.num_charged_rounds * 19 + DESIGN.num_window_rounds


def test_every_round_is_counted_once_or_is_a_washout() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(2))
    _, slices = play(schedule, steady(3000, "sql"))
    num_blocks = sum(one.phase is Phase.CONTROL for one in slices)
    unfinished = sum(one.phase is Phase.BEFORE for one in slices) - num_blocks
    assert unfinished == 0
    counted = sum(one.num_rounds for one in slices)
    assert 3000 - counted - num_blocks * 4 in range(29)  # a block that was not complete at the end is dropped


def test_all_tasks_that_speculate_switch_together() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(3))
    arms, slices = play(schedule, steady(3000, "sql", "code", "chat"))
    assert {sum(arm is None for arm in one.values()) for one in arms} == {0, 3}
    controls = [one for one in slices if one.phase is Phase.CONTROL]
    num_blocks = Counter(one.task for one in controls)
    assert num_blocks["sql"] == num_blocks["code"] == num_blocks["chat"] > 5
    assert len({one.block_id for one in controls}) == len(controls)  # each task has blocks of its own


def test_a_task_that_comes_in_a_control_slice_is_vanilla_too_and_not_counted() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(3))
    slices: list[Slice] = []
    num_joined, is_vanilla = 0, False
    for i in range(3000):
        running = {"sql": LOOKUP} | ({"chat": LOOKUP} if is_vanilla else {})
        arms = schedule.next_round(running)
        num_joined += is_vanilla and schedule.is_charged and arms["sql"] is None
        assert not is_vanilla or arms["chat"] == arms["sql"]
        is_vanilla = arms["sql"] is None
        slices += schedule.observe(facts(i, dict.fromkeys(running, 2)))
    assert num_joined > 20
    assert {one.task for one in slices if one.phase is Phase.CONTROL} == {"sql"}


def test_a_task_that_leaves_takes_nothing_from_the_others() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(3))
    slices: list[Slice] = []
    was_vanilla = False
    for i in range(3000):
        running = {"sql": LOOKUP} | ({} if was_vanilla else {"chat": LOOKUP})
        was_vanilla = schedule.next_round(running)["sql"] is None
        slices += schedule.observe(facts(i, dict.fromkeys(running, 2)))
    assert Counter(one.task for one in slices if one.phase is Phase.CONTROL).keys() == {"sql"}
    assert sum(one.phase is Phase.AFTER for one in slices) > 5


def test_control_begins_at_moments_that_cannot_be_foretold() -> None:
    gaps = []
    for seed in range(3):
        arms, _ = play(RoundSchedule(DESIGN, random.Random(seed)), steady(4000, "sql"))
        begins = [i for i in range(1, len(arms)) if arms[i]["sql"] is None and arms[i - 1]["sql"] is not None]
        gaps.append([after - before for before, after in pairwise(begins)])
    assert all(max(own) > 1.5 * min(own) for own in gaps)
    assert gaps[0] != gaps[1] != gaps[2]


def test_a_block_without_its_control_slice_leaves_nothing() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(4))
    slices: list[Slice] = []
    for i in range(3000):
        arm = schedule.next_round({"sql": LOOKUP})["sql"]
        # The task's sequences end in the middle of every control slice.
        slices += schedule.observe(facts(i, {"chat": 1} if arm is None and i % 3 == 0 else {"sql": 2}))
    assert {one.phase for one in slices} == {Phase.BETWEEN}


def test_a_complete_control_slice_is_kept_when_the_sequences_end_behind_it() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(5))
    slices: list[Slice] = []
    was_vanilla, i = False, 0
    while not any(one.phase is Phase.CONTROL for one in slices):
        is_gone = was_vanilla and schedule.next_round({"sql": LOOKUP})["sql"] is not None
        running = {} if is_gone else {"sql": LOOKUP}
        arm = schedule.next_round(running).get("sql")
        was_vanilla = arm is None
        slices += schedule.observe(facts(i, {} if is_gone else {"sql": 2}))
        i += 1
    assert [one.phase for one in slices if one.phase is not Phase.BETWEEN] == [Phase.BEFORE, Phase.CONTROL]


def test_the_draft_length_follows_the_policy_and_another_drafter_ends_the_block() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(6))
    wanted = {True: Treatment("lookup", 2), False: Treatment("lookup", 6)}
    slices: list[Slice] = []
    for i in range(3000):
        arm = schedule.next_round({"sql": wanted[i % 7 == 0]})["sql"]
        assert arm in (None, wanted[i % 7 == 0])
        slices += schedule.observe(facts(i, {"sql": 1}))
    by_block = defaultdict(set)
    for one in slices:
        if one.phase is not Phase.BETWEEN:
            by_block[one.block_id].add(one.treatment)
    assert len(by_block) > 5
    assert {len(treatments) for treatments in by_block.values()} == {1}  # that of the block's first round
    between = {one.treatment for one in slices if one.phase is Phase.BETWEEN}
    assert between == set(wanted.values())

    schedule = RoundSchedule(DESIGN, random.Random(6))
    alternating = [Treatment("lookup", 2), Treatment("draft", 2)]
    _, slices = play(schedule, (({"sql": alternating[i // 5 % 2]}, facts(i, {"sql": 1})) for i in range(2000)))
    assert all(one.phase is Phase.BETWEEN for one in slices)


def test_rounds_with_a_prompt_are_kept_apart() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(7))
    reads = [i % 4 == 0 for i in range(3000)]
    rounds = (
        ({"sql": LOOKUP}, facts(i, {"sql": 2}, wall_s=0.05 if reading else 0.01, has_prompt=reading))
        for i, reading in enumerate(reads)
    )
    _, slices = play(schedule, rounds)
    controls = [one for one in slices if one.phase is Phase.CONTROL]
    assert controls
    for one in controls:
        assert one.num_rounds == 8
        assert one.sequence_s == pytest.approx(8 * 2 * 0.01)
        assert one.num_prompt_rounds in (2, 3)
        assert one.prompt_sequence_s == pytest.approx(one.num_prompt_rounds * 2 * 0.05)


def test_a_task_whose_every_round_reads_a_prompt_is_not_held_in_control() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(8))
    arms, slices = play(schedule, (({"sql": LOOKUP}, facts(i, {"sql": 2}, has_prompt=True)) for i in range(2000)))
    assert {one.phase for one in slices} == {Phase.BETWEEN}
    assert all(one["sql"] is not None for one in arms)


def test_no_share_means_no_trials() -> None:
    design = RoundDesign(control_share=0.0)
    arms, _ = play(RoundSchedule(design, random.Random(9)), steady(2000, "sql"))
    assert all(one["sql"] is not None for one in arms)


def test_slices_between_blocks_are_split_by_load() -> None:
    schedule = RoundSchedule(DESIGN, random.Random(10))
    rounds = (({"sql": LOOKUP}, facts(i, {"sql": 1 if i % 400 < 200 else 8})) for i in range(4000))
    _, slices = play(schedule, rounds)
    between = [one for one in slices if one.phase is Phase.BETWEEN]
    assert {one.stratum.running for one in between} == {0, 3}
    assert {one.mean_running for one in between} == {1.0, 8.0}
