"""How long each request's drafts are, over recorded steps. tests/integration/test_inside_vllm.py has the real vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from alphaloop.inside_vllm.draft_lengths import Drafting, DraftLengths

K = 4
CONTEXT = 100


@dataclass
class Params:
    """vLLM's `SamplingParams`, as far as the scheduler class reads it."""

    temperature: float = 0.0
    extra_args: dict[str, Any] | None = None


@dataclass
class Request:
    """vLLM's `Request`: `num_computed_tokens` are those of earlier steps."""

    request_id: str
    sampling_params: Params | None = field(default_factory=Params)
    num_computed_tokens: int = 10
    spec_token_ids: list[int] = field(default_factory=lambda: [7] * K)


def asking(name: str, k: object = None, *, temperature: float = 0.0, computed: int = 10) -> Request:
    extra = None if k is None else {"alphaloop_num_draft_tokens": k}
    return Request(name, Params(temperature, extra), computed)


def drafting(**other: Any) -> Drafting:
    usual = {"takes_fewer": True, "has_cache": True, "context": CONTEXT, "keeps_apart": False}
    return Drafting(K, **{**usual, **other})


def step(lengths: DraftLengths, *requests: Request, tokens: int = 1) -> int:
    """Schedule the requests: how many tokens are proposed after the step."""
    by_name = {request.request_id: request for request in requests}
    lengths.trim(requests, ())
    return lengths.of_step(K, dict.fromkeys(by_name, tokens), by_name)


def waiting(*requests: Request) -> list[int]:
    return [len(request.spec_token_ids) for request in requests]


def test_each_request_keeps_as_many_draft_tokens_as_it_asked_for() -> None:
    asked = [asking(str(k), k) for k in (None, 0, 1, 4, 9, -3)]
    assert step(DraftLengths(drafting()), *asked) == K
    assert waiting(*asked) == [K, 0, 1, 4, K, 0]


@pytest.mark.parametrize("wrong", [True, "2", 1.5, [1]])
def test_a_wish_of_another_type_counts_as_left_out(wrong: object) -> None:
    request = asking("a", wrong)
    assert step(DraftLengths(drafting()), request) == K
    assert waiting(request) == [K]


def test_a_step_proposes_as_many_tokens_as_its_longest_wish() -> None:
    lengths = DraftLengths(drafting())
    assert step(lengths, asking("a", 0), asking("b", 2), asking("c", 1)) == 2
    assert step(lengths, asking("a", 0), asking("d", 0)) == 0
    assert step(lengths, Request("pooled", None)) == K


def test_placeholders_that_requests_share_are_cut_for_each_alone() -> None:
    shared = [-1] * K
    short, long = asking("short", 1), asking("long")
    short.spec_token_ids = long.spec_token_ids = shared
    step(DraftLengths(drafting()), short, long)
    assert waiting(short, long) == [1, K]
    assert shared == [-1] * K


def test_a_drafter_that_takes_only_the_servers_k_keeps_it_and_drafts_are_cut_all_the_same() -> None:
    request = asking("a", 0)
    assert step(DraftLengths(drafting(takes_fewer=False)), request) == K
    assert waiting(request) == [0]


def speculative(method: str = "eagle3", **other: Any) -> SimpleNamespace:
    members = {
        "method": method,
        "parallel_drafting": False,
        "use_step3p5_mtp": lambda: False,
        "uses_draft_kv_cache": lambda: True,
        "draft_model_config": None,
    }
    return SimpleNamespace(**{**members, **other})


def config(found: object, *, ranks: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=found,
        model_config=SimpleNamespace(max_model_len=CONTEXT),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
    )


