"""The whole benchmark: its report, and the near-ties that explain where texts part."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from benchmarks.whole.lineup import BASELINE, CONTESTANTS, ENGINE, ENGINE_VANILLA, VLLM, WORKER, Played, draw_order
from benchmarks.whole.near_ties import NEAR_TIE, Difference, explain, num_shared
from benchmarks.whole.report import Round, SlotsReport, met


def played(name: str, tokens_per_s: float, **fields: object) -> Played:
    return Played(name, 10.0, round(10 * tokens_per_s), **fields)  # type: ignore[arg-type]


def report(*rounds: Round) -> SlotsReport:
    return SlotsReport(8, 100, rounds)


def test_every_order_in_which_the_engine_follows_the_worker_is_drawn() -> None:
    rng = random.Random(5)
    orders = Counter(tuple(draw_order(CONTESTANTS, rng)) for _ in range(6000))
    assert len(orders) == 60, "half of 120"
    assert all(order.index(WORKER) < order.index(ENGINE) for order in orders)
    assert min(orders.values()) > 50
    assert max(orders.values()) < 150


def test_ratios_are_taken_within_a_round() -> None:
    fast, slow = (Round((played(WORKER, 96 * x), played(ENGINE, 100 * x), played(VLLM, 60 * x))) for x in (1, 0.5))
    found = {one.other: one for one in report(fast, slow).paired()}
    assert found[ENGINE].ratios == pytest.approx([0.96, 0.96])
    assert found[ENGINE].is_met
    assert found[VLLM].ratio.median == pytest.approx(1.6)
    assert found[ENGINE].ratio.low is None, "two rounds bound nothing"


def test_a_missed_bar_is_named_and_vanilla_has_none() -> None:
    found = met([report(Round((played(WORKER, 90, occupied=0.9), played(ENGINE, 100), played(ENGINE_VANILLA, 50))))])
    assert found == {"8 slots: worker / engine >= 0.95": False, "8 slots: occupied >= 0.95": False}


def test_a_text_that_no_near_tie_explains_is_unsound() -> None:
    both = (played(WORKER, 90), played(ENGINE, 100))
    tied = report(Round(both, (Difference("job-1", 3, 0.1),)))
    wrong = report(Round(both, (Difference("job-1", 3, 0.1), Difference("job-2", 3, None))))
    assert tied.is_sound()
    assert not wrong.is_sound()
    texts = wrong.as_json()["texts"]
    assert (texts["compared"], texts["identical"], texts["near_ties"], texts["unexplained"]) == (100, 98, 1, 1)


def test_faults_of_both_workers_are_added_up() -> None:
    fine, bad = {"missing": 0, "several": 0}, {"missing": 0, "several": 2}
    rounds = [Round((played(WORKER, 90, faults=bad), played(BASELINE, 80, faults=fine))) for _ in range(2)]
    assert report(*rounds).faults() == {"worker: several": 4}
    assert not report(*rounds).is_sound()


WORDS = ("<end>", "a", "b", "ab", "c", "\N{REPLACEMENT CHARACTER}", "é")
END, A, B, AB, C, HALF, E_ACUTE = range(len(WORDS))


class Target:
    """Logits by what stands before; a token is its word, the end token no text, and HALF and HALF are one é."""

    end_tokens = frozenset({END})

    def __init__(self, logits: Mapping[tuple[int, ...], Mapping[int, float]]) -> None:
        self._logits = logits

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        given = self._logits.get(tuple(token_ids), {})
        return [given.get(token, 0.0) for token in range(len(WORDS))]

    def decode(self, token_ids: Sequence[int]) -> str:
        text = "".join(WORDS[token] for token in token_ids if token != END)
        return text.replace(2 * WORDS[HALF], WORDS[E_ACUTE])


@pytest.mark.parametrize(
    ("tokens", "text", "shared"),
    [
        ((A, B, C), "abc", 3),
        ((A, B, C), "abb", 2),
        ((A, B), "abc", 2),
        ((A, B, C), "ab", 2),
        ((A, B, C), "c", 0),
        ((A, HALF, HALF, C), "aéb", 3),
    ],
)
def test_tokens_are_shared_as_far_as_their_text_is(tokens: tuple[int, ...], text: str, shared: int) -> None:
    assert num_shared(Target({}).decode, tokens, text) == shared


@pytest.mark.parametrize(
    ("text", "tokens", "logits", "place", "gap"),
    [
        pytest.param("abc", (A, B, B), {(C, A, B): {B: 9.0, C: 8.9}}, 2, 0.1, id="two tokens as good as equal"),
        pytest.param("ac", (A, B), {(C, A): {A: 9.0, B: 8.9, C: 8.7}}, 1, 0.3, id="the lower of the two counts"),
        pytest.param("abc", (A, B, B), {(C, A, B): {B: 9.0, C: 8.9 - NEAR_TIE}}, 2, None, id="one is not wanted"),
        pytest.param("abc", (A, B, B), {(C, A, B): {B: 9.0, A: 9.0}}, 2, None, id="one that goes on otherwise"),
        pytest.param("ab", (A, B, C), {(C, A, B): {C: 9.0, END: 8.9}}, 2, 0.1, id="the worker ended"),
        pytest.param(
            "ab", (A, B, C), {(C, A, B): {C: 9.0, A: 8.9}}, 2, None, id="the worker ended without an end token"
        ),
        pytest.param("abc", (A, B, END), {(C, A, B): {END: 9.0, C: 8.9}}, 2, 0.1, id="the engine ended"),
        pytest.param("a", (A, B, C), {}, 1, None, id="a text that was cut short"),
        pytest.param("abc", (A, B, B), {(C,): {A: 9.0, AB: 8.9}}, 0, 0.1, id="the same characters in other tokens"),
    ],
)
def test_a_difference_is_explained_by_a_near_tie_with_a_token_that_goes_on_as_the_text_does(
    text: str,
    tokens: tuple[int, ...],
    logits: dict[tuple[int, ...], dict[int, float]],
    place: int,
    gap: float | None,
) -> None:
    """`logits` by prompt and text before; elsewhere the target wants what the engine wrote, and nothing else."""
    wanted = {(C, *tokens[:number]): {token: 9.0} for number, token in enumerate(tokens)}
    found = explain("job", Target(wanted | logits), (C,), tokens, text)
    assert (found.place, found.gap) == (place, pytest.approx(gap))
    assert found.is_near_tie is (gap is not None)
