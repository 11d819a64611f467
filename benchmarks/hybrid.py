"""Tokens a round of look-up, a draft model, and both in one round: `rule = "switch"` and `rule = "tree"`.

    python -m benchmarks.hybrid --prompts FOLDER --draft FOLDER

FOLDER holds TASK.jsonl files with a `prompt` a line. Without a draft a stand-in drafts: the target without some of its
middle layers, which is as slow as it looks, so only rounds are counted, not times. Greedy, one text at a time, each
prompt with every drafter. The rounds that read a prompt are left out. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from alphaloop.settings.models import ModelSettings
from benchmarks.engines.serve import dense_folder
from benchmarks.jobs import PromptJob, forced, prompts_of, sample, without_residents
from benchmarks.reporting import console, machine, parser_of, table_of
from worker.engine import Engine, Sampling

DRAFTERS: Final = ("lookup", "draft", "switch", "tree")


def main() -> None:
    """Decode every prompt with each drafter, and print the table and the JSON line."""
    options = _options()
    prompts = prompts_of(options.prompts, seed=options.seed, max_characters=3500)
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(options, Path(folder))
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for task in options.task or sorted(prompts):
            for number, prompt in enumerate(sample(prompts[task], options.num, seed=options.seed)):
                job = PromptJob(f"{task}-{number}", task, prompt, options.max_tokens)
                for drafter in DRAFTERS:
                    found[task][drafter].append(_tokens_per_round(engine, job, drafter, options.k))
            console.print(f"{task}: " + ", ".join(f"{name} {fmean(its):.2f}" for name, its in found[task].items()))
    table = table_of("Tokens a round", "task", *DRAFTERS)
    for task, by_drafter in found.items():
        table.add_row(task, *(f"{fmean(by_drafter[name]):.2f}" for name in DRAFTERS))
    means = {name: fmean(value for its in found.values() for value in its[name]) for name in DRAFTERS}
    table.add_row("mean", *(f"{means[name]:.2f}" for name in DRAFTERS))
    console.print(table)
    print(json.dumps({"conditions": machine() | {"k": options.k}, "mean": means, "tasks": found}))


def _tokens_per_round(engine: Engine, job: PromptJob, drafter: str, k: int) -> float:
    sampling = Sampling(max_tokens=job.max_tokens, temperature=0.0)
    engine.admit(engine.prepare(job.as_job(), sampling), forced(drafter, k))
    while True:
        for one in engine.step().finished:
            (drafted,) = [its.counts for its in one.drafted if its.drafter == drafter] or [one.counts]
            return drafted.num_tokens / max(1, drafted.rounds)


def _engine(options: argparse.Namespace, folder: Path) -> Engine:
    from worker.decoding.engine import load_engine

    target = options.target or str(dense_folder("bfloat16"))
    both: dict[str, Any] = {
        "method": "hybrid",
        "sources": ["lookup", "draft"],
        "max_draft_tokens": 16,
        "most_tokens": {"lookup": options.lookup_tokens, "draft": options.k - options.lookup_tokens},
    }
    switch = both | {"most_tokens": {}, "min_probability": options.min_probability}
    source = options.draft or _stand_in(target, folder, options.without)
    drafters: dict[str, Any] = {
        "lookup": {"max_draft_tokens": 16, "shadow_share": 0},
        "draft": {"method": "draft_model", "source": source, "max_draft_tokens": 16},
        "switch": switch,
        "tree": both | {"rule": "tree"},
    }
    settings = {"target": {"source": target, "context_length": 4096}, "drafters": drafters}
    return load_engine(without_residents(ModelSettings.model_validate(settings)), num_slots=1)


def _stand_in(target: str, folder: Path, num_layers: int) -> str:
    """The target without so many layers in its middle, with its tokenizer, in `folder`."""
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype="bfloat16")
    layers = model.model.layers
    begin = (len(layers) - num_layers) // 2
    model.model.layers = nn.ModuleList([*layers[:begin], *layers[begin + num_layers :]])
    model.config.num_hidden_layers = len(model.model.layers)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return str(folder)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="folder with TASK.jsonl files")
    parser.add_argument("--target", default=None, help="folder of the model; default: SmolLM2")
    parser.add_argument("--draft", default=None, help="folder of a draft for it; default: a stand-in")
    parser.add_argument("--without", type=int, default=4, help="layers of the target that the stand-in lacks")
    parser.add_argument("--task", action="append", help="only these tasks")
    parser.add_argument("--num", type=int, default=2, help="prompts a task")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("-k", type=int, default=7, help="most draft tokens a round")
    parser.add_argument("--lookup-tokens", type=int, default=3, help="of them, look-up's in a tree")
    parser.add_argument("--min-probability", type=float, default=0.5, help="of the switch")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
