"""Draft models with a tokenizer of their own, over tiny targets in float64: the target's text, whatever drafts."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Final

import pytest
import torch

from alphaloop.engine import Sampling
from alphaloop.errors import IncompatiblePair
from alphaloop.settings.models import DraftModelDrafterSettings, ModelSettings, TargetSettings
from engine.device import Placement
from engine.drafters.draft_model import DraftModelDrafter, DraftModels
from engine.drafters.draft_vocabulary import write_draft_vocabulary
from engine.models import find_weights, load_target
from engine.own import load_engine
from engine.proposal import Ask
from engine.sampling import TokenChooser
from engine.scoring import score
from tests.fixtures.models import (
    byte_fallback,
    other_tokenizer,
    small_llama,
)

GREEDY: Final = Sampling(max_tokens=24, temperature=0.0)
TOKENIZERS: Final = {"other merges": other_tokenizer, "byte fallback": byte_fallback}


@pytest.fixture(scope="module", params=TOKENIZERS)
def source(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small draft whose tokenizer is not that of the tiny models."""
    tokenizer = TOKENIZERS[request.param]()
    changes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    changes |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    folder = tmp_path_factory.mktemp("other")
    return small_llama(tiny_models["llama"], tokenizer, folder, dtype=torch.float64, **changes)


@pytest.fixture(scope="module")
def served(tiny_models: dict[str, Path]) -> TargetSettings:
    return TargetSettings(name="tiny", source=str(tiny_models["llama"]), dtype="float64", device="cpu", num_threads=1)


def test_its_rounds_and_prompts_are_timed(served: TargetSettings, source: Path) -> None:
    small = DraftModelDrafterSettings(source=str(source))
    engine = load_engine(ModelSettings(target=served, drafters={"small": small}), num_slots=4)
    assert engine.measure_round_ms("small", 2, 4, 64, 1) > 0
    assert engine.measure_prefill_ms("small", 64, 1) > 0


def loaded(served: TargetSettings, **drafters: DraftModelDrafterSettings) -> dict[str, DraftModelDrafter]:
    target = load_target(served)
    models = DraftModels(drafters, served, target, placement=Placement(target.device), num_slots=2)
    return {name: models.load(name) for name in drafters}


def test_its_revision_names_the_map_and_what_the_map_cannot_do_is_off(
    served: TargetSettings, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "engine.drafters"):
        made = loaded(
            served,
            plain=DraftModelDrafterSettings(source=str(source)),
            gated=DraftModelDrafterSettings(source=str(source), min_probability=0.25),
        )
    plain, gated = made["plain"], made["gated"]
    assert plain.translation is not None
    assert f"{plain.translation.share:.0%} of those of a sample text" in caplog.text
    base = f"{find_weights(str(source)).revision}-i{plain.translation.revision}"
    assert (plain.state.revision, gated.state.revision) == (base, f"{base}-p0.25")
    assert plain.model is gated.model
    assert [one.state.name for one in plain.shared_weights] == ["gated"]
    assert not plain.state.is_scorable
    per_token = plain.model.kv_shape.bytes_per_token * plain.translation.length
    assert plain.bytes_per_token == plain.state.cache_bytes_per_token == math.ceil(per_token)
    assert score(plain, [40, 50], [60, 70], 4, max_tokens=2) is None, "one pass does not say what it would propose"


def test_a_head_that_was_cut_already_proposes_what_is_left(
    served: TargetSettings, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(source, folder)
    known = torch.arange(10, 280, 3)
    write_draft_vocabulary(folder, known)
    (made,) = loaded(served, small=DraftModelDrafterSettings(source=str(folder))).values()
    assert made.translation is not None
    assert made.tokens.token_ids is not None
    proposable = made.tokens.token_ids.tolist()
    both = {*made.translation.draft_of.values()}
    assert max(both) > 200
    assert {made.translation.draft_of[token] for token in proposable} == both & {*known.tolist()}
    text = [40, 50, 60]
    made.open("j", text, GREEDY, "code")
    (proposal,) = made.propose([Ask("j", text, 4, TokenChooser("j", GREEDY, len(text)))])
    assert {*proposal.tokens} <= {*proposable}


def test_a_pair_that_shares_too_little_is_refused_with_the_figure(
    served: TargetSettings, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Bytes alone are in every text, but a draft of nearly the target's size needs more."""
    tokenizer = byte_fallback()
    changes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "intermediate_size": 230}
    folder = small_llama(tiny_models["llama"], tokenizer, tmp_path, eos_token_id=tokenizer.eos_token_id, **changes)
    with pytest.raises(IncompatiblePair, match=r"260 of the target's 384 tokens .* 74% .* Expected more than 8\d%"):
        loaded(served, small=DraftModelDrafterSettings(source=str(folder)))
