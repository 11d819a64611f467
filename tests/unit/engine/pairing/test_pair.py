"""The checks of a pair, each at both of its sides."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaloop.engine import CheckFinding
from alphaloop.errors import IncompatiblePair
from alphaloop.settings.models import ModelSettings
from engine.drafters.translation import Translation
from engine.pairing import DeviceRoom, ModelFacts, check_pair, num_shared_tokens, refuse_or_warn
from tests.fixtures.models import make_tiny_tokenizer

WORDS = {0: "<eos>", 1: "<user>", 2: "a", 3: "b", 4: "c"}
TARGET = ModelFacts(
    source="target",
    num_layers=24,
    hidden_size=896,
    family="llama",
    refusal=None,
    tokens=WORDS,
    num_rows=5,
    end_tokens=frozenset({0}),
    bos_token=None,
    pad_token=None,
    chat_template="{{ x }}",
    num_parameters=1_000_000,
    num_parameters_read=900_000,
    dtype="bfloat16",
    itemsize=2,
    kv_bytes_per_token=100,
    pass_bytes_per_row=60,
    context_length=1000,
)
DRAFT = replace(TARGET, source="draft", num_parameters=200_000, num_parameters_read=90_000, kv_bytes_per_token=10)


def findings(
    target: ModelFacts, draft: ModelFacts, room: int | DeviceRoom = 10**9, draft_room: DeviceRoom | None = None
) -> dict[str, CheckFinding]:
    room = DeviceRoom("cpu", room) if isinstance(room, int) else room
    found = check_pair(target, draft, num_slots=4, max_draft_tokens=5, room=room, draft_room=draft_room)
    return {finding.check: finding for finding in found}


def test_a_pair_that_fits_has_nothing_but_ok() -> None:
    found = findings(TARGET, DRAFT)
    checks = ["vocabulary", "special tokens", "chat template", "size", "architecture", "dtype", "context", "memory"]
    assert list(found) == checks
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert "All 5 ids name the same tokens." in found["vocabulary"].sentence
    assert "0 '<eos>'" in found["special tokens"].sentence
    assert "ratio of 0.10" in found["size"].sentence
    refuse_or_warn("small", DRAFT.source, tuple(found.values()))


@pytest.mark.parametrize(
    ("check", "change", "verdict", "said"),
    [
        ("vocabulary", {"tokens": {**WORDS, 3: "B"}}, "refused", "1 of 5 ids name different tokens: 3 is 'b' and 'B'"),
        ("vocabulary", {"tokens": {2: "b", 3: "a"}}, "refused", "2 of 2 ids"),
        ("vocabulary", {"tokens": {}}, "refused", "share no id"),
        ("vocabulary", {"tokens": {9: "a"}}, "refused", "share no id"),
        ("vocabulary", {"num_rows": 8}, "ok", "Rows that pad the embeddings (5 and 8) are never proposed"),
        ("vocabulary", {"tokens": {**WORDS, 5: "<tool>"}, "num_rows": 6}, "warning", "1 only the draft knows (from 5"),
        ("vocabulary", {"tokens": {0: "<eos>", 1: "<user>", 2: "a"}}, "warning", "2 only the target knows (from 3"),
        ("vocabulary", {"tokens": {0: "<eos>", 1: "<user>"}, "num_rows": 4}, "refused", "the first of them 4 ('c')"),
        ("vocabulary", {"num_rows": 3}, "refused", "2 of the target's tokens have no row in the draft's 3 embeddings"),
        ("special tokens", {"end_tokens": frozenset({0, 1})}, "warning", "with 0 '<eos>', 1 '<user>' for the draft"),
        ("special tokens", {"end_tokens": frozenset()}, "warning", "none for the draft"),
        ("special tokens", {"bos_token": 1}, "warning", "begin with None for the target and 1"),
        ("special tokens", {"pad_token": 0}, "ok", "nothing is padded"),
        ("chat template", {"chat_template": "other"}, "warning", "has another"),
        ("chat template", {"chat_template": None}, "warning", "has none"),
        ("size", {"num_parameters_read": 315_000}, "ok", "0.35"),
        ("size", {"num_parameters_read": 330_000}, "warning", "0.37"),
        ("size", {"num_parameters_read": 900_000}, "refused", "cannot pay"),
        ("size", {"num_parameters_read": 300_000, "itemsize": 8}, "refused", "1.33"),
        ("architecture", {"family": "qwen2"}, "ok", "A qwen2 drafts for a llama"),
        ("architecture", {"refusal": "found linear_attention"}, "refused", "The draft cannot be decoded here: found l"),
        ("dtype", {"dtype": "float32", "itemsize": 4}, "warning", "2 times the bytes"),
        ("dtype", {"dtype": "float16"}, "ok", "the text stays the target's"),
        ("context", {"context_length": 999}, "warning", "beyond its 999"),
        ("context", {"context_length": 2000}, "ok", "all 1,000 tokens"),
    ],
)
def test_what_differs_is_found(check: str, change: dict[str, Any], verdict: str, said: str) -> None:
    finding = findings(TARGET, replace(DRAFT, **change))[check]
    assert (finding.verdict, finding.check) == (verdict, check)
    assert said in finding.sentence


@pytest.mark.parametrize(
    ("check", "of_target", "of_draft", "verdict", "said"),
    [
        ("vocabulary", {"num_rows": 8}, {}, "ok", "which the draft has no row for is decoded without it"),
        ("vocabulary", {"num_rows": 3}, {"num_rows": 3}, "ok", "All 5 ids"),  # other tokens are in no text
        ("architecture", {"refusal": "found a sliding window"}, {}, "refused", "The target"),
        ("chat template", {"chat_template": None}, {"chat_template": None}, "ok", "Neither has one."),
    ],
)
def test_a_fact_of_the_target_is_found(
    check: str, of_target: dict[str, Any], of_draft: dict[str, Any], verdict: str, said: str
) -> None:
    finding = findings(replace(TARGET, **of_target), replace(DRAFT, **of_draft))[check]
    assert finding.verdict == verdict
    assert said in finding.sentence
    assert said not in findings(TARGET, DRAFT)[check].sentence or said == "All 5 ids"


def translated(share: float, **more: Any) -> Translation:
    """Of a pair in which the draft has three of the target's tokens."""
    tokenizer = make_tiny_tokenizer()
    ids = torch.tensor([0, 2, 4])
    return Translation(tokenizer, tokenizer, ids, ids, share=share, length=1.5, **more)


