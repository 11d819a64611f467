"""Heads and their parent on the same states of held-out texts: how many rounds each needs for a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.draft_card import DraftMethod
from alphaloop.settings.models import TargetSettings
from engine.device import find_device
from engine.drafters.head_files import check_heads
from engine.models import load_weights
from engine.pairing import refuse_or_warn
from engine.text_facts import text_config
from engine.training.data import TextRequest
from engine.training.distil import num_layers
from engine.training.heads import HeadsInTraining
from engine.training.parents import ParentHeads, new_heads, read_parent
from engine.training.recipe import Recipe
from engine.training.recording import RecordedText, StateRecorder
from engine.training.writing import TrainingProgress, stage, written_texts


@dataclass(frozen=True, slots=True)
class RivalRounds:
    """One held-out text, whose tokens are the same whoever drafts."""

    task: str
    num_tokens: int  #: the first one left out, which reading the prompt gives
    parent_rounds: int
    candidate_rounds: int


def judge_rivals(
    served: TargetSettings,
    method: DraftMethod,
    parent: str,
    candidate: str,
    read_prompts: Callable[[Any], Sequence[TextRequest]],
    *,
    state: Path,
    recipe: Recipe,
    progress: TrainingProgress,
    should_stop: Callable[[], bool],
) -> list[RivalRounds] | None:
    """Greedy rounds of k = `recipe.num_unrolled` over each text that is long enough; None when stopped.

    `read_prompts` gives the held-out prompts with the target's tokenizer, and `state` keeps their texts and states: a
    training run's own folder has them already. Raises ModelError or ConfigError for heads that do not fit the target.
    """
    device = find_device(served.device)
    loaded = load_weights(served.source, served.revision, served.dtype, device)
    target, sizes = loaded.model, text_config(loaded.model.config)
    rivals = [read_parent(source, method) for source in (parent, candidate)]
    for rival in rivals:
        findings = check_heads(
            rival.facts,
            hidden_size=sizes.hidden_size,
            num_layers=num_layers(target),
            vocabulary=sizes.vocab_size,
            target_revision=None,  # the parent's may be the target before
        )
        refuse_or_warn("refresh", rival.facts.source, findings)
    networks = [_as_served(rival, method, target, recipe) for rival in rivals]
    layers = rivals[0].facts.taps_in(num_layers(target)) if method == "eagle3" else ()
    recorder = StateRecorder(layers, state / "states")
    requests = [
        TextRequest(number, request.task, request.prompt)
        for number, request in enumerate(read_prompts(loaded.tokenizer))
    ]
    texts = written_texts(
        served,
        loaded.tokenizer,
        requests,
        recipe,
        recorder,
        state=state,
        progress=progress,
        should_stop=should_stop,
    )
    if texts is None:
        return None
    held_out = [text for text in texts if text.number < len(requests)]
    with stage(progress, "held-out texts judged", len(held_out)) as advance:
        rounds = []
        for text in held_out:
            recorded = recorder.read(text)
            counts = [] if recorded is None else [_counts(network, recorded) for network in networks]
            advance()
            if all(counts) and len(counts) == len(networks):
                by_parent, by_candidate = (each for each in counts if each is not None)
                rounds.append(RivalRounds(text.task, by_parent.num_tokens, by_parent.rounds, by_candidate.rounds))
    return rounds


def _as_served(rival: ParentHeads, method: DraftMethod, target: Any, recipe: Recipe) -> HeadsInTraining[Any]:
    """Heads with all that their files say, the head and what it drafts included."""
    taps = rival.facts.taps_in(num_layers(target)) if method == "eagle3" else ()
    heads = new_heads(method, target, torch.zeros(1, dtype=torch.long), recipe, taps)
    heads.begin_with(rival.tensors(), with_head=True)
    return heads


@torch.inference_mode()
def _counts(heads: HeadsInTraining[Any], recorded: RecordedText) -> AcceptanceCounts | None:
    """None of a text that is too short."""
    return next((counts for _, counts, _ in heads.judged([recorded]) if counts.rounds), None)
