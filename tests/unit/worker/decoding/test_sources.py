"""Where weights are found, what their revision follows, and the devices that settings name."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from alphaloop.errors import ConfigError, ModelNotFound, UnsupportedModel
from alphaloop.settings import load_settings
from alphaloop.settings.models import DraftModelDrafterSettings, LookupDrafterSettings, ModelSettings, TargetSettings
from tests.fixtures.logical_devices import Gpus, logical_gpus
from worker.decoding import models
from worker.decoding.device import Placement, find_device
from worker.decoding.models import find_weights


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(models, "_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An importable package with one GGUF file inside."""
    folder = tmp_path / "site" / "some_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('finding a model must not run its package')\n")
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_a_package_is_searched_without_being_run(package: Path) -> None:
    weights = find_weights("package:some_model")
    assert weights.path == package / "tiny.gguf"
    assert weights.is_gguf
    assert weights.revision == hashlib.sha256(b"GGUF").hexdigest()[:12]


def test_a_package_with_two_models_is_ambiguous(package: Path) -> None:
    (package / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"expected one \.gguf file .* found 2"):
        find_weights("package:some_model")


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ModelNotFound, match="no installed package no_such_model") as refusal:
        find_weights("package:no_such_model")
    hint = (refusal.value.hint or "").replace("-", "_")
    assert "no_such_model" not in hint, "nobody is told to install what was typed"


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/model", "~/nowhere", "nowhere.gguf"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(source: str) -> None:
    with pytest.raises(ModelNotFound, match="found nothing at"):
        find_weights(source)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModel, match="pickled"):
        find_weights(str(tmp_path))


def write_shard(file: Path, number: float) -> None:
    save_file({"weight": torch.tensor([number])}, file)


DECIDING = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("chat_template.jinja", "draft_vocabulary.json"),
)


def test_the_revision_of_a_folder_follows_every_file_that_decides_a_text(tmp_path: Path) -> None:
    seen = []
    for shard, number in ((1, 0), (2, 1), (1, 1), (2, 0)):  # at last their contents have changed places
        write_shard(tmp_path / f"model-{shard}.safetensors", number)
        seen.append(find_weights(str(tmp_path)).revision)
    for name in DECIDING:
        for content in ("{}", '{"a": 1}'):
            (tmp_path / name).write_text(content)
            seen.append(find_weights(str(tmp_path)).revision)
    assert len(set(seen)) == len(seen)
    (tmp_path / "README.md").write_text("nothing that is loaded")
    assert find_weights(str(tmp_path)).revision == seen[-1]


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_cut_file_is_refused_by_its_name(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.safetensors"
    write_shard(file, 1)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UnsupportedModel, match=r"/model\.safetensors: ") as refusal:
        find_weights(str(tmp_path))
    assert "complete" in (refusal.value.hint or "")


@pytest.mark.parametrize("find", [find_weights, models.find_description])
@pytest.mark.parametrize(
    "source", ["package:", "package:..", "package:no.such.model", "a\0b", "~no-such-user-here/model"]
)
def test_a_name_that_names_nothing_is_an_error_of_ours(find: Callable[[str], object], source: str) -> None:
    with pytest.raises((ModelNotFound, UnsupportedModel)):
        find(source)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    write_shard(tmp_path / "model-1.safetensors", 1)
    (tmp_path / name).mkdir()
    with pytest.raises(UnsupportedModel, match=name):
        find_weights(str(tmp_path))


