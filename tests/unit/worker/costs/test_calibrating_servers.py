"""Servers are asked little, the most useful first, and never longer than they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alphaloop.costs import CostKind, CostPoint
from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import DecodeFailed
from tests.fakes import FakeEngine
from worker.costs.calibration import Shape, calibrate_servers
from worker.servers.fleet_member import EndpointStatus, SuspectCounts

NGRAM = DrafterState("ngram", "r1", 4, least_draft_tokens=4, num_vanilla_endpoints=1)


class Servers(FakeEngine):
    """One vanilla server and one with look-up, of eight requests each, on a clock that only they move."""

    can_redraft = False

    def __init__(self, refuses: tuple[Shape, ...] = (), drafter: DrafterState = NGRAM) -> None:
        super().__init__(num_slots=16, drafters=(drafter,), context_length=8192)
        self.now_s, self.asked, self._refuses = 0.0, list[Shape](), refuses

    def calibrate(self, budget_s: float = 1000.0) -> list[CostPoint]:
        return calibrate_servers(self, budget_s=budget_s, clock=lambda: self.now_s)

    def endpoints(self) -> Sequence[EndpointStatus]:
        return [
            EndpointStatus(name, drafter, "up", 0, 8, 0.0, None, False, {})
            for name, drafter in (("plain", None), ("speculative", "ngram"))
        ]

    def unavailable(self) -> str | None:
        return None

    def suspects(self) -> SuspectCounts:
        return SuspectCounts()

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        kind = CostKind.SERVED if drafter else CostKind.ROUND
        return self._taken(Shape(drafter or "", batch, width, context, kind), 20.0 + batch, num_samples)

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        return self._taken(Shape(drafter or "", 1, num_tokens, 0, CostKind.PREFILL), 0.1 * num_tokens, num_samples)

    def _taken(self, shape: Shape, ms: float, num_samples: int) -> float:
        assert num_samples == 1
        self.asked.append(shape)
        self.now_s += 32 * ms / 1000
        if shape in self._refuses:
            raise DecodeFailed("the server is away")
        return ms


def test_each_shape_is_asked_once_and_only_the_servers_own_length() -> None:
    engine = Servers()
    points = engine.calibrate()
    assert [(s.drafter, s.batch, s.width, s.context, s.kind) for s in engine.asked] == [
        ("", 1, 1, 256, CostKind.ROUND),
        ("ngram", 1, 5, 256, CostKind.SERVED),
        ("", 1, 512, 0, CostKind.PREFILL),
        ("ngram", 1, 512, 0, CostKind.PREFILL),
        ("", 8, 1, 256, CostKind.ROUND),
        ("ngram", 8, 5, 256, CostKind.SERVED),
        ("", 4, 1, 256, CostKind.ROUND),
        ("ngram", 4, 5, 256, CostKind.SERVED),
        ("", 2, 1, 256, CostKind.ROUND),
        ("ngram", 2, 5, 256, CostKind.SERVED),
        ("", 1, 1, 2048, CostKind.ROUND),
        ("ngram", 1, 5, 2048, CostKind.SERVED),
    ]
    assert [Shape.of(point) for point in points] == engine.asked
    assert {point.num_samples for point in points} == {1}


def test_where_requests_choose_their_draft_length_the_shortest_is_asked_too() -> None:
    engine, fixed = Servers(drafter=replace(NGRAM, least_draft_tokens=1)), Servers()
    engine.calibrate()
    fixed.calibrate()
    assert engine.asked[4] == Shape("ngram", 1, 2, 256, CostKind.SERVED)
    assert engine.asked[:4] + engine.asked[5:] == fixed.asked


def test_the_budget_is_kept_and_routes_are_asked_alike() -> None:
    for budget_s in (0.0, 1.0, 4.0, 9.0):
        engine = Servers()
        points = engine.calibrate(budget_s)
        assert engine.now_s <= budget_s + 32 * 0.06
        assert 0 <= 2 * sum(point.drafter is None for point in points) - len(points) <= 1
    assert Servers().calibrate(0.0) == []


def test_a_server_that_does_not_answer_is_asked_no_more() -> None:
    away = Shape("ngram", 8, 5, 256, CostKind.SERVED)
    engine = Servers(refuses=(away,))
    points = engine.calibrate()
    assert [shape for shape in engine.asked if shape.drafter][-1] == away
    assert engine.asked[-1] == Shape("", 1, 1, 2048)
    assert {Shape.of(point) for point in points} == set(engine.asked) - {away}
