"""A prompt that cannot fit is refused before it is tokenized, and one that may fit never is."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alphaloop.engine import PreparedJob, Sampling
from alphaloop.errors import PromptTooLong
from alphaloop.messages import Origin, parse_job
from engine.prompts import longest_token_chars, prepare_job
from tests.fixtures.models import NUM_TOKENS


def prepare(tokenizer: Any, context_length: int, **body: Any) -> PreparedJob:
    value = json.dumps({"body": body}).encode()
    job = parse_job(value, Origin("c", "jobs.qa", 0, 1), task="qa")
    longest = longest_token_chars(tokenizer)
    return prepare_job(tokenizer, "tiny", context_length, job, Sampling(1, 0.0), longest_token_chars=longest)


@pytest.mark.parametrize("body", [{"prompt": "x" * 1_000_000}, {"messages": [{"role": "user", "content": "x" * 9**6}]}])
def test_a_prompt_of_a_megabyte_is_refused_without_tokenizing(
    tiny_tokenizer: Any, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(tiny_tokenizer), "__call__", lambda *_, **__: pytest.fail("tokenized"))
    with pytest.raises(PromptTooLong, match=r"expected at most \d+ characters") as caught:
        prepare(tiny_tokenizer, 100, **body)
    assert caught.value.field == f"body.{next(iter(body))}"


@given(st.data())
def test_no_token_stands_for_more_characters(tiny_tokenizer: Any, data: st.DataObject) -> None:
    longest = longest_token_chars(tiny_tokenizer)
    text = data.draw(st.text(st.characters(exclude_categories=("Cs",)), max_size=200))
    known = data.draw(st.lists(st.sampled_from(sorted(tiny_tokenizer.get_vocab())), max_size=20))
    text += tiny_tokenizer.convert_tokens_to_string(known)
    assert len(text) <= longest * len(tiny_tokenizer(text)["input_ids"])


def test_the_longest_prompt_that_can_fit_is_tokenized(tiny_tokenizer: Any) -> None:
    longest = longest_token_chars(tiny_tokenizer)
    texts = [tiny_tokenizer.convert_tokens_to_string([token]) for token in sorted(tiny_tokenizer.get_vocab())]
    text = max((one for one in texts if one.strip()), key=len)
    assert len(text) == longest
    num_tokens = len(tiny_tokenizer(text * 20)["input_ids"])
    assert len(prepare(tiny_tokenizer, num_tokens + 1, prompt=text * 20).token_ids) == num_tokens


def test_a_normalizer_that_shortens_is_taken_into_account(tiny_tokenizer: Any) -> None:
    stripping = deepcopy(tiny_tokenizer)
    stripping.backend_tokenizer.normalizer = normalizers.Strip()
    padded = " " * 10_000 + "short" + " " * 10_000
    assert prepare(stripping, 20, prompt=padded).token_ids == prepare(tiny_tokenizer, 20, prompt="short").token_ids


def test_there_is_no_limit_where_a_token_may_stand_for_any_text(tiny_tokenizer: Any) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    unknown = PreTrainedTokenizerFast(tokenizer_object=words)  # type: ignore[no-untyped-call]
    assert longest_token_chars(unknown) is None
    greedy = deepcopy(tiny_tokenizer)
    greedy.add_tokens([AddedToken("<wide>", rstrip=True, special=True)])
    assert longest_token_chars(greedy) is None
    assert len(tiny_tokenizer) == NUM_TOKENS