def test_a_large_file_is_hashed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(models, "QUICK_BYTES", 0)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"first")
    first = find_weights(str(file)).revision
    (note,) = (cache / "hashes").iterdir()
    note.write_text("remembered")
    assert find_weights(str(file)).revision == "remembered"
    file.write_bytes(b"second!")
    assert find_weights(str(file)).revision == hashlib.sha256(b"second!").hexdigest()[:12]
    assert first == hashlib.sha256(b"first").hexdigest()[:12]


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(models, "_cache", lambda: Path("/dev/null/alphaloop"))
    monkeypatch.setattr(models, "QUICK_BYTES", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    weights = find_weights(str(file))
    assert weights.revision == hashlib.sha256(b"weights").hexdigest()[:12], "hashed, though nobody remembers it"
    working, folder = models.working_folder(), models.converted_folder(weights, "float32")
    (working / "config.json").write_text("converted")
    models.publish_folder(working, folder)
    assert (models.converted_folder(weights, "float32") / "config.json").read_text() == "converted"
    assert folder.is_relative_to(tmp_path)
    assert len([one for one in caplog.messages if "cannot keep converted models in /dev/null/alphaloop" in one]) == 1


def test_two_who_convert_at_once_end_with_one_whole_copy(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    for name in ("one", "two"):
        finished = tmp_path / name
        finished.mkdir()
        (finished / "config.json").write_text(name)
        models.publish_folder(finished, folder)
        assert not finished.exists()
    assert (folder / "config.json").read_text() == "one"


def test_a_model_is_described_without_its_hash(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert models.find_description(str(tmp_path)) == tmp_path
    assert not cache.exists()
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="pickled"):
        models.find_description(str(tmp_path))


def test_a_finished_dense_copy_describes_its_gguf_file(package: Path) -> None:
    copy = models.converted_folder(find_weights("package:some_model"), "float32")
    copy.mkdir(parents=True)
    assert models.find_description("package:some_model") == package / "tiny.gguf"
    (copy / "config.json").touch()
    assert models.find_description("package:some_model") == copy


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    with logical_gpus(monkeypatch, 2) as made:
        yield made


def settings(device: str, **drafts: str) -> ModelSettings:
    found = {name: DraftModelDrafterSettings(source="s", device=where) for name, where in drafts.items()}
    return ModelSettings(target=TargetSettings(device=device), drafters={"lookup": LookupDrafterSettings(), **found})


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:01", "CUDA:0", "cpu:0", "mps", ""])
@pytest.mark.parametrize("path", ["models.target.device", "models.drafters.small.device"])
def test_a_name_that_is_no_device_is_refused_with_its_path(path: str, name: str) -> None:
    given = {"method": "draft_model", "source": "s"} if "drafters" in path else {}
    section, key = path.split(".")[1:-1], path.split(".")[-1]
    overrides: dict[str, object] = {**given, key: name}
    for part in reversed(section):
        overrides = {part: overrides}
    with pytest.raises(ConfigError) as caught:
        load_settings(overrides={"models": overrides})
    assert caught.value.message == (
        f"{path}: expected auto, cpu, cuda, or cuda:N with the number of a GPU, as in cuda:1; found {name!r}"
    )


def test_a_gpu_without_a_build_of_torch_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"^models\.target\.device: .*CUDA or ROCm to serve 'cuda', found torch 2"):
        find_device("cuda")


def test_gpus_that_this_process_does_not_see_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        logical_gpus(monkeypatch, 0),
        pytest.raises(ConfigError, match=r"a GPU that torch can use.*found none") as none,
    ):
        find_device("cuda:0", setting="--device")
    assert none.value.message.startswith("--device: ")
    assert "CUDA_VISIBLE_DEVICES" in (none.value.hint or "")
    with (
        logical_gpus(monkeypatch, 2),
        pytest.raises(ConfigError, match=r"one of the 2 GPUs .*\(cuda:0 to cuda:1\), found 'cuda:2'"),
    ):
        find_device("cuda:2")
    with logical_gpus(monkeypatch, 1), pytest.raises(ConfigError, match=r"\(cuda:0\), found 'cuda:1'"):
        find_device("cuda:1")


def test_auto_is_the_first_gpu_or_the_cpu_and_of_a_draft_the_targets(gpus: Gpus) -> None:
    placed = Placement.of(settings("auto", small="auto"))
    assert (placed.target, placed.drafts["small"]) == (torch.device("cuda:0"), torch.device("cuda:0"))
    assert Placement.of(settings("cuda", small="auto")).devices == (torch.device("cuda:0"),)
    placed = Placement.of(settings("cuda:1", small="auto", other="cpu"))
    assert placed.drafts == {"small": torch.device("cuda:1"), "other": torch.device("cpu")}
    assert placed.devices == (torch.device("cuda:1"), torch.device("cpu"))


def test_auto_is_the_cpu_where_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("device", ["auto", "cuda:0", "cuda:1", "cpu"])
def test_a_worker_is_named_by_kinds_of_devices_whatever_their_numbers(gpus: Gpus, device: str) -> None:
    alone, paired = Placement.of(settings(device)).name, Placement.of(settings(device, small=device)).name
    threads = torch.get_num_threads()
    assert alone == paired == (f"cpu-{threads}-threads" if device == "cpu" else "Logical GPU")
    if device.startswith("cuda"):
        apart = Placement.of(settings(device, small="cuda:0" if device == "cuda:1" else "cuda:1"))
        assert apart.name == "Logical GPU, small on another Logical GPU"
