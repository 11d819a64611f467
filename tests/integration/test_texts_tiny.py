"""Texts of a model whose tokenizer is SentencePiece's, as jobs get them: the first space, and stop strings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from alphaloop.engine import Generation, Sampling
from alphaloop.messages import Body, Job
from alphaloop.settings.models import ModelSettings, TargetSettings
from engine.own import TransformersEngine, load_engine
from tests.fixtures.models import VANILLA, byte_fallback, decode_one

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


def decode(engine: TransformersEngine, sampling: Sampling, **body: Any) -> Generation:
    job = Job(job_id="a", task="code", body=Body.model_validate(body))
    return decode_one(engine, engine.prepare(job, sampling), VANILLA)


def test_the_first_space_may_begin_a_stop_string_and_an_answer_has_none(
    engine: TransformersEngine, tokenizer: Any
) -> None:
    is_next = ((tokenizer.convert_tokens_to_ids("▁="), 100.0),)
    sampling = Sampling(max_tokens=3, temperature=0.0, logit_bias=is_next)
    for stream in (False, True):
        assert decode(engine, sampling, prompt="def add", stream=stream).text == " = = ="
    assert decode(engine, sampling, messages=[{"role": "user", "content": "def add"}]).text == "= = ="
    stopped = Sampling(max_tokens=3, temperature=0.0, logit_bias=is_next, stop=(" =",))
    found = decode(engine, stopped, prompt="def add")
    assert (found.text, found.finish_reason, len(found.token_ids)) == ("", "stop", 1)
