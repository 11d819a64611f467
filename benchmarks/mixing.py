"""What a round costs whose sequences differ in width, in context or in whether a draft model drafts for them.

    python -m benchmarks.mixing                     # SmolLM2 in bf16, batch 8 and 32
    OMP_NUM_THREADS=1 python -m benchmarks.mixing --batch 8 --clock cpu    # on a busy machine

Every round that is half of one kind and half of the other is compared with the mean of the two unmixed rounds. Above 1,
an order of admission that keeps the kinds apart would gain. The draft models have SmolLM2's shape, 3 and 9 of its 30
layers and random weights, because only their time counts. Kinds take turns, and each counts with its fastest sample,
because other processes only make samples slower; they disturb CPU time less than the wall clock. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from alphaloop.settings.models import TargetSettings
from worker import decoding as _decoding  # noqa: F401  # before torch computes: it settles how threads wait
from worker.decoding.models import load_target
from worker.decoding.network.language_model import LanguageModel
from worker.decoding.network.passes import Read
from worker.decoding.network.slots import SlotCache

NUM_WARM_UP: Final = 4
CLOCKS: Final[dict[str, Callable[[], float]]] = {"wall": time.perf_counter, "cpu": time.process_time}
#: Width and context of the two kinds of sequence.
KINDS: Final = (((1, 256), (3, 256)), ((1, 256), (5, 256)), ((1, 256), (9, 256)), ((1, 128), (1, 1024)))
DRAFTS: Final = ((3, 1), (3, 3), (9, 1), (9, 3))  #: layers and draft tokens


def main() -> None:
    """Print a table of fastest times, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    target = load_target(TargetSettings(context_length=4096))
    found: dict[str, dict[str, float]] = {}
    for batch in options.batch or (8, 32):
        for (width, context), (other_width, other_context) in KINDS:
            name = f"{batch}: width {width} context {context}, width {other_width} context {other_context}"
            kinds = ((width, context), (other_width, other_context))
            found[name] = _compared(_passes(target.model, batch, kinds), options.samples, clock)
        for num_layers, k in DRAFTS:
            rounds = _draft_rounds(target.model, _draft(num_layers), batch, k)
            found[f"{batch}: vanilla, {num_layers} layers k {k}"] = _compared(rounds, options.samples, clock)
    table = Table(title=f"ms a round of SmolLM2, {target.identity.device}")
    for column in ("batch and kinds", "first", "second", "half each", "half each / mean"):
        table.add_column(column, justify="right")
    for name, row in found.items():
        table.add_row(name, *(f"{row[key]:.1f}" for key in ("first", "second", "mixed")), f"{row['ratio']:.3f}")
    Console(stderr=True).print(table)
    print(json.dumps({"engine": target.identity.engine, "device": target.identity.device, "rounds": found}))


def _passes(
    model: LanguageModel, batch: int, kinds: tuple[tuple[int, int], tuple[int, int]]
) -> dict[str, Callable[[], None]]:
    """Passes over sequences of (width, context): all of the first kind, all of the second, and by turns."""
    cache = model.new_cache(batch)
    slots = [cache.acquire() for _ in range(batch)]

    def passes(numbers: list[int]) -> Callable[[], None]:
        def run() -> None:
            for slot, number in zip(slots, numbers, strict=True):
                cache.lengths[slot] = kinds[number][1]
            _read(model, cache, slots, [kinds[number][0] for number in numbers])

        return run

    return {"first": passes([0] * batch), "second": passes([1] * batch), "mixed": passes([0, 1] * (batch // 2))}


def _draft_rounds(target: LanguageModel, draft: LanguageModel, batch: int, k: int) -> dict[str, Callable[[], None]]:
    """Rounds in which no sequence drafts, all draft, and half of them do."""
    caches = target.new_cache(batch), draft.new_cache(batch)
    slots = [[cache.acquire() for _ in range(batch)] for cache in caches]
    for cache in caches:
        cache.lengths = [256] * batch

    def rounds(num_drafting: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(k if num_drafting else 0):
                _read(draft, caches[1], slots[1][:num_drafting], [1] * num_drafting)
            _read(target, caches[0], slots[0], [1 + k] * num_drafting + [1] * (batch - num_drafting))

        return run

    return {"first": rounds(0), "second": rounds(batch), "mixed": rounds(batch // 2)}


def _read(model: LanguageModel, cache: SlotCache, slots: list[int], widths: list[int]) -> None:
    reads = [Read(slot, [7] * width, num_logits=width) for slot, width in zip(slots, widths, strict=True)]
    model.read(cache, reads).argmax(dim=-1).tolist()


@torch.inference_mode()
def _compared(runs: dict[str, Callable[[], None]], num_samples: int, clock: Callable[[], float]) -> dict[str, float]:
    """The fastest milliseconds of each, and of the mixed one over the mean of the two others."""
    fastest = dict.fromkeys(runs, float("inf"))
    for sample in range(num_samples + NUM_WARM_UP):
        for name, run in runs.items():
            began = clock()
            run()
            if sample >= NUM_WARM_UP:
                fastest[name] = min(fastest[name], 1000 * (clock() - began))
    return {**fastest, "ratio": 2 * fastest["mixed"] / (fastest["first"] + fastest["second"])}


def _draft(num_layers: int) -> LanguageModel:
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = LlamaForCausalLM(config)
        return LanguageModel(model.eval(), 4096)
    finally:
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    main()
