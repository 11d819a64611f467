"""`alphaloop measure`: its prompts, blocks, figures, and the reasons that it gives."""

from __future__ import annotations

import io
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import TypeAdapter

from alphaloop import commands
from alphaloop.acceptance import AcceptanceCounts
from alphaloop.cli.measure import SHORTER_IS_BETTER, report_as_json, show
from alphaloop.commands import EVENT
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling, Step
from alphaloop.errors import ConfigError
from alphaloop.job_lines import JobLine
from alphaloop.messages import Purpose
from alphaloop.payoff.figures import VANILLA, Acceptance, Candidate, RoundTimes, ShipVerdict
from alphaloop.payoff.report import Footprint, Report
from alphaloop.settings import Settings, load_settings
from tests.fakes import FakeEngine
from tests.fixtures.cli import measure_order
from tests.fixtures.costs import NUM_PROMPTS, acceptance, evidence, figures
from tests.fixtures.models import make_job
from worker.measuring import report as why
from worker.measuring import session as session_module
from worker.measuring.observing import Observation, choose_candidates, choose_drafters, divide, turns
from worker.measuring.report import REASONS, CandidateEvidence, DrafterRecords, GreedySample, HeldOut, reasons
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


def test_wrong_lines_are_named_with_place_and_field_and_never_quoted(tmp_path: Path, settings: Settings) -> None:
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


def test_a_candidate_with_nothing_wrong_has_an_account_and_no_excuse() -> None:
    fine = evidence((0.9, 0.9, 0.9, 0.9), draft=0.05, verify=0.95, ratio=1.9)
    assert [name for name, _ in reasons(fine)] == ["account"]
    assert len({reason.__name__ for reason in REASONS}) == len(REASONS)


FALLING = [1.0 + 0.02 * i for i in range(NUM_PROMPTS)]
FLAT = evidence((0.9,) * 4, draft=0.0, verify=0.9, ratio=[1.0] * NUM_PROMPTS)
STEEP = evidence((0.9, 0.2, 0.2, 0.2), draft=0.8, verify=1.2)
#: The same prompts decoded greedy were accepted more often.
COSTLY = replace(evidence(), temperature=0.8, greedy=GreedySample(acceptance([0.9], 8), acceptance([0.6], 8)))
QUIET = AcceptanceCounts(101, 61, 0, (40, 40), (40, 30), (30, 20))
#: By reason: where it speaks, parts of what it says, and where it is silent.
CASES: Final = [
    (
        why.account,
        evidence((0.5,), draft=0.3, verify=1.0, reading=1.0),
        [
            "1.50 tokens a round",
            "takes 1.40 vanilla rounds (drafting 0.30, the target's pass 1.00, the rest 0.10)",
            "50 % of vanilla's time: 1.03x",
        ],
        [replace(evidence(), costs=None)],
    ),
    (  # a round of 1.4 at k = 1 needs 1 + α = 1.4 · 1.3
        why.low_acceptance,
        evidence((0.5,), draft=0.3, verify=1.0),
        ["α is 0.50 [", "1.30x needs 0.82, and 0.40 to lose nothing"],
        [evidence((0.95,), draft=0.3, verify=1.0), evidence(accepted=acceptance([]))],
    ),
    (why.low_acceptance, evidence((0.5,), draft=0.9, verify=1.0), ["needs more than every token accepted."], []),
    (
        why.k_too_high,
        evidence(
            (0.9, 0.5, 0.3, 0.2),
            ratio=FALLING,
            siblings=[figures(Candidate("small", 2), [1.2 * ratio for ratio in FALLING])],
        ),
        [
            "k=4 is too long: on the same prompts k=2 is 1.20 [1.20 1.20] times as fast",
            "from 0.90 at position 1 to 0.2",
        ],
        [
            # Faster on seven prompts of twelve, slower on five: the medians differ, the prompts do not say so.
            replace(FLAT, siblings=[figures(Candidate("small", 2), [1.1] * 7 + [0.9] * 5)]),
            replace(FLAT, siblings=[figures(Candidate("small", 8), [2.0] * NUM_PROMPTS)]),
        ],
    ),
    (  # a shorter draft that was not tried is modelled
        why.k_too_high,
        STEEP,
        ["k=1 would be", "measure it with --k 1"],
        [
            # It was measured, and was no faster on these prompts: the model is not believed.
            replace(STEEP, siblings=[figures(Candidate("small", 1), 1.0)]),
            evidence((0.9,) * 4, draft=0.1, verify=1.0),
        ],
    ),
    (
        why.temperature,
        COSTLY,
        ["Temperature 0.8 costs acceptance: on 8 of the prompts α is 0.60 [", "and 0.90 ["],
        [
            replace(COSTLY, greedy=GreedySample(acceptance([0.6], 8), acceptance([0.6], 8))),
            replace(COSTLY, greedy=GreedySample(acceptance([], 8), acceptance([0.6], 8))),
            evidence(),
        ],
    ),
    (
        why.tokenizer,
        replace(evidence(), findings=[("size", "It is large."), ("chat template", "The draft has none.")]),
        ["do not fit in full. chat template: The draft has none."],
        [replace(evidence(), findings=[("size", "It is large.")])],
    ),
    (
        why.domain,
        replace(evidence((0.6,)), held_out=HeldOut(0.75, "its 64 held-out texts")),
        ["α_1 is 0.60 [", " 0.75 on its 64 held-out texts"],
        [replace(evidence((0.6,)), held_out=HeldOut(0.6, "its texts")), evidence((0.6,))],
    ),
    (
        why.draft_cost,
        evidence((0.7, 0.7), draft=0.8, verify=0.9, ratio=1.2),
        ["costs 0.40 of a target pass (c), 0.80 a round", "this would be 2.19x"],
        [
            evidence((0.2, 0.2), draft=0.8, verify=0.9, ratio=0.7),
            evidence((0.7, 0.7), draft=0.8, verify=0.9, ratio=1.35),
        ],
    ),
    (
        why.wide_pass,
        evidence((0.7, 0.7), draft=0.1, verify=1.8, ratio=1.05, batch=16),
        ["on this device at batch 16: a pass over 3.0 positions takes 2.00 times one over 1"],
        [
            evidence((0.7, 0.7), draft=0.1, verify=0.91, ratio=1.05),
            evidence((0.1, 0.1), draft=0.1, verify=1.8, ratio=0.6),
        ],
    ),
    (
        why.prompt_dominated,
        evidence((0.9, 0.9), draft=0.1, verify=1.0, reading=3.0, ratio=1.15),
        ["75 % of vanilla's time", "could gain more than 1.33x"],
        [
            evidence((0.9, 0.9), draft=0.1, verify=1.0, reading=3.0, ratio=1.4),
            evidence((0.2, 0.2), draft=0.1, verify=1.0, reading=3.0),
        ],
    ),
    (why.short_outputs, evidence(output_tokens=19.0), ["19 tokens in the median"], [evidence(output_tokens=20.0)]),
    (
        why.nothing_proposed,
        evidence(accepted=Acceptance((QUIET,) * NUM_PROMPTS, NUM_PROMPTS)),
        ["small proposes nothing in 60 % of the rounds"],
        [evidence()],
    ),
    (
        why.long_tail,
        evidence(ratio=[1.4] * 16 + [0.75] * 4, seconds=[1.0] * 16 + [20.0] * 4),
        ["The median is 1.40x", "all tokens over all seconds are 0.81x: prompts that gain less"],
        [evidence(ratio=[1.3, 1.4, 1.5] * 6), evidence(ratio=[1.4] * 3)],
    ),
]


