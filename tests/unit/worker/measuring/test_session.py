"""A whole measurement over an engine without a model, whose clock is what its rounds are said to cost.

What is compared and in which order: complete, balanced, the same for the same seed. Of the user's prompts every form
is read, and every mistake is told with its line and field.
"""

from __future__ import annotations

import io
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from alphaloop import commands
from alphaloop.cli.measure import SHORTER_IS_BETTER, report_as_json, show
from alphaloop.commands import EVENT
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling, Step
from alphaloop.errors import ConfigError
from alphaloop.job_lines import JobLine
from alphaloop.messages import Purpose
from alphaloop.payoff.figures import VANILLA, ShipVerdict
from alphaloop.payoff.report import Footprint, Report
from alphaloop.settings import Settings, load_settings
from tests.fakes import FakeEngine
from tests.fixtures.cli import measure_order
from tests.fixtures.models import make_job
from worker.measuring import session as session_module
from worker.measuring.observing import choose_candidates, choose_drafters, divide, turns
from worker.measuring.report import REASONS, DrafterRecords
from worker.measuring.session import MeasuringPlan, MeasuringSession, draw, prepare, read_lines, refuse_few

NUM = 14
SECRET = "zebra"


class Timed(FakeEngine):
    """Reading takes 20 ms, a vanilla round 10 ms, a drafted token 0.5 ms and its place in the pass 0.1 ms."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def step(self) -> Step:
        step = super().step()
        draft_s, verify_s = 0.0005 * (step.width - 1), 0.01 + 0.0001 * (step.width - 1)
        wall_s = 0.02 if step.num_prefill_tokens else draft_s + verify_s
        self.now += wall_s
        return replace(step, wall_s=wall_s, draft_s=draft_s, verify_s=verify_s, num_positions=step.batch * step.width)


def session_of(
    engine: Timed,
    *,
    lengths: tuple[int, ...] = (2, 4),
    batch: int = 1,
    repeats: int = 1,
    seed: int = 0,
    sampling: Sampling = Sampling(max_tokens=60, temperature=0.0),  # noqa: B008
    should_stop: Callable[[], bool] = lambda: False,
) -> MeasuringSession:
    prompts = [engine.prepare(make_job(f"{SECRET} {number}", number), sampling) for number in range(NUM)]
    plan = MeasuringPlan(prompts, choose_candidates(engine.drafters, lengths), batch, repeats, 1.3, seed)
    return MeasuringSession(engine, plan, should_stop=should_stop, clock=engine.clock)


def report_of(session: MeasuringSession) -> Report:
    session.run()
    return session.report(DrafterRecords(), lambda: Footprint((), 1 << 30, None), ["a note"])


def test_what_pays_ships_and_says_by_how_much(seed: int) -> None:
    report = report_of(session_of(Timed(acceptance=(0.95,)), seed=seed))
    assert {row.judgement.verdict for row in report.rows} == {ShipVerdict.SHIP}
    assert report.shipped.candidate.num_draft_tokens == 4
    assert report.shipped.figures.ratio.estimate > 2
    assert not report.shipped.reasons
    for row in report.rows:
        assert row.figures.exactness.num_equal == NUM
        assert row.costs.draft_step == pytest.approx(0.05, rel=0.05)
        # What the parts explain is what was measured.
        assert row.costs.speedup == pytest.approx(row.figures.ratio.estimate, rel=0.02)


def test_what_does_not_pay_says_why(seed: int) -> None:
    report = report_of(session_of(Timed(acceptance=(0.1,)), seed=seed))
    assert {row.judgement.verdict for row in report.rows} == {ShipVerdict.DO_NOT_SHIP}
    assert report.shipped is None
    for row in report.rows:
        assert {"account", "low_acceptance"} <= {name for name, _ in row.reasons}


@pytest.mark.parametrize(("batch", "repeats"), [(1, 1), (1, 2), (2, 1)])
def test_the_prompts_of_a_batch_are_one_pair_however_often_they_are_decoded(batch: int, repeats: int) -> None:
    session = session_of(Timed(num_slots=2), batch=batch, repeats=repeats)
    for row in report_of(session).rows:
        assert row.figures.ratio.num_values == NUM // batch
        assert row.figures.acceptance.num_texts == NUM * repeats
        assert len(row.figures.acceptance.by_prompt) == NUM
    assert all(generation.batch_size == batch for _, generation in session.measured.generations(VANILLA))


def test_an_interrupted_run_reports_whole_turns_and_leaves_the_engine_empty(
    rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Timed()
    stop_at = rng.randint(400, 900)
    session = session_of(engine, should_stop=lambda: engine.num_steps >= stop_at)
    report = report_of(session)
    assert report.is_interrupted
    assert 0 < report.num_turns < NUM == report.num_turns_planned
    assert all(len(turn) == 3 for turn in session.measured.turns)
    show(report)
    assert "INTERRUPTED: " in capsys.readouterr().out
    assert engine.load().num_running == 0


def test_an_interrupted_warm_up_leaves_nothing_to_report() -> None:
    session = session_of(Timed(), should_stop=lambda: True)
    session.run()
    assert session.measured.is_interrupted
    assert not session.measured.turns


def test_a_failing_step_keeps_what_was_measured() -> None:
    engine = Timed(failing_steps=[700])
    session = session_of(engine)
    report = report_of(session)
    assert session.failure is not None
    assert 0 < report.num_turns < NUM
    assert engine.load().num_running == 0


def test_sampled_prompts_are_not_compared_and_are_tried_greedy(rng: random.Random) -> None:
    sampled = Sampling(max_tokens=60, temperature=0.7)
    report = report_of(session_of(Timed(acceptance=(0.2,)), sampling=sampled))
    assert report.setup.temperature == 0.7
    for row in report.rows:
        assert row.figures.exactness.num_sampled == NUM
        assert row.figures.exactness.is_exact


@pytest.mark.parametrize(
    ("num_prompts", "batch", "num_candidates", "hint"),
    [
        (24, 4, 3, "at least 25 prompts"),
        (10, 2, 1, "at least 11 prompts"),
    ],
)
def test_too_few_batches_are_refused(num_prompts: int, batch: int, num_candidates: int, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_few(num_prompts, batch, num_candidates)
    assert hint in raised.value.hint
    refuse_few(num_prompts + 1, batch, num_candidates)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_report_fits_and_holds_no_prompt(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = report_of(session_of(Timed(acceptance=(0.45,), num_slots=1), lengths=(1, 3, 8)))
    show(report)
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= columns
    for row in report.rows:
        assert f"{row.candidate.name}: {row.judgement.verdict.upper()}," in told
    assert "seed 0" in " ".join(told.split())
    assert "Note: a note." in told
    assert "exactly what vanilla wrote" in told
    machine = json.dumps(report_as_json(report))
    assert SECRET not in told + machine
    assert all(word not in machine for word in ("amber", "basil"))
    found = json.loads(machine)
    assert [one["name"] for one in found["candidates"]] == ["lookup k=1", "lookup k=3", "lookup k=8"]
    assert len(found["candidates"][0]["ratios"]) == NUM
    assert found["ship"] is None or found["ship"].startswith("lookup")


def test_a_report_crosses_to_the_command_line_unchanged() -> None:
    report = report_of(session_of(Timed(acceptance=(0.45,))))
    event = EVENT.validate_json(commands.ReportEvent(data=report).model_dump_json())
    assert isinstance(event, commands.ReportEvent)
    assert TypeAdapter(Report).validate_python(event.data) == report


def test_the_one_reason_told_of_slower_candidates_exists() -> None:
    assert SHORTER_IS_BETTER in {reason.__name__ for reason in REASONS}


LOOKUP = DrafterState("lookup", "1", 12)
SMALL = DrafterState("small", "2", 5)
TINY = DrafterState("tiny", "3", 1)


def test_every_drafter_gets_the_usual_lengths_that_it_can_draft() -> None:
    names = [candidate.name for candidate in choose_candidates([LOOKUP, SMALL, TINY], [])]
    assert names == ["lookup k=2", "lookup k=4", "lookup k=8", "small k=2", "small k=4", "tiny k=1"]


def test_lengths_that_were_asked_for_are_tried_once_each() -> None:
    names = [candidate.name for candidate in choose_candidates([LOOKUP, SMALL], [6, 3, 3])]
    assert names == ["lookup k=3", "lookup k=6", "small k=3"]
    with pytest.raises(ConfigError, match="at most 12, found 13"):
        choose_candidates([LOOKUP, SMALL], [4, 13])


def test_drafters_are_all_or_those_wanted() -> None:
    assert choose_drafters(["a", "b"], []) == ["a", "b"]
    assert choose_drafters(["a", "b"], ["b", "b"]) == ["b"]
    with pytest.raises(ConfigError, match="one of a, b, found 'c'"):
        choose_drafters(["a", "b"], ["c"])
    with pytest.raises(ConfigError, match="no drafter is configured"):
        choose_drafters([], [])


def test_blocks_hold_every_prompt_once_and_are_of_one_size(rng: random.Random) -> None:
    num_prompts, batch = rng.randint(1, 60), rng.randint(1, 9)
    blocks = divide(num_prompts, batch, rng)
    assert sorted(number for block in blocks for number in block) == list(range(num_prompts))
    sizes = {len(block) for block in blocks}
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1
    assert len(blocks) == -(-num_prompts // batch)


def test_every_block_is_decoded_in_every_way_and_nobody_is_always_first(seed: int) -> None:
    blocks = [(i,) for i in range(40)]
    candidates = choose_candidates([LOOKUP], [2, 4])
    order = list(turns(blocks, candidates, 3, random.Random(seed)))
    assert all(sorted(turn.candidates, key=repr) == sorted([VANILLA, *candidates], key=repr) for turn in order)
    for repeat in range(3):
        part = order[40 * repeat : 40 * (repeat + 1)]
        assert {turn.repeat for turn in part} == {repeat}
        assert sorted(turn.block for turn in part) == list(range(40))
        assert all(turn.prompts == blocks[turn.block] for turn in part)
    first = Counter(turn.candidates[0] for turn in order)
    # 120 turns, 40 expected for each of three; five standard errors.
    assert all(14 <= first[candidate] <= 66 for candidate in (VANILLA, *candidates))
    assert order == list(turns(blocks, candidates, 3, random.Random(seed)))


@pytest.fixture(scope="module")
def settings() -> Settings:
    return load_settings(Path(__file__).resolve().parents[4] / "configs")


def written(folder: Path, lines: Sequence[Any]) -> Path:
    file = folder / "mine.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def read(file: Path, settings: Settings, **options: Any) -> list[JobLine]:
    return read_lines(measure_order(file, **options), settings)


def test_all_forms_are_read_and_are_no_traffic(tmp_path: Path, settings: Settings) -> None:
    turn = [{"role": "user", "content": "c"}]
    file = written(
        tmp_path,
        [
            {"prompt": "a"},
            {"task": "unheard-of", "body": {"messages": turn, "max_tokens": 7, "model": "another"}},
            {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "d", "temperature": 0.5}},
            {"messages": turn, "deadline": "2020-01-01T00:00:00Z", "purpose": "control", "decoding": "speculative"},
            "",
            {"prompt": "e", "model": "gpt"},
        ],
    )
    jobs = [line.job for line in read(file, settings, max_tokens=9)]
    assert {job.purpose for job in jobs} == {Purpose.PROBE}
    assert {job.body.max_tokens for job in jobs} == {9}
    assert {job.body.model for job in jobs} == {None}
    assert {job.deadline for job in jobs} == {None}
    assert [job.task for job in jobs] == ["prompts", "unheard-of", "prompts", "prompts", "prompts"]
    assert jobs[2].body.temperature == 0.5


def test_wrong_lines_are_told_with_place_and_field_and_never_quoted(tmp_path: Path, settings: Settings) -> None:
    file = written(tmp_path, [{"prompt": "fine"}, {"prompt": "secret", "temperature": 9}, "{secret", {"n": 3}])
    with pytest.raises(ConfigError) as raised:
        read(file, settings)
    told = str(raised.value)
    assert "3 of 4 prompts" in told
    assert "mine.jsonl:2: temperature: " in told
    assert "mine.jsonl:3: " in told
    assert "mine.jsonl:4: " in told
    assert "secret" not in told


def test_many_wrong_lines_are_counted(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"mine.jsonl:10: .*\n  and 15 more"):
        read(written(tmp_path, ["x"] * 25), settings)


def test_a_file_must_be_there_and_be_a_sample(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "missing", settings)
    with pytest.raises(ConfigError, match="Is a directory"):
        read(tmp_path, settings)
    monkeypatch.setattr(session_module, "MAX_FILE_BYTES", 8)
    with pytest.raises(ConfigError, match="expected at most"):
        read(written(tmp_path, [{"prompt": "a"}]), settings)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "long enough"}')))
    with pytest.raises(ConfigError, match="expected at most"):
        read(Path("-"), settings)


def test_standard_input(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}')))
    assert [line.where for line in read(Path("-"), settings)] == ["standard input:1", "standard input:2"]


def lines_of(tmp_path: Path, settings: Settings, texts: Sequence[str]) -> list[JobLine]:
    return read(written(tmp_path, [{"prompt": text} for text in texts]), settings)


def test_fewer_than_ten_different_prompts_are_refused(tmp_path: Path, settings: Settings, rng: random.Random) -> None:
    lines = lines_of(tmp_path, settings, ["same"] * 30 + [str(i) for i in range(8)])
    with pytest.raises(ConfigError, match="at least 10 different prompts, found 9"):
        draw(lines, 100, rng)


def test_repeated_prompts_count_once_and_too_many_are_drawn_from(
    tmp_path: Path, settings: Settings, rng: random.Random
) -> None:
    lines = lines_of(tmp_path, settings, [str(i) for i in range(40)] * 2)
    kept, notes = draw(lines, 100, rng)
    assert kept == lines[:40]
    assert notes == ["lines that repeat an earlier prompt, left out: 40"]
    drawn, notes = draw(lines, 12, rng)
    assert len({line.where for line in drawn}) == 12
    assert "12 of 40 prompts" in notes[1]
    few, notes = draw(lines[:11], 100, rng)
    assert (len(few), len(notes)) == (11, 1)


def test_a_prompt_that_does_not_fit_names_its_line(tmp_path: Path, settings: Settings) -> None:
    lines = lines_of(tmp_path, settings, ["one two", "one two three four five"])
    with pytest.raises(ConfigError, match=r"1 of 2 prompts.*\n.*mine.jsonl:2: prompt: expected fewer than 5"):
        prepare(lines, FakeEngine(context_length=5), settings.tasks)


def test_a_task_fills_in_what_a_prompt_leaves_open(tmp_path: Path, settings: Settings) -> None:
    tasks = {"code": settings.tasks["code"].model_copy(update={"max_tokens": 33, "temperature": 0.7})}
    lines = read(written(tmp_path, [{"prompt": "a", "temperature": 0.1}]), settings, task="code")
    (prepared,) = prepare(lines, FakeEngine(), tasks)
    assert (prepared.sampling.max_tokens, prepared.sampling.temperature) == (33, 0.1)
    assert prepared.job.job_id == "measured-0"
