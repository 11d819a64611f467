"""The own engine on a GPU, which is torch alone, writes in float32 what transformers writes there.

Tiny models with random weights of every family that the engine computes itself, of one that transformers' modules do,
and of Mistral with a window. No server, no download. On a machine that has little more than torch, transformers and
pytest (pydantic, pydantic-settings and platformdirs are needed, numba is not):

    python -m pytest --noconftest -W default tests/integration/test_on_a_gpu.py
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from alphaloop.engine import Generation, Sampling
from alphaloop.messages import Constraint
from alphaloop.settings.models import (
    HeadsDrafterSettings,
    HybridDrafterSettings,
    LayerSkipDrafterSettings,
    LookupDrafterSettings,
    ModelSettings,
    RecyclingDrafterSettings,
    TargetSettings,
)
from engine.network.slots import WORTH_A_PASS
from engine.own import TransformersEngine, load_engine
from tests.fixtures import heads
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import (
    FAMILIES,
    NUM_TOKENS,
    VANILLA,
    decision,
    finish,
    make_job,
    make_tiny_model,
    make_tiny_tokenizer,
)

DEVICE: Final = "cuda"
NUM_SLOTS: Final = 6
#: Of two logits of size 10: float32 sums in another order decide between them, and either token is right.
NEAR_TIE: Final = 2e-3
GREEDY: Final = Sampling(max_tokens=32, temperature=0.0)
DRAFTERS: Final = ("", "lookup", "other", "itself")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a family's model in float32, made at its first use; `seed` draws its weights."""
    tokenizer = make_tiny_tokenizer()

    def make(family: str, seed: int = 20_240_607) -> Path:
        torch.manual_seed(seed)
        made = make_tiny_model(family, tokenizer)
        folder = tmp_path_factory.mktemp(family)
        made.to(torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return functools.cache(make)


def engine_for(folder_of: Callable[..., Path], family: str) -> TransformersEngine:
    """With look-up, a draft model of other weights, and the target's own weights as a draft model."""
    target = TargetSettings(name="tiny", source=str(folder_of(family)), dtype="float32", device=DEVICE)
    engine = load_engine(
        ModelSettings(target=target, drafters={"lookup": LookupDrafterSettings()}), num_slots=NUM_SLOTS
    )
    for name, folder in (("other", folder_of(family, 7)), ("itself", folder_of(family))):
        engine._drafters[name] = draft_model(name, folder, num_slots=NUM_SLOTS, device=DEVICE, dtype="float32")
    return engine


def some_text(rng: random.Random, num_characters: int) -> str:
    # A prompt of white space alone is refused.
    return "a" + "".join(rng.choice("ab cd\n") for _ in range(num_characters - 1))


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_texts_on_a_gpu_are_those_of_transformers(folder_of: Callable[..., Path], family: str) -> None:
    """Vanilla and with every drafter, prompts of 1 to 700 characters at once, and sequences that join late."""
    rng = random.Random(sum(map(ord, family)))
    engine = engine_for(folder_of, family)
    lengths = (1, 7, 40, 90, 700, 15, 33, 200, 3, 64, 120, 25)
    work = [
        (
            make_job(some_text(rng, length), number),
            replace(GREEDY, max_tokens=rng.randint(8, 32)),
            decision(DRAFTERS[number % 4], 1 + number % 5) if number % 4 else VANILLA,
        )
        for number, length in enumerate(lengths)
    ]
    prepared = {job.job_id: (engine.prepare(job, sampling), decided) for job, sampling, decided in work}
    finished = _decode(engine, list(prepared), lambda name: engine.admit(*prepared[name]))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32)
    reference = reference.eval().to(DEVICE)
    for name, (one, decided) in prepared.items():
        generation = finished[name]
        _assert_greedy(reference, one.token_ids, generation.token_ids, one.sampling.max_tokens)
        if decided.drafter in ("other", "itself") and len(generation.token_ids) > 2:
            assert generation.counts.num_trials > 0
        if decided.drafter == "itself":
            assert generation.counts.num_accepted >= 0.9 * generation.counts.num_trials


