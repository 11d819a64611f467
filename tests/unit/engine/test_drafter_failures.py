"""A drafter, a shadow or a score that raises costs no job: the text is the target's, decoded without it."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from alphaloop.engine import Generation, PreparedJob, Sampling
from alphaloop.errors import DecodeFailed
from alphaloop.messages import Purpose
from alphaloop.settings.models import HybridDrafterSettings, LookupDrafterSettings, RecyclingDrafterSettings
from engine.drafters.draft_vocabulary import DraftTokens
from engine.drafters.hybrid import HybridDrafter
from engine.drafters.lookup import LookupDrafter
from engine.drafters.recycling import RecyclingDrafter
from engine.measuring import measure_draft_ms, measure_draft_prefill_ms
from engine.open_drafters import MOST_IN_A_ROW
from engine.own import TransformersEngine
from engine.proposal import Ask, DraftDistributions, Proposal
from tests.fixtures.drafting import ScriptedDrafter, draft_model
from tests.fixtures.models import NUM_TOKENS, VANILLA, Reference, decision, finish, make_job, right_outputs, steps

Build = Callable[..., TransformersEngine]
GREEDY: Final = Sampling(max_tokens=16, temperature=0.0)
#: Answers that are no proposal: they would fail the target's pass, or verification.
WRONG: Final[dict[str, Callable[[Sequence[Ask]], Any]]] = {
    "too few": lambda asks: [],
    "too long": lambda asks: [Proposal((1,) * (ask.num_tokens + 1)) for ask in asks],
    "no token of the target": lambda asks: [Proposal((10**6,)) for _ in asks],
    "a negative token": lambda asks: [Proposal((-1,)) for _ in asks],
    "a parent that follows": lambda asks: [Proposal((1,), (0,)) for _ in asks],
    "distributions of another vocabulary": lambda asks: [
        Proposal((1,), q=DraftDistributions(torch.ones(1, 3))) for _ in asks
    ],
    "no list": lambda asks: None,
}


class Fault(Exception):
    """What a drafter raises; its words may quote a prompt."""


@dataclass
class Bench:
    """An engine of four slots with every kind of drafter, and what a model alone writes."""

    engine: TransformersEngine
    reference: Reference
    rng: random.Random
    patch: pytest.MonkeyPatch

    def failing(self, drafter: str, method: str, calls: Callable[[int], bool]) -> Counter[str]:
        """Have `method` raise at the calls whose number, from 1, `calls` picks; returns how often it did."""
        real, num = getattr(self.engine._drafters[drafter], method), Counter[str]()

        def called(*args: Any, **kwargs: Any) -> Any:
            num["calls"] += 1
            if calls(num["calls"]):
                num["raised"] += 1
                raise Fault("a prompt's own words")
            return real(*args, **kwargs)

        self.patch.setattr(self.engine._drafters[drafter], method, called)
        return num

    def prepare(self, num: int, first: int = 0) -> list[PreparedJob]:
        """Jobs of traffic, greedy and seeded in turn, which no end token cuts."""
        endless = replace(GREEDY, logit_bias=((0, -1000.0),))
        return [
            self.engine.prepare(
                make_job("ab " * self.rng.randint(1, 40), first + i),
                replace(endless, temperature=i % 2, seed=i, max_tokens=self.rng.randint(8, 16)),
            )
            for i in range(num)
        ]

    def decode(self, jobs: list[PreparedJob], *drafters: str) -> tuple[dict[str, Generation], Counter[str]]:
        """Decode everything, job i with drafter i; the generations by job_id, and the failures by drafter."""
        finished: dict[str, Generation] = {}
        failures = Counter[str]()
        waiting = list(enumerate(jobs))
        while waiting or self.engine.load().num_running:
            while waiting and self.engine.has_room(waiting[0][1]):
                i, job = waiting.pop(0)
                self.engine.admit(job, decision(drafters[i % len(drafters)], 4))
            step = self.engine.step()
            failures.update(step.drafter_failures)
            finished |= {generation.job_id: generation for generation in step.finished}
        return finished, failures

    def know(self, jobs: list[PreparedJob]) -> dict[str, list[int]]:
        """The right outputs by job_id, which the scripted drafter is told."""
        expected = right_outputs(self.reference, jobs)
        for one in jobs:
            truth = [*one.token_ids, *expected[one.job.job_id]]
            self.engine._drafters["tree"].truths[one.job.job_id] = truth  # type: ignore[attr-defined]
        return expected

    def decode_right(self, jobs: list[PreparedJob], *drafters: str) -> tuple[dict[str, Generation], Counter[str]]:
        """The same, with right texts, counts that add up and are nested, and every slot of the target free."""
        expected = self.know(jobs)
        finished, failures = self.decode(jobs, *drafters)
        assert {job_id: list(generation.token_ids) for job_id, generation in finished.items()} == expected
        for one in finished.values():
            assert one.counts.num_tokens == len(one.token_ids)
            assert one.num_vanilla_rounds + sum(its.counts.rounds for its in one.drafted) == one.counts.rounds
            for its in (*(its.counts for its in one.drafted), *(its.counts for its in one.shadows)):
                assert all(a <= t <= p for a, t, p in zip(its.accepts, its.trials, its.proposed, strict=True))
                assert list(its.trials) == sorted(its.trials, reverse=True)
        assert self.engine.load().num_free == 4
        assert len(self.engine._cache._free) == 4
        return finished, failures


@pytest.fixture
def bench(
    tiny_engine: Build,
    tiny_models: dict[str, Path],
    references: Callable[[str], Reference],
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    model = draft_model("model", tiny_models["qwen2"], num_slots=4)
    again = RecyclingDrafter("recycling", RecyclingDrafterSettings(), frozenset({0}))
    drafters = {"model": model, "tree": ScriptedDrafter("tree", rng, is_tree=True), "recycling": again}
    return Bench(tiny_engine(num_slots=4, drafters=drafters), references("llama"), rng, monkeypatch)


@pytest.mark.parametrize("method", ["open", "propose", "close"])
@pytest.mark.parametrize("drafter", ["lookup", "model", "tree", "recycling"])
def test_a_drafter_that_raises_once_costs_no_text(
    bench: Bench, caplog: pytest.LogCaptureFixture, drafter: str, method: str
) -> None:
    at = bench.rng.randint(1, 4)
    raised = bench.failing(drafter, method, lambda number: number == at)
    finished, failures = bench.decode_right(bench.prepare(8), drafter)
    assert raised["raised"] == 1
    # What a draft model holds of a text that it did not close is lost to it, so it may lack room for another.
    assert failures == {drafter: 1} or method == "close"
    assert bench.engine.unserved([]) == {}, "once is no reason to end it for the worker"
    assert any(one.drafted for one in finished.values()), "the others draft on"
    told, *_ = [record for record in caplog.records if getattr(record, "action", "") == "drafter_failed"]
    assert told.levelno == logging.ERROR
    assert "own words" not in told.getMessage()


@pytest.mark.parametrize(("drafter", "method"), [("lookup", "open"), ("model", "propose"), ("tree", "close")])
def test_a_drafter_that_always_raises_ends_for_the_worker(bench: Bench, drafter: str, method: str) -> None:
    raised = bench.failing(drafter, method, lambda number: True)
    _, failures = bench.decode_right(bench.prepare(12), drafter, "lookup" if drafter != "lookup" else "model")
    assert raised["raised"] >= MOST_IN_A_ROW
    assert failures[drafter] >= MOST_IN_A_ROW
    why = bench.engine.unserved([])[drafter]
    assert "Fault" in why
    assert "own words" not in why
    num_before = raised["raised"]
    finished, failures = bench.decode_right(bench.prepare(4, first=100), drafter)
    assert not failures
    assert raised["raised"] == num_before, "nobody asks it again"
    assert all(not one.drafted for one in finished.values())


@pytest.mark.parametrize("failing", ["hybrid", "recycling"])
def test_a_drafter_that_ends_fails_none_that_shares_its_texts(bench: Bench, failing: str) -> None:
    """A hybrid's sources hold its sequences beside their own."""
    sources = {name: bench.engine._drafters[name] for name in ("lookup", "recycling")}
    hybrid = HybridDrafter("hybrid", HybridDrafterSettings(sources=tuple(sources), rule="tree"), sources)
    bench.engine._drafters["hybrid"] = hybrid
    bench.failing(failing, "open", lambda number: bench.engine.load().num_running > 1)
    others = [name for name in ("lookup", "recycling") if name != failing]
    _, failures = bench.decode_right(bench.prepare(16), failing, *others)
    assert failing in bench.engine.unserved([])
    assert failures.keys() == {failing}


