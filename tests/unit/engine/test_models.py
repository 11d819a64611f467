"""What is loaded, what it is called, and what is refused."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from alphaloop.engine import Sampling
from alphaloop.errors import ConfigError, InvalidField, UnsupportedModel
from alphaloop.settings import TaskSettings
from alphaloop.settings.models import ModelSettings, TargetSettings
from engine import text_facts as text_facts_module
from engine.models import end_tokens, load_target, refuse_unsupported, sampling_defaults
from engine.network import compiled, fused, language_model
from engine.network.fused import VERSION as FUSED_VERSION
from engine.network.operations import GELU_TANH
from engine.network.passes import Pass, Placed, ReadGroup, plan_pass
from engine.own import load_engine
from engine.pairing import facts_of
from engine.text_facts import text_facts
from tests.fixtures.models import NUM_TOKENS, VANILLA, decode_one, make_job, small_llama, with_config


def settings(source: Path, **more: Any) -> TargetSettings:
    return TargetSettings(name="tiny", source=str(source), dtype="float32", device="cpu", **more)


def test_a_target_is_named_by_its_weights_its_device_and_what_computes_it(tiny_models: dict[str, Path]) -> None:
    identities = [
        load_target(settings(tiny_models[family])).identity for family in ("llama", "qwen2", "llama", "gpt_neox")
    ]
    assert identities[0] == identities[2]
    assert identities[0].target_revision != identities[1].target_revision
    assert identities[0].device == f"cpu-{torch.get_num_threads()}-threads"
    assert identities[0].context_length == 2048
    assert identities[0].engine == f"fused{FUSED_VERSION}-torch-{torch.__version__}-float32"
    assert identities[3].engine == f"transformers-{transformers.__version__}-float32"


def test_a_context_longer_than_the_models_is_refused(tiny_models: dict[str, Path]) -> None:
    assert load_target(settings(tiny_models["llama"], context_length=64)).identity.context_length == 64
    with pytest.raises(UnsupportedModel, match="2048 positions"):
        load_target(settings(tiny_models["llama"], context_length=4096))


@pytest.mark.parametrize(
    ("written", "suggested", "unsupported", "shown"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05},
            (),
            "temperature 0.6, top_p 0.9, top_k 20, repetition_penalty 1.05 (not used, jobs are greedy by default)",
        ),
        ({"do_sample": True, "top_k": 5}, {"temperature": 1.0, "top_k": 5}, (), "temperature 1, top_k 5 (not used"),
        # transformers draws only where do_sample says so, and warns of the others.
        ({"do_sample": False, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, (), "repetition_penalty 1.1"),
        ({"suppress_tokens": [3]}, {}, ("suppress_tokens",), "not supported: suppress_tokens"),
        ({"eos_token_id": 0}, {}, (), ""),
    ],
)
def test_what_a_generation_config_says_of_sampling_is_shown_and_taken_only_if_wanted(
    tiny_models: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    written: dict[str, Any],
    suggested: dict[str, float],
    unsupported: tuple[str, ...],
    shown: str,
) -> None:
    shutil.copytree(tiny_models["llama"], folder := tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(written))
    with caplog.at_level("INFO"):
        defaults = load_target(settings(folder)).sampling_defaults
    assert (defaults.suggested, defaults.unsupported, defaults.are_used) == (suggested, unsupported, False)
    assert shown in defaults.sentence()
    assert [record.action for record in caplog.records if "generation_config" in record.message] == [
        "sampling_defaults"
    ] * bool(shown)
    task = TaskSettings(top_p=0.5)
    assert defaults.applied_to(task) == task
    taken = load_target(settings(folder, use_generation_config=True)).sampling_defaults.applied_to(task)
    assert taken == TaskSettings(**{**suggested, "top_p": 0.5})


#: Of transformers' generation config: tokens, lengths, outputs, caches and drafts; and what matters to beams only.
WITHOUT_EFFECT = re.compile(
    r"^_|^(bos|eos|pad|decoder_start)_token_id$|^max_|^output_|assistant|lookbehind|cache|compile|^do_sample$|^use_mtp$"
    r"|^(num_return_sequences|return_dict_in_generate|transformers_version|prefill_chunk_size|continuous_batching_config)"
    r"|^(early_stopping|length_penalty|diversity_penalty|num_beam_groups|constraints|force_words_ids|low_memory)"
    r"|^(renormalize_logits|remove_invalid_values|speculation_type|prompt_lookup_num_tokens)"
)
#: 1 is a token, or a number of tokens, but of these it changes nothing.
FACTORS = {"num_beams", "typical_p", "top_h", "guidance_scale", "encoder_repetition_penalty"}


def test_every_field_of_a_generation_config_that_changes_texts_is_shown() -> None:
    names = sorted(name for name in transformers.GenerationConfig().__dict__ if not WITHOUT_EFFECT.search(name))
    assert "forced_eos_token_id" in names
    for name in [*names, "presence_penalty", "frequency_penalty"]:
        for value in (True,) if name == "token_healing" else (0.5, 1):
            config = transformers.GenerationConfig(do_sample=True)
            setattr(config, name, value)
            found = sampling_defaults(config, are_used=False)
            is_shown = name in found.suggested or name in found.unsupported
            assert is_shown == (value != 1 or name not in FACTORS), (name, value)
    assert sampling_defaults(transformers.GenerationConfig(), are_used=False).sentence() == ""


def test_a_generation_config_that_no_job_could_have_is_refused_where_jobs_are_to_take_it(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_models["llama"], folder := tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 3.0}))
    assert load_target(settings(folder)).sampling_defaults.suggested == {"temperature": 3.0}
    with pytest.raises(ConfigError, match=r"temperature of the model's generation_config.json: .* less than or equal"):
        load_target(settings(folder, use_generation_config=True))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UnsupportedModel):
        load_target(settings(tmp_path))


def test_code_that_comes_with_a_model_is_never_run(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    folder = with_config(tiny_models["llama"], tmp_path / "model", model_type="mine", auto_map=code)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\n")
    with pytest.raises(UnsupportedModel):
        load_target(settings(folder))
    assert not (tmp_path / "was-run").exists()


SLIDING = "sliding_attention"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.Qwen3NextConfig(), "found linear_attention"),
        (transformers.MambaConfig(), "of mamba, found linear_attention"),
        (transformers.Llama4TextConfig(), "found chunked_attention"),
        (transformers.GPTNeoConfig(), "found local_attention"),
        (transformers.DogeConfig(), "found keep_window_size = 2048"),
        (transformers.FalconConfig(alibi=True), "found ALiBi"),
        (transformers.BloomConfig(), "found ALiBi"),
        (transformers.MptConfig(), "found ALiBi"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "in both directions"),
        (transformers.T5Config(), "decoder-only"),
        (transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "rope type dynamic"),
        (transformers.LlamaConfig(quantization_config={"quant_method": "bitsandbytes"}), "found bitsandbytes"),
        (transformers.LlamaConfig(quantization_config={"quant_method": "fp8"}), "dense weights, found fp8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_slots_cannot_reproduce_is_refused(config: Any, reason: str) -> None:
    refuse_unsupported(transformers.LlamaConfig())
    with pytest.raises(UnsupportedModel, match=reason):
        refuse_unsupported(config, 8192)


def test_a_rope_that_changes_at_a_boundary_serves_contexts_below_it() -> None:
    factors = [1.0] * 8
    rope = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
    }
    config = transformers.Phi3Config(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=131_072, rope_parameters=rope
    )
    refuse_unsupported(config, 4096)
    with pytest.raises(
        UnsupportedModel, match=r"beyond 4096 positions, found a context of 8192 \(context_length: 4096"
    ):
        refuse_unsupported(config)


def test_facts_are_of_the_text_model() -> None:
    text = {"sliding_window": 16, "layer_types": [SLIDING, SLIDING, "full_attention"], "num_hidden_layers": 3}
    config = transformers.Gemma3Config(text_config={**text, "max_position_embeddings": 123})
    facts = text_facts(config)
    assert (facts.window, facts.longest, facts.refusal) == (16, 123, None)
    assert facts.kinds == (SLIDING, SLIDING, "full_attention")


def shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any) -> Pass:
        plan = plan_pass(*args)
        return replace(plan, positions=plan.positions + 1 - torch.eye(1, len(plan.positions), dtype=torch.long)[0])

    monkeypatch.setattr(language_model, "plan_pass", shifted)


def hide_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*args: Any) -> Pass:
        plan = plan_pass(*args)
        for group in plan.groups:
            if group.mask is not None:
                group.mask[..., 1:, 0] = -torch.inf
        return plan

    monkeypatch.setattr(compiled, "can_compile", lambda _: False)
    monkeypatch.setattr(language_model, "plan_pass", blind)


def see_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placed, "ancestry", property(lambda placed: [1 << token for token in range(placed.width)]))


def forget_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = compiled.layer_arguments
    monkeypatch.setattr(compiled, "layer_arguments", lambda heads, table, _: arguments(heads, table, None))


def turn_all_layers_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fused._rotations
    monkeypatch.setattr(fused, "_rotations", lambda inner, config, _, num: right(inner, config, "full_attention", num))


def spoil_layers(change: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """What a fused decoder might forget or confuse."""
    make = fused.FusedDecoder.__init__

    def spoiled(self: fused.FusedDecoder, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        for layer in self._layers:
            change(layer)

    return lambda monkeypatch: monkeypatch.setattr(fused.FusedDecoder, "__init__", spoiled)


def change_heads(layer: Any, **changed: Any) -> None:
    layer.heads = replace(layer.heads, **changed)


@pytest.mark.parametrize(
    ("family", "plant"),
    [
        ("gemma3_text", spoil_layers(lambda layer: setattr(layer, "after_attention", None))),
        ("qwen3", spoil_layers(lambda layer: change_heads(layer, norms=None))),
        ("llama", spoil_layers(lambda layer: change_heads(layer, scaling=layer.heads.scaling * 1.1))),
        ("qwen2", spoil_layers(lambda layer: setattr(layer.qkv, "_bias", None))),
        ("llama", spoil_layers(lambda layer: setattr(layer, "activation", GELU_TANH))),
        ("llama", shift_positions),
        ("gpt_neox", shift_positions),
        ("llama", hide_what_was_read),
        ("gpt_neox", hide_what_was_read),
        ("llama", see_only_itself),
        ("gemma3_text", forget_the_window),
        ("gemma3_text", turn_all_layers_alike),
    ],
)
def test_a_pass_that_computes_otherwise_is_caught(
    tiny_models: dict[str, Path],
    family: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_target(settings(tiny_models[family]))
    plant(monkeypatch)
    with pytest.raises(UnsupportedModel, match="slot cache differ"):
        load_target(settings(tiny_models[family]))


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_window_that_passes_do_not_keep_is_caught(
    tiny_models: dict[str, Path], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window has 16 tokens, more than the check reads: the check makes it shorter."""
    monkeypatch.setattr(compiled, "can_compile", lambda _: False)
    if not is_fused:
        monkeypatch.setattr(language_model, "can_fuse", lambda _: False)
    load_target(settings(tiny_models["gemma3_text"]))
    monkeypatch.setattr(ReadGroup, "local_mask", property(lambda group: group.mask))
    with pytest.raises(UnsupportedModel, match="a window of 16 tokens differs"):
        load_target(settings(tiny_models["gemma3_text"]))
    monkeypatch.setattr(language_model, "mask_error", lambda _: None)
    with pytest.raises(UnsupportedModel, match="slot cache differ"):
        load_target(settings(tiny_models["gemma3_text"]))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_rotations_that_depend_on_the_longest_text_are_caught(
    tiny_models: dict[str, Path], tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((tiny_models[family] / "config.json").read_text())
    num_pairs = 8 if family == "llama" else 2  # GPT-NeoX rotates a quarter of a head
    rope = config["rope_parameters"] | {
        "rope_type": "longrope",
        "short_factor": [1.0] * num_pairs,
        "long_factor": [2.0] * num_pairs,
        "original_max_position_embeddings": 100,
    }
    folder = with_config(tiny_models[family], tmp_path / "model", rope_parameters=rope)
    assert load_target(settings(folder, context_length=100)).identity.context_length == 100
    with pytest.raises(UnsupportedModel, match="rope type longrope"):
        load_target(settings(folder, context_length=101))
    # As if its name were not known.
    monkeypatch.setattr(text_facts_module, "_UNSTABLE_ROPE", frozenset())
    with pytest.raises(UnsupportedModel, match=r"the rotation of position \d+ depends on the length of the text"):
        load_target(settings(folder, context_length=101))


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> Path:
    """A copy of a model whose tensors were changed in place."""
    with_config(source, folder, **config)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "num_layers", "reason"),
    [
        (lambda tensors: tensors.popitem(), 2, "1 missing"),
        (lambda tensors: [tensors.pop(name) for name in [*tensors] if ".1.mlp." in name], 2, "missing"),
        (lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}), 2, "1 unexpected"),
        (lambda tensors: tensors.update({name: one[:-1] for name, one in tensors.items()}), 2, "of another shape"),
        (lambda tensors: None, 1, r"\d+ unexpected \(model\.layers\.1\."),
    ],
    ids=["one tensor", "one MLP", "a third layer", "shapes", "a config with fewer layers"],
)
def test_a_model_loads_complete_or_not_at_all(
    tiny_models: dict[str, Path],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    num_layers: int,
    reason: str,
) -> None:
    folder = changed(tiny_models["llama"], tmp_path / "model", change, num_hidden_layers=num_layers)
    with pytest.raises(UnsupportedModel, match=rf"with {num_layers} layers, found .*{reason}"):
        load_target(settings(folder))


