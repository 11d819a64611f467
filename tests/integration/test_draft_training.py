"""`alphaloop draft train` on a tiny target with random weights: from nothing to a registered draft."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from pydantic import SecretStr
from safetensors.torch import load_file, save_file

from alphaloop.cli.models import _show_card
from alphaloop.commands import RegisterOrder, TrainOrder
from alphaloop.draft_card import DraftCard, read_card
from alphaloop.engine import Sampling
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.settings import Settings, TaskSettings
from alphaloop.settings.models import HeadsDrafterSettings, ModelSettings, TargetSettings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from engine.drafters.draft_vocabulary import read_draft_vocabulary
from engine.models import find_weights, load_weights
from engine.own import load_engine
from engine.training.recipe import Recipe
from engine.training.run import TrainingRun, WantedDraft
from tests.fixtures.cli import CarriedOut, Cli, train_order
from tests.fixtures.models import drafted_alike, make_job, small_llama
from worker.commands import TrainingEvents, read_prompts

RECIPE: Final = Recipe(
    num_layers=1,
    num_draft_tokens_known=200,
    num_texts=48,
    num_taught=20,
    num_held_out=16,
    max_prompt_tokens=8,
    max_answer_tokens=24,
    batch_size=8,
    num_epochs=4,
    batch_tokens=256,
    learning_rate=3e-3,
    precision="float32",
    num_teacher_tokens=16,
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], tiny_tokenizer: Any) -> Path:
    """A Llama of four layers."""
    changes = {"num_hidden_layers": 4, "max_position_embeddings": 256, "tie_word_embeddings": True}
    folder = tmp_path_factory.mktemp("target")
    return small_llama(tiny_models["llama"], tiny_tokenizer, folder, initializer_range=0.15, **changes)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order, so that two runs can be compared bit for bit."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def settings(target_folder: Path) -> Settings:
    target = TargetSettings(name="tiny", source=str(target_folder), dtype="float32", device="cpu", num_threads=1)
    tasks = {"code": TaskSettings(description="Write code")}
    return Settings(models=ModelSettings(target=target, drafters={}), tasks=tasks)


def opened(order: TrainOrder, settings: Settings, recipe: Recipe, should_stop: Callable[[], bool]) -> TrainingRun:
    return TrainingRun(
        WantedDraft(order.folder, order.method, order.name, order.prompts, order.held_out, order.begun_from),
        settings.models.target,
        recipe,
        descriptions={name: task.description for name, task in settings.tasks.items()},
        read_prompts=partial(read_prompts, settings, order.task, print),
        progress=TrainingEvents(lambda event: None),
        should_stop=should_stop,
    )


def train(settings: Settings, folder: Path, recipe: Recipe = RECIPE) -> DraftCard | None:
    run = opened(train_order(folder, name="small"), settings, recipe, lambda: False)
    try:
        return run.make()
    finally:
        run.close()


@pytest.fixture(scope="module")
def finished(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DraftCard]:
    """A draft that was trained without a break, and its card."""
    folder = tmp_path_factory.mktemp("finished") / "small"
    card = train(settings, folder)
    assert card is not None
    return folder, card


def test_training_beats_the_untrained_early_exit_on_texts_never_seen(finished: tuple[Path, DraftCard]) -> None:
    folder, card = finished
    judgement = card.judgement
    assert judgement.total.num_texts == judgement.untrained.num_texts == RECIPE.num_held_out
    trained, untrained = judgement.total.alphas(), judgement.untrained.alphas()
    assert trained[0] > untrained[0] + 0.03
    assert judgement.total.overlap_sum > judgement.untrained.overlap_sum
    assert sum(measured.num_texts for measured in judgement.by_task.values()) == RECIPE.num_held_out
    assert set(judgement.by_task) == {"any", "code"}
    assert 0 < judgement.cost_ratio < 1.5
    assert card.draft_revision == find_weights(str(folder)).revision
    assert read_card(folder) == card
    assert card.trained_on.startswith("48 texts, ")
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"] == RECIPE.num_layers
    assert len(read_draft_vocabulary(folder)) == RECIPE.num_draft_tokens_known


def test_a_finished_run_asked_again_does_nothing_anew(settings: Settings, finished: tuple[Path, DraftCard]) -> None:
    folder, card = finished
    times = {path: path.stat().st_mtime_ns for path in (folder / ".training").rglob("*.safetensors")}
    again = train(settings, folder)
    assert again.draft_revision == card.draft_revision
    assert again.judgement.total == card.judgement.total
    assert {path: path.stat().st_mtime_ns for path in (folder / ".training").rglob("*.safetensors")} == times


def test_a_full_disk_at_the_end_is_told(
    settings: Settings, finished: tuple[Path, DraftCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("engine.training.run.write_draft_vocabulary", full)
    with pytest.raises(ConfigError, match=r"small cannot be written: .*No space left"):
        train(settings, finished[0])


def test_a_folder_of_something_else_is_left_alone(
    settings: Settings, finished: tuple[Path, DraftCard], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="another recipe"):
        train(settings, finished[0], recipe=RECIPE.model_copy(update={"num_layers": 2}))
    for name in ("My draft", "small.v2"):
        with pytest.raises(ConfigError, match="expected a drafter's name"):
            opened(train_order(tmp_path / name), settings, RECIPE, lambda: False)
        assert not (tmp_path / name).exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="found something else"):
        train(settings, tmp_path / "mine")
    held = opened(train_order(tmp_path / "new"), settings, RECIPE, lambda: True)
    try:
        with pytest.raises(ConfigError, match="in use"):
            opened(train_order(tmp_path / "new"), settings, RECIPE, lambda: True)
    finally:
        held.close()


@pytest.fixture
def environment(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same settings for a child, in a folder of TOML files; returns the recipe's file."""
    configs = tmp_path / "configs"
    configs.mkdir()
    target = settings.models.target
    (configs / "models.toml").write_text(
        f'[models.target]\nname = "tiny"\nsource = "{target.source}"\ndtype = "float32"\ndevice = "cpu"\n'
        "num_threads = 1\n",
        encoding="utf-8",
    )
    (configs / "tasks.toml").write_text('[tasks.code]\ndescription = "Write code"\n', encoding="utf-8")
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(configs))
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(tmp_path / "data"))
    recipe = tmp_path / "recipe.toml"
    given = RECIPE.model_dump(exclude_defaults=True)
    recipe.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()), encoding="utf-8")
    return recipe


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    environment: Path, tmp_path: Path, finished: tuple[Path, DraftCard], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my drafts" / "small"
    folder.parent.mkdir()
    command = [sys.executable, "-m", "alphaloop.cli", "draft", "train", str(folder), "--recipe", str(environment)]
    texts = folder / ".training" / "texts.jsonl"
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not (texts.exists() and texts.stat().st_size) and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.02)
            break
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "the same command continues from there" in err
    assert out == ""
    # The same order in this process: another one would only load torch again.
    done = CarriedOut(train_order(folder, recipe=environment))
    assert done.code == 0
    assert "by an earlier run" in "".join(done.notes)
    assert f"not registered: no database is configured. Later: alphaloop draft register '{folder}'" in done.notes
    (data,) = done.reports
    odd = tmp_path / 'a "b" \\ c\nd\x7f' / "é🙂"
    _show_card(DraftCard.model_validate(data), odd)
    told = capsys.readouterr()
    assert "all, untrained" in told.out
    _, _, lines = told.out.partition("in configs/models.toml:")
    assert tomllib.loads(lines)["models"]["drafters"][data["name"]]["source"] == str(odd)
    assert load_file(folder / "model.safetensors").keys() == load_file(finished[0] / "model.safetensors").keys()
    assert read_card(folder).draft_revision == finished[1].draft_revision