def test_a_drafter_that_serves_others_is_not_ended(bench: Bench) -> None:
    """A prompt that it cannot bear now and then, more often than a broken drafter would be borne with."""
    jobs = bench.prepare(4 * MOST_IN_A_ROW)
    bad = {one.job.job_id for one in jobs[::3]}
    drafter = bench.engine._drafters["lookup"]
    propose = drafter.propose

    def picky(asks: Sequence[Ask]) -> list[Proposal]:
        if any(ask.job_id in bad for ask in asks):
            raise Fault
        return propose(asks)

    bench.patch.setattr(drafter, "propose", picky)
    finished: dict[str, Generation] = {}
    for job in jobs:
        found, _ = bench.decode_right([job], "lookup")
        finished |= found
    assert not bench.engine.unserved([])
    assert {job_id for job_id, one in finished.items() if not one.drafted} == bad


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("is_drawn", [False, True])
def test_an_answer_that_is_no_proposal_counts_as_a_failure(bench: Bench, wrong: str, is_drawn: bool) -> None:
    jobs = bench.prepare(4)
    if is_drawn:
        jobs = [replace(one, sampling=replace(one.sampling, temperature=1.0, seed=None)) for one in jobs]
    bench.patch.setattr(bench.engine._drafters["tree"], "propose", WRONG[wrong])
    finished, failures = bench.decode(jobs, "tree")
    assert len(finished) == 4
    assert failures["tree"] >= 1
    assert all(len(finished[one.job.job_id].token_ids) == one.sampling.max_tokens for one in jobs)