def test_another_tokenizer_works_where_it_shares_more_than_a_step_costs() -> None:
    """The draft reads a tenth of the target's bytes, its head cut to three of five rows."""
    other = replace(DRAFT, tokens={number: name.upper() for number, name in WORDS.items()}, num_head_rows=5)
    for share, verdict, said in (
        (0.9, "warning", "3 of the target's 5 tokens are the draft's too, 90% of those of a sample text."),
        (0.11, "warning", "It works by intersection"),
        (0.09, "refused", "9% of those of a sample text. Expected more than 10%"),
        (0.05, "refused", "larger or more similar vocabulary"),
    ):
        found = check_pair(
            TARGET, other, num_slots=4, max_draft_tokens=5, room=DeviceRoom("cpu", 10**9), translation=translated(share)
        )
        assert (found[0].check, found[0].verdict) == ("vocabulary", verdict), found[0].sentence
        assert said in found[0].sentence
        assert (found[1].check, found[1].verdict) == ("special tokens", "ok")
        assert "15 bytes a token" in found[-1].sentence, "half as many tokens again"


def test_a_cut_head_is_read_in_part_and_copied_where_the_embeddings_lend_it() -> None:
    facts = replace(DRAFT, num_head_rows=5, hidden_size=10)
    assert facts.proposing(3).num_parameters_read == facts.num_parameters_read - 20
    assert facts.proposing(3).num_parameters == facts.num_parameters - 20
    assert replace(facts, is_tied=True).proposing(3).num_parameters == facts.num_parameters + 30


def test_memory_is_weights_and_slots_and_passes() -> None:
    weights = 2 * (1_000_000 + 200_000)
    slot = 1000 * (100 + 10) + 6 * 60 + 5 * 60
    for room, verdict, said in (
        (weights + 4 * slot, "ok", "2.84 MB, of 2.84 MB free on cpu"),
        (weights + 4 * slot - 1, "warning", "Full slots that fit: 3."),
        (weights + slot, "warning", "Full slots that fit: 1."),
        (weights + slot - 1, "refused", "Not one full slot fits"),
    ):
        finding = findings(TARGET, DRAFT, room)["memory"]
        assert (finding.verdict, said in finding.sentence) == (verdict, True), finding.sentence


def test_each_device_holds_its_own_model() -> None:
    target_needs = 2 * 1_000_000 + 4 * (1000 * 100 + 6 * 60 + 5 * 60)
    draft_needs = 2 * 200_000 + 4 * (1000 * 10 + 5 * 60)
    for short_target, short_draft, verdict, said in (
        (0, 0, "ok", "with 4 slots 441 kB, of 441 kB free on cuda:1."),
        (1, 0, "warning", "Full slots that fit: 3."),
        (0, 1, "warning", "Full slots that fit: 3."),
        (target_needs, 0, "refused", "Not one full slot fits on cuda:0."),
        (0, draft_needs, "refused", "Not one full slot fits on cuda:1."),
    ):
        rooms = DeviceRoom("cuda:0", target_needs - short_target), DeviceRoom("cuda:1", draft_needs - short_draft)
        finding = findings(TARGET, DRAFT, *rooms)["memory"]
        assert (finding.verdict, said in finding.sentence) == (verdict, True), finding.sentence
        assert ("lower worker.batch_size" in finding.sentence) == (verdict != "ok")
        assert "another device" not in finding.sentence, "it has one"


def test_a_draft_keeps_no_more_context_than_is_served() -> None:
    longer, same = (
        findings(TARGET, replace(DRAFT, context_length=length))["memory"].sentence for length in (99_999, 1000)
    )
    assert longer == same


def test_proposals_end_where_the_shared_tokens_end() -> None:
    assert num_shared_tokens(TARGET, replace(DRAFT, num_rows=64)) == 5
    assert num_shared_tokens(TARGET, replace(DRAFT, tokens={**WORDS, 5: "<tool>"})) == 5
    assert num_shared_tokens(TARGET, replace(DRAFT, tokens={0: "<eos>"})) == 1
    assert num_shared_tokens(TARGET, replace(DRAFT, tokens={})) == 0
    assert num_shared_tokens(TARGET, replace(DRAFT, num_rows=3)) == 3


def test_every_refusal_is_in_the_error() -> None:
    found = findings(TARGET, replace(DRAFT, tokens={}, num_parameters_read=10**6))
    with pytest.raises(IncompatiblePair, match=r"draft cannot draft: vocabulary: .* size: .*cannot pay") as caught:
        refuse_or_warn("small", DRAFT.source, tuple(found.values()))
    assert "check-pair" in (caught.value.hint or "")


def test_the_settings_that_the_guide_of_gpus_shows_are_settings() -> None:
    guide = (Path(__file__).parents[4] / "docs/guides/gpus.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    read = ModelSettings.model_validate(tomllib.loads(block)["models"])
    assert (read.target.device, read.drafters["small"].device) == ("cuda:0", "cuda:1")  # type: ignore[union-attr]