@pytest.mark.parametrize(
    ("found", "ranks", "expected"),
    [
        *((speculative(method), 1, True) for method in ("ngram", "draft_model", "eagle", "eagle3", "mtp")),
        *((speculative(method), 1, False) for method in ("medusa", "suffix", "ngram_gpu", "dflash", "custom_class")),
        (speculative(parallel_drafting=True), 1, False),
        (speculative("mtp", use_step3p5_mtp=lambda: True), 1, False),
        (speculative(), 2, False),  # ranks that draft different numbers of tokens wait for each other for ever
        (None, 1, False),
    ],
)
def test_only_some_drafters_propose_fewer_tokens_than_the_servers_k(found: object, ranks: int, expected: bool) -> None:
    drafts = Drafting.of(config(found, ranks=ranks), K, is_v2=False, is_cpu=False)
    assert drafts.takes_fewer is expected


def test_nothing_is_drafted_beside_a_sampled_request_where_vllm_verifies_that_wrongly() -> None:
    cpu = Drafting.of(config(speculative()), K, is_v2=False, is_cpu=True)
    gpu = Drafting.of(config(speculative()), K, is_v2=True, is_cpu=False)
    for found, expected in ((cpu, 0), (gpu, K)):
        greedy, sampled = asking("greedy"), asking("sampled", temperature=0.7)
        assert step(DraftLengths(found), greedy, sampled) == expected
        assert waiting(greedy) == [expected]
        greedy = asking("greedy")
        DraftLengths(found).trim([greedy], [sampled])  # it may join the step that verifies
        assert waiting(greedy) == [expected]


def test_a_drafter_that_was_left_out_of_a_step_proposes_nothing_to_its_requests_again() -> None:
    lengths = DraftLengths(drafting())
    near_the_end, other = asking("near", computed=CONTEXT - K), asking("other")
    assert step(lengths, near_the_end, other) == 0
    other.spec_token_ids = [0] * K  # what vLLM hands out in place of a draft
    assert step(lengths, other) == 0
    assert waiting(other) == [0]
    late = asking("late")
    other.spec_token_ids = [7] * K
    assert step(lengths, other, late) == K
    assert waiting(other, late) == [0, K]


def test_look_up_drafts_again_in_the_step_after_it_was_left_out() -> None:
    lengths = DraftLengths(drafting(has_cache=False))
    other = asking("other")
    assert step(lengths, asking("near", computed=CONTEXT - K), other) == 0
    assert step(lengths, other) == K
    assert waiting(other) == [0]
    other.spec_token_ids = [7] * K
    assert step(lengths, other) == K
    assert waiting(other) == [K]


def test_the_drafter_reads_up_to_its_own_context_and_on_the_second_model_runner_always() -> None:
    short = speculative(draft_model_config=SimpleNamespace(max_model_len=50))
    found = Drafting.of(config(short), K, is_v2=False, is_cpu=False)
    assert (found.context, found.has_cache) == (50, True)
    assert Drafting.of(config(short), K, is_v2=True, is_cpu=False).context is None
    assert step(DraftLengths(drafting(context=None)), asking("a", computed=CONTEXT - 1)) == K


def limiting(k: object, seconds: object = 10) -> Request:
    return Request("limit", Params(0, {"alphaloop_max_draft_tokens": k, "alphaloop_max_draft_tokens_s": seconds}))


def test_a_request_limits_the_drafts_of_all_until_another_one_or_its_time_ends_that() -> None:
    now = [0.0]
    lengths = DraftLengths(drafting(), clock=lambda: now[0])

    def seen() -> tuple[int, int]:
        request = asking("a")
        return step(lengths, request), *waiting(request)

    lengths.take(limiting(1))
    assert seen() == (1, 1)
    lengths.take(asking("usual", 3))
    assert seen() == (1, 1)
    lengths.take(limiting(0))
    assert seen() == (0, 0)
    lengths.take(limiting(-1))
    assert seen() == (K, K)
    lengths.take(limiting(2))
    now[0] = 9.9
    assert seen() == (2, 2)
    now[0] = 10.0
    assert seen() == (K, K)
    for wrong in (True, "1", None):
        lengths.take(limiting(wrong))
    assert seen() == (K, K)
    lengths.take(limiting(0, seconds="for ever"))
    now[0] += 60
    assert seen() == (K, K)
