"""The experiment over a server's own rounds: the slices have the rounds' times, less the drafter's for its cache."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from alphaloop.experiment.estimate import measured_speedup
from alphaloop.experiment.observe import Phase, Slice, Treatment
from alphaloop.experiment.rounds import FreeSequence, Yielded
from alphaloop.inside_vllm.measuring import MOST_IN_A_REPLY, SLICES, STEPS, DrafterTime, ServerExperiment, StepFacts
from worker.servers.forms import ReplyPiece

START = datetime(2026, 1, 1, tzinfo=UTC)
CODE = FreeSequence("code greedy", Treatment("draft", 3))
ROUND_S, VANILLA_S, DRAFTER_S = 0.05, 0.04, 0.004


class Server:
    """Rounds of four requests, three tokens a round with drafts; the drafter reads on in control."""

    def __init__(self, *, share: float = 0.3, measures_drafter: bool = True, pause_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.experiment = ServerExperiment(
            rng=random.Random(1), clock=lambda: self.now_s, now=lambda: START + timedelta(seconds=self.now_s)
        )
        self.experiment.share(share)
        self.measures_drafter, self.pause_s = measures_drafter, pause_s
        self.num_control = 0
        self.steps: list[dict[str, Any]] = []

    def run(self, num_rounds: int, free: dict[str, FreeSequence], *, has_prompt: bool = False) -> list[dict[str, Any]]:
        taken: list[dict[str, Any]] = []
        for _ in range(num_rounds):
            self.experiment.begin(free)
            is_control = all(map(self.experiment.is_control, free))
            self.num_control += is_control
            self.experiment.scheduled(
                StepFacts(4, 100.0, has_prompt, 4, num_drafted=1 if is_control else 3, is_for_cache_only=is_control)
            )
            self.now_s += VANILLA_S + DRAFTER_S if is_control else ROUND_S
            yielded = {name: Yielded(1 if is_control else 3, 0 if is_control else 3) for name in free}
            drafter = DrafterTime(1 if is_control else 3, DRAFTER_S) if self.measures_drafter else None
            self.experiment.ended(yielded, drafter=drafter, goes_on=not self.pause_s)
            self.now_s += self.pause_s
            taken.append(self.experiment.take())
        self.steps += [step for new in taken for step in new.get(STEPS, [])]
        return [part for new in taken for part in new.get(SLICES, [])]


def read(slices: list[dict[str, Any]]) -> tuple[Slice, ...]:
    """As the worker reads them from replies."""
    parts: list[Slice] = []
    for first in range(0, len(slices), MOST_IN_A_REPLY):
        some = slices[first : first + MOST_IN_A_REPLY]
        piece = ReplyPiece.model_validate_json(json.dumps({"kv_transfer_params": {"alphaloop_slices": some}}))
        assert len(piece.slices) == len(some)
        parts += piece.slices
    return tuple(parts)


@pytest.mark.parametrize("pause_s", [0.0, 0.5], ids=["at once", "with idle time between"])
def test_the_figure_is_that_of_a_server_without_the_drafter(pause_s: float) -> None:
    server = Server(pause_s=pause_s)
    slices = read(server.run(3000, {f"r{i}": CODE for i in range(4)}))
    found = measured_speedup(slices)
    assert found.num_blocks >= 8
    assert found.speedup.mean == pytest.approx(3 * VANILLA_S / ROUND_S)
    assert server.num_control / 3000 == pytest.approx(0.3, abs=0.05)


def test_rounds_whose_drafter_was_not_timed_are_not_counted() -> None:
    server = Server(measures_drafter=False)
    slices = read(server.run(2000, {"r": CODE}))
    assert not [part for part in slices if part.phase is Phase.CONTROL]


def test_rounds_that_read_a_prompt_are_kept_apart() -> None:
    server = Server()
    slices = read(server.run(40, {"r": CODE}, has_prompt=True) + server.run(400, {"r": CODE}))
    assert sum(part.num_prompt_rounds for part in slices) == 40


def test_a_share_of_nothing_is_no_control() -> None:
    server = Server(share=0.0)
    server.run(2000, {"r": CODE})
    assert server.num_control == 0


def test_a_reply_brings_a_bounded_number_and_the_rest_comes_later() -> None:
    server = Server()
    server.experiment.take = dict  # type: ignore[method-assign]  # no reply comes meanwhile
    server.run(2000, {f"r{i}": FreeSequence(f"task{i} greedy", CODE.treatment) for i in range(9)})
    del server.experiment.take  # type: ignore[method-assign]
    numbers = [len(server.experiment.take().get(SLICES, [])) for _ in range(100)]
    assert max(numbers) == numbers[0] == MOST_IN_A_REPLY
    assert numbers[1] > 0
    assert numbers[-1] == 0


def test_a_share_that_changes_ends_the_slices_of_the_old_one() -> None:
    server = Server()
    server.run(20, {"r": CODE})
    server.experiment.share(0.1)
    (part,) = read(server.experiment.take()[SLICES])
    assert part.num_rounds == 19  # the last one has not ended


@pytest.mark.parametrize("wrong", [None, [], "x", [1], [{}], [{"phase": "control"}], {"a": 1}, [{"num_rounds": -1}]])
def test_slices_that_cannot_be_read_cost_no_text(wrong: object) -> None:
    piece = ReplyPiece.model_validate_json(json.dumps({"kv_transfer_params": {"alphaloop_slices": wrong}}))
    assert piece.slices == ()


def test_the_times_of_steps_are_added_up_by_shape() -> None:
    server = Server(share=0.3)
    server.run(500, {"r": CODE})
    server.run(50, {"r": CODE}, has_prompt=True)
    server.run(1, {"r": CODE})
    assert sum(step["num_steps"] for step in server.steps) == 500  # none that read a prompt, nor the last
    for step in server.steps:
        per_step_s = VANILLA_S + DRAFTER_S if step["num_drafted"] == 1 else ROUND_S
        assert step["batch"] == 4
        assert step["num_positions"] == 4 * step["num_steps"]
        assert step["wall_s"] == pytest.approx(per_step_s * step["num_steps"])
        assert step["drafter_s"] == pytest.approx(DRAFTER_S * step["num_steps"])
