"""Linear layers whose weights have the layout that the processor reads fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worker.decoding.network.kernels.linear import (
    Arguments,
    arranged,
    arranged_bias,
    can_arrange,
    linear_kernel,
    most_rows,
)
from worker.decoding.network.kernels.multiplying import has_pair_products
from worker.decoding.network.kernels.threads import openmp


class PackedLinear:
    """y = x W' + b, once prepared for many calls.

    On a CPU in bfloat16 there are two ways to compute it, each with a layout of its own: `kernels.linear`, and oneDNN,
    whose weights are reordered into its blocks here because torch's own linear does that again in every call. Where the
    kernel is always the faster one (`kernels.linear.most_rows`), weights have its layout only. Elsewhere it serves
    passes of a few tokens, and weights are held in both layouts if `is_twice`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_twice: bool = False) -> None:
        self.num_outputs: int = weight.shape[0]
        can_compile = can_pack(weight) and can_arrange(weight) and openmp() is not None
        is_always = can_compile and most_rows() is None
        self._layers: list[CompiledLinear | TorchLinear] = []  # the first that serves a number of tokens computes them
        if is_always or (can_compile and is_twice):
            self._layers.append(CompiledLinear(weight, bias))
        if not is_always:
            self._layers.append(TorchLinear(weight, bias))

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] → [tokens, out]."""
        return self._layer(len(x))(x, None)

    def added_to(self, held: Tensor, x: Tensor) -> Tensor:
        """`held` + y, in one kernel if there is one."""
        return self._layer(len(x))(x, held)

    @property
    def compiled(self) -> CompiledLinear | None:
        """The layer by `kernels.linear`, if there is one."""
        return next((layer for layer in self._layers if isinstance(layer, CompiledLinear)), None)

    def _layer(self, num_rows: int) -> CompiledLinear | TorchLinear:
        return next(layer for layer in self._layers if layer.serves(num_rows))


class TorchLinear:
    """The layer by oneDNN, and by torch's own linear where oneDNN has no kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._is_packed = can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self._is_packed else weight
        self._bias = None if bias is None else bias.contiguous()

    def serves(self, num_rows: int) -> bool:
        """Always."""
        return True

    def __call__(self, x: Tensor, held: Tensor | None = None) -> Tensor:
        """[tokens, in] → [tokens, out]; `held` is added."""
        if not self._is_packed:
            plain = functional.linear(x, self._weight, self._bias)
            return plain if held is None else held + plain
        y: Tensor
        if held is None:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = torch.ops.mkldnn._linear_pointwise.binary(x, held, self._weight, self._bias, "add")
        return y


class CompiledLinear:
    """The layer by `kernels.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._most_rows = most_rows()
        self._weight = arranged(weight)
        self._bias = None if bias is None else arranged_bias(bias)  # its address is below
        self.num_outputs, self._num_inputs = weight.shape
        self.kernel = linear_kernel(by_pairs=has_pair_products())
        self._arguments = self.arguments()

    def serves(self, num_rows: int) -> bool:
        """Whether this is how so many tokens are computed."""
        return self._most_rows is None or num_rows <= self._most_rows

    def arguments(self) -> Arguments:
        """For the kernel; x, y, held and the number of rows are lacking."""
        return Arguments(
            weights=self._weight.data_ptr(),
            num_inputs=self._num_inputs,
            num_outputs=self.num_outputs,
            bias=0 if self._bias is None else self._bias.data_ptr(),
        )

    def __call__(self, x: Tensor, held: Tensor | None) -> Tensor:
        """[tokens, in] → [tokens, out]; `held` is added."""
        x = x.contiguous()
        y = x.new_empty((len(x), self.num_outputs))
        if not len(x):
            return y
        held = None if held is None else held.contiguous()
        a = self._arguments
        a.x, a.y, a.held = x.data_ptr(), y.data_ptr(), 0 if held is None else held.data_ptr()
        a.num_rows = len(x)
        self.kernel(a, torch.get_num_threads())
        return y


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a kernel for this weight's device and dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
