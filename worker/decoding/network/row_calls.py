"""Calls of a program that compute the same rows: norms, linear layers, gates, choices of rows."""

from __future__ import annotations

import ctypes

from torch import Tensor

from worker.decoding.network.kernels import linear as linears
from worker.decoding.network.kernels import pointwise
from worker.decoding.network.kernels.pointwise import choice_kernel, gate_kernel, norm_kernel
from worker.decoding.network.kernels.program import Program
from worker.decoding.network.kernels.threads import Kernel
from worker.decoding.network.layers import Norm
from worker.decoding.network.packed import PackedLinear


class RowCalls:
    """Adds calls to a program. Tensors are [rows, size]; a pass computes their first rows, and they have to live."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._arguments: list[ctypes.Structure] = []

    def set_num_rows(self, num_rows: int) -> None:
        """How many rows the next pass computes."""
        for arguments in self._arguments:
            arguments.num_rows = num_rows

    def norm(self, norm: Norm, x: Tensor, y: Tensor, *, held: Tensor | None = None) -> None:
        """y = norm(x) + held."""
        weight, epsilon = norm.weight.data_ptr(), norm.epsilon
        a = pointwise.Arguments(x=x.data_ptr(), y=y.data_ptr(), size=x.shape[1], weight=weight, epsilon=epsilon)
        a.held = _address(held)
        self._add(norm_kernel(x.dtype), a)

    def linear(
        self, linear: PackedLinear, x: Tensor, y: Tensor | None, *, held: Tensor | None = None
    ) -> linears.Arguments:
        """y = linear(x) + held. Without y its address is set in the arguments, which are returned, for each pass."""
        if linear.compiled is None:
            raise ValueError("expected a linear layer with a kernel")
        a = linear.compiled.arguments()
        a.x, a.y, a.held = x.data_ptr(), _address(y), _address(held)
        self._add(linear.compiled.kernel, a)
        return a

    def gate(self, gates_and_ups: Tensor, y: Tensor, activation: str) -> None:
        """y = activation(gates) * ups."""
        a = pointwise.Arguments(x=gates_and_ups.data_ptr(), y=y.data_ptr(), size=y.shape[1])
        self._add(gate_kernel(y.dtype, activation), a)

    def choose(self, x: Tensor, y: Tensor) -> pointwise.Arguments:
        """Rows of x. The address of their numbers is set in the arguments, which are returned, for each pass."""
        a = pointwise.Arguments(x=x.data_ptr(), y=y.data_ptr(), size=x.shape[1])
        self._add(choice_kernel(x.dtype), a)
        return a

    def _add(self, kernel: Kernel, arguments: ctypes.Structure) -> None:
        self._program.add(kernel, arguments)
        self._arguments.append(arguments)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