@pytest.mark.parametrize(("reason", "speaks", "parts", "silent"), CASES, ids=[case[0].__name__ for case in CASES])
def test_it_speaks_where_the_figures_bear_it_out(
    reason: Callable[[CandidateEvidence], str | None],
    speaks: CandidateEvidence,
    parts: Sequence[str],
    silent: Sequence[CandidateEvidence],
) -> None:
    told = reason(speaks)
    assert [part for part in parts if part not in told] == []
    assert [reason(other) for other in silent] == [None] * len(silent)


def test_what_ships_shows_the_texts_that_it_slows_down() -> None:
    told = dict(reasons(evidence(ratio=[2.0] * 18 + [0.9, 0.8]), ships=True))
    assert told.keys() == {"long_tail", "slower_texts"}
    slower = "2 of 20 prompts were slower than vanilla, the slowest 0.80x; they took 21 % of its time."
    assert told["slower_texts"] == slower
    assert not list(reasons(evidence(ratio=2.0), ships=True))


def observations(ms: list[float]) -> list[Observation]:
    times = [RoundTimes(num_rounds=20, num_steps=20, round_s=20 * one / 1000) for one in ms]
    return [Observation(VANILLA, number, 0, (), one, 1.0) for number, one in enumerate(times)]


def test_a_busy_machine_is_remarked_with_its_figures(rng: random.Random) -> None:
    assert why.busy_note(observations([rng.gauss(20.0, 1.0) for _ in range(40)])) is None, "it is quiet"
    told = why.busy_note(observations([rng.choice([20.0, 40.0]) for _ in range(40)]))
    assert "vanilla's own rounds took 20.0 to 40.0 ms" in told
    assert why.busy_note(observations([1.0, 100.0])) is None, "of few prompts nothing is said"
