"""What the matrix products alone take of a run of `benchmarks.whole`: nothing that decodes vanilla can be faster.

    taskset -c 0,1 python -m benchmarks.whole.matrix_products --prompt-tokens 30000 --tokens 10000 --slots 8 32

The products of SmolLM2-135M in bfloat16 by torch: prompts in passes of 256 rows, texts in passes of one row a slot, all
slots always taken. Attention, norms, sampling and everything around the model are left out. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

HIDDEN: Final = 576
INTERMEDIATE: Final = 1536
KEYS_AND_VALUES: Final = 384
VOCABULARY: Final = 49_152
NUM_LAYERS: Final = 30
_PROMPT_ROWS: Final = 256
_NUM_WARM: Final = 3
_NUM_SAMPLES: Final = 15


def _drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).to(torch.bfloat16)


class Products:
    """The matrices of the model, drawn at random."""

    def __init__(self) -> None:
        self._layers = [
            (
                _drawn(HIDDEN + KEYS_AND_VALUES, HIDDEN),
                _drawn(HIDDEN, HIDDEN),
                _drawn(2 * INTERMEDIATE, HIDDEN),
                _drawn(HIDDEN, INTERMEDIATE),
            )
            for _ in range(NUM_LAYERS)
        ]
        self._head = _drawn(VOCABULARY, HIDDEN)

    def seconds(self, rows: int, *, with_head: bool) -> float:
        """Median time of a pass over so many rows."""
        narrow, wide = _drawn(rows, HIDDEN), _drawn(rows, INTERMEDIATE)
        took = []
        for number in range(_NUM_WARM + _NUM_SAMPLES):
            began = time.perf_counter()
            for attention, out, up, down in self._layers:
                linear(narrow, attention), linear(narrow, out), linear(narrow, up), linear(wide, down)
            if with_head:
                linear(narrow, self._head)
            if number >= _NUM_WARM:
                took.append(time.perf_counter() - began)
        return statistics.median(took)


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
        prompts_s = options.prompt_tokens / _PROMPT_ROWS * products.seconds(_PROMPT_ROWS, with_head=False)
        texts_s = {n: options.tokens / n * products.seconds(n, with_head=True) for n in options.slots}
    found = {
        str(num_slots): {
            "prompts_s": round(prompts_s, 1),
            "texts_s": round(seconds, 1),
            "tokens_per_s": round(options.tokens / (prompts_s + seconds), 1),
        }
        for num_slots, seconds in texts_s.items()
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
