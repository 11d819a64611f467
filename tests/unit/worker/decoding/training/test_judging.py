"""Acceptance by teacher forcing: rounds walked as they would happen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.acceptance import AcceptanceCounts
from worker.decoding.device import find_device
from worker.decoding.models import load_weights
from worker.decoding.training.data import TeacherNotes, WrittenText
from worker.decoding.training.distil import judge, walk_rounds


def test_rounds_by_hand() -> None:
    # k = 2: [accept, accept, free] [reject] [accept, (the last token is the target's own)]
    counts = walk_rounds([True, True, False, False, True, True], 2)
    assert counts.rounds == 3
    assert counts.proposed == (3, 2)
    assert counts.trials == (3, 1)
    assert counts.accepts == (2, 1)
    assert counts.num_tokens == 6


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=30, max_size=60), st.integers(1, 3))
def test_accepts_are_the_runs_of_matches_that_rounds_meet(matches: list[bool], k: int) -> None:
    counts, place = walk_rounds(matches, k), 0
    accepted = []
    while place < len(matches) - 1:
        run = 0
        while run < min(k, len(matches) - place - 1) and matches[place + run]:
            run += 1
        accepted.append(run)
        place += run + 1
    assert counts.num_accepted == sum(accepted)
    assert counts.accepts[:1] == ((sum(run > 0 for run in accepted),) if accepted else ())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_target_that_drafts_for_itself_is_always_accepted(
    tiny_models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    target = load_weights(str(tiny_models[family]), None, "float64", find_device("cpu")).model
    prompt = (5, 7, 9)
    with torch.inference_mode():
        written = target.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=-1)
    text = WrittenText(0, "code", prompt, tuple(written[0, len(prompt) :].tolist()))
    notes = TeacherNotes(tmp_path, [text], max_length=64, num_kept=384)
    assert notes.write(target, lambda: False, lambda num: None)
    verdict = judge(target, notes.lessons(), None, 4)["code"]
    # 19 tokens behind the prefill's: three rounds of 5, then one of 4.
    assert verdict.counts == AcceptanceCounts(4, 0, 0, (4, 4, 4, 3), (4, 4, 4, 3), (4, 4, 4, 3))
    assert verdict.counts.num_tokens == 19
    assert verdict.num_positions == 20
    assert verdict.measured().overlap() == pytest.approx(1.0, abs=1e-3)
    # A draft that cannot say the text's tokens is never accepted; what it gives to others is no overlap either.
    columns = torch.full((target.config.vocab_size,), -1)
    dumb = judge(target, notes.lessons(), columns, 4)["code"]
    assert dumb.counts.num_accepted == 0
    assert dumb.measured().overlap() == 0.0
