"""A pass of random weights of a stated shape: recorded, plain, and by transformers, beside its floor.

    python -m benchmarks.gpu_step                                    # a 7B target and a .5B draft, on the GPU
    python -m benchmarks.gpu_step --model draft-0.5b --shape 8x1 --context 512

The floor is the time in which the device's memory gives what a pass has to read once: weights, and the keys and values
of the context, at the rate that a plain copy reaches. The contestants take turns, so that drift falls on all alike;
a time ends when the argmax of every column is known to Python, which is what the engine waits for. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from benchmarks.paired import paired_ratio
from worker import decoding as _decoding  # noqa: F401  # before torch computes: it settles how threads wait
from worker.decoding.network.groups import Read
from worker.decoding.network.language_model import LanguageModel

#: Qwen2.5's, by size; the last is for trying this program out.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "target-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "draft-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
NUM_WARM_UP: Final = 3


def main() -> None:
    """Print a table for each model, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", action="append", choices=sorted(SHAPES))
    parser.add_argument("--shape", action="append", help="BATCHxWIDTH")
    parser.add_argument("--context", action="append", type=int)
    parser.add_argument("--samples", type=int, default=30)
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = [tuple(map(int, one.split("x"))) for one in options.shape or _every_shape()]
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bytes_per_s": _bytes_per_s(device),
        "passes": [],
    }
    for name in options.model or ("target-7b", "draft-0.5b"):
        contestants = _Contestants(name, device)
        table = Table(title=f"{name}, {found['device']}, {found['bytes_per_s'] / 1e12:.2f} TB/s: ms a pass")
        for column in ("batch x width", "context", "floor", "recorded", "plain", "transformers", "transformers/ours"):
            table.add_column(column, justify="right")
        for context in options.context or (512, 4096):
            for batch, width in shapes:
                measured = contestants.measure(batch, width, context, options.samples, found["bytes_per_s"])
                found["passes"].append({"model": name, "batch": batch, "width": width, "context": context, **measured})
                numbers = [measured[key] for key in ("floor_ms", "recorded_ms", "plain_ms", "transformers_ms")]
                cells = ["-" if number is None else f"{number:.2f}" for number in numbers]
                table.add_row(f"{batch}x{width}", str(context), *cells, str(measured["ratio"]))
        Console(stderr=True).print(table)
    print(json.dumps(found))


def _every_shape() -> list[str]:
    return [f"{batch}x{width}" for batch in (1, 4, 8, 16, 32) for width in (1, 2, 4, 8)]


class _Contestants:
    """One model three times: two of them share its weights."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._theirs = _model(name, device)
        ours = _model(name, device)
        weights = {id(weight): weight for weight in ours.parameters()}
        self._weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
        if not ours.config.tie_word_embeddings:
            self._weight_bytes -= ours.get_input_embeddings().weight.numel() * 2  # a few rows of it are read
        self._ours = LanguageModel(ours, 8192, gpu_kernels=True)
        self._recorded = self._ours._recorded

    @torch.inference_mode()
    def measure(
        self, batch: int, width: int, context: int, num_samples: int, bytes_per_s: float
    ) -> dict[str, float | str | None]:
        """Median milliseconds of each, and the ratio of transformers' to ours, recorded where that is possible."""
        cache = self._ours.new_cache(batch)
        tokens = torch.randint(0, self._ours.vocabulary_size, (batch, width)).tolist()
        reads = [Read(cache.acquire(), row, num_logits=width) for row in tokens]
        cache.lengths = [context] * batch

        def ours(recorded: Any) -> None:
            self._ours._recorded = recorded
            self._ours.read(cache, reads).argmax(dim=-1).tolist()

        past = self._past(batch, context)
        columns = torch.tensor(tokens, device=self._device)

        def theirs() -> None:
            logits = self._theirs(input_ids=columns, past_key_values=past, use_cache=True).logits
            logits.argmax(dim=-1).tolist()
            past.crop(-width)

        runs: dict[str, Callable[[], None]] = {"plain": lambda: ours(None), "transformers": theirs}
        if self._recorded is not None:
            runs = {"recorded": lambda: ours(self._recorded), **runs}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for sample in range(num_samples + NUM_WARM_UP):
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                if sample >= NUM_WARM_UP:
                    times[name].append(1000 * (time.perf_counter() - began))
        held = batch * context * self._ours.kv_shape.bytes_per_token
        ratio = paired_ratio(times["transformers"], times["recorded" if self._recorded is not None else "plain"])
        medians = {name: statistics.median(some) for name, some in times.items()}
        return {
            "floor_ms": 1000 * (self._weight_bytes + held) / bytes_per_s,
            "recorded_ms": medians.get("recorded"),
            "plain_ms": medians["plain"],
            "transformers_ms": medians["transformers"],
            "ratio": str(ratio),
        }

    def _past(self, batch: int, context: int) -> DynamicCache:
        shape = self._ours.kv_shape
        past = DynamicCache()
        for layer in range(shape.num_layers):
            size = (batch, shape.num_heads, context, shape.head_dim)
            keys, values = torch.randn((2, *size), dtype=shape.dtype, device=self._device).unbind()
            past.update(keys, values, layer)
        return past


def _model(name: str, device: torch.device) -> Any:
    config = Qwen2Config(max_position_embeddings=32768, **SHAPES[name])
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model: Any = Qwen2ForCausalLM(config)
            return model.eval()
    finally:
        torch.set_default_dtype(torch.float32)


def _bytes_per_s(device: torch.device) -> float:
    """What a copy of memory much larger than any cache reads and writes."""
    num_bytes = 1 << (32 if device.type == "cuda" else 28)
    source = torch.randint(0, 100, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        began = time.perf_counter()
        target.copy_(source)
        int(target[0])  # a GPU is done only when somebody looks
        times.append(time.perf_counter() - began)
    return 2 * num_bytes / min(times)


if __name__ == "__main__":
    main()
