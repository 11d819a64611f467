"""Kernels that run one after the other in one call, each on all threads.

A pass of SmolLM2 runs some 270 kernels. Called one by one from Python, they took 3 to 4 ms more. Each of
those calls also gave the interpreter to another thread and waited for it again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.network.kernels.compiling import array, kernel
from engine.network.kernels.threads import Kernel, arguments, team_functions


@arguments
class _Arguments(ctypes.Structure):
    taken: int
    calls: int  #: int64 [calls, 2]: addresses of a kernel and of its arguments
    num_calls: int


_LAYOUT: Final = np.dtype(_Arguments)


class Program:
    """A list of kernels with their arguments, which may be changed between two runs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Kernel, ctypes.Structure]] = []
        self._addresses = np.empty((0, 2), np.int64)

    def __len__(self) -> int:
        return len(self.calls)

    def add(self, kernel: Kernel, arguments: ctypes.Structure) -> None:
        """One more call. Its arguments have to be those of no other call."""
        self.calls.append((kernel, arguments))

    def run(self, num_calls: int) -> None:
        """The first calls. Whatever arguments point to has to live until this returns."""
        if len(self._addresses) != len(self.calls):
            rows = [(kernel.address, ctypes.addressof(arguments)) for kernel, arguments in self.calls]
            self._addresses = np.array(rows, np.int64)
        _runner()(_Arguments(calls=self._addresses.ctypes.data, num_calls=num_calls), torch.get_num_threads())


@kernel
def _runner() -> Callable[[Any], None]:
    thread, _, wait_for_all = team_functions()

    def run(address: Any) -> None:
        a = numba.carray(address, (1,), _LAYOUT)[0]
        calls = array(a.calls, (a.num_calls, 2), np.int64)
        if thread() == 0:
            for number in range(len(calls)):
                array(calls[number, 1], (1,), np.int64)[0] = 0  # taken
        wait_for_all()
        for number in range(len(calls)):
            _call(calls[number, 0], calls[number, 1])
            wait_for_all()

    return run


def _generate_call(typing_context: Any, function: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function, arguments = values
        kind = ir.FunctionType(ir.VoidType(), [arguments.type])
        builder.call(builder.inttoptr(function, kind.as_pointer()), [arguments])
        return context.get_dummy_value()

    return types.void(function, arguments), generate


#: Calls a kernel with its arguments; both are addresses, as integers.
_call: Final[Any] = intrinsic(_generate_call)
