"""Whether every drafter in a batch of 8 writes, in float32, what vanilla decoding writes alone.

    python -m benchmarks.exactness --prompts FOLDER --num 200
    python -m benchmarks.exactness --prompts FOLDER --num 26 --models configs/models.toml

The drafter is look-up, or those of `[models.drafters]` in the file, whose target is loaded in float32. FOLDER holds
TASK.jsonl files with a `prompt` a line. Passes of another shape round differently, so two texts may part where the
target's two best tokens are as good as equal: each such place is listed with its gap, measured by a plain pass of
transformers' own modules over the text that both share. Last line: JSON. Exit status 1 where a text parts elsewhere.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import Progress

import engine as _engine  # noqa: F401  # before torch computes: it settles how threads wait
from alphaloop.deciding.policy import Decision
from alphaloop.engine import Generation, Sampling
from alphaloop.messages.job import Job
from alphaloop.settings.models import LookupDrafterSettings, ModelSettings, TargetSettings
from benchmarks.jobs import PromptJob, forced, prompts_of, sample
from benchmarks.reporting import console, parser_of
from engine.models import load_weights
from engine.own import TransformersEngine, load_engine

BATCH: Final = 8
#: Logits that a pass of another shape may swap: rounding in float32 over 30 layers moves a logit by some 1e-5 of its
#: size, which is about 20.
NEAR_TIE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two texts part, and what the target alone thinks there."""

    job_id: str
    drafter: str
    place: int  #: output tokens that are equal
    gap: float  #: between the logits of the two tokens
    below_best: float  #: from the highest logit to the lower of the two

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.below_best < NEAR_TIE


def first_difference(
    reference: Any, prompt: Sequence[int], one: Sequence[int], two: Sequence[int], job_id: str = "", drafter: str = ""
) -> Difference | None:
    """None where the texts are equal. `reference`: the transformers model, as it was loaded."""
    if list(one) == list(two):
        return None
    pairs = zip(one, two, strict=False)
    place = next((i for i, pair in enumerate(pairs) if len(set(pair)) > 1), None)
    if place is None:
        # One goes on after the end of the other: the same tokens ended one text and not the other.
        return Difference(job_id, drafter, min(len(one), len(two)), float("inf"), float("inf"))
    shared = torch.tensor([[*prompt, *one[:place]]])
    with torch.inference_mode():
        logits = reference(input_ids=shared, use_cache=False, logits_to_keep=1).logits[0, 0]
    found = [float(logits[text[place]]) for text in (one, two)]
    return Difference(job_id, drafter, place, abs(found[0] - found[1]), float(logits.max()) - min(found))


def decode(
    engine: TransformersEngine, jobs: Sequence[Job], sampling: Sampling, decision: Decision, *, batch: int
) -> Iterator[Generation]:
    """Every job's text as it finishes, at most `batch` at a time."""
    waiting = list(jobs)
    while waiting or engine.load().num_running:
        while waiting and engine.load().num_running < batch:
            engine.admit(engine.prepare(waiting.pop(0), sampling), decision)
        yield from engine.step().finished


def main() -> None:
    """Decode, compare, list, and print the JSON line."""
    options = _options()
    models = _models(options)
    engine = load_engine(models, num_slots=BATCH)
    reference = load_weights(models.target.source, None, "float32", torch.device("cpu")).model
    jobs = _jobs(options)
    sampling = Sampling(max_tokens=options.max_tokens, temperature=0.0)
    lengths = {name: min(options.k, one.max_draft_tokens) for name, one in models.drafters.items()}
    ways = {"vanilla": (forced(), 1)} | {name: (forced(name, k), BATCH) for name, k in lengths.items()}
    texts: dict[str, dict[str, Generation]] = {}
    with Progress(console=console) as progress:
        for name, (decision, batch) in ways.items():
            bar = progress.add_task(f"{name}, {batch}", total=len(jobs))
            texts[name] = {}
            for generation in decode(engine, jobs, sampling, decision, batch=batch):
                texts[name][generation.job_id] = generation
                progress.advance(bar)
    differences = []
    for name in lengths:
        for job in jobs:
            prompt = engine.prepare(job, sampling).token_ids
            one, two = (texts[way][job.job_id].token_ids for way in ("vanilla", name))
            if (found := first_difference(reference, prompt, one, two, job.job_id, name)) is not None:
                differences.append(found)
                console.print(
                    f"{found.job_id}, {name}: differs at token {found.place}, gap {found.gap:.1e}, "
                    f"{found.below_best:.1e} below the best: {'near-tie' if found.is_near_tie else 'NOT A TIE'}"
                )
    num_wrong = sum(not found.is_near_tie for found in differences)
    result = {
        "engine": engine.identity.engine,
        "device": engine.identity.device,
        "target": models.target.source,
        "prompts": len(jobs),
        "max_tokens": options.max_tokens,
        "k": lengths,
        "batch": BATCH,
        "seed": options.seed,
        "tokens": sum(len(generation.token_ids) for generation in texts["vanilla"].values()),
        "drafts_tested": {name: sum(one.counts.num_trials for one in texts[name].values()) for name in lengths},
        "drafts_accepted": {name: sum(one.counts.num_accepted for one in texts[name].values()) for name in lengths},
        "identical": {name: len(jobs) - sum(one.drafter == name for one in differences) for name in lengths},
        "near_ties": len(differences) - num_wrong,
        "wrong": num_wrong,
        "differences": [asdict(found) for found in differences],
    }
    print(json.dumps(result))
    sys.exit(bool(num_wrong))


def _models(options: argparse.Namespace) -> ModelSettings:
    if options.models is None:
        target = TargetSettings(source=options.source, dtype="float32", device="cpu")
        return ModelSettings(target=target, drafters={"lookup": LookupDrafterSettings()})
    given = tomllib.loads(options.models.read_text())["models"]
    given["target"] |= {"dtype": "float32", "device": "cpu"}
    return ModelSettings.model_validate(given)


def _jobs(options: argparse.Namespace) -> list[Job]:
    """`num` prompts, as many of every task as of any other, as far as they go."""
    prompts = prompts_of(options.prompts, seed=options.seed, max_characters=options.max_characters)
    share = -(-options.num // len(prompts))
    chosen = [
        PromptJob(f"{task}-{number}", task, prompt, options.max_tokens)
        for task, found in sorted(prompts.items())
        for number, prompt in enumerate(sample(found, share, seed=options.seed))
    ]
    random.Random(options.seed).shuffle(chosen)
    return [job.as_job() for job in chosen[: options.num]]


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="folder of TASK.jsonl files")
    parser.add_argument("--num", type=int, default=200, help="prompts, spread over the tasks")
    parser.add_argument("--source", default=TargetSettings().source)
    parser.add_argument("--models", type=Path, help="TOML with [models.target] and drafters; without it look-up alone")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-characters", type=int, default=3500)
    return parser.parse_args()


if __name__ == "__main__":
    main()
