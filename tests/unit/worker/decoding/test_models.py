"""What is loaded, what it is called, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from alphaloop.errors import ConfigError, UnsupportedModel
from alphaloop.settings import TaskSettings
from alphaloop.settings.models import TargetSettings
from worker.decoding.models import end_tokens, load_target, refuse_unsupported
from worker.decoding.network import fused, language_model
from worker.decoding.network.fused import VERSION as FUSED_VERSION
from worker.decoding.network.groups import Placed
from worker.decoding.network.passes import Pass, plan_pass


def settings(source: Path, **more: Any) -> TargetSettings:
    return TargetSettings(name="tiny", source=str(source), dtype="float32", device="cpu", **more)


def test_a_target_is_named_by_its_weights_and_device(tiny_models: dict[str, Path]) -> None:
    identities = [load_target(settings(tiny_models[family])).identity for family in ("llama", "qwen2", "llama")]
    assert identities[0] == identities[2]
    assert identities[0].target_revision != identities[1].target_revision
    assert identities[0].device == f"cpu-{torch.get_num_threads()}-threads"
    assert identities[0].context_length == 2048
    assert identities[0].engine == f"fused{FUSED_VERSION}-torch-{torch.__version__}-float32"


def test_a_family_that_is_not_fused_is_named_by_the_library_that_computes_it(tiny_models: dict[str, Path]) -> None:
    identity = load_target(settings(tiny_models["gpt_neox"])).identity
    assert identity.engine == f"transformers-{transformers.__version__}-float32"


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


def test_a_generation_config_that_no_job_could_have_is_refused_where_jobs_are_to_take_it(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_models["llama"], folder := tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 3.0}))
    assert load_target(settings(folder)).sampling_defaults.suggested == {"temperature": 3.0}
    with pytest.raises(ConfigError, match=r"temperature of the model's generation_config.json: .* less than or equal"):
        load_target(settings(folder, use_generation_config=True))


def test_a_template_that_writes_nothing_is_refused_when_the_model_is_loaded(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_models["llama"], folder := tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")
    with pytest.raises(UnsupportedModel, match="no Jinja template"):
        load_target(settings(folder))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UnsupportedModel):
        load_target(settings(tmp_path))


def test_code_that_comes_with_a_model_is_never_run(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\n")
    with pytest.raises(UnsupportedModel):
        load_target(settings(folder))
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": None, "sliding_window": 4096}, "a sliding window"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type dynamic"),
        ({"is_encoder_decoder": True}, "decoder-only"),
    ],
)
def test_attention_that_slots_cannot_reproduce_is_refused(found: dict[str, Any], reason: str) -> None:
    config = {"model_type": "some", "is_encoder_decoder": False, "rope_parameters": {"rope_type": "default"}}
    model = SimpleNamespace(config=SimpleNamespace(**config), forward=lambda input_ids, logits_to_keep: None)
    refuse_unsupported(model)
    model.config.__dict__.update(found)
    with pytest.raises(UnsupportedModel, match=reason):
        refuse_unsupported(model)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_positions_that_are_not_the_texts_are_caught(
    tiny_models: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_target(settings(tiny_models[family]))

    def shifted(*args: Any) -> Pass:
        plan = plan_pass(*args)
        return replace(plan, positions=plan.positions + 1 - torch.eye(1, len(plan.positions), dtype=torch.long)[0])

    monkeypatch.setattr(language_model, "plan_pass", shifted)
    with pytest.raises(UnsupportedModel, match="slot cache differ"):
        load_target(settings(tiny_models[family]))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_mask_that_hides_what_was_read_is_caught(
    tiny_models: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "can_compile", lambda *_: False)

    def blind(*args: Any) -> Pass:
        plan = plan_pass(*args)
        for group in plan.groups:
            if group.mask is not None:
                group.mask[..., 1:, 0] = -torch.inf
        return plan

    monkeypatch.setattr(language_model, "plan_pass", blind)
    with pytest.raises(UnsupportedModel, match="slot cache differ"):
        load_target(settings(tiny_models[family]))


def test_a_kernel_that_sees_the_wrong_tokens_is_caught(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_target(settings(tiny_models["llama"]))
    only_itself = property(lambda placed: [1 << token for token in range(placed.width)])
    monkeypatch.setattr(Placed, "ancestry", only_itself)
    with pytest.raises(UnsupportedModel, match="slot cache differ"):
        load_target(settings(tiny_models["llama"]))


def test_every_place_that_names_an_end_token_counts() -> None:
    def named(value: Any) -> SimpleNamespace:
        return SimpleNamespace(eos_token_id=value)

    model = SimpleNamespace(generation_config=named([3, 4]), config=named(4))
    assert end_tokens(model, named(7)) == {3, 4, 7}
    assert end_tokens(SimpleNamespace(generation_config=named(None), config=named(None)), named(None)) == frozenset()
