"""Texts of a model whose tokenizer is SentencePiece's, as jobs get them: the first space, characters, stop strings."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alphaloop.messages import Job, Origin, parse_job
from alphaloop.settings.models import ModelSettings, TargetSettings
from tests.fixtures.models import byte_fallback, lookup_decision, steps
from worker.decoding.engine import TransformersEngine, load_engine
from worker.engine import Generation, Sampling

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = byte_fallback()
    made.chat_template = "{% for message in messages %}<|x|>{{ message['content'] }}{% endfor %}<s>"
    return made


@pytest.fixture(scope="module")
def engine(
    tiny_models: dict[str, Path], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> TransformersEngine:
    """The tiny Llama: its tokens mean other texts here."""
    shutil.copytree(tiny_models["llama"], folder := tmp_path_factory.mktemp("texts") / "model")
    tokenizer.save_pretrained(folder)
    # Nothing of the model ends a text, so that stop strings do.
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": None}))
    target = TargetSettings(name="tiny", source=str(folder), dtype="float64", device="cpu", num_threads=1)
    return load_engine(ModelSettings(target=target), num_slots=2)


def decode(engine: TransformersEngine, sampling: Sampling, k: int = 0, **body: Any) -> tuple[Generation, str]:
    """A job's generation, and its deltas together."""
    taken = list(steps(engine, [(as_job(**body), sampling, lookup_decision(k))]))
    (generation,) = (one for step in taken for one in step.finished)
    return generation, "".join(delta.text for step in taken for delta in step.deltas)


def as_job(**body: Any) -> Job:
    return parse_job(
        json.dumps({"task": "code", "body": body}).encode(), Origin("test", "jobs.code", 0, 0), task="code"
    )


@pytest.mark.parametrize("k", [0, 4])
def test_a_text_is_the_same_streamed_stored_or_searched_and_goes_on_from_its_prompt(
    engine: TransformersEngine, tokenizer: Any, rng: random.Random, k: int
) -> None:
    names = ("▁a", "▁=", "▁def", "t", "h", "<|x|>")
    likely = tuple(sorted((tokenizer.convert_tokens_to_ids(name), 30.0) for name in names))
    for seed in range(12):
        sampling = Sampling(max_tokens=60, temperature=1.0, seed=seed, logit_bias=likely)
        prompt = "def add" + "日本語" * rng.randrange(3)
        found, _ = decode(engine, sampling, k, prompt=prompt)
        streamed, deltas = decode(engine, sampling, k, prompt=prompt, stream=True)
        searched, _ = decode(engine, replace(sampling, stop=("never",)), k, prompt=prompt)
        assert found.text == streamed.text == searched.text == deltas
        whole = tokenizer.decode([*tokenizer(prompt)["input_ids"], *found.token_ids], skip_special_tokens=True)
        assert prompt + found.text == whole


def test_the_first_space_may_begin_a_stop_string_and_an_answer_has_none(
    engine: TransformersEngine, tokenizer: Any
) -> None:
    is_next = ((tokenizer.convert_tokens_to_ids("▁="), 100.0),)
    sampling = Sampling(max_tokens=3, temperature=0.0, logit_bias=is_next)
    assert decode(engine, sampling, prompt="def add")[0].text == " = = ="
    assert decode(engine, sampling, messages=[{"role": "user", "content": "def add"}])[0].text == "= = ="
    stopped = Sampling(max_tokens=3, temperature=0.0, logit_bias=is_next, stop=(" =",))
    found, _ = decode(engine, stopped, prompt="def add")
    assert (found.text, found.finish_reason, len(found.token_ids)) == ("", "stop", 1)
