"""`alphaloop check-pair` over model folders: what their files say, and what the command prints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import TypeAdapter

from alphaloop.cli.models import _show_pair
from alphaloop.commands import PairCheck
from alphaloop.errors import ModelNotFound, UnsupportedModel
from engine.drafters.draft_vocabulary import write_draft_vocabulary
from engine.models import find_weights
from engine.pairing import facts_of
from tests.fixtures.cli import CarriedOut, Cli, check_pair_order
from tests.fixtures.heads import eagle3, sequential
from tests.fixtures.models import byte_fallback, small_llama, with_config


@pytest.fixture(scope="module")
def draft(tiny_models: dict[str, Path], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a third of the tiny one's size, its embeddings padded and shared with the head."""
    changes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes |= {"num_key_value_heads": 1, "vocab_size": 400, "max_position_embeddings": 512}
    folder = tmp_path_factory.mktemp("draft")
    return small_llama(tiny_models["llama"], tiny_tokenizer, folder, tie_word_embeddings=True, **changes)


def test_facts_agree_with_the_loaded_model(tiny_models: dict[str, Path], draft: Path) -> None:
    for folder, is_tied in ((tiny_models["qwen3"], False), (draft, True)):
        facts = facts_of(str(folder), dtype="float64")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        assert facts.num_parameters == sum(weight.numel() for weight in model.parameters())
        rows = model.get_input_embeddings().weight
        assert facts.num_parameters_read == facts.num_parameters - (0 if is_tied else rows.numel())
        assert facts.num_rows == len(rows)
        with torch.inference_mode():
            cache = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert facts.kv_bytes_per_token * 3 == held
        assert facts.tokens[0] == "<eos>"
        assert facts.end_tokens == {0}
        assert facts.refusal is None


def test_a_context_is_the_models_or_what_is_served(tiny_models: dict[str, Path]) -> None:
    assert facts_of(str(tiny_models["llama"]), dtype="float32").context_length == 2048
    assert facts_of(str(tiny_models["llama"]), dtype="float32", context_length=64).context_length == 64
    assert facts_of(str(tiny_models["llama"]), dtype="float32", context_length=9999).context_length == 2048


