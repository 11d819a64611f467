"""Texts of a model whose tokenizer is SentencePiece's, as jobs get them: the first space, and stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaloop.engine import Generation, Sampling
from alphaloop.messages import Body, Job
from tests.fixtures.models import VANILLA, byte_fallback, decode_one, engine_over, with_config

pytestmark = pytest.mark.model


def test_the_first_space_may_begin_a_stop_string_and_an_answer_has_none(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """The tiny Llama: its tokens mean other texts here, and nothing of the model ends one."""
    tokenizer = byte_fallback()
    tokenizer.chat_template = "{% for message in messages %}<|x|>{{ message['content'] }}{% endfor %}<s>"
    folder = with_config(tiny_models["llama"], tmp_path / "model", eos_token_id=None)
    (folder / "generation_config.json").write_text("{}")
    tokenizer.save_pretrained(folder)
    engine, is_next = engine_over(folder), ((tokenizer.convert_tokens_to_ids("▁="), 100.0),)

    def decode(*stop: str, **body: Any) -> Generation:
        sampling = Sampling(max_tokens=3, temperature=0.0, logit_bias=is_next, stop=stop)
        job = Job(job_id="a", task="code", body=Body.model_validate(body))
        return decode_one(engine, engine.prepare(job, sampling), VANILLA)

    for stream in (False, True):
        assert decode(prompt="def add", stream=stream).text == " = = ="
    assert decode(messages=[{"role": "user", "content": "def add"}]).text == "= = ="
    stopped = decode(" =", prompt="def add")
    assert (stopped.text, stopped.finish_reason, len(stopped.token_ids)) == ("", "stop", 1)