def _decode(engine: TransformersEngine, names: list[str], admit: Callable[[str], None]) -> dict[str, Generation]:
    """Half of the slots are taken at first; every third step one more sequence joins those that run."""
    finished: dict[str, Generation] = {}
    for name in names[: NUM_SLOTS // 2]:
        admit(name)
    waiting, num_steps = names[NUM_SLOTS // 2 :], 0
    while waiting or engine.load().num_running:
        if waiting and engine.load().num_free and num_steps % 3 == 2:
            admit(waiting.pop(0))
        finished |= {generation.job_id: generation for generation in engine.step().finished}
        num_steps += 1
    return finished


@torch.inference_mode()
def _assert_greedy(model: Any, prompt: tuple[int, ...], output: tuple[int, ...], max_tokens: int) -> None:
    """Each token is the likeliest one behind those before it, so the text is the greedy one."""
    whole = torch.tensor([[*prompt, *output]], device=DEVICE)
    logits = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
    found = logits.gather(1, whole[0, len(prompt) :, None])[:, 0]
    assert float((logits.amax(dim=-1) - found).max()) < NEAR_TIE
    end = model.config.eos_token_id
    assert end not in output[:-1]
    assert len(output) == max_tokens or output[-1] == end


def test_passes_over_slots_have_the_logits_of_transformers(folder_of: Callable[..., Path]) -> None:
    """In float32, of ragged reads: a chain, a tree, a piece of a prompt, beside a slot that is not read."""
    from engine.network.language_model import LanguageModel
    from engine.network.passes import Read

    rng = random.Random(7)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    for family in FAMILIES:
        reference = load(folder_of(family)).eval().to(DEVICE)
        model = LanguageModel(load(folder_of(family)).eval().to(DEVICE), 1024)
        texts = [[rng.randrange(NUM_TOKENS) for _ in range(num)] for num in (5, 40, 9, 3)]
        cache = model.new_cache(4)
        with torch.inference_mode():
            for text in texts:
                model.prefill(cache, cache.acquire(), text)
            chain, piece = ([rng.randrange(NUM_TOKENS) for _ in range(num)] for num in (3, 100))
            reads = [Read(0, chain, 3), Read(1, [5, 6, 7], 3, parents=[-1, -1, 1]), Read(3, piece, 1)]
            found = model.read(cache, reads)
            paths = [
                *(texts[0] + chain[:num] for num in (1, 2, 3)),
                *(texts[1] + behind for behind in ([5], [6], [6, 7])),
                texts[3] + piece,
            ]
            expected = [
                reference(input_ids=torch.tensor([path], device=DEVICE), use_cache=False).logits[0, -1]
                for path in paths
            ]
        error = (found - torch.stack(expected)).norm() / torch.stack(expected).norm()
        assert float(error) < 1e-4, family


def engine_with_all(folder_of: Callable[..., Path], where: Path) -> TransformersEngine:
    """In float64: all that drafts without a model of its own, two hybrids, and the target as its own draft."""
    folder = folder_of("llama")
    head = transformers.AutoModelForCausalLM.from_pretrained(folder).get_output_embeddings().weight.detach().double()
    drafters = {
        "lookup": LookupDrafterSettings(num_branches=2),
        "sequential": HeadsDrafterSettings(source=str(heads.sequential(where / "sequential", head)), num_branches=2),
        "medusa": HeadsDrafterSettings(source=str(heads.medusa(where / "medusa", head))),
        "eagle3": HeadsDrafterSettings(method="eagle3", source=str(heads.eagle3(where / "eagle3", len(head)))),
        "recycling": RecyclingDrafterSettings(),
        "skip": LayerSkipDrafterSettings(skip_layers=(1,)),
        "tree": HybridDrafterSettings(sources=("sequential", "lookup"), rule="tree"),
        "switch": HybridDrafterSettings(sources=("lookup", "eagle3")),
    }
    target = TargetSettings(name="tiny", source=str(folder), dtype="float64", device=DEVICE)
    engine = load_engine(ModelSettings(target=target, drafters=drafters), num_slots=NUM_SLOTS)
    engine._drafters["itself"] = draft_model("itself", folder, num_slots=NUM_SLOTS, device=DEVICE, dtype="float64")
    return engine


CONSTRAINED: Final = Constraint("regex", "(abc|def|[0-9]+ )+", "body")


@pytest.mark.parametrize(
    "sampling",
    [
        replace(GREEDY, max_tokens=24),
        Sampling(max_tokens=24, temperature=1.2, seed=5, top_k=40),
        replace(GREEDY, max_tokens=24, constraint=CONSTRAINED),
        Sampling(max_tokens=24, temperature=1.0, seed=5, constraint=CONSTRAINED),
    ],
    ids=["greedy", "seeded", "constrained", "constrained, seeded"],
)
def test_every_other_drafter_on_a_gpu_leaves_the_text_as_it_is(
    folder_of: Callable[..., Path], tmp_path: Path, sampling: Sampling
) -> None:
    engine = engine_with_all(folder_of, tmp_path)
    rng = random.Random(11)
    jobs = [make_job(some_text(rng, length), number) for number, length in enumerate((3, 90, 40, 300, 17, 65))]
    alone = finish(engine, ((job, sampling, VANILLA) for job in jobs))
    for name in ("sequential", "medusa", "eagle3", "recycling", "skip", "tree", "switch"):
        drafted = finish(engine, ((job, sampling, decision(name, 4)) for job in jobs))
        assert {one: its.token_ids for one, its in drafted.items()} == {
            one: its.token_ids for one, its in alone.items()
        }, name
        # EAGLE-3 waits where tokens were forced, and in this expression most are.
        is_forced = sampling.constraint is not None and name == "eagle3"
        assert is_forced or sum(its.counts.num_trials for its in drafted.values()) > 0, name


def test_drawn_drafts_on_a_gpu_are_judged_by_what_they_were_drawn_from(
    folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    """A draft with the target's own weights is accepted nearly always, whole or cut to few tokens."""
    engine = engine_with_all(folder_of, tmp_path)
    jobs = [make_job(f"ab {number}", number) for number in range(6)]
    for cut in ({}, {"top_k": 20, "top_p": 0.9}, {"presence_penalty": 0.5}):
        sampling = Sampling(max_tokens=40, temperature=1.0, **cut)
        done = finish(engine, ((job, sampling, decision("itself", 4)) for job in jobs))
        counts = [its.counts for its in done.values()]
        assert sum(one.num_accepted for one in counts) >= 0.97 * sum(one.num_trials for one in counts) > 0, cut


def test_a_beginning_stays_on_a_gpu_and_leaves_the_text_as_it_is(folder_of: Callable[..., Path]) -> None:
    rng = random.Random(3)
    beginning = some_text(rng, 3 * WORTH_A_PASS["cuda"])  # several characters are a token
    jobs = [make_job(f"{beginning}{number}{some_text(rng, 20)}", number) for number in range(5)]
    found, num_cached = [], []
    for max_bytes in (0, 1 << 26):
        target = TargetSettings(
            name="tiny",
            source=str(folder_of("llama")),
            dtype="float64",
            device=DEVICE,
            max_prefix_cache_bytes=max_bytes,
        )
        engine = load_engine(ModelSettings(target=target, drafters={}), num_slots=2)
        texts, num = [], 0
        for job in jobs:  # one behind another, so that nobody runs in between
            engine.admit(engine.prepare(job, GREEDY), VANILLA)
            while engine.load().num_running:
                step = engine.step()
                num += step.num_prefix_cache_tokens
                texts += [one.token_ids for one in step.finished]
        found.append(texts)
        num_cached.append(num)
    assert found[0] == found[1]
    assert num_cached[0] == 0
    assert num_cached[1] >= 3 * WORTH_A_PASS["cuda"]