@pytest.mark.parametrize("method", ["rereading", "_propose"])
def test_what_look_up_does_beside_decoding_may_fail(bench: Bench, method: str) -> None:
    raised = bench.failing("lookup", method, lambda number: True)
    finished, failures = bench.decode_right(bench.prepare(8), "model")
    assert raised["raised"]
    assert failures["lookup"] >= 1
    assert "model" not in failures
    assert all("lookup" not in {its.drafter for its in one.shadows} for one in finished.values())


def test_a_score_that_fails_is_left_out(bench: Bench) -> None:
    job = make_job("ab ab ab", 1)
    control = job.model_copy(update={"purpose": Purpose.CONTROL, "scored_drafters": ("model", "lookup")})
    raised = bench.failing("model", "choices", lambda number: True)
    bench.engine.admit(bench.engine.prepare(control, GREEDY), VANILLA)
    done = list(steps(bench.engine))
    assert raised["raised"] == 1
    assert [step.drafter_failures for step in done if step.drafter_failures] == [{"model": 1}]
    (finished,) = (generation for step in done for generation in step.finished)
    assert [its.drafter for its in finished.shadows] == ["lookup"]
    assert finished.second_choices


def test_a_drafter_that_cannot_be_emptied_leaves_the_engine_emptied(bench: Bench) -> None:
    jobs = bench.prepare(4)
    bench.know(jobs)
    for job in jobs:
        bench.engine.admit(job, decision("tree", 3))
    bench.engine.step()
    bench.failing("lookup", "clear", lambda number: True)
    bench.engine.abandon()
    assert bench.engine.load().num_running == 0
    _, failures = bench.decode_right(jobs, "tree", "model")
    assert failures == {"lookup": 1}


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("open", torch.AcceleratorError("CUDA error: device-side assert triggered")),
        ("propose", RuntimeError("CUDA error: an illegal memory access was encountered")),
        ("propose", RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx")),
        ("close", RuntimeError("Triton Error [CUDA]: misaligned address")),
    ],
    ids=["assert", "access", "library", "kernel"],
)
def test_a_fault_of_the_device_is_not_the_drafters(bench: Bench, method: str, fault: Exception) -> None:
    """It fails the step, as everywhere: the self-test then finds the engine sick."""

    def broken(*args: Any, **kwargs: Any) -> None:
        raise fault

    bench.patch.setattr(bench.engine._drafters["model"], method, broken)
    bench.engine.admit(bench.prepare(1)[0], decision("model", 3))
    with pytest.raises(DecodeFailed if method == "propose" else type(fault)):
        finish(bench.engine)
    assert bench.engine.unserved([]) == {}


