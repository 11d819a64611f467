"""What rules a drafter out, and times that have to be met; each guard has its own reason."""

from __future__ import annotations

from dataclasses import replace

from alphaloop.cost import CostPoint, CostTable
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.job_facts import Aim, Objective
from alphaloop.deciding.policy import Reason
from alphaloop.messages import Decoding, Mode, Purpose
from tests.fixtures.deciding import LOOKUP, choose, costs, inferred, with_prompts


def test_short_outputs_are_not_worth_a_draft() -> None:
    short = choose({"lookup": inferred(0.9)}, expected_tokens=19.0, known_output_jobs=12.0)
    assert short.reason is Reason.SHORT_OUTPUT
    assert "12 jobs" in short.explanation
    assert choose({"lookup": inferred(0.9)}, expected_tokens=20.0).reason is Reason.FASTER


def test_a_stale_drafter_serves_nobody_but_its_probe() -> None:
    stale = replace(LOOKUP, is_stale=True)
    history = {"lookup": inferred(0.9)}
    assert choose(history, drafters=(stale,)).reason is Reason.STALE_DRAFT
    assert choose(history, drafters=(stale,), decoding=Decoding.SPECULATIVE).mode is Mode.VANILLA
    assert choose(history, drafters=(stale,), purpose=Purpose.PROBE).reason is Reason.PROBE
    assert choose(history, drafters=()).reason is Reason.NO_DRAFTER


def test_every_guard_has_its_own_reason_and_says_why() -> None:
    history = {"lookup": inferred(0.9)}
    heavy = replace(LOOKUP, cache_bytes_per_token=1 << 20)
    memory = choose(history, drafters=(heavy,), free_cache_bytes=512 << 20, max_sequence_tokens=600.0)
    assert memory.reason is Reason.NO_MEMORY
    assert (
        "1 sequences x 600 tokens x 1048576 bytes = 600 MiB, 512 MiB are free beside the target" in memory.explanation
    )
    assert choose(history, drafters=(heavy,), free_cache_bytes=601 << 20, max_sequence_tokens=600.0).mode is (
        Mode.SPECULATIVE
    )
    for beside, of_its_own, mode in ((0, 600, Mode.SPECULATIVE), (10_000, 599, Mode.VANILLA)):
        found = choose(
            history,
            drafters=(heavy,),
            free_cache_bytes=beside << 20,
            free_elsewhere={LOOKUP.name: of_its_own << 20, "another": 0},
            max_sequence_tokens=600.0,
        )
        assert found.mode is mode, "a draft on a device of its own takes nothing of the target's"
    assert "600 MiB, 599 MiB are free on its device" in found.explanation
    hasty = replace(heavy, max_prompt_tokens=100)
    for output, needed in ((200.0, 300), (550.0, 600)):
        asked = {"max_sequence_tokens": 600.0, "max_output_tokens": output}
        short = choose(history, drafters=(hasty,), free_cache_bytes=(needed << 20) - 1, **asked)
        assert f"1 sequences x {needed} tokens" in short.explanation, (
            "what it does not read of a prompt takes no memory"
        )
        assert choose(history, drafters=(hasty,), free_cache_bytes=needed << 20, **asked).mode is Mode.SPECULATIVE
    unable = choose(history, cannot_serve={"lookup": "logit_bias"})
    assert (unable.reason, "logit_bias" in unable.explanation) == (Reason.CANNOT_SERVE, True)
    off = choose(history, switched_off="Translate *")
    assert (off.reason, "Translate *" in off.explanation) == (Reason.SWITCHED_OFF, True)
    assert choose(history, drafters=(replace(LOOKUP, revision=""),)).reason is Reason.UNKNOWN_REVISION


def test_a_guard_takes_out_one_drafter_and_leaves_the_other() -> None:
    other = DrafterState("other", "r2", 4)
    table = CostTable([*costs().points, CostPoint("other", 1, 2, 1.0, 5)])
    history = {"lookup": inferred(0.9), "other": inferred(0.7, k=4)}
    decision = choose(history, drafters=(replace(LOOKUP, is_stale=True), other), costs=table)
    assert (decision.drafter, decision.reason) == ("other", Reason.FASTER)