def test_quantized_and_unreadable_models_are_told_apart(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    packed = with_config(tiny_models["llama"], tmp_path / "packed", quantization_config={"quant_method": "awq"})
    assert "found awq" in (facts_of(str(packed), dtype="float32").refusal or "")
    with pytest.raises(UnsupportedModel):
        facts_of(str(with_config(tiny_models["llama"], tmp_path / "odd", model_type="odd")), dtype="float32")
    with pytest.raises(ModelNotFound, match=r"expected a model folder or a \.gguf file, found nothing at \./nowhere"):
        facts_of("./nowhere", dtype="float32")


def test_of_a_head_that_was_cut_only_its_rows_are_read(draft: Path, tmp_path: Path) -> None:
    folder = with_config(draft, tmp_path / "cut")
    write_draft_vocabulary(folder, torch.arange(0, 384, 4))
    whole, cut = (facts_of(str(one), dtype="float32") for one in (draft, folder))
    # The rows are a copy of the shared embeddings' own, which are now looked up only.
    assert cut.num_parameters == whole.num_parameters + 96 * 32
    assert cut.num_parameters_read == whole.num_parameters_read - (400 - 96) * 32
    assert cut.num_rows == whole.num_rows


def test_experts_that_stay_idle_are_not_read(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    dense = facts_of(str(tiny_models["llama"]), dtype="float32")
    changes = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1}
    mixed = facts_of(str(with_config(tiny_models["llama"], tmp_path / "mixed", **changes)), dtype="float32")
    gates = 2 * 4 * 64
    assert mixed.num_parameters_read == dense.num_parameters_read + gates
    assert mixed.num_parameters == dense.num_parameters + gates + 2 * 3 * (3 * 64 * 96)


def found_by(done: CarriedOut) -> PairCheck:
    (data,) = done.reports
    return TypeAdapter(PairCheck).validate_python(data)


def test_a_pair_that_fits_is_printed_as_a_table(
    tiny_models: dict[str, Path], draft: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CarriedOut(check_pair_order(tiny_models["llama"], draft))
    assert done.code == 0
    _show_pair(found_by(done))
    printed = capsys.readouterr()
    assert "can serve" in printed.err
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    rows = [re.split(r" {2,}", line) for line in printed.out.splitlines() if line[0] != " "]
    verdicts = {row[0]: row[1] for row in rows if row[1]}  # a long name goes on in a line of its own
    assert verdicts["context"] == "warning"
    assert set(verdicts.values()) == {"verdict", "ok", "warning"}
    assert "(384 and 400)" in " ".join(printed.out.split())


def test_a_draft_with_another_tokenizer_shows_what_it_shares(
    tiny_models: dict[str, Path], draft: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(draft, tmp_path / "other")
    byte_fallback().save_pretrained(folder)
    done = CarriedOut(check_pair_order(tiny_models["llama"], folder))
    assert done.code == 0
    said = {one.check: (one.verdict, one.sentence) for one in found_by(done).findings}
    assert said["vocabulary"][0] == "warning"
    assert "260 of the target's 384 tokens are the draft's too, 74% of those of a sample text" in said["vocabulary"][1]
    assert "by intersection" in said["vocabulary"][1]
    assert said["special tokens"] == (
        "ok",
        "The end is '<eos>' for the target and '</s>' for the draft: one is proposed as the other.",
    )


def test_a_refused_pair_is_an_exit_code(tiny_models: dict[str, Path]) -> None:
    done = CarriedOut(check_pair_order(tiny_models["llama"], tiny_models["qwen2"]))
    assert done.code == 1
    found = found_by(done)
    assert found.is_refused
    assert {one.check for one in found.findings if one.verdict == "refused"} == {"size"}


def test_devices_are_given_by_name_and_must_be_there(tiny_models: dict[str, Path], draft: Path, cli: Cli) -> None:
    done = CarriedOut(check_pair_order(tiny_models["llama"], draft, draft_device="cuda:0"))
    if torch.cuda.is_available():
        memory = next(one for one in found_by(done).findings if one.check == "memory")
        assert "free on cpu. Draft: " in memory.sentence
        assert memory.sentence.endswith("free on cuda:0.")
    else:
        assert done.error.message.startswith("--draft-device: expected ")
    ran = cli("check-pair", "one", "other", "--device", "gpu0")
    assert ran.code == 2
    assert "expected auto, cpu, cuda, or cuda:N" in " ".join(ran.err.split())


@pytest.mark.parametrize(
    ("taps", "code", "verdict"), [((0, 1), 0, "ok"), ((0, 9), 1, "refused"), (None, 1, "refused")], ids=str
)
def test_heads_are_judged_by_what_their_config_says_of_layers(
    tiny_models: dict[str, Path], tmp_path: Path, taps: tuple[int, ...] | None, code: int, verdict: str
) -> None:
    """vLLM's own layers, where the config names none, are not there in a target of two."""
    done = CarriedOut(check_pair_order(tiny_models["llama"], eagle3(tmp_path / "heads", 384, taps=taps)))
    assert done.code == code
    by_check = {one.check: one for one in found_by(done).findings}
    assert by_check["layers"].verdict == verdict
    assert by_check["states"].verdict == by_check["vocabulary"].verdict == "ok"


@pytest.mark.parametrize("made_for", ["this target", "another", None])
def test_heads_say_which_target_they_were_trained_for(
    tiny_models: dict[str, Path], tmp_path: Path, made_for: str | None
) -> None:
    revision = find_weights(str(tiny_models["llama"])).revision
    changes = {} if made_for is None else {"target_revision": revision if made_for == "this target" else "earlier"}
    head = torch.zeros(384, 64)
    done = CarriedOut(check_pair_order(tiny_models["llama"], sequential(tmp_path / "heads", head, **changes)))
    (found,) = (one for one in found_by(done).findings if one.check == "target")
    assert (done.code, found.verdict) == (0, "warning" if made_for == "another" else "ok")
    said = {
        "this target": f"trained for this target, tiny {revision}",
        "another": f"trained for tiny earlier, this target is {revision}",
        None: "does not say which target",
    }
    assert said[made_for] in found.sentence