@pytest.mark.parametrize("name", ["vision_tower.patch.weight", "model.mtp.0.weight", "model.layers.2.eh_proj.weight"])
def test_parts_that_decode_nothing_are_left_out(tiny_models: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder, tensor = tmp_path / "model", {name: torch.ones(2)}
    changed(tiny_models["llama"], folder, lambda tensors: tensors.update(tensor), num_nextn_predict_layers=1)
    assert load_target(settings(folder)).end_tokens


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_heads_that_come_with_a_target_are_said_to_be_left_out(
    tiny_models: dict[str, Path], tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    changed(tiny_models["llama"], folder, lambda tensors: None, **{name: 2})
    load_target(settings(folder))
    (record,) = [record for record in caplog.records if getattr(record, "action", "") == "mtp_left_out"]
    assert "2 layers of multi-token prediction" in record.getMessage()
    assert 'method = "mtp"' in record.__dict__["hint"]


def test_a_library_that_fails_while_loading_is_the_reason_of_a_refusal(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise ZeroDivisionError("deep\n  inside")

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "forward", fail)
    with pytest.raises(UnsupportedModel, match=r"^/.*: ZeroDivisionError: deep inside$"):
        load_target(settings(tiny_models["llama"]))


def with_tokenizer(source: Path, folder: Path, tokenizer: Any, num_rows: int) -> Path:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:num_rows].clone()

    changed(source, folder, cut, vocab_size=num_rows)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_tokenizer_of_another_model_is_refused(
    tiny_models: dict[str, Path], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    folder = with_tokenizer(tiny_models["llama"], tmp_path / "model", tiny_tokenizer, 300)
    with pytest.raises(UnsupportedModel, match=r"for 300 rows of embeddings, found 84 tokens without a row, .* 300 "):
        load_target(settings(folder))
    refusal = facts_of(str(folder), dtype="float32").refusal
    assert "300 rows" in refusal


def test_an_added_token_without_a_row_is_refused_where_a_prompt_holds_it(
    tiny_models: dict[str, Path], tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grown = copy.deepcopy(tiny_tokenizer)
    grown.add_special_tokens({"pad_token": "<pad>"})
    folder = with_tokenizer(tiny_models["llama"], tmp_path / "model", grown, NUM_TOKENS)
    target = settings(folder)
    engine = load_engine(ModelSettings(target=target, drafters={}), num_slots=1)
    assert [record.__dict__["action"] for record in caplog.records if record.levelname == "WARNING"] == [
        "tokens_without_row"
    ]
    sampling = Sampling(max_tokens=1, temperature=0.0)
    engine.prepare(make_job("a pad"), sampling)
    with pytest.raises(InvalidField, match=rf"token {NUM_TOKENS} \('<pad>'\): its embeddings have {NUM_TOKENS} rows"):
        engine.prepare(make_job("a <pad>"), sampling)
    for more in ({"logit_bias": ((NUM_TOKENS, 1.0),)}, {"stop_token_ids": (NUM_TOKENS,)}):
        with pytest.raises(InvalidField, match=f"below {NUM_TOKENS}, found {NUM_TOKENS}"):
            engine.prepare(make_job("a"), replace(sampling, **more))


def test_every_place_that_names_an_end_token_counts() -> None:
    def named(value: Any) -> SimpleNamespace:
        return SimpleNamespace(eos_token_id=value)

    def model(*values: Any) -> SimpleNamespace:
        generation, outer, text = map(named, values)
        outer.get_text_config = lambda: text
        embeddings = SimpleNamespace(weight=range(8))
        return SimpleNamespace(generation_config=generation, config=outer, get_input_embeddings=lambda: embeddings)

    assert end_tokens(model([3, 4], 4, 5), named(7)) == {3, 4, 5, 7}
    assert end_tokens(model(None, None, None), named(None)) == frozenset()
    assert end_tokens(model([3, 8], -1, "<eos>"), named(9)) == {3}, "the others are no tokens of the model"


@pytest.mark.parametrize("named", [999, -1, [0, 999]])
def test_an_end_token_that_the_model_does_not_have_ends_nothing(
    tiny_models: dict[str, Path], tmp_path: Path, named: Any
) -> None:
    """Barred for `min_tokens`, it would fail the round of every job beside, or bar the vocabulary's last token."""
    folder = with_config(tiny_models["llama"], tmp_path / "model", eos_token_id=named)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    engine = load_engine(ModelSettings(target=settings(folder), drafters={}), num_slots=1)
    barred = Sampling(max_tokens=3, temperature=0.0, min_tokens=2, logit_bias=((NUM_TOKENS - 1, 1000.0),))
    generation = decode_one(engine, engine.prepare(make_job("a"), barred), VANILLA)
    assert generation.token_ids == (NUM_TOKENS - 1,) * 3


@pytest.mark.parametrize("content", ["{", "", "[]", "null", "5"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_that_is_no_json_object_is_refused_by_its_name(
    tiny_models: dict[str, Path], tmp_path: Path, name: str, content: str
) -> None:
    """transformers passes over a generation config that it cannot read, and its end tokens with it."""
    shutil.copytree(tiny_models["llama"], folder := tmp_path / "model")
    (folder / name).write_text(content)
    with pytest.raises(UnsupportedModel, match=rf"/{name}: "):
        load_target(settings(folder))
    with pytest.raises(UnsupportedModel, match=rf"/{name}: "):
        facts_of(str(folder), dtype="float32")


@pytest.mark.parametrize("model_type", ["mistral3", "qwen2_vl", "t5", "vit"])
def test_a_model_that_continues_no_text_is_refused_in_a_sentence(
    tiny_models: dict[str, Path], tmp_path: Path, model_type: str
) -> None:
    shutil.copytree(tiny_models["llama"], folder := tmp_path / "model")
    transformers.CONFIG_MAPPING[model_type]().save_pretrained(folder)
    said = rf"model: expected a decoder-only language model, found {model_type}$"
    with pytest.raises(UnsupportedModel, match=said):
        load_target(settings(folder))
    with pytest.raises(UnsupportedModel, match=said):
        facts_of(str(folder), dtype="float32")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_the_reason_of_a_refusal(
    tiny_models: dict[str, Path], tiny_tokenizer: Any, tmp_path: Path, value: float
) -> None:
    """In any layer, also in those that are not compared."""
    deep = small_llama(tiny_models["llama"], tiny_tokenizer, tmp_path / "deep", num_hidden_layers=5)
    for number, name in enumerate(("lm_head.weight", "model.layers.4.mlp.up_proj.weight")):

        def spoil(tensors: dict[str, torch.Tensor], name: str = name) -> None:
            tensors[name][3] = value

        folder = changed(deep, tmp_path / str(number), spoil)
        with pytest.raises(UnsupportedModel, match="expected weights that give logits"):
            load_target(settings(folder))


@pytest.mark.parametrize(
    ("kinds", "num"), [(["f"] * 30, 2), (["s", "s", "f"] * 4, 3), (["f"] * 5 + ["s"], 6), (["f"], 1)], ids=str
)
def test_the_fewest_layers_are_compared_that_are_two_and_one_of_each_kind(kinds: list[str], num: int) -> None:
    facts = replace(text_facts(transformers.LlamaConfig()), kinds=tuple(kinds))
    assert language_model._num_compared(facts) == num
