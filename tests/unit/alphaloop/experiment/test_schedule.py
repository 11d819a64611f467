from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby, pairwise

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


Round = tuple[Mapping[str, Treatment], RoundFacts]


def play(round_of: Callable[[int, bool], Round], *, seed: int = 3) -> tuple[list[Mapping[str, Arm]], list[Slice]]:
    """The arms of 3,000 rounds, and the slices. A round may depend on whether sql was vanilla in the last one."""
    schedule = RoundSchedule(DESIGN, random.Random(seed))
    arms: list[Mapping[str, Arm]] = []
    slices: list[Slice] = []
    for i in range(3000):
        running, one = round_of(i, bool(arms) and arms[-1]["sql"] is None)
        arms.append(dict(schedule.next_round(running)))
        slices += schedule.observe(one)
    return arms, [*slices, *schedule.close()]


def steady(*tasks: str) -> Callable[[int, bool], Round]:
    """Two sequences of each, all the time."""
    return lambda i, _: (dict.fromkeys(tasks, LOOKUP), facts(i, dict.fromkeys(tasks, 2)))


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
    arms: list[Arm] = []
    slices: list[Slice] = []
    for i in range(2000):
        arms.append(schedule.next_round({"sql": LOOKUP})["sql"])
        slices += schedule.observe(facts(i, {"sql": 2}, tokens=1 if arms[-1] is None else 3))
    # The slice, and the washout before it.
    assert {len(list(stretch)) for arm, stretch in groupby(arms) if arm is None} == {8 + 2}
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
    _, slices = play(steady("sql"))
    num_blocks = sum(one.phase is Phase.CONTROL for one in slices)
    unfinished = sum(one.phase is Phase.BEFORE for one in slices) - num_blocks
    assert unfinished == 0
    counted = sum(one.num_rounds for one in slices)
    assert 3000 - counted - num_blocks * 4 in range(29)  # a block that was not complete at the end is dropped


def test_all_tasks_that_speculate_switch_together() -> None:
    arms, slices = play(steady("sql", "code", "chat"))
    assert {sum(arm is None for arm in one.values()) for one in arms} == {0, 3}
    controls = [one for one in slices if one.phase is Phase.CONTROL]
    num_blocks = Counter(one.task for one in controls)
    assert num_blocks["sql"] == num_blocks["code"] == num_blocks["chat"] > 5
    assert len({one.block_id for one in controls}) == len(controls)  # each task has blocks of its own


def test_a_task_that_comes_in_a_control_slice_is_vanilla_too_and_not_counted() -> None:
    arms, slices = play(
        lambda i, was_vanilla: steady("sql", "chat")(i, True) if was_vanilla else steady("sql")(i, False)
    )
    joined = [one for one in arms if "chat" in one]
    assert all(one["chat"] == one["sql"] for one in joined)
    assert sum(one["chat"] is None for one in joined) > 30
    assert {one.task for one in slices if one.phase is Phase.CONTROL} == {"sql"}


def test_a_task_that_leaves_takes_nothing_from_the_others() -> None:
    _, slices = play(lambda i, was_vanilla: steady("sql")(i, True) if was_vanilla else steady("sql", "chat")(i, False))
    assert Counter(one.task for one in slices if one.phase is Phase.CONTROL).keys() == {"sql"}
    assert sum(one.phase is Phase.AFTER for one in slices) > 5


def test_control_begins_at_moments_that_cannot_be_foretold() -> None:
    gaps = []
    for seed in range(3):
        arms, _ = play(steady("sql"), seed=seed)
        begins = [i for i in range(1, len(arms)) if arms[i]["sql"] is None and arms[i - 1]["sql"] is not None]
        gaps.append([after - before for before, after in pairwise(begins)])
    assert all(max(own) > 1.5 * min(own) for own in gaps)
    assert gaps[0] != gaps[1] != gaps[2]


def test_a_block_without_its_control_slice_leaves_nothing() -> None:
    def ends_in_every_control_slice(i: int, was_vanilla: bool) -> Round:
        return {"sql": LOOKUP}, facts(i, {"chat": 1} if was_vanilla and i % 3 == 0 else {"sql": 2})

    _, slices = play(ends_in_every_control_slice)
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
    def played(wanted: Sequence[Treatment]) -> list[Slice]:
        arms, slices = play(lambda i, _: ({"sql": wanted[i % len(wanted)]}, facts(i, {"sql": 1})))
        assert all(arm["sql"] in (None, wanted[i % len(wanted)]) for i, arm in enumerate(arms))
        return slices

    short, long = Treatment("lookup", 2), Treatment("lookup", 6)
    slices = played((short, *(long,) * 6))
    by_block = defaultdict(set)
    for one in slices:
        if one.phase is not Phase.BETWEEN:
            by_block[one.block_id].add(one.treatment)
    assert len(by_block) > 5
    assert {len(treatments) for treatments in by_block.values()} == {1}  # that of the block's first round
    between = {one.treatment for one in slices if one.phase is Phase.BETWEEN}
    assert between == {short, long}
    alternating = played((short,) * 5 + (Treatment("draft", 2),) * 5)
    assert all(one.phase is Phase.BETWEEN for one in alternating)


def test_rounds_with_a_prompt_are_kept_apart() -> None:
    def reading(i: int, _: bool) -> Round:
        wall_s, has_prompt = (0.05, True) if i % 4 == 0 else (0.01, False)
        return {"sql": LOOKUP}, facts(i, {"sql": 2}, wall_s=wall_s, has_prompt=has_prompt)

    _, slices = play(reading)
    controls = [one for one in slices if one.phase is Phase.CONTROL]
    assert controls
    for one in controls:
        assert one.num_rounds == 8
        assert one.sequence_s == pytest.approx(8 * 2 * 0.01)
        assert one.num_prompt_rounds in (2, 3)
        assert one.prompt_sequence_s == pytest.approx(one.num_prompt_rounds * 2 * 0.05)


def test_a_task_whose_every_round_reads_a_prompt_is_not_held_in_control() -> None:
    arms, slices = play(lambda i, _: ({"sql": LOOKUP}, facts(i, {"sql": 2}, has_prompt=True)))
    assert {one.phase for one in slices} == {Phase.BETWEEN}
    assert all(one["sql"] is not None for one in arms)


def test_slices_between_blocks_are_split_by_load() -> None:
    _, slices = play(lambda i, _: ({"sql": LOOKUP}, facts(i, {"sql": 1 if i % 400 < 200 else 8})))
    between = [one for one in slices if one.phase is Phase.BETWEEN]
    assert {one.stratum.running for one in between} == {0, 3}
    assert {one.mean_running for one in between} == {1.0, 8.0}