def test_a_probe_uses_the_drafter_and_k_it_names() -> None:
    other = DrafterState("other", "r2", 4)
    drafters = (LOOKUP, other)
    probe = choose(drafters=drafters, purpose=Purpose.PROBE, probe_drafter="other", probe_num_draft_tokens=2)
    assert (probe.drafter, probe.draft_revision, probe.num_draft_tokens) == ("other", "r2", 2)
    assert choose(drafters=drafters, purpose=Purpose.PROBE, probe_num_draft_tokens=64).num_draft_tokens == 8
    unknown = choose(drafters=drafters, purpose=Purpose.PROBE, probe_drafter="gone")
    assert (unknown.mode, unknown.reason) == (Mode.VANILLA, Reason.NO_DRAFTER)


def test_controls_and_forced_modes_are_obeyed() -> None:
    history = {"lookup": inferred(0.9)}
    assert choose(history, purpose=Purpose.CONTROL).reason is Reason.CONTROL
    vanilla = choose(history, decoding=Decoding.VANILLA)
    assert (vanilla.mode, vanilla.reason) == (Mode.VANILLA, Reason.FORCED)
    forced = choose({"lookup": inferred(0.05)}, decoding=Decoding.SPECULATIVE, expected_tokens=1.0)
    assert (forced.mode, forced.reason) == (Mode.SPECULATIVE, Reason.FORCED)
    unmeasured = choose({"lookup": inferred(0.8)}, decoding=Decoding.SPECULATIVE, costs=CostTable(()))
    assert unmeasured.num_draft_tokens == 3  # .8³ > .5 > .8⁴


def test_a_target_time_is_met_surely_before_it_is_beaten_probably() -> None:
    # Vanilla needs 30 ms a token. Speculation is expected at 23, and may well be at 33.
    hopeful = {"lookup": inferred(0.35, sd=1.2)}
    table = costs(draft_ms=4.0)
    assert choose(hopeful, costs=table).mode is Mode.SPECULATIVE
    careful = choose(hopeful, costs=table, objective=Objective(Aim.TIME_PER_TOKEN, 31.0))
    assert (careful.mode, careful.reason) == (Mode.VANILLA, Reason.ON_TARGET)
    # Nothing but speculation can meet 25 ms, so it is tried however uncertain.
    needed = choose(hopeful, costs=table, objective=Objective(Aim.TIME_PER_TOKEN, 25.0))
    assert (needed.mode, needed.reason) == (Mode.SPECULATIVE, Reason.ON_TARGET)


def test_a_deadline_counts_the_whole_job() -> None:
    sure = {"lookup": inferred(0.9, sd=0.01)}
    table = with_prompts(costs(), target_ms=300.0)
    objective = Objective(Aim.DEADLINE, 300 + 200 * 30.0)
    relaxed = choose(sure, costs=table, prompt_tokens=100.0, objective=objective)
    assert relaxed.mode is Mode.SPECULATIVE
    assert all(a.chance == 1.0 for a in relaxed.alternatives if a.speedup >= 1)


def test_first_tokens_are_not_kept_waiting_for_a_draft_to_read() -> None:
    table = with_prompts(costs(), target_ms=300.0, draft_ms=60.0)
    history = {"lookup": inferred(0.9)}
    late = choose(history, costs=table, prompt_tokens=100.0, objective=Objective(Aim.TIME_TO_FIRST_TOKEN, 350.0))
    assert (late.mode, late.reason) == (Mode.VANILLA, Reason.FIRST_TOKENS)
    assert "300 + 60 ms" in late.explanation
    met = choose(history, costs=table, prompt_tokens=100.0, objective=Objective(Aim.TIME_TO_FIRST_TOKEN, 370.0))
    assert met.mode is Mode.SPECULATIVE


def test_every_reason_has_a_word_of_its_own() -> None:
    assert len({reason.value for reason in Reason}) == len(Reason)
    assert all(reason.value.replace("_", "").islower() for reason in Reason)
