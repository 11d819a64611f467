"""Draft models on devices of their own: on GPUs that are not there, whose tensors must not meet; and on real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from alphaloop.deciding.decision import Decision
from alphaloop.engine import Generation, PreparedJob, Sampling
from alphaloop.errors import ConfigError, IncompatiblePair
from alphaloop.settings.models import DraftModelDrafterSettings, LookupDrafterSettings, ModelSettings, TargetSettings
from engine.own import TransformersEngine, load_engine
from tests.fixtures.drafting import draft_model
from tests.fixtures.logical_devices import Copy, Gpus, logical_gpus
from tests.fixtures.models import VANILLA, decision, finish, make_job, small_llama

GREEDY: Final = Sampling(max_tokens=14, temperature=0.0)
DRAWN: Final = Sampling(max_tokens=14, temperature=1.0)
#: Every way in which tokens are chosen. Of the first three the target's device is given nothing but token ids.
SAMPLINGS: Final = {
    "greedy": GREEDY,
    "penalised": replace(GREEDY, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((7, 1.0),)),
    "seeded": replace(DRAWN, seed=3),
    "drawn": DRAWN,
    "cut": replace(DRAWN, top_p=0.9, top_k=40),
    "drawn and penalised": replace(DRAWN, presence_penalty=0.5),
}
NEAR: Final = {"far": "auto", "farther": "auto", "host": "auto"}
APART: Final = {"far": "cuda:1", "farther": "cuda:2", "host": "cpu"}


def crossed(gpus: Gpus) -> list[Copy]:
    """Copies from GPUs, without what the host reads of a distribution to choose a token from it."""
    reading = ("distribution.py", "sampling.py")
    return [copy for copy in gpus.from_gpus if copy.to.type == "cuda" or copy.place not in reading]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    with logical_gpus(monkeypatch, 3) as made:
        yield made


@pytest.fixture(scope="module")
def small(tiny_models: dict[str, Path], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of a quarter of the tiny Llama's size."""
    changes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 1}
    folder, is_exact = tmp_path_factory.mktemp("small"), {"seed": 5, "dtype": torch.float64}
    return small_llama(tiny_models["llama"], tiny_tokenizer, folder, num_key_value_heads=1, **changes, **is_exact)


def models(target: Path, draft: Path, devices: Mapping[str, str], *, device: str = "cuda:0") -> ModelSettings:
    served = TargetSettings(
        name="tiny", source=str(target), dtype="float64", device=device, num_threads=1, context_length=256
    )
    drafts = {name: DraftModelDrafterSettings(source=str(draft), device=where) for name, where in devices.items()}
    return ModelSettings(target=served, drafters={"lookup": LookupDrafterSettings(), **drafts})


def decode(engine: TransformersEngine, work: Mapping[str, tuple[Sampling, Decision]]) -> dict[str, Generation]:
    """All at once, by the names in `work`."""
    jobs = {name: make_job(f"ab cd {number} ab", number) for number, name in enumerate(work)}
    found = finish(engine, ((jobs[name], *work[name]) for name in work))
    return {name: found[job.job_id] for name, job in jobs.items()}


def every_way(drafters: Mapping[str, str]) -> dict[str, tuple[Sampling, Decision]]:
    """Every drafter with every way to choose tokens, side by side in every round."""
    return {
        f"{sampling} with {drafter}": (given, decision(drafter, 3))
        for drafter in (*drafters, "itself")
        for sampling, given in SAMPLINGS.items()
    }


@pytest.mark.parametrize("target_device", ["cuda:0", "cpu"])
def test_texts_and_counts_are_those_of_one_device(
    tiny_models: dict[str, Path], small: Path, gpus: Gpus, target_device: str
) -> None:
    found = []
    for devices in (NEAR, APART):
        engine = load_engine(models(tiny_models["llama"], small, devices, device=target_device), num_slots=24)
        where = target_device if devices is NEAR else "cuda:1"
        engine._drafters["itself"] = draft_model("itself", tiny_models["llama"], num_slots=24, device=where)
        found.append(decode(engine, every_way(devices)))
    together, apart = found
    assert together.keys() == apart.keys()
    for name, generation in together.items():
        assert apart[name].token_ids == generation.token_ids, name
        assert apart[name].counts == generation.counts, name
    accepted: Counter[str] = Counter()
    for name, generation in apart.items():
        accepted[name.rpartition(" ")[2]] += sum(generation.counts.accepts)
    assert accepted.keys() == {*APART, "itself"}
    assert all(accepted.values()), accepted


def test_distributions_cross_once_a_round_and_nothing_else_does(
    tiny_models: dict[str, Path], small: Path, gpus: Gpus
) -> None:
    engine = load_engine(models(tiny_models["llama"], small, APART), num_slots=8)
    gpus.copies.clear()
    host_free = {"greedy", "penalised", "seeded"}
    decode(engine, {name: (SAMPLINGS[name], decision("far", 3)) for name in host_free})
    assert crossed(gpus) == [], "token ids are numbers of the host"

    num_bytes = {}  # of a draft's distribution: float64s of the whole vocabulary, or of 40 tokens and their ids
    sizes = {"drawn": 384 * 8, "cut": 40 * (8 + 8), "drawn and penalised": 384 * 8}
    for number, (name, size) in enumerate(sizes.items()):
        one = engine.prepare(make_job(f"ab {number}", number), SAMPLINGS[name])
        num_bytes[one.job.job_id] = size
        engine.admit(one, decision("far", 3))
    num_crossings = 0
    while engine.load().num_running:
        gpus.copies.clear()
        gpus.waited_for.clear()
        step = engine.step()
        expected = sum(num_proposed * num_bytes[job_id] for job_id, num_proposed in step.proposed_by_job.items())
        num_proposed = sum(step.proposed_by_job.values())
        assert [(copy.source.index, copy.to.index, copy.place) for copy in crossed(gpus)] == [
            (1, 0, "open_drafters.py")
        ] * bool(num_proposed)
        assert [copy.num_bytes for copy in crossed(gpus)] == [expected] * bool(num_proposed)
        assert gpus.waited_for == [torch.device("cuda:0")] * bool(num_proposed), "else the copy counts as verification"
        num_crossings += bool(num_proposed)
    assert num_crossings > 5


