"""Triton kernels for a GPU's operations between matrix products."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from worker.decoding.network.operations import ACTIVATIONS
from worker.decoding.network.torch_operations import TorchOperations

if TYPE_CHECKING:
    from worker.decoding.network.gpu.operations import GpuOperations

log = logging.getLogger(__name__)


def gpu_operations(device: torch.device, dtype: torch.dtype, head_dim: int) -> GpuOperations | None:
    """Kernels for this device, compared with torch's; None where there are none, or they do not agree."""
    if device.type != "cuda":
        return None
    try:
        from worker.decoding.network.gpu.operations import DTYPES, HEAD_DIMS, GpuOperations  # only where Triton is

        if dtype not in DTYPES or head_dim not in HEAD_DIMS:
            return None
        made = GpuOperations(torch.cuda.get_device_properties(device).multi_processor_count)
        _compare(made, device, dtype)
    except Exception as error:  # Triton fails in ways of its own: no compiler, no driver, a GPU that it does not know
        log.warning("no kernels for this GPU, torch computes: %s", error, extra={"action": "no_gpu_kernels"})
        return None
    return made


@torch.inference_mode()
def _compare(made: GpuOperations, device: torch.device, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless norm and gate agree with torch's. Attention is compared with the whole model's pass."""
    x = torch.randn((3, 192), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    plain = TorchOperations()
    pairs = [(made.norm(x, x[0], 1e-6), plain.norm(x, x[0], 1e-6))]
    pairs += [(made.gate(x, activation), plain.gate(x, activation)) for activation in sorted(ACTIVATIONS)]
    for seen, expected in pairs:
        error = float((seen.double() - expected.double()).norm() / expected.double().norm())
        if not error <= (1e-5 if dtype == torch.float32 else 0.02):
            raise RuntimeError(f"a kernel differs from torch by {error:.1e} of the norm")
