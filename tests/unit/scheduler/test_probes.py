"""Which probes are due, what fits the budget, and the jobs that come of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.messages import Decoding, Purpose, encode_job
from scheduler.probes import Due, find_due, make_jobs, within_budget
from tests.fixtures.probes import probe_set

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
CODE = probe_set("code", [{"prompt": f"question {i}", "temperature": 0.9, "max_tokens": 500} for i in range(5)], 5)
SQL = probe_set("sql", [{"messages": [{"role": "user", "content": "question"}]}])


def due(last: dict[tuple[str, str], datetime]) -> list[Due]:
    return find_due(
        [CODE, SQL],
        ["lookup", "tiny"],
        last,
        NOW,
        max_age=DAY,
    )


def test_never_probed_comes_first_then_the_oldest() -> None:
    last = {("code", "lookup"): NOW - 2 * DAY, ("code", "tiny"): NOW - 3 * DAY, ("sql", "tiny"): NOW - HOUR}
    assert [(d.task, d.drafter) for d in due(last)] == [("sql", "lookup"), ("code", "tiny"), ("code", "lookup")]


def test_a_probe_uses_the_k_of_its_set() -> None:
    assert {(d.task, d.num_draft_tokens) for d in due({})} == {("code", 5), ("sql", 3)}


@given(st.floats(0, 500), st.dictionaries(st.sampled_from(["code", "sql"]), st.floats(0.1, 20)))
def test_the_budget_is_kept(budget: float, seconds: dict[str, float]) -> None:
    num_prompts = {"code": 4, "sql": 1}
    all_due = due({})
    chosen = within_budget(all_due, seconds, num_prompts, budget)
    assert chosen == all_due[: len(chosen)]
    cost = sum(seconds.get(d.task, 5.0) * num_prompts[d.task] for d in chosen)
    cost += sum(seconds.get(task, 5.0) * num_prompts[task] for task in {d.task for d in chosen})
    assert cost <= budget * (1 + 1e-9) + 1e-9


def test_every_probe_has_a_control_on_the_same_prompt() -> None:
    chosen = [Due("code", "lookup", 5, None), Due("code", "tiny", 5, None)]
    planned = make_jobs(chosen, {"code": CODE, "sql": SQL}, NOW, num_prompts=3, deadline=NOW + HOUR)
    assert [(p.position, p.job.purpose, p.job.probe_drafter) for p in planned[:3]] == [
        (0, Purpose.CONTROL, None),
        (0, Purpose.PROBE, "lookup"),
        (0, Purpose.PROBE, "tiny"),
    ]
    assert len(planned) == 9
    for p in planned:
        assert p.job.body.prompt == f"question {p.position}"
        assert p.prompt_id == CODE.prompts[p.position].prompt_id
        assert (p.job.body.temperature, p.job.body.max_tokens) == (0.0, 48)
        assert p.job.deadline == NOW + HOUR
        assert (p.job.decoding is Decoding.VANILLA) == (p.job.purpose is Purpose.CONTROL)
    assert planned[1].job.job_id == "probe-code-20260105T120000Z-0-lookup"
    assert len({p.job.job_id for p in planned}) == 9


def test_the_same_run_makes_the_same_bytes() -> None:
    chosen = [Due("sql", "lookup", 5, None)]

    def made() -> list[bytes]:
        planned = make_jobs(chosen, {"sql": SQL}, NOW, num_prompts=3, deadline=NOW + HOUR)
        return [encode_job(p.job) for p in planned]

    assert made() == made()


def test_long_names_still_make_an_identifier() -> None:
    task, drafter = "t" * 100, "d" * 100
    sets = {task: probe_set(task, [{"prompt": "question"}])}
    planned = make_jobs([Due(task, drafter, 3, None)], sets, NOW, num_prompts=1, deadline=NOW + HOUR)
    assert all(len(p.job.job_id) <= 200 for p in planned)
    assert len({p.job.job_id for p in planned}) == 2