def test_the_placement_is_part_of_the_engines_name(tiny_models: dict[str, Path], small: Path, gpus: Gpus) -> None:
    """Costs, speed-ups and choices are stored under the identity's device."""
    named = {
        load_engine(models(tiny_models["llama"], small, devices), num_slots=2).identity.device
        for devices in (NEAR, APART, {"far": "cuda:1"}, {"far": "cuda:2"}, {"far": "cpu"}, {"far": "cuda:0"})
    }
    assert named == {
        "Logical GPU",
        "Logical GPU, far on another Logical GPU, farther on another Logical GPU, host on cpu-1-threads",
        "Logical GPU, far on another Logical GPU",
        "Logical GPU, far on cpu-1-threads",
    }


def prepared(engine: TransformersEngine, number: int) -> PreparedJob:
    return engine.prepare(make_job(f"ab {number}", number), replace(GREEDY, logit_bias=((0, -1000.0),)))


def test_each_device_has_its_own_memory(tiny_models: dict[str, Path], small: Path, gpus: Gpus) -> None:
    engine = load_engine(models(tiny_models["llama"], small, APART), num_slots=4)
    memory = engine.memory()
    assert dict(memory.device_of) == {"far": "cuda:1", "farther": "cuda:2", "host": "cpu"}
    assert memory.elsewhere.keys() == {"cuda:1", "cuda:2", "cpu"}
    jobs = [prepared(engine, number) for number in range(4)]
    for job, decided in zip(jobs, (decision("far", 3), decision("farther", 3), VANILLA, VANILLA), strict=True):
        engine.admit(job, decided)
    engine.step()
    engine.step()
    running = engine.memory()
    drafts = engine._open_drafters.keeping
    assert running.held == engine._cache.num_bytes > 0
    assert running.elsewhere["cuda:1"].held == drafts["far"].num_cache_bytes > 0
    assert running.elsewhere["cuda:2"].held == drafts["farther"].num_cache_bytes > 0
    assert running.elsewhere["cpu"].held == 0

    gpus.free[1] = 0
    engine.redraft(jobs[2].job.job_id, "far", 3)
    engine.redraft(jobs[3].job.job_id, "farther", 3)
    drafting = engine.step().drafting
    assert jobs[2].job.job_id not in drafting, "its draft's device is full, so it decodes vanilla"
    assert {job.job.job_id for job in (jobs[0], jobs[1], jobs[3])} == set(drafting), "other devices go on"
    assert engine.has_room(prepared(engine, 9)) is False, "every slot is taken"
    engine.cancel(jobs[3].job.job_id)
    assert engine.has_room(prepared(engine, 9)), "a full draft device keeps no job waiting"


def test_a_draft_that_its_device_cannot_hold_is_refused_with_the_arithmetic(
    tiny_models: dict[str, Path], small: Path, gpus: Gpus
) -> None:
    gpus.free[1] = 1 << 10
    with pytest.raises(IncompatiblePair) as caught:
        load_engine(models(tiny_models["llama"], small, {"far": "cuda:1"}), num_slots=2)
    said = caught.value.message
    assert "of 1.02 kB free on cuda:1. Not one full slot fits on cuda:1." in said
    assert "What helps: a lower worker.batch_size or models.target.context_length" in said
    gpus.free = {0: 1 << 10, 1: 1 << 30, 2: 0}
    with pytest.raises(IncompatiblePair, match="another device for the draft"):
        load_engine(models(tiny_models["llama"], small, {"far": "auto"}), num_slots=2)


def test_a_device_that_is_not_there_is_told_before_anything_is_loaded(gpus: Gpus) -> None:
    nowhere = Path("/nowhere")
    with pytest.raises(ConfigError, match=r"^models\.drafters\.far\.device: .*found 'cuda:3'"):
        load_engine(models(nowhere, nowhere, {"far": "cuda:3"}), num_slots=2)


LAYOUTS: Final = (("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"))


@pytest.mark.gpu
@pytest.mark.parametrize(("target_device", "draft_device"), LAYOUTS)
def test_texts_on_real_devices_are_those_of_the_cpu(
    tiny_models: dict[str, Path], small: Path, target_device: str, draft_device: str
) -> None:
    """In float64, where a device's rounding decides no token of these texts."""
    if torch.cuda.device_count() < 1 + ("cuda:1" in (target_device, draft_device)):
        pytest.skip("needs a GPU for each")
    work = {
        f"{name} with {drafter}": (sampling, decision(drafter, 3))
        for drafter in ("far", "itself")
        for name, sampling in SAMPLINGS.items()
    }
    found = []
    for target_on, draft_on in (("cpu", "cpu"), (target_device, draft_device)):
        engine = load_engine(models(tiny_models["llama"], small, {"far": draft_on}, device=target_on), num_slots=12)
        engine._drafters["itself"] = draft_model("itself", tiny_models["llama"], num_slots=12, device=draft_on)
        found.append(decode(engine, work))
    on_cpu, apart = found
    for name, generation in on_cpu.items():
        assert apart[name].token_ids == generation.token_ids, name
