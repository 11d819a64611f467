"""The devices that settings name: what is refused, in which words, and what a placement is called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from alphaloop.errors import ConfigError
from alphaloop.settings import load_settings
from alphaloop.settings.models import DraftModelDrafterSettings, LookupDrafterSettings, ModelSettings, TargetSettings
from tests.fixtures.logical_devices import Gpus, logical_gpus
from worker.decoding.device import Placement, find_device


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


def test_look_up_says_that_it_needs_no_device() -> None:
    with pytest.raises(
        ConfigError, match=r"^models\.drafters\.lookup\.device: no such setting\s.*leave it out: look-up has no weights"
    ):
        load_settings(overrides={"models": {"drafters": {"lookup": {"device": "cpu"}}}})


def test_a_setting_of_kernels_that_are_gone_names_what_to_set_instead() -> None:
    with pytest.raises(ConfigError, match=r'^models\.target\.gpu_kernels: no such setting\s.*engine = "server"'):
        load_settings(overrides={"models": {"target": {"gpu_kernels": True}}})


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


@pytest.mark.parametrize("device", ["auto", "cuda:1", "cpu"])
def test_a_worker_whose_models_share_a_device_keeps_its_name(gpus: Gpus, device: str) -> None:
    alone, paired = Placement.of(settings(device)).name, Placement.of(settings(device, small=device)).name
    threads = torch.get_num_threads()
    assert alone == paired == (f"cpu-{threads}-threads" if device == "cpu" else "Logical GPU")


def test_a_pair_of_gpus_has_one_name_whatever_their_numbers(gpus: Gpus) -> None:
    names = {Placement.of(settings(*pair)).name for pair in (("cuda:0",), ("cuda:1",))}
    assert names == {"Logical GPU"}
    names = {
        Placement.of(settings(first, small=second)).name
        for first, second in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"))
    }
    assert names == {"Logical GPU, small on another Logical GPU"}


def test_the_shipped_settings_leave_the_device_to_the_host() -> None:
    shipped = load_settings(Path(__file__).parents[4] / "configs").models
    assert shipped.target.device == "auto"
    assert DraftModelDrafterSettings(source="s").device == "auto"
