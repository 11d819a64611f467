"""Linear layers whose weights have the layout that the processor reads fastest."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from worker.decoding.network.kernels.multiplying import has_pair_products
from worker.decoding.network.kernels.narrow import Arguments, arranged, can_arrange, most_rows, narrow_kernel
from worker.decoding.network.kernels.threads import openmp


class PackedLinear:
    """y = x W' + b, once prepared for many calls.

    On a CPU that oneDNN serves, the weights are reordered into its blocks: torch's own linear does that again in every
    call. Measured on 2 cores for SmolLM2 in bf16, one token: 0.6 of torch's time (docs/log.md). With
    `is_twice` a second copy has the layout that `kernels.narrow` reads, for passes of a few tokens: it halves the time
    once more, and doubles the memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_twice: bool = False) -> None:
        self._bias = None if bias is None else bias.contiguous()
        self._is_packed = can_pack(weight)
        self._narrow: _Narrow | None = None
        if is_twice and self._is_packed and can_arrange(weight) and openmp() is not None:
            self._narrow = _Narrow(weight, self._bias)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self._is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] → [tokens, out]."""
        if self._narrow is not None and len(x) <= self._narrow.most_rows:
            return self._narrow(x, None)
        if self._is_packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return functional.linear(x, self._weight, self._bias)

    def added_to(self, held: Tensor, x: Tensor) -> Tensor:
        """`held` + y, in one kernel if there is one."""
        if self._narrow is not None and len(x) <= self._narrow.most_rows:
            return self._narrow(x, held)
        if self._is_packed:
            total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, held, self._weight, self._bias, "add")
            return total
        return held + functional.linear(x, self._weight, self._bias)


class _Narrow:
    """The same for at most `most_rows` tokens."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.most_rows = most_rows()
        self._weight = arranged(weight)
        self._bias = bias  # its address is below
        self._num_outputs = weight.shape[0]
        self._kernel = narrow_kernel(by_pairs=has_pair_products())
        self._arguments = Arguments(
            weights=self._weight.data_ptr(),
            num_inputs=weight.shape[1],
            num_outputs=self._num_outputs,
            bias=0 if bias is None else bias.data_ptr(),
        )
        self._address = ctypes.addressof(self._arguments)

    def __call__(self, x: Tensor, held: Tensor | None) -> Tensor:
        x = x.contiguous()
        y = x.new_empty((len(x), self._num_outputs))
        if not len(x):
            return y
        a = self._arguments
        a.x, a.y, a.held = x.data_ptr(), y.data_ptr(), 0 if held is None else held.data_ptr()
        a.num_rows = len(x)
        self._kernel(self._address, torch.get_num_threads())
        return y


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a kernel for this weight's device and dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
