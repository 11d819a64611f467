"""Drafts cut out of a target, turned, written down and trained.

The loss is compared with sums by hand, a run that was stopped with one that was not, and rounds with teacher forcing.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from alphaloop.errors import ConfigError, UnsupportedModel
from engine.device import find_device
from engine.drafters.draft_vocabulary import read_draft_vocabulary, restrict_head, write_draft_vocabulary
from engine.models import DRAFT_VOCABULARY, find_weights, load_weights
from engine.training.data import Lesson, TeacherNotes, WrittenText
from engine.training.distil import (
    Distillation,
    collate,
    columns_of,
    cut_draft,
    distillation_loss,
    draft_training,
    fit_map,
    judge,
    num_layers,
    turn_head,
    walk_rounds,
)
from engine.training.recipe import Recipe, read_recipe

RECIPE = Recipe(num_epochs=2, batch_tokens=96, precision="float32", learning_rate=3e-3, warmup_share=0.2)
KNOWN = torch.arange(0, 384, 2)


def loaded_from(folder: Path, dtype: str = "float64") -> Any:
    return load_weights(str(folder), None, dtype, find_device("cpu"))


@pytest.fixture(scope="module")
def target(tiny_models: dict[str, Path]) -> Any:
    return loaded_from(tiny_models["llama"], "float32").model


@pytest.fixture(scope="module")
def lessons(target: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Lesson]:
    rng = random.Random(7)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(384) for _ in range(rng.randint(2, most)))

    texts = [WrittenText(i, "any", tokens(6), tokens(20)) for i in range(24)]
    notes = TeacherNotes(tmp_path_factory.mktemp("notes"), texts, max_length=20, num_kept=8)
    notes.write(target, lambda: False, lambda num: None)
    return notes.lessons()


@pytest.mark.parametrize("columns", [None, columns_of(KNOWN, 384)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_loss_is_the_sum_by_hand(lessons: list[Lesson], columns: Tensor | None, share: float) -> None:
    width = 384 if columns is None else len(KNOWN)
    batch = collate(lessons[:3], columns, RECIPE)
    num_texts, length = batch.token_ids.shape
    logits = torch.randn(num_texts * (length - 1), width, generator=torch.Generator().manual_seed(1))
    log_q = logits.log_softmax(dim=-1).view(num_texts, length - 1, width)
    total, weight = 0.0, 0.0
    for row, lesson in enumerate(lessons[:3]):
        for place in range(len(lesson.token_ids) - 1):
            counts = RECIPE.prompt_weight if place + 1 < lesson.first_answer else 1.0
            for rank, (token, log_p) in enumerate(
                zip(lesson.top_ids[place].tolist(), lesson.top_log_probs[place].tolist(), strict=True)
            ):
                column = token if columns is None else int(columns[token])
                if column < 0:
                    continue
                p = float(torch.tensor(log_p).exp())
                weight += counts * p
                total -= counts * (1 - share) * p * float(log_q[row, place, column])
                total -= counts * share * float(log_q[row, place, column]) if rank == 0 else 0.0
    assert float(distillation_loss(logits, batch, share)) == pytest.approx(total / weight, rel=1e-4)


def training(target: Any, lessons: list[Lesson], file: Path, recipe: Recipe = RECIPE) -> Distillation[Lesson]:
    draft = cut_draft(target, 1)
    restrict_head(draft, KNOWN)
    return draft_training(draft.train(), lessons, columns_of(KNOWN, 384), recipe, file)


def test_a_run_stopped_twice_ends_with_the_same_bits(target: Any, lessons: list[Lesson], tmp_path: Path) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = training(target, lessons, tmp_path / "whole")
        assert whole.run(lambda: False, lambda: None)
        for stop_after in (0, 3, 4, 1000):
            part = training(target, lessons, tmp_path / "part")
            limit = part.step + stop_after
            is_done = part.run(lambda p=part, n=limit: p.step >= n, lambda: None)  # type: ignore[misc]
            assert is_done == (stop_after == 1000)
    finally:
        torch.set_num_threads(num_threads)
    assert whole.step == part.step == whole.num_steps > 8
    for name, weight in whole.trained().items():
        assert torch.equal(weight, part.trained()[name]), name
    again = training(target, lessons, tmp_path / "whole")
    assert again.step == again.num_steps
    for name, weight in whole.trained().items():
        assert torch.equal(weight, again.trained()[name]), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_lowers_the_loss_and_moves_only_the_layers(
    target: Any, lessons: list[Lesson], tmp_path: Path, precision: str
) -> None:
    recipe = Recipe.model_validate({**RECIPE.model_dump(), "num_epochs": 6, "precision": precision})
    run = training(target, lessons, tmp_path / "state", recipe)
    losses: list[float] = []
    assert run.run(lambda: False, lambda: losses.append(run.loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert all(".layers." in name for name in run.trained())


def test_rounds_by_hand() -> None:
    # k = 2: [accept, accept, free] [reject] [accept, (the last token is the target's own)]
    matches = [True, True, False, False, True, True]
    counts = walk_rounds([matches, matches[1:]], 7)
    assert counts.rounds == 3
    assert counts.proposed == (3, 2)
    assert counts.trials == (3, 1)
    assert counts.accepts == (2, 1)
    assert counts.num_tokens == 6


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_target_that_drafts_for_itself_is_always_accepted(
    tiny_models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    target = loaded_from(tiny_models[family]).model
    prompt = (5, 7, 9)
    with torch.inference_mode():
        written = target.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=-1)
    text = WrittenText(0, "code", prompt, tuple(written[0, len(prompt) :].tolist()))
    notes = TeacherNotes(tmp_path, [text], max_length=64, num_kept=384)
    assert notes.write(target, lambda: False, lambda num: None)
    by_task, verdict = judge(target, notes.lessons(), None, 4)
    assert by_task == {"code": verdict}
    # 19 tokens behind the prefill's: three rounds of 5, then one of 4.
    assert (verdict.rounds, verdict.num_tokens, verdict.num_positions) == (4, 19, 20)
    assert verdict.proposed == verdict.trials == verdict.accepts == (4, 4, 4, 3)
    assert verdict.overlap() == pytest.approx(1.0, abs=1e-3)
    # A draft that cannot say the text's tokens is never accepted; what it gives to others is no overlap either.
    columns = torch.full((target.config.vocab_size,), -1)
    _, dumb = judge(target, notes.lessons(), columns, 4)
    assert (sum(dumb.accepts), dumb.overlap()) == (0, 0.0)


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]]), use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_draft_of_all_layers_is_the_target(tiny_models: dict[str, Path], family: str) -> None:
    target = loaded_from(tiny_models[family]).model
    draft = cut_draft(target, 2)
    torch.testing.assert_close(logits_of(draft).double(), logits_of(target), atol=1e-3, rtol=1e-3)
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".layers." in name for name in trained)
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.float32}


def test_a_text_model_inside_of_another_is_refused() -> None:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 1}
    sizes |= dict.fromkeys(("hidden_size", "vocab_size", "intermediate_size"), 8)
    config = transformers.Gemma3Config(text_config=sizes)
    with torch.device("meta"):
        target = transformers.AutoModelForCausalLM.from_config(config)
    assert num_layers(target) == 3
    with pytest.raises(UnsupportedModel, match="gemma3 cannot be taken out: expected a text model"):
        cut_draft(target, 2)


def test_a_saved_draft_is_a_plain_model_that_computes_the_same(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    loaded = loaded_from(tiny_models["qwen3"])
    draft = cut_draft(loaded.model, 1)
    with torch.no_grad():
        draft.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    expected = logits_of(draft).double()
    draft.to(torch.float64).save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    before = find_weights(str(tmp_path)).revision
    write_draft_vocabulary(tmp_path, torch.tensor([1, 5]))
    again = loaded_from(tmp_path)
    assert find_weights(str(tmp_path)).revision != before, "another vocabulary is another draft"
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"], "vLLM reads all of these"
    assert again.model.config.num_hidden_layers == 1
    assert again.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    torch.testing.assert_close(logits_of(again.model), expected, atol=1e-3, rtol=1e-3)


def test_a_vocabulary_comes_back_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    assert read_draft_vocabulary(tmp_path) is None
    write_draft_vocabulary(tmp_path, torch.tensor([2, 3, 9]))
    found = read_draft_vocabulary(tmp_path)
    assert found.tolist() == [2, 3, 9]
    for wrong in (torch.tensor([3, 2]), torch.tensor([2, 2]), torch.tensor([-1, 2]), torch.tensor([[1, 2]])):
        write_draft_vocabulary(tmp_path, wrong)
        with pytest.raises(UnsupportedModel, match=DRAFT_VOCABULARY):
            read_draft_vocabulary(tmp_path)
    (tmp_path / DRAFT_VOCABULARY).write_bytes(b"no JSON")
    with pytest.raises(UnsupportedModel, match=DRAFT_VOCABULARY):
        read_draft_vocabulary(tmp_path)


def distance(draft: Any, mapping: torch.Tensor, lessons: list[Lesson]) -> float:
    total = 0.0
    for lesson in lessons:
        with torch.inference_mode():
            output = draft(input_ids=lesson.token_ids[None, :-1], use_cache=False, output_hidden_states=True)
        total += float((output.hidden_states[-1][0] @ mapping.T - lesson.states.float()).square().sum())
    return total


def test_a_draft_that_is_the_target_needs_no_turning(target: Any, lessons: list[Lesson]) -> None:
    seen: list[None] = []
    draft = cut_draft(target, 2)
    mapping = fit_map(draft, lessons, lambda: seen.append(None))
    assert len(seen) == len(lessons)
    size = sum(float(lesson.states.float().square().sum()) for lesson in lessons if lesson.states is not None)
    assert distance(draft, mapping, lessons) < 1e-3 * size < 0.1 * distance(draft, torch.zeros(64, 64), lessons)


def test_no_other_map_is_nearer(target: Any, lessons: list[Lesson]) -> None:
    draft = cut_draft(target, 1)
    mapping = fit_map(draft, lessons, lambda: None)
    found = distance(draft, mapping, lessons)
    assert found < distance(draft, torch.eye(64), lessons)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        nearby = mapping + 0.05 * torch.randn(64, 64, generator=generator)
        assert found < distance(draft, nearby, lessons)


def test_a_turned_head_reads_mapped_states_and_leaves_the_target_alone(target: Any, lessons: list[Lesson]) -> None:
    draft = cut_draft(target, 1)
    before = target.get_output_embeddings().weight.clone()
    mapping = fit_map(draft, lessons, lambda: None)
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        expected = draft.get_output_embeddings()(states @ mapping.T)
        turn_head(draft, mapping)
        torch.testing.assert_close(draft.get_output_embeddings()(states), expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(target.get_output_embeddings().weight, before)


def test_a_file_is_read_and_the_seed_of_the_command_wins(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text("num_layers = 3\nseed = 1\n", encoding="utf-8")
    assert read_recipe(file) == Recipe(num_layers=3, seed=1)
    assert read_recipe(file, seed=7) == Recipe(num_layers=3, seed=7)
    assert read_recipe(None) == Recipe()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("num_layer = 3", "num_layer: "),
        ("num_layers = 0", "num_layers: "),
        ("num_layers = ", "Invalid value"),
    ],
)
def test_a_wrong_file_names_what_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        read_recipe(file)
