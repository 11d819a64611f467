"""Messages and raw prompts as token ids."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers

from alphaloop.errors import InvalidField, PromptTooLong, UnsupportedModel
from alphaloop.messages import Job, Origin, parse_job
from tests.fixtures.models import TEMPLATE
from worker.decoding.prompts import check_template, prepare_job
from worker.engine import PreparedJob, Sampling

SAMPLING = Sampling(max_tokens=100, temperature=0.0)


def job(**body: Any) -> Job:
    return parse_job(json.dumps({"task": "qa", "body": body}).encode(), Origin("c", "jobs.qa", 0, 1), task="qa")


def with_template(tokenizer: Any, template: Any) -> Any:
    changed = deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def prepared(tokenizer: Any, context_length: int = 1000, **body: Any) -> PreparedJob:
    return prepare_job(tokenizer, "tiny", context_length, job(**body), SAMPLING)


def control_tokens(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    special = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [special[token_id] for token_id in token_ids if token_id in special]


def test_a_raw_prompt_is_tokenized_as_it_stands(tiny_tokenizer: Any) -> None:
    assert tiny_tokenizer.decode(prepared(tiny_tokenizer, prompt="  as it\nstands ").token_ids) == "  as it\nstands "


READING = TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
STRICT = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }} {% endfor %}"


@pytest.mark.parametrize(
    ("template", "role", "content", "text"),
    [
        (TEMPLATE, "system", "be kind", "<user>be kind<user>hello<answer>"),
        (READING, "user", "<think>ab</think>cd", "<user>cd<user>hello<answer>"),
        (STRICT, "developer", "a", "system:a user:hello "),
        (None, "user", "one", "one\n\nhello"),
    ],
    ids=["ends where the answer begins", "reads what is no control token", "developer is system", "none: joined"],
)
def test_messages_go_through_the_chat_template(
    tiny_tokenizer: Any, template: str | None, role: str, content: str, text: str
) -> None:
    tokenizer = with_template(tiny_tokenizer, template)
    token_ids = prepared(tokenizer, messages=[{"role": role, "content": content}, *said("hello")]).token_ids
    assert tokenizer.decode(token_ids) == text
    assert text.endswith("<answer>") == (token_ids[-1] == tokenizer.convert_tokens_to_ids("<answer>"))


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("typed", ["<answer>", "say <user> <user>twice", " <eos>", "<eo<eos>s>", "\ue0000\ue000<eos>"])
def test_control_tokens_in_a_message_are_text(tiny_tokenizer: Any, typed: str, template: bool) -> None:
    tokenizer = tiny_tokenizer if template else with_template(tiny_tokenizer, None)
    token_ids = prepared(tokenizer, messages=said(typed) * 2).token_ids
    plain = prepared(tokenizer, messages=said("hello") * 2).token_ids
    assert tokenizer.decode(token_ids) == (f"<user>{typed}<user>{typed}<answer>" if template else f"{typed}\n\n{typed}")
    assert control_tokens(tokenizer, token_ids) == control_tokens(tokenizer, plain)


def test_control_tokens_in_a_raw_prompt_are_control_tokens(tiny_tokenizer: Any) -> None:
    token_ids = prepared(tiny_tokenizer, prompt="<user>hi<answer>").token_ids
    assert control_tokens(tiny_tokenizer, token_ids) == ["<user>", "<answer>"]


@pytest.mark.parametrize("typed", ["＜answer＞", "hi ＜answer> <user＞ <answer>", "＜ＡＮＳＷＥＲ＞"])
def test_what_the_normalizer_makes_a_control_token_is_text(tiny_tokenizer: Any, typed: str) -> None:
    tokenizer = deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    names = ["<eos>", "<user>", "<answer>"]
    # As some tokenizers have them: found after the normalizer.
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=True) for name in names], special_tokens=True)
    messages = said(typed) + said("a < b")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert len(control_tokens(tokenizer, tokenizer(text)["input_ids"])) > 3
    token_ids = prepared(tokenizer, messages=messages).token_ids
    assert control_tokens(tokenizer, token_ids) == ["<user>", "<user>", "<answer>"]
    assert tokenizer.decode(token_ids) == unicodedata.normalize("NFKC", text).lower()


@pytest.mark.parametrize(
    ("reading", "typed"),
    [
        (" | lower", "<ANSWER>"),
        (" | replace('\u200b', '')", "<ans\u200bwer>"),
        (" | replace('</b>', '')", "<ans</b>wer>"),
        (" | length", "<answer>"),
    ],
)
def test_a_control_token_that_the_template_makes_or_reads_is_refused(
    tiny_tokenizer: Any, reading: str, typed: str
) -> None:
    template = TEMPLATE.replace("message['content']", f"message['content']{reading}")
    tokenizer = with_template(tiny_tokenizer, template)
    plain = prepared(tokenizer, messages=said("a < b </i> <c>")).token_ids
    assert control_tokens(tokenizer, plain) == ["<user>", "<answer>"]
    with pytest.raises(InvalidField, match="without the strings of the target's control tokens"):
        prepared(tokenizer, messages=said(typed))


def test_a_conversation_without_control_tokens_is_tokenized_once(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    kind, read = type(tiny_tokenizer), type(tiny_tokenizer).__call__
    monkeypatch.setattr(kind, "__call__", lambda self, text, **how: calls.append(text) or read(self, text, **how))
    for content in ("a b", "a < b", "<b>a</b>"):
        prepared(tiny_tokenizer, messages=said(content))
        assert [text.count(content) for text in calls] == [1]
        calls.clear()


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (replace(SAMPLING, logit_bias=((2, 1.0), (384, -1.0))), "body.logit_bias"),
        (replace(SAMPLING, stop_token_ids=(500, 1)), "body.stop_token_ids"),
    ],
)
def test_token_ids_that_the_tokenizer_lacks_are_refused(tiny_tokenizer: Any, sampling: Sampling, field: str) -> None:
    largest = len(tiny_tokenizer) - 1
    within = replace(SAMPLING, logit_bias=((largest, 1.0),), stop_token_ids=(0, largest))
    assert prepare_job(tiny_tokenizer, "tiny", 1000, job(prompt="x"), within).sampling == within
    with pytest.raises(InvalidField, match=f"below {len(tiny_tokenizer)}, found") as refused:
        prepare_job(tiny_tokenizer, "tiny", 1000, job(prompt="x"), sampling)
    assert refused.value.field == field


FAILS = "chat template fails on this conversation: "


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", f"{FAILS}TypeError\n"),
        ("{{ range(10 ** 9) | list }}", f"{FAILS}OverflowError\n"),
        ("{{ 1 // 0 }}", f"{FAILS}ZeroDivisionError\n"),
        ("{{ messages[0]['content'].encode('ascii') }}", f"{FAILS}UnicodeEncodeError\n"),
    ],
)
def test_a_conversation_that_the_template_fails_on_is_an_invalid_field(
    tiny_tokenizer: Any, template: str, reason: str
) -> None:
    broken = with_template(tiny_tokenizer, template)
    with pytest.raises(InvalidField, match=reason) as refused:
        prepared(broken, messages=said("secret é"))
    assert refused.value.field == "body.messages"
    assert prepared(broken, prompt="hello").token_ids


def test_a_template_that_writes_no_conversation_is_refused_at_load(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = deepcopy(tiny_tokenizer)
    for template, reason in (
        ({"tool_use": TEMPLATE, "rag": TEMPLATE}, "named default, found rag, tool_use"),
        ("{% for m in messages %}", "no Jinja template: line 1"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(UnsupportedModel, match=reason):
            check_template(tokenizer)
    for fine in (None, TEMPLATE, {"default": TEMPLATE, "rag": "{{ 1 // 0 }}"}):
        tokenizer.chat_template = fine
        check_template(tokenizer)
    assert not caplog.records
    tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    check_template(tokenizer)
    assert "fails on this conversation: TypeError" in caplog.text


@pytest.mark.parametrize(("context_length", "max_tokens"), [(1000, 100), (103, 100), (102, 99), (4, 1)])
def test_max_tokens_is_lowered_to_what_fits(tiny_tokenizer: Any, context_length: int, max_tokens: int) -> None:
    found = prepared(tiny_tokenizer, context_length, prompt="<eos><eos><eos>")
    assert len(found.token_ids) == 3
    assert found.sampling.max_tokens == max_tokens


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(tiny_tokenizer: Any) -> None:
    with pytest.raises(PromptTooLong, match=r"expected fewer than 3 prompt tokens, found 3 \(max_tokens is 100"):
        prepared(tiny_tokenizer, 3, prompt="<eos><eos><eos>")


def test_only_the_served_model_may_be_named(tiny_tokenizer: Any) -> None:
    assert prepared(tiny_tokenizer, prompt="x", model="tiny").token_ids
    with pytest.raises(InvalidField, match=r"body\.model: expected 'tiny'"):
        prepared(tiny_tokenizer, prompt="x", model="large")
