"""Constrained texts of tiny models in float64: the same with and without drafts and forced tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import jsonschema

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.decision import Decision
from alphaloop.engine import Generation, Sampling
from alphaloop.messages import Constraint, Job, Purpose
from alphaloop.settings.models import LookupDrafterSettings
from engine.constraint import ConstrainedText
from engine.drafters.lookup import LookupDrafter
from engine.own import TransformersEngine
from engine.scoring import Shadows
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import VANILLA, decision, finish, make_job, steps

Text = tuple[int, ...]
PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TAGS: Final = {"type": "array", "items": {"type": "string", "pattern": "^[a-d]{1,6}$"}, "minItems": 2, "maxItems": 6}
FIELD: Final = "body.response_format.json_schema.schema"
CONSTRAINTS: Final = (
    Constraint("json_schema", json.dumps(PERSON), FIELD),
    Constraint("json_schema", json.dumps(TAGS), FIELD),
    Constraint("regex", "(the |other )*thing[0-9]{2,20}!", "body.structured_outputs.regex"),
    Constraint("choice", json.dumps(["yes", "no, never", "yes, perhaps"]), "body.structured_outputs.choice"),
    Constraint("grammar", 'start: "(" item ("," item)* ")"\nitem: /[a-z]{1,5}/', "body.structured_outputs.grammar"),
)
GREEDY: Final = Sampling(max_tokens=60, temperature=0.0)
SAMPLED: Final = Sampling(max_tokens=60, temperature=0.8)

Build = Callable[..., TransformersEngine]


def work_of(sampling: Sampling, decided: Decision) -> list[tuple[Job, Sampling, Decision]]:
    """Each constraint behind two prompts."""
    prompts = ("the theory of it", '[{"name": "alpha", "age": 12, "kind": "beta"}] again:')
    pairs = ((prompt, constraint) for constraint in CONSTRAINTS for prompt in prompts)
    return [
        (make_job(prompt, number), replace(sampling, constraint=constraint), decided)
        for number, (prompt, constraint) in enumerate(pairs)
    ]


def decoded(engine: TransformersEngine, sampling: Sampling, decided: Decision) -> dict[str, Generation]:
    """In the order of `work_of`."""
    found = finish(engine, work_of(sampling, decided))
    return {job.job_id: found[job.job_id] for job, _, _ in work_of(sampling, decided)}


def tree_drafter() -> LookupDrafter:
    return LookupDrafter("tree", LookupDrafterSettings(max_draft_tokens=8, num_branches=3, min_probability=0.0))


def test_an_ended_text_matches_and_only_where_the_grammar_accepts_it_ends(tiny_engine: Build) -> None:
    engine = tiny_engine()
    found = [*decoded(engine, SAMPLED, decision("lookup", 4)).values()]
    ended = [one for one in found if one.finish_reason == "stop"]
    assert len(ended) > len(found) // 2
    for one, constraint in zip(found, (each for each in CONSTRAINTS for _ in range(2)), strict=True):
        text = ConstrainedText.of(engine._target.grammars, constraint)
        for token in one.token_ids:
            text.take(token)
        assert text._settled().is_accepting() == (one.finish_reason == "stop")
        if one.finish_reason == "stop" and constraint.kind == "json_schema":
            jsonschema.validate(json.loads(one.text), json.loads(constraint.source))


def test_a_shadow_and_a_score_are_what_decoding_would_count(tiny_engine: Build, tiny_models: dict[str, Any]) -> None:
    look_up = LookupDrafterSettings(max_draft_tokens=5, min_probability=0.0, shadow_share=1.0)
    small = draft_model("small", tiny_models["llama"], num_slots=4)
    engine = tiny_engine(drafters={"chain": LookupDrafter("chain", look_up), "tree": tree_drafter(), "small": small})
    engine._shadows = Shadows(engine._drafters, clock=lambda: 0.0)
    plain = decoded(engine, GREEDY, VANILLA)
    total = AcceptanceCounts()
    for drafter, k in (("chain", 5), ("tree", 8)):
        real = decoded(engine, GREEDY, decision(drafter, k))
        for one, text in real.items():
            (shadow,) = (each for each in plain[one].shadows if each.drafter == drafter)
            assert shadow.counts == text.counts
            total += text.counts
    assert 0 < total.num_accepted < total.num_trials
    asked = {"purpose": Purpose.CONTROL, "scored_drafters": ("small", "chain"), "probe_num_draft_tokens": 4}
    work = [(job.model_copy(update=asked), sampling, VANILLA) for job, sampling, _ in work_of(GREEDY, VANILLA)]
    scored = finish(engine, work)
    for drafter in ("small", "chain"):
        # One by one: beside a text with its prompt, the first round would be drafted.
        alone = [finish(engine, [work]) for work in work_of(GREEDY, decision(drafter, 4))]
        for one, text in ((one, text) for each in alone for one, text in each.items()):
            (score,) = (each for each in scored[one].shadows if each.drafter == drafter)
            assert scored[one].token_ids == text.token_ids
            assert (score.counts.trials, score.counts.accepts) == (text.counts.trials, text.counts.accepts)
            assert score.counts.num_forced == text.counts.num_forced
            assert score.counts.num_tokens == len(text.token_ids) == len(scored[one].second_choices)


def test_fields_that_leave_no_token_end_their_job_alone(tiny_engine: Build) -> None:
    engine = tiny_engine()
    tokens = engine._target.tokenizer("the", add_special_tokens=False)["input_ids"]
    thing = Constraint("regex", "the thing", "body.structured_outputs.regex")
    bad = [
        replace(GREEDY, constraint=thing, allowed_token_ids=tuple(tokens)),
        replace(SAMPLED, constraint=thing, bad_words=("t", "th", "the")),
        replace(GREEDY, constraint=Constraint("choice", '["yes"]', "body.x"), min_tokens=30),
        replace(SAMPLED, seed=7, constraint=thing, allowed_token_ids=tuple(tokens), n=2),
    ]
    good = replace(GREEDY, constraint=thing)
    jobs = [make_job("of it", number) for number in range(len(bad) + 1)]
    work = [(job, sampling, decision("lookup", 3)) for job, sampling in zip(jobs, [*bad, good], strict=True)]
    failed: dict[str, str] = {}
    finished: dict[str, Generation] = {}
    for step in steps(engine, work):
        failed |= {one.job_id: one.error.code for one in step.failed}
        finished |= {one.job_id: one for one in step.finished}
    assert failed == {job.job_id: "grammar_conflict" for job in jobs[:-1]}
    assert [one.text for one in finished.values()] == ["the thing"]
    assert engine.load().num_running == 0
