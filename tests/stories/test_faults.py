"""The injected faults, on a drafter and an engine that are always right."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.messages import Mode
from tests.stories.faults import Dropped, Faults, Worn, inject
from worker.decoding.proposal import NOTHING, Proposal
from worker.engine import Generation, SecondChoice, Step

RIGHT = (5, 6, 7)


class RightDrafter:
    def open(self, job_id: str, text: Sequence[int], sampling: Any, task: str) -> None:
        """Nothing to remember."""

    def propose(self, asks: Sequence[Any]) -> list[Proposal]:
        return [Proposal(RIGHT) if ask.num_tokens else NOTHING for ask in asks]


class TextEngine:
    """Ends every job that was admitted, at once."""

    def __init__(self) -> None:
        self._drafters = {"lookup": RightDrafter()}
        self._target = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids))))
        self._admitted: list[str] = []

    def admit(self, prepared: Any, decision: Any) -> None:
        self._admitted.append(prepared.job.job_id)

    def step(self) -> Step:
        ended, self._admitted = self._admitted, []
        choices = tuple(SecondChoice(i, 1.0) for i in range(8))
        counts = AcceptanceCounts(rounds=8)
        return Step(
            tuple(
                Generation(
                    job_id, "whole", tuple(range(8)), "length", 4, counts, 0.1, 0.2, 0.2, 1, second_choices=choices
                )
                for job_id in ended
            ),
            (),
            1,
            1,
            0.1,
        )


def share_wrong(engine: Any, task: str, job_ids: Sequence[str], told: str | None = None) -> float:
    """Of these jobs of a task, those drafted wrongly. `told`: the task that the drafter is told, if another."""
    drafter, wrong = engine._drafters["lookup"], 0
    for job_id in job_ids:
        admitted = SimpleNamespace(job=SimpleNamespace(job_id=job_id, task=task))
        engine.admit(admitted, SimpleNamespace(mode=Mode.SPECULATIVE))
        drafter.open(job_id, [], None, task if told is None else told)
        (proposal,) = drafter.propose([SimpleNamespace(job_id=job_id, num_tokens=3)])
        wrong += proposal.tokens != RIGHT
    return wrong / len(job_ids)


def test_wear_comes_slowly_and_only_to_its_task() -> None:
    engine: Any = TextEngine()
    inject(engine, Faults(seed=1, worn=Worn(task="code", drafter="lookup", sound=50, wholly=100)))

    assert share_wrong(engine, "code", [f"early-{i}" for i in range(50)]) == 0
    middle = share_wrong(engine, "code", [f"middle-{i}" for i in range(100)])
    late = share_wrong(engine, "code", [f"late-{i}" for i in range(100)])
    assert 0.2 < middle < 0.7 < late < 1.0
    assert share_wrong(engine, "sql", [f"other-{i}" for i in range(50)]) == 0
    # A new process begins anew: that is what a restart heals.
    healed: Any = TextEngine()
    inject(healed, Faults(seed=1, worn=Worn(task="code", drafter="lookup", sound=50, wholly=100)))
    assert share_wrong(healed, "code", [f"again-{i}" for i in range(50)]) == 0


def test_probes_are_worn_too_although_a_drafter_is_not_told_their_task() -> None:
    engine: Any = TextEngine()
    inject(engine, Faults(seed=1, worn=Worn(task="code", drafter="lookup", sound=0, wholly=1)))
    assert share_wrong(engine, "code", [f"probe-{i}" for i in range(50)], told="") > 0.7
    assert share_wrong(engine, "sql", [f"other-{i}" for i in range(50)], told="") == 0


def test_an_empty_proposal_stays_empty() -> None:
    engine: Any = TextEngine()
    inject(engine, Faults(seed=1, worn=Worn(task="code", drafter="lookup", sound=0, wholly=1)))
    drafter = engine._drafters["lookup"]
    drafter.open("a", [], None, "code")
    assert drafter.propose([SimpleNamespace(job_id="a", num_tokens=0)]) == [NOTHING]


def test_a_token_is_dropped_from_speculative_texts_of_its_task_only() -> None:
    engine: Any = TextEngine()
    inject(engine, Faults(seed=1, dropped=Dropped(task="code", sound=1, place=2)))

    def ended(job_id: str, task: str, mode: Mode) -> Generation:
        job = SimpleNamespace(job_id=job_id, task=task)
        engine.admit(SimpleNamespace(job=job), SimpleNamespace(mode=mode))
        (generation,) = engine.step().finished
        assert isinstance(generation, Generation)
        return generation

    assert ended("sound", "code", Mode.SPECULATIVE).token_ids == tuple(range(8))
    dropped = ended("dropped", "code", Mode.SPECULATIVE)
    assert dropped.token_ids == (0, 1, 3, 4, 5, 6, 7)
    assert dropped.text == "0 1 3 4 5 6 7"
    assert [choice.token_id for choice in dropped.second_choices] == [0, 1, 3, 4, 5, 6, 7]
    assert ended("vanilla", "code", Mode.VANILLA).token_ids == tuple(range(8))
    assert ended("other", "sql", Mode.SPECULATIVE).token_ids == tuple(range(8))
