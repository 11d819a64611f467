"""A GGUF file says what its safetensors twin says, or is refused by the name of what cannot be carried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from alphaloop.errors import UnsupportedModel
from engine import models
from engine.models import load_weights
from engine.pairing import facts_of

Edit = Callable[[gguf.GGUFWriter], None]
CPU = torch.device("cpu")
TOKENS = ["<|end|>", "<|turn|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "12"]
MERGES = ["Ġ Ġ", "1 2"]
SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
PARTS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "output": "self_attn.o_proj"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **{
        f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}"
        for layer in range(2)
        for ours, theirs in (
            *((ours, f"attn_{name}") for name, ours in PARTS.items()),
            *((f"mlp.{name}_proj", f"ffn_{name}") for name in ("gate", "up", "down")),
            *(("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")),
        )
    },
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "_cache", lambda: tmp_path / "cache")


def model_of(kind: str, rope: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(5)
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](
        **SHAPE, tie_word_embeddings=False, rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **rope}
    )
    return AutoModelForCausalLM.from_config(config).eval()


def write(file: Path, model: PreTrainedModel, *edits: Edit, pre: str = "gpt-2") -> Path:
    kind = model.config.model_type
    writer = gguf.GGUFWriter(file, kind)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, weight in model.state_dict().items():
        module, suffix = name.rsplit(".", 1)
        numbers = weight.float().numpy()
        if kind == "llama" and module.endswith(("q_proj", "k_proj")):  # llama.cpp keeps a rotation's pairs together
            heads = 4 if module.endswith("q_proj") else 2
            numbers = numbers.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{NAMES[module]}.{suffix}", np.ascontiguousarray(numbers))
    for edit in edits:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def scaled(kind: str, factor: float, original: int | None = None) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        if original is not None:
            writer.add_rope_scaling_orig_ctx_len(original)

    return edit


def divided(writer: gguf.GGUFWriter) -> None:
    rope = model_of("llama", LLAMA3).config
    plain = 1 / 10000.0 ** (torch.arange(8) / 8)
    writer.add_tensor("rope_freqs.weight", (plain / ROPE_INIT_FUNCTIONS["llama3"](rope, CPU)[0]).numpy())


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("rope", "edits"),
    [
        ({}, []),
        ({}, [scaled("none", 4.0)]),
        ({"rope_type": "linear", "factor": 4.0}, [scaled("linear", 4.0)]),
        ({"rope_type": "linear", "factor": 4.0}, [lambda writer: writer.add_rope_scaling_factor(4.0)]),
        ({}, [scaled("linear", 0.0)]),
        ({}, [lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)]),
        (YARN, [scaled("yarn", 4.0, 16)]),
        (LLAMA3, [divided]),
    ],
    ids=["plain", "none", "linear", "linear by factor", "linear by nothing", "linear alone", "yarn", "llama3"],
)
def test_a_file_has_the_logits_of_its_safetensors_twin(
    tmp_path: Path, kind: str, rope: dict[str, Any], edits: list[Edit]
) -> None:
    twin = model_of(kind, rope)
    file = write(tmp_path / "tiny.gguf", twin, *edits)
    token_ids = torch.arange(3, 63)[None]
    with torch.inference_mode():
        found = load_weights(str(file), None, "float32", CPU).model(input_ids=token_ids).logits
        torch.testing.assert_close(found, twin(input_ids=token_ids).logits, rtol=1e-5, atol=2e-5)
        if rope:
            assert (found - model_of(kind, {})(input_ids=token_ids).logits).abs().max() > 0.01, "it matters"


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda writer: writer.add_float32("llama.attention.scale", 0.5), r"llama\.attention\.scale = 0\.5"),
        (lambda writer: writer.add_logit_scale(2.0), r"llama\.logit_scale"),
        (lambda writer: writer.add_sliding_window(8), r"llama\.attention\.sliding_window = 8"),
        (lambda writer: writer.add_expert_count(4), r"llama\.expert_count"),
        (lambda writer: writer.add_causal_attention(False), r"llama\.attention\.causal = False"),
        (lambda writer: writer.add_float32("general.sampling.xtc_threshold", 0.5), r"general\.sampling\.xtc_threshold"),
        (lambda writer: writer.add_add_space_prefix(True), r"tokenizer\.ggml\.add_space_prefix = True"),
        (lambda writer: writer.add_bool("made.up", True), r"made\.up = True"),
        (
            lambda writer: writer.add_chat_template([{"name": "tool_use", "template": "x"}]),
            r"tokenizer\.chat_template\.tool_use = x",
        ),
        (scaled("longrope", 4.0), r"llama\.rope\.scaling\.type = longrope"),
        (lambda writer: writer.add_rope_scaling_attn_factors(0.7), r"rope\.scaling\.attn_factor = 0\.69"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.full(8, 3, np.float32)), r"rope_freqs\.weight"),
        (
            lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)),
            r"expected tensors of llama that can be carried over, found 1 others: blk\.0\.attn_q\.bias",
        ),
    ],
)
def test_what_cannot_be_carried_is_refused_by_its_name(tmp_path: Path, edit: Edit, name: str) -> None:
    file = write(tmp_path / "tiny.gguf", model_of("llama", {}), edit)
    with pytest.raises(UnsupportedModel, match=name) as refusal:
        load_weights(str(file), None, "float32", CPU)
    assert refusal.value.message.startswith(f"{file}: ")


def test_facts_that_change_no_weight_are_carried(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(1)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.25)

    loaded = load_weights(str(write(tmp_path / "tiny.gguf", model_of("llama", {}), edit)), None, "float32", CPU)
    assert models.end_tokens(loaded.model, loaded.tokenizer) == {0, 1}
    assert models.sampling_defaults(loaded.model.generation_config, are_used=True).suggested == {
        "temperature": 0.5,
        "top_k": 20,
        "repetition_penalty": 1.25,
    }


@pytest.mark.parametrize(("pre", "num_tokens"), [("gpt-2", 3), ("smollm", 4), ("llama-bpe", 3)])
def test_texts_are_split_as_the_file_says(tmp_path: Path, pre: str, num_tokens: int) -> None:
    file = write(tmp_path / "tiny.gguf", model_of("llama", {}), pre=pre)
    described = facts_of(str(file), dtype="float32").tokenizer
    loaded = load_weights(str(file), None, "float32", CPU).tokenizer
    assert described("a 12")["input_ids"] == loaded("a 12")["input_ids"]
    assert len(loaded("a 12", add_special_tokens=False)["input_ids"]) == num_tokens
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre = made-up"):
        facts_of(str(write(file, model_of("llama", {}), pre="made-up")), dtype="float32")


#: Tokens of DeepSeek's distilled models, of user-defined spaces, and one that no merge makes.
SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<end>", "   "]


@pytest.mark.parametrize(
    ("pre", "edit", "begins", "takes_pieces"),
    [
        ("deepseek-r1-qwen", None, False, False),
        ("deepseek-r1-qwen", lambda writer: writer.add_add_bos_token(True), True, False),
        ("llama-bpe", None, True, True),
        ("tekken", None, True, True),
        ("llama-bpe", lambda writer: writer.add_add_bos_token(False), False, True),
    ],
)
def test_tokens_of_a_file_are_whole_as_in_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pre: str, edit: Edit | None, begins: bool, takes_pieces: bool
) -> None:
    tokens = [*SPECIAL, *TOKENS[2:], "abcd"]
    monkeypatch.setattr("tests.unit.engine.test_gguf_files.TOKENS", tokens)
    monkeypatch.setitem(SHAPE, "vocab_size", len(tokens))

    def typed(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.token_type"]
        writer.add_token_types([3, 3, 3, 4] + [1] * (len(tokens) - 4))
        del writer.kv_data[0]["tokenizer.ggml.eos_token_id"]
        writer.add_eos_token_id(2)

    file = write(tmp_path / "tiny.gguf", model_of("llama", {}), typed, *filter(None, [edit]), pre=pre)
    loaded = load_weights(str(file), None, "float32", CPU)
    for tokenizer in (loaded.tokenizer, facts_of(str(file), dtype="float32").tokenizer):
        ids = tokenizer("<｜User｜>abcd   <end>")["input_ids"]
        a, d, whole = tokens.index("a"), tokens.index("d"), len(tokens) - 1
        assert ids == [*[0] * begins, 1, *([whole] if takes_pieces else range(a, d + 1)), 3, 2]
        assert tokenizer.decode(ids[begins:]) == "<｜User｜>abcd   <end>"
    assert len(loaded.tokenizer) == len(tokens), "no token beside those of the file"
    assert loaded.tokenizer.bos_token_id == 0
    assert {token_id: one.special for token_id, one in loaded.tokenizer.added_tokens_decoder.items()} == {
        **dict.fromkeys((0, 1, 2), True),
        3: False,
    }
    assert models.end_tokens(loaded.model, loaded.tokenizer) == {2}


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen2",
        "qwen3",
        "gpt2",
        "gpt_neox",
        "gemma2",
        "gemma3_text",
        "mistral",
        "phi3",
        "olmo2",
        "cohere",
        "bloom",
    ],
)
def test_the_ids_of_a_folder_are_those_of_its_tokenizer_file(tmp_path: Path, kind: str, begins: bool) -> None:
    exact = Tokenizer(BPE({token: index for index, token in enumerate(TOKENS)}, [tuple(m.split()) for m in MERGES]))
    exact.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    exact.add_special_tokens(TOKENS[:2])
    if begins:
        exact.post_processor = TemplateProcessing(single="<|turn|> $A", special_tokens=[("<|turn|>", 1)])
    exact.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    loaded = models.load_tokenizer(tmp_path)
    for text in ("a 12", "don't  1", "\n\n  x\t12<|turn|>12", "12 12"):
        assert loaded(text)["input_ids"] == exact.encode(text).ids
    loaded.save_pretrained(tmp_path / "again")
    assert models.load_tokenizer(tmp_path / "again")("a 12")["input_ids"] == exact.encode("a 12").ids
