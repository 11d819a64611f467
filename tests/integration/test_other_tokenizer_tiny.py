"""Draft models with a tokenizer of their own, over tiny targets in float64: the target's text, whatever drafts."""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling
from alphaloop.errors import IncompatiblePair
from alphaloop.settings.models import DraftModelDrafterSettings, ModelSettings, TargetSettings
from engine.device import Placement
from engine.drafters.draft_model import DraftModelDrafter, DraftModels
from engine.drafters.draft_vocabulary import DraftTokens, restrict_head, write_draft_vocabulary
from engine.drafters.translation import TranslatedText, Translation
from engine.models import find_weights, load_target
from engine.network.language_model import LanguageModel
from engine.own import TransformersEngine, load_engine
from engine.proposal import Ask
from engine.sampling import TokenChooser
from engine.scoring import score
from tests.fixtures.models import (
    VANILLA,
    byte_fallback,
    decision,
    finish,
    make_job,
    other_tokenizer,
    small_llama,
)

GREEDY: Final = Sampling(max_tokens=24, temperature=0.0)
SAMPLINGS: Final = (
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.2),
    Sampling(max_tokens=24, temperature=0.9, seed=5),
    Sampling(max_tokens=24, temperature=1.1, seed=5, top_p=0.8, top_k=40),
)
PROMPTS: Final = ("wrapping and filling of text", "é 丁七 text\n\n    wrapped", "JSON", "a " * 40, "x" * 200)
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


@pytest.fixture(scope="module")
def twin(
    tiny_models: dict[str, Path], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> DraftModelDrafter:
    """The target itself under other ids: whatever it proposes is right, as long as its slot holds the text."""
    folder = tmp_path_factory.mktemp("twin")
    tiny_tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = list(range(3, 384))
    random.Random(4).shuffle(ids)
    new = dict(enumerate([0, 1, 2, *ids]))
    content["model"]["vocab"] = {name: new[old] for name, old in content["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made = Translation.between(tiny_tokenizer, tokenizer, num_target_rows=384, num_draft_rows=384)
    assert made is not None
    assert all(made.draft_of[old] == new[old] for old in made.draft_of)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_models["llama"], dtype=torch.float64).eval()
    order = torch.tensor([old for old, _ in sorted(new.items(), key=lambda pair: pair[1])])
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight.copy_(weight[order])
    restrict_head(model, made.draft_ids)
    known = DraftTokens(384, 384, frozenset({0}), made.target_ids)
    state = DrafterState("twin", "r", 8)
    return DraftModelDrafter(state, LanguageModel(model, 512), known, num_slots=4, context_length=512, translation=made)


def test_the_target_under_other_ids_is_nearly_always_right(
    tiny_engine: Callable[..., TransformersEngine], twin: DraftModelDrafter
) -> None:
    engine = tiny_engine(num_slots=4, drafters={"twin": twin})
    for how in (GREEDY, SAMPLINGS[2]):
        work = [(make_job(prompt, number), how) for number, prompt in enumerate(PROMPTS)]
        plain, drafted = (finish(engine, [(*one, way) for one in work]) for way in (VANILLA, decision("twin", 4)))
        assert {one: its.token_ids for one, its in drafted.items()} == {
            one: its.token_ids for one, its in plain.items()
        }
        counts = [its.counts for its in drafted.values()]
        # A random model writes what no tokenizer would: the draft reads it as its tokenizer writes it.
        assert sum(one.num_accepted for one in counts) > 0.3 * sum(one.num_trials for one in counts)


@torch.inference_mode()
def test_drafts_are_drawn_from_the_drafts_own_distribution_over_the_shared_tokens(twin: DraftModelDrafter) -> None:
    translation, how = twin.translation, Sampling(max_tokens=30, temperature=0.8, top_k=30)
    assert translation is not None
    for sampling in (how, replace(how, top_k=0)):
        text = translation.target("wrapping and filling")["input_ids"]
        twin.open("j", text, sampling, "code")
        (proposal,) = twin.propose([Ask("j", text, 4, TokenChooser("j", sampling, len(text)))])
        twin.close("j")
        assert proposal.q is not None
        assert len(proposal.q) == len(proposal.tokens)
        _, read = TranslatedText(translation).take(text)
        cache = twin.model.new_cache(1)
        for place, token in enumerate(proposal.tokens):
            slot = cache.acquire()
            logits = twin.model.prefill(
                cache, slot, [*read, *(translation.draft_of[one] for one in proposal.tokens[:place])]
            )
            cache.release(slot)
            logits = logits.flatten().double() / 0.8
            if sampling.top_k:
                logits[logits < logits.topk(sampling.top_k).values[-1]] = -torch.inf
            q = torch.zeros(384, dtype=torch.float64)
            q[translation.target_ids] = logits.softmax(0)
            stated = -proposal.q[place : place + 1].taken_from(torch.zeros((1, 384), dtype=torch.float64))[0]
            assert torch.allclose(stated, q, atol=1e-9)
            assert q[token] > 0


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
