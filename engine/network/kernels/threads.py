"""Compiled functions on torch's own threads, which share the items of a kernel's work.

A second pool of threads would fight torch's for the cores: each spins while the other works. GNU OpenMP's entry point
for compiled code, `GOMP_parallel(function, argument, threads, flags)`, is stable, and LLVM's and Intel's runtimes have
it too. Called in the runtime that torch has loaded, it runs a function on the very threads that torch waits with.

Each thread takes the next item when it has finished one. So a thread that another process has kept from its core delays
the others by one item, and not by all that it would have had to do.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final, TypeVar

import torch
from llvmlite import binding
from numba.core import types

_Structure = TypeVar("_Structure", bound=type[ctypes.Structure])

_ENTRY: Final = "GOMP_parallel"
_THREAD: Final = "omp_get_thread_num"
_TEAM: Final = "omp_get_num_threads"
_BARRIER: Final = "GOMP_barrier"


@functools.cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch computes with; None where it cannot be called."""
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return None
    # torch loads its runtime for all to see: the names resolve to the one that its own calls go to.
    runtime = ctypes.CDLL(None)
    try:
        getattr(runtime, _ENTRY).argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        getattr(runtime, _ENTRY).restype = None
        for name in (_THREAD, _TEAM, _BARRIER):
            # Compiled code calls them by name, because an address is another one in the next process.
            binding.add_symbol(name, ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value)
    except AttributeError:
        return None
    return runtime


def team_functions() -> tuple[Any, Any, Any]:
    """What a kernel calls: its thread's number, how many threads there are, and to wait for all of them.

    A kernel need not be called in parallel. Where `openmp` finds no runtime, there are no kernels.
    """
    number = types.int32()
    return (
        types.ExternalFunction(_THREAD, number),
        types.ExternalFunction(_TEAM, number),
        types.ExternalFunction(_BARRIER, types.void()),
    )


def arguments(structure: _Structure) -> _Structure:
    """Lay out the arguments of a kernel: 64 bits for each annotated name, a float64 or an integer.

    The first of every kernel's is `taken`: how many items its threads have taken.
    """
    kinds: dict[str, Any] = {"int": ctypes.c_int64, "float": ctypes.c_double}
    structure._fields_ = [(name, kinds[kind]) for name, kind in structure.__annotations__.items()]
    return structure


class Kernel:
    """One compiled function `void(int64 *arguments)`, which all threads call."""

    def __init__(self, address: int, owner: object) -> None:
        """`owner`: of the machine code at that address."""
        self.address = address
        self._owner = owner
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        self._together: Any = getattr(openmp(), _ENTRY)

    def __call__(self, arguments: ctypes.Structure, num_threads: int) -> None:
        """Run with these arguments. What they point to has to live until this returns."""
        arguments.taken = 0
        if num_threads > 1:
            self._together(self.address, ctypes.addressof(arguments), num_threads, 0)
        else:
            self._alone(ctypes.addressof(arguments))