def test_a_draft_whose_logits_are_no_numbers_counts_as_failed(bench: Bench) -> None:
    """Drawn from such a distribution, a draft would be verified against no number at all."""
    draft: Any = bench.engine._drafters["model"]
    read = draft.model.read
    bench.patch.setattr(draft.model, "read", lambda cache, reads: torch.full_like(read(cache, reads), torch.nan))
    jobs = [replace(one, sampling=replace(one.sampling, temperature=1.0, seed=None)) for one in bench.prepare(4)]
    finished, failures = bench.decode(jobs, "model")
    assert len(finished) == 4
    assert failures["model"] >= 1
    assert all(one.counts.num_trials == 0 for one in finished.values())


def test_a_draft_with_too_few_rows_never_reads_a_token_that_it_has_no_row_for(
    bench: Bench, tiny_engine: Build, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """On a GPU such a read ends the process. Rows that pad the target's embeddings have no token, but may come."""
    small = transformers.AutoModelForCausalLM.from_pretrained(tiny_models["qwen2"], dtype=torch.float64)
    small.resize_token_embeddings(300)
    small.save_pretrained(tmp_path)
    draft = draft_model("small", tmp_path, num_slots=4)
    draft.tokens = DraftTokens(NUM_TOKENS, 300, frozenset({0}))
    drafters = {"small": draft, "tree": ScriptedDrafter("tree", bench.rng, is_tree=True)}
    bench = replace(bench, engine=tiny_engine(num_slots=4, drafters=drafters))
    # Half of the prompts it can read, and then the target may still write a token that it cannot.
    jobs = [
        replace(one, token_ids=(*bench.rng.choices(range(1, 300), k=20), bench.rng.randint(300, 383) if i % 2 else 299))
        for i, one in enumerate(bench.prepare(8))
    ]
    highest: list[int] = []
    read = draft.model.read

    def watched(cache: Any, reads: Any) -> torch.Tensor:
        highest.extend(max(one.token_ids) for one in reads)
        return read(cache, reads)

    draft.model.read = watched  # type: ignore[method-assign]
    _, failures = bench.decode_right(jobs, "small")
    assert not failures
    assert 0 <= max(highest) < 300


def test_a_drafter_that_fails_is_named_and_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(asks: Sequence[Ask]) -> None:
        raise RuntimeError("out of memory")

    drafter = LookupDrafter("recording", LookupDrafterSettings())
    monkeypatch.setattr(drafter, "propose", fail)
    with pytest.raises(DecodeFailed, match=r"by recording failed: RuntimeError: out of memory"):
        measure_draft_ms(drafter, 2, 5, 16, 1)
    assert drafter._open == {}
    with pytest.raises(DecodeFailed, match=r"recording reads 16 tokens failed"):
        measure_draft_prefill_ms(drafter, 16, 1)
    assert drafter._open == {}
