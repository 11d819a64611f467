"""`alphaloop measure` on a tiny model: the whole command, its texts, a draft's record."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from alphaloop.cli.measure import report_as_json, show_targets, targets_as_json
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling
from alphaloop.payoff.figures import VANILLA
from alphaloop.payoff.report import Report
from alphaloop.payoff.targets import TargetsReport, difference_of
from tests.fakes import FakeEngine
from tests.fixtures.cli import CarriedOut, measure_order
from tests.fixtures.inference_server import ServedEngine, serving
from tests.fixtures.models import make_job, small_llama
from worker.measuring import observing
from worker.measuring.observing import ExactnessCheck, Runner

NUM = 12


@pytest.fixture
def configs(tmp_path: Path, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny target and look-up, as the environment names them."""
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "models.toml").write_text(
        f'[models.target]\nname = "tiny"\nsource = "{tiny_models["llama"]}"\ndtype = "float64"\ndevice = "cpu"\n'
        "num_threads = 1\n[models.drafters.lookup]\nmax_draft_tokens = 6\n"
    )
    (folder / "tasks.toml").write_text("[tasks.code]\nmax_tokens = 24\n")
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(folder))
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(tmp_path))
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A dozen."""
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"ab {n} ab {n} ab {n * n}"}) for n in range(NUM)))
    return file


@pytest.mark.usefixtures("configs")
def test_everything_is_measured_compared_and_judged(prompts: Path) -> None:
    done = CarriedOut(measure_order(prompts, task="code", k=(1, 4), seed=5))
    assert done.code == 0, done.error
    (data,) = done.reports
    told = report_as_json(TypeAdapter(Report).validate_python(data))
    assert told["setup"]["identity"]["target"] == "tiny"
    assert told["setup"]["seed"] == 5
    assert told["num_batches"] == NUM
    assert [one["num_draft_tokens"] for one in told["candidates"]] == [1, 4]
    for one in told["candidates"]:
        # In float64 a text is vanilla's, token for token.
        assert one["exactness"]["num_equal"] == NUM
        assert one["verdict"] in ("ship", "do not ship", "too close")
        assert one["num_texts"] == NUM
        assert one["ratio"]["low"] <= one["ratio"]["estimate"] <= one["ratio"]["high"]
        assert one["counts"]["trials"][0] > 0
        assert (one["verdict"] == "ship") == (not one["reasons"])
    assert told["memory"]["parts"][0]["weight_bytes"] > 0
    assert told["memory"]["peak_process_bytes"] > told["memory"]["parts"][0]["weight_bytes"]


@pytest.mark.usefixtures("configs")
def test_two_targets_are_timed_in_pairs_and_their_texts_compared(
    prompts: Path,
    tiny_models: dict[str, Path],
    tiny_tokenizer: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = tiny_models["llama"]
    copy = shutil.copytree(one, tmp_path / "copy")
    other = small_llama(one, tiny_tokenizer, tmp_path / "other", dtype=torch.float64)

    def compared(first: Path, second: Path, **options: Any) -> TargetsReport:
        done = CarriedOut(measure_order(prompts, target=(str(first), str(second)), task="code", **options))
        assert done.code == 0, done.error
        (data,) = done.reports
        return TypeAdapter(TargetsReport).validate_python(data)

    same = compared(one, copy)
    assert (same.differences, same.num_compared, same.num_turns) == ((), NUM, NUM)
    assert same.targets[0].identity.target_revision == same.targets[1].identity.target_revision
    assert same.ratio.low <= same.ratio.estimate <= same.ratio.high
    assert len(same.ratios) == NUM
    found = compared(one, other, batch=2, repeats=2)
    assert (found.num_turns, len(found.ratios)) == (NUM, NUM // 2)
    assert 0 < len(found.differences) <= NUM
    for difference in found.differences:
        assert difference.where.startswith(str(prompts))
        assert 0 <= difference.num_equal_characters <= min(difference.num_characters)
    show_targets(found)
    shown = capsys.readouterr().out
    assert f"A: {one}, revision {same.targets[0].identity.target_revision}" in shown
    assert f"Texts: {len(found.differences)} of {NUM} differ." in shown
    assert "prompt" not in json.dumps(targets_as_json(found)["differences"])
    drawn = compared(one, copy, temperature=1.0)
    assert (drawn.num_compared, drawn.differences) == (0, ())


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [("a b", "a b", None), ("a b", "a c", 2), ("a", "ab", 1), ("", "b", 0)],
)
def test_texts_part_where_their_first_characters_differ(first: str, second: str, where: int | None) -> None:
    found = difference_of("mine:1", first, second)
    assert (found and found.num_equal_characters) == where


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": ["one"]}, "--target: expected two different models, found one"),
        ({"target": ["one", "one"]}, "--target: expected two different models, found one, one"),
        ({"drafter": ["nonesuch"]}, "--drafter: expected one of lookup, found 'nonesuch'"),
        ({"k": [7]}, "--k: expected at most 6, found 7"),
        ({"task": "cod"}, "--task: expected one of code, found 'cod'"),
        ({"batch": 4}, "expected at least 7 batches to bound 2 candidates, found 3"),
        ({"max_tokens": 4000}, None),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    prompts: Path, options: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine import own

    monkeypatch.setattr(own, "load_engine", _must_not_run)
    if said is None:
        with pytest.raises(Loaded):
            CarriedOut(measure_order(prompts, **options))
        return
    done = CarriedOut(measure_order(prompts, **options))
    assert done.code == 1
    assert said in done.error.message


class Loaded(Exception):
    """The engine was to be loaded."""


def _must_not_run(*_: object, **__: object) -> None:
    raise Loaded


def test_a_differing_text_is_a_near_tie_or_a_fault(tiny_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine("llama", num_slots=2)
    sampling = Sampling(max_tokens=12, temperature=0.0)
    prepared = [engine.prepare(make_job(f"text {n}", n), sampling) for n in range(4)]
    runner = Runner(engine, prepared)
    truths = list(enumerate(runner.decode(prepared[:2], VANILLA)[0] + runner.decode(prepared[2:], VANILLA)[0]))
    place = 5
    others = []
    for number, truth in truths:
        tokens = list(truth.token_ids)
        tokens[place] = (tokens[place] + 1) % 300
        others.append((number, replace(truth, token_ids=tuple(tokens))))

    def compared(found: list[Any]) -> Any:
        return ExactnessCheck(runner, prepared, engine.identity.dtype).compare(truths, found)

    assert compared(truths).num_equal == 4
    # The target is sure of its own token: by 1e-9 nothing is changed.
    assert compared(others).num_wrong == 4
    assert not compared(others).is_exact
    # Raised by more than any logit, each of the two is chosen.
    monkeypatch.setattr(observing, "tolerance_of", lambda dtype: 1e6)
    assert compared(others).num_near_ties == 4
    assert compared(others).is_exact
    # The same tokens, but one text goes on: no rounding does that.
    cut = [(number, replace(truth, token_ids=truth.token_ids[:-1])) for number, truth in truths]
    assert compared(cut).num_wrong == 4
    monkeypatch.setattr(observing, "MAX_EXAMINED", 1)
    limited = compared(others)
    assert (limited.num_near_ties, limited.num_unexamined) == (1, 3)
    assert engine.load().num_running == 0


def test_records_of_a_draft_come_from_its_folder_and_only_for_its_weights(
    tiny_models: dict[str, Path], tiny_engine: Any, tmp_path: Path
) -> None:
    import shutil

    from alphaloop.draft_card import DraftCard, DraftJudgement, MeasuredDraft
    from alphaloop.settings import load_settings
    from engine.models import find_weights
    from worker.measuring.records import MemoryWatch, records_of

    folder = tmp_path / "draft"
    shutil.copytree(tiny_models["llama"], folder)
    # Another template is what check-pair warns of; the same size would be refused, but nothing is loaded here.
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    engine = tiny_engine("llama")
    measured = MeasuredDraft(
        num_texts=9,
        num_tokens=100,
        rounds=50,
        proposed=(50, 50),
        trials=(50, 40),
        accepts=(40, 20),
        num_positions=100,
        overlap_sum=70.0,
    )
    card = DraftCard(
        name="small",
        draft_revision=find_weights(str(folder)).revision,
        target="tiny",
        target_revision=engine.identity.target_revision,
        trained_on="its own texts",
        recipe={},
        judgement=DraftJudgement(
            num_draft_tokens=2, by_task={}, total=measured, untrained=measured, target_pass_ms=2.0, draft_pass_ms=1.0
        ),
    )
    card.write(folder)
    settings = load_settings(
        None,
        overrides={
            "models": {
                "target": {"source": str(tiny_models["llama"]), "dtype": "float64", "device": "cpu"},
                "drafters": {"lookup": {}, "small": {"method": "draft_model", "source": str(folder)}},
            }
        },
    )
    state = replace(engine.drafters[0], name="small", revision=f"{card.draft_revision}-p0.4")
    engine._drafters["small"] = type("Draft", (), {"state": state})()
    engine._models = settings.models
    parts, records, notes = records_of(settings, engine)
    assert [part.name for part in parts] == ["target", "small"]
    assert parts[0].kv_bytes_per_slot == parts[0].kv_bytes_per_token * engine.identity.context_length
    assert records.held_out["small"].alpha_1 == 0.8
    assert records.held_out["small"].where == "its 9 held-out texts"
    assert "chat template" in {check for check, _ in records.findings["small"]}
    assert notes == []
    footprint = MemoryWatch(engine).footprint(parts)
    assert footprint.parts == parts
    assert footprint.device_bytes is None
    engine._drafters["small"].state = replace(state, revision="000000000000")
    assert "small" not in records_of(settings, engine)[1].held_out


def test_servers_are_measured_like_an_engine_of_ones_own(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = FakeEngine(drafters=(DrafterState("ngram", "fake-1", 4),))
    plain, speculative = ServedEngine(FakeEngine(), round_s=0.002), ServedEngine(drafting, "ngram", 4, 0.002)
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(tmp_path))
    with serving(plain) as one, serving(speculative) as other:
        text = ["[models.target]", 'engine = "server"', 'name = "fake"']
        text += ["[models.endpoints.plain]", 'kind = "vllm"', f'url = "{one.url}"']
        text += ["[models.endpoints.speculative]", 'kind = "vllm"', f'url = "{other.url}"']
        text += ['drafter = "ngram"', "num_draft_tokens = 4"]
        (tmp_path / "models.toml").write_text("\n".join(text))
        (tmp_path / "tasks.toml").write_text("")
        done = CarriedOut(measure_order(prompts, batch=2))
    assert done.code == 0, done.error
    (data,) = done.reports
    told = report_as_json(TypeAdapter(Report).validate_python(data))
    assert told["setup"]["identity"]["engine"] == "vllm-0.32.0"
    (speculating,) = told["candidates"]
    assert (speculating["drafter"], speculating["num_draft_tokens"]) == ("ngram", 4)
    assert speculating["exactness"]["num_equal"] == NUM
    assert speculating["counts"]["trials"][0] > speculating["counts"]["accepts"][0] > 0
