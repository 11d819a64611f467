"""Compiled functions on torch's own threads.

A second pool of threads would fight torch's for the cores: each spins while the other works. GNU OpenMP's entry point
for compiled code, `GOMP_parallel(function, argument, threads, flags)`, is stable, and LLVM's and Intel's runtimes have
it too. Called in the runtime that torch has loaded, it runs a function on the very threads that torch waits with.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from typing import Any, Final

import torch

_ENTRY: Final = "GOMP_parallel"
_THREAD: Final = "omp_get_thread_num"
_TEAM: Final = "omp_get_num_threads"


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
        for name in (_THREAD, _TEAM):
            getattr(runtime, name).argtypes = ()
            getattr(runtime, name).restype = ctypes.c_int
    except AttributeError:
        return None
    return runtime


def thread_functions() -> tuple[Any, Any]:
    """What a kernel calls to know its number and how many there are: it need not be called in parallel."""
    runtime = openmp()
    if runtime is None:
        raise RuntimeError("expected an OpenMP runtime: ask `openmp()` first")
    return getattr(runtime, _THREAD), getattr(runtime, _TEAM)


def argument_fields(places: type[IntEnum], *floats: IntEnum) -> list[tuple[str, type]]:
    """Fields of a ctypes.Structure: 64 bits for each place, by its name in lower case; integers, but for `floats`."""
    return [(place.name.lower(), ctypes.c_double if place in floats else ctypes.c_int64) for place in places]


class Kernel:
    """One compiled function `void(int64 *arguments)`; each thread takes its part of the work by its number."""

    def __init__(self, name: str, compiled: Any) -> None:
        self.name = name
        self._compiled = compiled  # owns the machine code
        self._address: int = compiled.address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._together: Any = getattr(openmp(), _ENTRY)

    def __call__(self, arguments: int, num_threads: int) -> None:
        """Run with the arguments at that address. What they point to has to live until this returns."""
        if num_threads > 1:
            self._together(self._address, arguments, num_threads, 0)
        else:
            self._alone(arguments)
