"""Constrained texts of tiny models in float64: the same with and without drafts and forced tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import jsonschema
import pytest
import torch

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.decision import Decision
from alphaloop.engine import Generation, Sampling
from alphaloop.messages import Constraint, Job, Purpose
from alphaloop.settings.models import LookupDrafterSettings
from engine.constraint import GRAMMAR, ConstrainedText
from engine.drafters.lookup import LookupDrafter
from engine.own import TransformersEngine
from engine.scoring import Shadows
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import NUM_TOKENS, VANILLA, Reference, decision, finish, make_job, steps
from tests.integration.test_sampling_tiny import chi_square_excess

Text = tuple[int, ...]
NUM_TEXTS: Final = 300
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
SEEDED: Final = Sampling(max_tokens=40, temperature=0.9, seed=7)
CUT: Final = Sampling(max_tokens=24, temperature=1.1, seed=3, top_p=0.9, repetition_penalty=1.2)
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


@pytest.mark.parametrize(
    ("family", "sampling"),
    [("gpt_neox", GREEDY), ("llama", GREEDY), ("llama", SEEDED), ("llama", CUT)],
    ids=["transformers' own passes", "greedy", "seeded", "seeded and cut"],
)
def test_a_text_is_the_same_with_and_without_drafts_and_forced_tokens(
    tiny_engine: Build, tiny_models: dict[str, Any], family: str, sampling: Sampling
) -> None:
    drafter = draft_model("draft", tiny_models["qwen2"], num_slots=4)
    engine = tiny_engine(family, drafters={"draft": drafter, "tree": tree_drafter()})
    engine._target.grammars.takes_forced = False
    plain = decoded(engine, sampling, VANILLA)
    assert not any(text.counts.num_forced for text in plain.values())
    engine._target.grammars.takes_forced = True
    for decided in (VANILLA, decision("lookup", 5), decision("draft", 3), decision("tree", 7)):
        found = decoded(engine, sampling, decided)
        for one, text in found.items():
            assert (text.token_ids, text.text) == (plain[one].token_ids, plain[one].text)
            assert text.counts.num_tokens == len(text.token_ids)
        counts = sum((text.counts for text in found.values()), AcceptanceCounts())
        assert counts.num_forced > 0
        assert decided is VANILLA or 0 < counts.num_accepted < counts.num_trials
        if decided.drafter == "lookup":
            assert {counts.proposer for text in found.values() for counts in text.proposers} == {"lookup", GRAMMAR}


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


FEW: Final = Sampling(
    max_tokens=12, temperature=1.3, constraint=Constraint("regex", "(an|the|a) ?[ot](ne|wo)", "body.x")
)


def expected_texts(engine: TransformersEngine, reference: Reference, prompt: Sequence[int]) -> dict[Text, float]:
    """Every text with its probability: the model's own logits, cut to the mask behind each prefix and renormalised."""
    grammars, found = engine._target.grammars, dict[Text, float]()
    constraint = FEW.constraint
    assert constraint is not None

    def write(output: Text, probability: float) -> None:
        matcher = grammars.compiled(constraint)
        assert matcher.consume_tokens(list(output))
        if matcher.is_stopped():
            found[output] = probability
            return
        bits = matcher.compute_bitmask()
        allowed = torch.tensor([token for token in range(NUM_TOKENS) if bits[token >> 3] >> (token & 7) & 1])
        p = (reference.logits([*prompt, *output])[-1][allowed] / FEW.temperature).softmax(0)
        for token, share in zip(allowed.tolist(), p.tolist(), strict=True):
            if token in engine._target.end_tokens:
                found[(*output, token)] = probability * share
            else:
                write((*output, token), probability * share)

    write((), 1.0)
    return found


@pytest.mark.parametrize("drafter", [None, "lookup", "draft", "tree"])
def test_a_sampled_text_has_the_restricted_targets_distribution(
    tiny_engine: Build, tiny_models: dict[str, Any], references: Callable[[str], Reference], drafter: str | None
) -> None:
    drafters = {"draft": draft_model("draft", tiny_models["qwen2"], num_slots=16), "tree": tree_drafter()}
    engine = tiny_engine(num_slots=16, drafters=drafters)
    prompt = "one two a one the two an one"
    jobs = [make_job(prompt, number) for number in range(NUM_TEXTS)]
    expected = expected_texts(engine, references("llama"), engine.prepare(jobs[0], FEW).token_ids)
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-9)
    found = finish(engine, ((job, FEW, decision(drafter, 3) if drafter else VANILLA) for job in jobs))
    seen = Counter(one.token_ids for one in found.values())
    assert chi_square_excess(seen, expected) < 1
    assert sum(one.counts.num_forced for one in found.values()) > 0


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
        replace(SEEDED, constraint=thing, allowed_token_ids=tuple(tokens), n=2),
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


def test_logprobs_of_a_constrained_text_are_of_every_token(tiny_engine: Build) -> None:
    engine = tiny_engine()
    plain, told = (
        decoded(engine, replace(GREEDY, max_tokens=20, num_logprobs=num), decision("lookup", 4)) for num in (None, 1)
    )
    for one, text in told.items():
        assert text.token_ids == plain[one].token_ids
        (choice,) = text.choices
        assert len(choice.logprobs or ()) == len(text.token_ids)
        assert text.counts.num_forced == 0