@pytest.mark.postgres
def test_a_trained_draft_is_registered_and_listed(
    environment: Path,
    finished: tuple[Path, DraftCard],
    database_url: SecretStr,
    database: Database,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, card = finished
    monkeypatch.setenv("DATABASE_URL", database_url.get_secret_value())
    (told,) = CarriedOut(RegisterOrder(folder=folder, name=None)).reports
    assert told == f"small {card.draft_revision} for target {card.target_revision}: candidate"
    (known,) = DraftRegistry(database).all()
    assert (known.drafter, known.draft_revision) == ("small", card.draft_revision)
    assert known.target_revision == known.trained_for == card.target_revision
    assert known.parent_revision is None, "it was not trained from another draft"
    assert (known.status, known.trained_on) == (DraftStatus.CANDIDATE, card.trained_on)
    listed = cli("draft", "list", "--json")
    assert listed.code == 0
    assert listed.json[0]["figures"]["total"]["trials"] == list(card.judgement.total.trials)
    shown = cli("draft", "list")
    assert "candidate" in shown.out
    assert f"{card.judgement.total.alphas()[0]:.2f}".removeprefix("0") in shown.out
    assert CarriedOut(RegisterOrder(folder=folder, name="other")).code == 0
    assert {draft.drafter for draft in DraftRegistry(database).all()} == {"small", "other"}


def test_a_folder_that_is_no_draft_cannot_be_registered(
    environment: Path, finished: tuple[Path, DraftCard], tmp_path: Path
) -> None:
    def refused(folder: Path) -> str:
        done = CarriedOut(RegisterOrder(folder=folder, name=None))
        assert done.code == 1
        return done.error.message

    assert "expected a draft's folder with draft.json" in refused(tmp_path)
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "draft.json").write_bytes((finished[0] / "draft.json").read_bytes())
    weights = bytearray((finished[0] / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    assert "was written for weights" in refused(changed)
    (changed / "draft.json").write_text("{}", encoding="utf-8")
    assert "draft.json" in refused(changed)


@pytest.mark.parametrize("method", ["heads", "eagle3"])
def test_heads_are_trained_on_states_that_writing_recorded_stop_and_go_on_and_draft(
    settings: Settings, tmp_path: Path, method: Any
) -> None:
    folder, recipe = tmp_path / "heads", RECIPE.model_copy(update={"num_unrolled": 3, "num_epochs": 12})
    order = train_order(folder, name="heads", method=method)
    num_asked = 0

    def should_stop() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked > 20

    for stop, is_done in ((should_stop, False), (lambda: False, True)):
        run = opened(order, settings, recipe, stop)
        try:
            card = run.make()
        finally:
            run.close()
        assert (card is not None) == is_done
    assert card is not None
    assert card == read_card(folder)
    assert card.method == method
    assert card.judgement.total.alphas()[0] > card.judgement.untrained.alphas()[0]
    drafter = HeadsDrafterSettings(method=method, source=str(folder), max_draft_tokens=3)
    models = settings.models.model_copy(update={"drafters": {"heads": drafter}})
    engine = load_engine(models, num_slots=2)
    jobs = [make_job(f"{number} words", number) for number in range(4)]
    sampling = Sampling(max_tokens=32, temperature=0.0)
    _, drafted = drafted_alike(engine, jobs, sampling, "heads", 3)
    assert sum(its.counts.num_accepted for its in drafted.values()) > 0


@pytest.fixture(scope="module", params=["heads", "eagle3"])
def parent(
    request: pytest.FixtureRequest, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DraftCard | None, Path]:
    """Heads of the target, and their folder."""
    folder, recipe = tmp_path_factory.mktemp(request.param) / "parent", RECIPE.model_copy(update={"num_epochs": 12})
    return finished_run(opened(train_order(folder, method=request.param), settings, recipe, lambda: False)), folder


def finished_run(run: TrainingRun) -> DraftCard | None:
    try:
        return run.make()
    finally:
        run.close()


@pytest.fixture(scope="module")
def next_target(target_folder: Path, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The same settings with a fine-tune of the target: its weights, moved a little."""
    folder = tmp_path_factory.mktemp("next") / "target"
    shutil.copytree(target_folder, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    moved = {name: x + 0.01 * x.std() * torch.randn(x.shape, generator=generator) for name, x in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    target = settings.models.target.model_copy(update={"source": str(folder)})
    return settings.model_copy(update={"models": ModelSettings(target=target, drafters={})})


def test_training_goes_on_from_heads_of_the_target_before_and_after_a_break(
    parent: tuple[DraftCard, Path], next_target: Settings, tmp_path: Path
) -> None:
    card, folder = parent
    recipe = RECIPE.model_copy(update={"num_epochs": 1, "learning_rate": 1e-6})
    begun = train_order(tmp_path / "begun", method=card.method, begun_from=str(folder))
    whole = finished_run(opened(begun, next_target, recipe, lambda: False))
    assert whole is not None
    assert (card.parent_revision, whole.parent_revision) == (None, card.draft_revision)
    assert whole.target_revision != card.target_revision
    before, after = (load_file(heads / "model.safetensors") for heads in (folder, tmp_path / "begun"))
    # At this learning rate the network stays where it began, and the head is the new target's.
    network = before.keys() - {"lm_head.weight", "token_ids", "d2t", "t2d"}
    assert len(network) >= 2
    assert all(torch.allclose(before[name], after[name], atol=1e-4) for name in network)
    assert any(not torch.equal(before[name], after[name]) for name in network)
    rows = load_file(Path(next_target.models.target.source) / "model.safetensors")["model.embed_tokens.weight"]
    known = after["token_ids"] if "token_ids" in after else after["d2t"] + torch.arange(len(after["d2t"]))
    assert torch.equal(after["lm_head.weight"], rows[known])
    num_asked = 0

    def should_stop() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked > 20

    broken = train_order(tmp_path / "broken", method=card.method, begun_from=str(folder))
    assert finished_run(opened(broken, next_target, recipe, should_stop)) is None
    again = finished_run(opened(broken, next_target, recipe, lambda: False))
    assert again is not None
    assert again.draft_revision == whole.draft_revision
    with pytest.raises(ConfigError, match="holds a run with another from"):
        opened(broken.model_copy(update={"begun_from": None}), next_target, recipe, lambda: False)


def test_training_goes_on_from_nothing_that_does_not_fit(
    parent: tuple[DraftCard, Path], finished: tuple[Path, DraftCard], settings: Settings, tmp_path: Path
) -> None:
    card, folder = parent

    def refused(method: Any, begun_from: Path) -> str:
        with pytest.raises(AlphaloopError) as error:
            opened(
                train_order(tmp_path / "x", method=method, begun_from=str(begun_from)), settings, RECIPE, lambda: False
            )
        assert not (tmp_path / "x").exists()
        return error.value.message

    other = "eagle3" if card.method == "heads" else "heads"
    assert refused("draft_model", folder) == "expected --method heads or eagle3 with --from, found draft_model"
    assert f"expected heads of the method {other}, found" in refused(other, folder)
    assert refused(card.method, finished[0]).endswith("found a model")
    shutil.copytree(folder, wrong := tmp_path / "wrong", ignore=shutil.ignore_patterns(".training"))
    weights = load_file(wrong / "model.safetensors")
    name = "outer.weight" if card.method == "heads" else "fc.weight"
    save_file(weights | {name: weights[name][:, :-1].contiguous()}, wrong / "model.safetensors", {"format": "pt"})
    assert f"expected {name} of" in refused(card.method, wrong)
    save_file(weights | {"bias": torch.zeros(1)}, wrong / "model.safetensors", {"format": "pt"})
    assert refused(card.method, wrong) == "expected no further tensors, found bias"


def test_a_wrong_field_of_a_prompt_is_named_as_in_its_line(settings: Settings, tmp_path: Path) -> None:
    tokenizer = load_weights(settings.models.target.source, None, "float32", torch.device("cpu")).tokenizer
    said: list[str] = []
    wrong: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"nobody": 1}}
    for fields, field in (
        (wrong, "chat_template_kwargs.nobody"),
        ({"body": wrong}, "body.chat_template_kwargs.nobody"),
    ):
        (tmp_path / "p.jsonl").write_text(json.dumps({"task": "code", **fields}), encoding="utf-16")
        with pytest.raises(ConfigError, match=rf"p\.jsonl:1: {field}: expected"):
            read_prompts(settings, None, said.append, tmp_path / "p.jsonl", tokenizer)
    assert said == [f"{tmp_path / 'p.jsonl'} is read as UTF-16"] * 2


def test_prompts_of_a_pipe_are_read_as_often_as_those_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--prompts <(zcat a.gz) --held-out <(zcat b.gz)`."""
    given: dict[str, Path] = {}
    for name in ("prompts", "held_out"):
        read, write = os.pipe()
        os.write(write, name.encode())
        os.close(write)
        given[name] = Path(f"/dev/fd/{read}")
    read_twice: list[bytes] = []

    class Run:
        def __init__(self, wanted: WantedDraft, *_: object, **__: object) -> None:
            for file in (wanted.prompts, wanted.held_out) * 2:
                assert file is not None
                read_twice.append(file.read_bytes())

        def make(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr("engine.training.run.TrainingRun", Run)
    assert CarriedOut(train_order(tmp_path, **given)).code == 130
    assert read_twice == [b"prompts", b"held_out"] * 2
    for file in given.values():
        os.close(int(file.name))
