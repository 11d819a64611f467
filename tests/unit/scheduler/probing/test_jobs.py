"""The jobs of a measurement."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from alphaloop.messages import Decoding, Purpose, encode_job
from alphaloop.probe_plan import DueProbe
from scheduler.probing import make_jobs
from tests.fixtures.probes import probe_set

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
CODE = probe_set("code", [{"prompt": f"question {i}", "temperature": 0.9, "max_tokens": 500} for i in range(5)], 5)
SQL = probe_set("sql", [{"messages": [{"role": "user", "content": "question"}]}])


def test_every_probe_has_a_control_on_the_same_prompt() -> None:
    chosen = [DueProbe("code", "lookup", 5, None), DueProbe("code", "tiny", 5, None)]
    planned = make_jobs(chosen, {"code": CODE, "sql": SQL}, NOW, num_prompts=3, decoded_share=0.25, deadline=NOW + HOUR)
    assert [(p.position, p.job.purpose, p.job.probe_drafter) for p in planned[:3]] == [
        (0, Purpose.CONTROL, None),
        (0, Purpose.PROBE, "lookup"),
        (0, Purpose.PROBE, "tiny"),
    ]
    assert len(planned) == 9
    for p in planned:
        assert p.job.body.prompt == CODE.prompts[p.position].body["prompt"]
        assert p.prompt_id == CODE.prompts[p.position].prompt_id
        assert (p.job.body.temperature, p.job.body.max_tokens) == (0.0, 48)
        assert p.job.deadline == NOW + HOUR
        assert (p.job.decoding is Decoding.VANILLA) == (p.job.purpose is Purpose.CONTROL)
    assert planned[1].job.job_id == "probe-code-20260105T120000Z-0-lookup"
    assert len({p.job.job_id for p in planned}) == 9


def test_a_drafter_is_scored_on_the_controls_of_the_prompts_that_it_does_not_decode() -> None:
    chosen = [DueProbe("code", "lookup", 5, None, is_scored=True), DueProbe("code", "tiny", 5, None)]
    decoded = set()
    for hours in range(40):
        planned = make_jobs(
            chosen, {"code": CODE}, NOW + hours * HOUR, num_prompts=4, decoded_share=0.25, deadline=NOW + 50 * HOUR
        )
        controls = [p for p in planned if p.job.purpose is Purpose.CONTROL]
        (probe,) = (p for p in planned if p.job.probe_drafter == "lookup")
        assert [p.job.scored_drafters for p in controls if p.position != probe.position] == [("lookup",)] * 3
        assert {p.job.probe_num_draft_tokens for p in controls if p.job.scored_drafters} == {5}
        (undrafted,) = (p for p in controls if p.position == probe.position)
        assert (undrafted.job.scored_drafters, undrafted.job.probe_num_draft_tokens) == ((), None)
        assert len([p for p in planned if p.job.probe_drafter == "tiny"]) == 4
        decoded.add(probe.position)
    assert decoded == {0, 1, 2, 3}, "each prompt has its turn"


def test_the_same_run_makes_the_same_bytes() -> None:
    chosen = [DueProbe("sql", "lookup", 5, None, is_scored=True)]

    def made() -> list[bytes]:
        planned = make_jobs(chosen, {"sql": SQL}, NOW, num_prompts=3, decoded_share=0.25, deadline=NOW + HOUR)
        return [encode_job(p.job) for p in planned]

    assert made() == made()


def test_long_names_still_make_an_identifier() -> None:
    task, drafter = "t" * 100, "d" * 100
    sets = {task: probe_set(task, [{"prompt": "question"}])}
    planned = make_jobs(
        [DueProbe(task, drafter, 3, None)], sets, NOW, num_prompts=1, decoded_share=0.25, deadline=NOW + HOUR
    )
    assert all(len(p.job.job_id) <= 200 for p in planned)
    assert len({p.job.job_id for p in planned}) == 2
