"""A draft model from its settings: checked against its target, warned of or refused, and what it is called."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alphaloop.engine import Sampling
from alphaloop.errors import IncompatiblePair
from alphaloop.settings.models import DraftModelDrafterSettings, TargetSettings
from engine.device import Placement
from engine.drafters.draft_model import DraftModelDrafter, DraftModels
from engine.drafters.draft_vocabulary import write_draft_vocabulary
from engine.models import Target, find_weights, load_target
from engine.proposal import Ask
from engine.sampling import TokenChooser
from tests.fixtures.models import small_llama, word_pieces

GREEDY = Sampling(max_tokens=20, temperature=0.0)


@pytest.fixture(scope="module")
def served(tiny_models: dict[str, Path]) -> TargetSettings:
    return TargetSettings(
        name="tiny", source=str(tiny_models["llama"]), dtype="float32", device="cpu", context_length=64
    )


@pytest.fixture(scope="module")
def target(served: TargetSettings) -> Target:
    return load_target(served)


@pytest.fixture(scope="module")
def source(tiny_models: dict[str, Path], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small draft with a context of 16 and padded embeddings."""
    changes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    changes |= {"max_position_embeddings": 16, "vocab_size": 400}
    return small_llama(tiny_models["llama"], tiny_tokenizer, tmp_path_factory.mktemp("source"), **changes)


def load(source: Path, served: TargetSettings, target: Target, **more: Any) -> DraftModelDrafter:
    settings = DraftModelDrafterSettings(source=str(source), max_draft_tokens=4, **more)
    models = DraftModels({"small": settings}, served, target, placement=Placement(target.device), num_slots=2)
    return models.load("small")


def drafts(made: DraftModelDrafter, text: list[int]) -> tuple[int, ...]:
    made.open("j", text, GREEDY, "code")
    (proposal,) = made.propose([Ask("j", text, 4, TokenChooser("j", GREEDY, len(text)))])
    made.close("j")
    return proposal.tokens


def test_it_drafts_what_the_model_says_within_its_context(
    served: TargetSettings, target: Target, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "engine.drafters"):
        made = load(source, served, target)
    assert [record.__dict__["check"] for record in caplog.records] == ["context"]
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    text = [5, 6, 7]
    for token in drafts(made, list(text)):
        with torch.inference_mode():
            assert token == int(model(torch.tensor([text])).logits[0, -1, :384].argmax())
        text.append(token)
    assert len(text) == 7 or text[-1] in target.end_tokens
    assert drafts(made, list(range(5, 5 + 17))) == ()


def test_its_revision_is_its_weights_and_a_dtype_of_its_own(
    served: TargetSettings, target: Target, source: Path
) -> None:
    revision = find_weights(str(source)).revision
    assert load(source, served, target).state.revision == revision
    other = load(source, served, target, dtype="bfloat16").state
    assert (other.revision, other.name, other.max_draft_tokens) == (f"{revision}-bfloat16", "small", 4)
    dialled = load(source, served, target, min_probability=0.25, num_branches=2).state
    assert dialled.revision == f"{revision}-p0.25-b2w"
    assert dialled.num_read(1000.0) == 1000.0
    hasty = load(source, served, target, max_prompt_tokens=64).state
    assert (hasty.revision, hasty.num_read(1000.0), hasty.num_read(10.0)) == (f"{revision}-t64", 64, 10.0)


def test_a_cut_head_is_found_beside_the_weights(
    served: TargetSettings, target: Target, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(source, folder)
    write_draft_vocabulary(folder, torch.tensor([7, 9, 11]))
    made = load(folder, served, target)
    assert set(drafts(made, [5, 6])) <= {7, 9, 11}
    assert made.state.revision != find_weights(str(source)).revision


def test_drafters_of_the_same_weights_share_them_but_no_slots(
    served: TargetSettings, target: Target, source: Path
) -> None:
    dials: dict[str, dict[str, Any]] = {
        "plain": {},
        "gated": {"min_probability": 0.9},
        "branching": {"num_branches": 2},
        "hasty": {"max_prompt_tokens": 16},
        "hasty gated": {"max_prompt_tokens": 16, "min_probability": 0.5},
        "other": {"dtype": "bfloat16"},
    }
    settings = {
        name: DraftModelDrafterSettings(source=str(source), max_draft_tokens=4, **more) for name, more in dials.items()
    }
    models = DraftModels(settings, served, target, placement=Placement(target.device), num_slots=2)
    made = {name: models.load(name) for name in dials}
    plain, gated = made["plain"], made["gated"]
    assert {name for name, one in made.items() if one.model is not plain.model} == {"other"}
    assert len({one.state.revision for one in made.values()}) == len(dials)
    shared_weights = {
        name: [(other.state.name, other.min_probability) for other in one.shared_weights] for name, one in made.items()
    }
    assert shared_weights == {
        "plain": [("gated", 0.9)],
        "gated": [("plain", 0.0)],
        "branching": [],
        "other": [],
        "hasty": [("hasty gated", 0.5)],
        "hasty gated": [("hasty", 0.0)],
    }
    assert plain.shared_weights[0].state == gated.state
    assert plain.state.shared_weights == gated.state.shared_weights != made["hasty"].state.shared_weights
    assert not made["branching"].state.shared_weights
    text = [5, 6, 7]
    alone = drafts(load(source, served, target), text)
    plain.open("j", text, GREEDY, "code")
    gated.open("j", [9, 8, 7, 6], GREEDY, "code")
    (proposal,) = gated.propose([Ask("j", [9, 8, 7, 6], 4, TokenChooser("j", GREEDY, 4))])
    assert proposal.tokens == drafts(load(source, served, target, min_probability=0.9), [9, 8, 7, 6])
    (proposal,) = plain.propose([Ask("j", text, 4, TokenChooser("j", GREEDY, len(text)))])
    assert proposal.tokens == alone


def test_a_pair_that_does_not_fit_is_refused_before_its_weights_are_read(
    served: TargetSettings, target: Target, source: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(IncompatiblePair, match=r"size: .* cannot pay"):
        load(tiny_models["qwen2"], served, target)
    folder = tmp_path / "other"
    shutil.copytree(source, folder)
    word_pieces().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(IncompatiblePair, match=r"ids name different tokens: .* Nor can they be matched by their bytes"):
        load(folder, served, target)
