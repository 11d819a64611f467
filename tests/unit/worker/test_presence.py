"""What a worker says of itself: seldom, in one write, with the tokens of the jobs that it decodes now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from alphaloop.engine import Step
from alphaloop.store.workers import WorkerLoad
from tests.fakes import FakeEngine
from tests.fixtures.deciding import SETUP
from worker.presence import EVERY_S, Presence


class Said:
    """The table of workers, written at once."""

    def __init__(self) -> None:
        self.loads: list[WorkerLoad] = []
        self.left: list[str] = []
        self.entered: list[WorkerLoad] = []
        self.revisions: list[str] = []

    def enter(self, load: WorkerLoad) -> Sequence[str]:
        self.entered.append(load)
        return self.revisions

    def say(self, load: WorkerLoad) -> int:
        self.loads.append(load)
        return len(self.loads) - 1

    def leave(self, owner: str) -> None:
        self.left.append(owner)

    def write(self, what: str, write: Callable[[], object]) -> None:
        write()


def presence_of(said: Said, device: str = "cpu-2-threads", now: Callable[[], float] = lambda: 0.0) -> Presence:
    return Presence(
        said,  # type: ignore[arg-type]
        said.write,
        replace(FakeEngine().identity, device=device),
        owner="w",
        sampling_defaults="top_k 5",
        num_held=lambda: 3,
        setup=lambda: SETUP,
        clock=now,
    )


def step(**tokens: int) -> Step:
    return Step((), (), len(tokens), 1, 0.01, tokens_by_job=tokens)


@pytest.mark.parametrize(("device", "num_peers"), [("servers 12ab", 1), ("cpu-2-threads", 0)])
def test_a_load_is_said_now_and_then_however_many_steps_there_are(device: str, num_peers: int) -> None:
    said, now = Said(), [0.0]
    presence = presence_of(said, device, lambda: now[0])
    running: list[str] = []

    def turn() -> None:
        presence.say_when_due(lambda: list(running), num_slots=4, num_waiting=lambda: 7)

    turn()
    running[:] = ["a", "b"]
    for job_id in running:
        presence.started(job_id)
    for _ in range(64):
        now[0] += EVERY_S / 64
        presence.stepped(step(a=2, b=1))
        turn()
    assert len(said.loads) == 2
    assert presence.num_peers == num_peers, "workers on equal devices have a device each"
    first, second = said.loads
    assert (first.tokens, first.tokens_per_s) == ({}, None)
    assert (second.tokens, second.tokens_per_s) == ({"a": 128, "b": 64}, 192 / EVERY_S)
    assert first.sampling_defaults == second.sampling_defaults == "top_k 5"
    assert second.setup is SETUP
    assert (second.owner, second.num_slots, second.num_waiting, second.num_held) == ("w", 4, 7, 3)


def test_a_job_that_is_decoded_again_counts_from_its_start_and_one_that_ended_is_forgotten() -> None:
    said = Said()
    presence = presence_of(said)
    for job_id in ("a", "b"):
        presence.started(job_id)
    presence.stepped(step(a=5, b=5))
    presence.started("a")
    presence.stepped(step(a=1))
    presence.say_when_due(lambda: ["a"], num_slots=1, num_waiting=lambda: 0)
    assert said.loads[0].tokens == {"a": 1}
    presence.leave()
    assert said.left == ["w"]


def test_a_worker_that_enters_says_whether_others_serve_another_revision(caplog: pytest.LogCaptureFixture) -> None:
    said = Said()
    presence = presence_of(said)
    presence.enter(num_slots=8)
    assert not caplog.records
    said.revisions = ["older"]
    presence.enter(num_slots=8)
    (told,) = caplog.records
    assert (told.levelno, told.__dict__["action"]) == (logging.WARNING, "other_revision")
    assert "older" in told.getMessage()
    assert [(load.num_slots, load.tokens) for load in said.entered] == [(8, {})] * 2
