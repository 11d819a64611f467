"""What the matrix products alone take of a run of `benchmarks.whole`, by the fastest way that is known.

    taskset -c 0,1 python -m benchmarks.whole.matrix_products --prompt-tokens 30000 --tokens 10000 --slots 8 32

The products of SmolLM2-135M in bfloat16: prompts in passes of 512 rows, texts in passes of one row a slot, all slots
always taken. Attention, norms, sampling and everything around the model are left out. Each is computed by the worker's
own layers and by oneDNN with weights that it reordered before, in turns; the faster one counts. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from worker.decoding.network.compiled import CompiledOperations
from worker.decoding.network.operations import TorchLinear

HIDDEN: Final = 576
INTERMEDIATE: Final = 1536
KEYS_AND_VALUES: Final = 384
VOCABULARY: Final = 49_152
NUM_LAYERS: Final = 30
_PROMPT_ROWS: Final = 512
_NUM_WARM: Final = 3
_NUM_SAMPLES: Final = 15

Layer = Callable[[Tensor], Any]


def _drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).to(torch.bfloat16)


class Products:
    """The matrices of the model, drawn at random, as two sets of layers: ours, and oneDNN's."""

    def __init__(self) -> None:
        layers = [
            [
                _drawn(HIDDEN + KEYS_AND_VALUES, HIDDEN),
                _drawn(HIDDEN, HIDDEN),
                _drawn(2 * INTERMEDIATE, HIDDEN),
                _drawn(HIDDEN, INTERMEDIATE),
            ]
            for _ in range(NUM_LAYERS)
        ]
        head = _drawn(VOCABULARY, HIDDEN)
        self._ways: dict[str, tuple[list[list[Layer]], Layer]] = {
            name: ([[pack(weight) for weight in layer] for layer in layers], pack(head))
            for name, pack in {"ours": _ours, "oneDNN": _onednn}.items()
        }

    def seconds(self, rows: int, *, with_head: bool) -> dict[str, float]:
        """Median time of a pass over so many rows, either way."""
        took: dict[str, list[float]] = {name: [] for name in self._ways}
        for number in range(_NUM_WARM + _NUM_SAMPLES):
            for name, (layers, head) in self._ways.items():
                seconds = _timed(layers, head if with_head else None, rows)
                if number >= _NUM_WARM:
                    took[name].append(seconds)
        return {name: statistics.median(samples) for name, samples in took.items()}


def _timed(layers: list[list[Layer]], head: Layer | None, rows: int) -> float:
    narrow, wide = _drawn(rows, HIDDEN), _drawn(rows, INTERMEDIATE)
    began = time.perf_counter()
    for attention, out, up, down in layers:
        attention(narrow), out(narrow), up(narrow), down(wide)
    if head is not None:
        head(narrow)
    return time.perf_counter() - began


def _ours(weight: Tensor) -> Layer:
    return CompiledOperations(weight.dtype, is_twice=True).linear(weight, None)


def _onednn(weight: Tensor) -> Layer:
    return TorchLinear(weight, None)


def _milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * value, 1) for name, value in seconds.items()}


def main() -> int:
    """Measure, add up, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole.matrix_products", description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=30_000)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        products = Products()
        prompt = products.seconds(_PROMPT_ROWS, with_head=False)
        texts = {n: products.seconds(n, with_head=True) for n in options.slots}
    prompts_s = options.prompt_tokens / _PROMPT_ROWS * min(prompt.values())
    found: dict[str, object] = {"pass_ms": {str(_PROMPT_ROWS): _milliseconds(prompt)}}
    for num_slots, text in texts.items():
        texts_s = options.tokens / num_slots * min(text.values())
        found[str(num_slots)] = {
            "pass_ms": _milliseconds(text),
            "prompts_s": round(prompts_s, 1),
            "texts_s": round(texts_s, 1),
            "tokens_per_s": round(options.tokens / (prompts_s + texts_s), 1),
        }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
