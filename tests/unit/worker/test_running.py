"""What runs in the engine: failures meet the job that caused them, and every job leaves exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.deciding.decision import Reason
from alphaloop.deciding.policy import DraftSetting
from alphaloop.errors import RequestRefused
from tests.fakes import FakeEngine
from tests.fixtures.publishing import NOW, VANILLA, claimed_job
from worker.claims import ClaimedJob
from worker.engine import FailedRequest, Step
from worker.running import RunningJob, RunningJobs


def start(running: RunningJobs, *claimed: ClaimedJob, alone: bool = False) -> None:
    for one in claimed:
        running.start(RunningJob(one, VANILLA, UUID(int=1), NOW, DraftSetting()), alone=alone)


def names(claimed: Iterable[ClaimedJob]) -> list[str]:
    return [one.job_id for one in claimed]


def test_a_sequence_is_told_how_to_draft_only_when_that_changes() -> None:
    told: list[tuple[str, str | None, int]] = []

    class Noting(FakeEngine):
        def redraft(self, job_id, drafter, num_draft_tokens):
            told.append((job_id, drafter, num_draft_tokens))

    running = RunningJobs(Noting())
    start(running, claimed_job("a"), claimed_job("b"))
    wanted = {"a": DraftSetting(), "b": DraftSetting("lookup", 3)}
    for _ in range(2):
        running.redraft(lambda job: wanted[job.job_id])
    wanted["b"] = DraftSetting()
    running.redraft(lambda job: wanted[job.job_id])
    assert told == [("b", "lookup", 3), ("b", None, 0)]


ACTS = st.lists(st.sampled_from(["start", "again", "step", "cancel", "alone"]), max_size=40)


@given(acts=ACTS, failing=st.sets(st.integers(0, 12)))
def test_every_job_leaves_exactly_once_whatever_happens(acts: list[str], failing: set[int]) -> None:
    running = RunningJobs(FakeEngine(num_slots=3, failing_steps=sorted(failing)))
    came: list[str] = []
    left: list[str] = []
    for act in acts:
        if act == "start" and running.num_free():
            came.append(f"job-{len(came)}")
            start(running, claimed_job(came[-1], max_tokens=3))
        elif act == "again":
            came.append(f"job-{len(came)}")
            running.run_alone_later([claimed_job(came[-1], num_crashes=1)])
        elif act == "alone" and (alone := running.next_alone()):
            start(running, alone, alone=True)
        elif act == "cancel" and came:
            left += names(running.drop(came[::2]))
        elif act == "step" and len(running):
            stepped = running.step()
            left += [job.job_id for job, _ in stepped.finished] + [job.job_id for job, _ in stepped.failed]
    left += names(running.give_back())
    assert sorted(left) == sorted(came)


def test_a_job_that_a_server_refuses_leaves_alone() -> None:
    class Server(FakeEngine):
        """Refuses one job."""

        def step(self) -> Step:
            step = super().step()
            if not self.cancel("one"):
                return step
            return replace(step, failed=(FailedRequest("one", RequestRefused("no"), is_final=True),))

    running = RunningJobs(Server(num_slots=2))
    start(running, claimed_job("one"), claimed_job("two"))
    stepped = running.step()
    assert [(job.job_id, failed.error.code) for job, failed in stepped.refused] == [("one", "request_refused")]
    assert list(running.by_id()) == ["two"]
    ended = []
    while len(running):
        ended += [job.job_id for job, _ in running.step().finished]
    assert ended == ["two"]


def test_a_control_request_says_that_its_decision_was_not_followed() -> None:
    decision = replace(VANILLA, drafter="lookup", num_draft_tokens=3, explanation="lookup is expected to be faster")
    job = RunningJob(claimed_job("a"), decision, UUID(int=1), NOW, DraftSetting(), is_control=True)
    assert job.recorded.explanation.startswith("decoded vanilla as a control request")
    assert job.recorded.explanation.endswith("decided was: lookup is expected to be faster")
    assert job.recorded.reason is Reason.CONTROL
    assert RunningJob(claimed_job("b"), decision, UUID(int=1), NOW, decision.setting).recorded is decision
