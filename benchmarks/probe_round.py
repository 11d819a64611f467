"""What a round of probes costs on the real engine: every prompt decoded with every drafter, or scored on its control.

    python -m benchmarks.probe_round                          # SmolLM2 in float32, look-up and two cut drafts
    python -m benchmarks.probe_round --dtype bfloat16 --layers 4

The drafts are the target's own first layers: `--layers 24` of 30 is a slow draft that is often right, `--layers 4` a
quick one. Prompts are the demo's. Processor seconds, because they mean the same on a busy machine. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.policy import Decision, Reason
from alphaloop.demo.prompts import harvest
from alphaloop.messages import Body, Job, Mode, Purpose
from alphaloop.settings import load_settings
from worker import decoding as _decoding  # noqa: F401  # before torch computes: it settles how threads wait
from worker.decoding.drafters.draft_model import DraftModelDrafter
from worker.decoding.drafters.draft_vocabulary import DraftTokens
from worker.decoding.engine import TransformersEngine, load_engine
from worker.decoding.models import load_weights
from worker.decoding.network.language_model import LanguageModel
from worker.decoding.scoring import with_scores
from worker.engine import Generation, Sampling

VANILLA: Final = Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "benchmark")
_CONTEXT: Final = 2048


@dataclass(slots=True)
class Costs:
    """Processor seconds over all prompts, and what was counted there."""

    decode_s: float = 0.0
    score_s: float = 0.0
    num_prompts: int = 0
    num_equal_texts: int = 0  #: the decoded text is the control's
    num_equal_counts: int = 0  #: of these, trials and accepts are the score's
    alpha_1: dict[str, tuple[int, int]] = field(default_factory=dict)  #: accepts and trials, by method


def main() -> None:
    """Decode and score the same prompts, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="of the demo; its tasks take turns")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 24])
    parser.add_argument("--decoded-share", type=float, default=0.25)
    options = parser.parse_args()
    models = load_settings(profile="local").models
    models = models.model_copy(update={"target": models.target.model_copy(update={"dtype": options.dtype})})
    engine = load_engine(models, num_slots=1)
    for layers in options.layers:
        engine._drafters[f"first-{layers}"] = _cut(models.target.source, options.dtype, layers)
    drafters = {name: Costs() for name in engine._drafters}
    sampling = Sampling(max_tokens=options.max_tokens, temperature=0.0)
    control_s = 0.0
    print(f"loaded in {time.process_time():.0f} processor seconds", flush=True)
    probes = harvest(1, num_traffic=1, num_probes=options.prompts).probes
    asked = [prompt for its in zip(*probes.values(), strict=True) for prompt in its][: options.prompts]
    for number, prompt in enumerate(asked):
        control, seconds = _decode(engine, _job(prompt, f"control-{number}"), sampling, VANILLA)
        control_s += seconds
        for name, costs in drafters.items():
            drafted = Decision(Mode.SPECULATIVE, name, None, options.k, Reason.FORCED, "benchmark")
            decoded, seconds = _decode(engine, _job(prompt, f"{name}-{number}"), sampling, drafted)
            costs.decode_s += seconds
            asking = _job(prompt, f"control-{number}", (name,), options.k)
            scored, seconds = _score(engine, asking, sampling, control)
            costs.score_s += seconds
            _compare(costs, control, decoded, scored)
        print(json.dumps(_told(options.decoded_share, control_s, drafters, number + 1)), flush=True)


def _told(share: float, control_s: float, drafters: Mapping[str, Costs], num_prompts: int) -> dict[str, object]:
    before = control_s + sum(costs.decode_s for costs in drafters.values())
    after = control_s + sum(share * costs.decode_s + (1 - share) * costs.score_s for costs in drafters.values())
    return {
        "num_prompts": num_prompts,
        "control_cpu_s": round(control_s, 2),
        "round_cpu_s": {"decoded": round(before, 2), f"scored, {share:g} decoded": round(after, 2)},
        "saved": round(1 - after / before, 3),
        "drafters": {
            name: {
                "decode_cpu_s": round(costs.decode_s, 2),
                "score_cpu_s": round(costs.score_s, 3),
                "score_over_decode": round(costs.score_s / costs.decode_s, 3),
                "equal_texts": costs.num_equal_texts,
                "equal_counts": costs.num_equal_counts,
                "alpha_1": {how: f"{a}/{t}" for how, (a, t) in costs.alpha_1.items()},
            }
            for name, costs in drafters.items()
        },
    }


def _cut(source: str, dtype: str, num_layers: int) -> DraftModelDrafter:
    """The target's first layers as a draft model."""
    model = load_weights(source, None, dtype, torch.device("cpu")).model
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    language_model = LanguageModel(model, _CONTEXT)
    columns = language_model.vocabulary_size
    state = DrafterState(f"first-{num_layers}", "cut", 8, is_scorable=True)
    tokens = DraftTokens(columns, columns, frozenset())
    return DraftModelDrafter(state, language_model, tokens, num_slots=1, context_length=_CONTEXT)


def _job(prompt: str, job_id: str, scored: tuple[str, ...] = (), k: int | None = None) -> Job:
    return Job(
        job_id=job_id,
        task="code",
        body=Body.model_validate({"prompt": prompt}),
        purpose=Purpose.CONTROL,
        scored_drafters=scored,
        probe_num_draft_tokens=k,
    )


def _decode(engine: TransformersEngine, job: Job, sampling: Sampling, decision: Decision) -> tuple[Generation, float]:
    prepared = engine.prepare(job, sampling)
    began = time.process_time()
    engine.admit(prepared, decision)
    while not (finished := engine.step().finished):
        pass
    return finished[0], time.process_time() - began


def _score(engine: TransformersEngine, job: Job, sampling: Sampling, control: Generation) -> tuple[Generation, float]:
    began = time.process_time()
    scored = with_scores(control, engine.prepare(job, sampling), engine._drafters, _raise)
    return scored, time.process_time() - began


def _raise(drafter: str, method: str, error: Exception) -> None:
    raise error


def _compare(costs: Costs, control: Generation, decoded: Generation, scored: Generation) -> None:
    (shadow,) = scored.shadows
    costs.num_prompts += 1
    for how, counts in (("decoded", decoded.counts), ("scored", shadow.counts)):
        accepts, trials = costs.alpha_1.get(how, (0, 0))
        costs.alpha_1[how] = accepts + sum(counts.accepts[:1]), trials + sum(counts.trials[:1])
    if decoded.token_ids == control.token_ids:
        costs.num_equal_texts += 1
        costs.num_equal_counts += _tested(decoded.counts) == _tested(shadow.counts)


def _tested(counts: AcceptanceCounts) -> list[tuple[int, int]]:
    return [pair for pair in zip(counts.trials, counts.accepts, strict=True) if pair[0]]


if __name__ == "__main__":
    main()
