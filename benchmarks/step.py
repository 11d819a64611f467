"""Where a pass of the target goes: linear layers with the head, attention, norms and gates, the cache, Python.

    python -m benchmarks.step                    # SmolLM2 in bf16, batch 1, 4, 8, 16
    python -m benchmarks.step --source FOLDER --shape 1x1 --shape 8x9

The pass is timed whole, many times. Shares are those of another pass under torch's profiler, whose kernels run one by
one: where a pass is one program, the share of Python is that of the profiled pass alone. Last line: JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from alphaloop.settings.models import TargetSettings
from worker.decoding.models import Target, load_target
from worker.decoding.network.kernels.program import Program
from worker.decoding.network.kernels.threads import Kernel
from worker.decoding.network.passes import Read

CONTEXT = 256
PARTS = ("linear", "attention", "pointwise", "cache", "other calls", "Python")


def main() -> None:
    """Print a table of shares, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=TargetSettings().source)
    parser.add_argument("--shape", action="append", help="BATCHxWIDTH")
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    target = load_target(TargetSettings(source=options.source, context_length=4096))
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape or ("1x1", "4x1", "8x1", "16x1", "1x9")]
    found = {f"{batch}x{width}": _measure(target, batch, width, options.samples) for batch, width in shapes}
    table = Table(title=f"One pass of {options.source}, context {CONTEXT}, {target.identity.device}")
    for column in ("shape", "ms", *PARTS):
        table.add_column(column, justify="right")
    for shape, measured in found.items():
        table.add_row(shape, f"{measured['ms']:.1f}", *(f"{measured['shares'][part]:.0%}" for part in PARTS))
    Console(stderr=True).print(table)
    print(json.dumps({"engine": target.identity.engine, "device": target.identity.device, "passes": found}))


@torch.inference_mode()
def _measure(target: Target, batch: int, width: int, num_samples: int) -> dict[str, Any]:
    cache = target.model.new_cache(batch)
    reads = [Read(cache.acquire(), [7] * width, num_logits=width) for _ in range(batch)]
    cache.lengths = [CONTEXT] * batch
    times = []
    for sample in range(num_samples + 5):
        began = time.perf_counter()
        target.model.read(cache, reads).max(dim=-1)
        if sample >= 5:
            times.append(time.perf_counter() - began)
    whole = statistics.median(times)
    with _kernels_recorded(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        began = time.perf_counter()
        for _ in range(10):
            target.model.read(cache, reads).max(dim=-1)
        traced = time.perf_counter() - began
    seconds: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        seconds[_part(event.key)] += event.self_cpu_time_total / 1e6
    seconds["Python"] = max(0.0, traced - sum(seconds.values()))
    return {"ms": 1000 * whole, "shares": {part: seconds[part] / traced for part in PARTS}}


@contextmanager
def _kernels_recorded() -> Iterator[None]:
    """Have torch's profiler see compiled kernels, which run one by one then."""
    plain = Kernel.__call__

    def recorded(kernel: Kernel, arguments: ctypes.Structure, num_threads: int) -> None:
        with record_function(f"kernel::{kernel.name}"):
            plain(kernel, arguments, num_threads)

    def one_by_one(program: Program, num_calls: int | None = None) -> None:
        for kernel, arguments in program.calls[:num_calls]:
            kernel(arguments, torch.get_num_threads())

    with mock.patch.object(Kernel, "__call__", recorded), mock.patch.object(Program, "run", one_by_one):
        yield


def _part(call: str) -> str:
    if "linear" in call or call in ("aten::addmm", "aten::mm"):
        return "linear"
    if "attention" in call:
        return "attention"
    if call in ("aten::index_copy_", "aten::index_select", "aten::embedding", "kernel::choose"):
        return "cache"
    names = (
        "norm",
        "gate",
        "mul",
        "silu",
        "gelu",
        "complex",
        "real",
        "rsqrt",
        "pow",
        "mean",
        "sum",
        "div",
        "add",
        "_to_copy",
    )
    return "pointwise" if any(name in call for name in names) else "other calls"


if __name__ == "__main__":
    main()
