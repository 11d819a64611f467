"""How Python becomes machine code here: numba, with types that numba itself does not tell."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from worker.decoding.network.kernels.machine_code import Loaded, MachineCode, emitted, kept
from worker.decoding.network.kernels.threads import Kernel, openmp

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")

#: Sums may be split over the lanes of vector units; numbers that are not finite are not expected.
_OPTIONS: Final[Any] = {"fastmath": True, "error_model": "numpy"}
#: Nothing calls these but kernels: what Python or C would call them through need not be compiled.
_ONLY_INSIDE: Final[Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

# It logs every line of what it compiles.
logging.getLogger("numba").setLevel(logging.WARNING)


def inlined(function: Function) -> Function:
    """A function that is compiled into each place that calls it: cheaper than its own where that is one."""
    made: Function = numba.njit(inline="always", **_OPTIONS)(function)
    return made


def compiled(function: Function) -> Function:
    """A function that kernels call."""
    made: Function = numba.njit(**_OPTIONS, **_ONLY_INSIDE)(function)
    return made


def kernel(build: Callable[Arguments, Callable[[Any], None]]) -> Callable[Arguments, Kernel]:
    """The kernel of a function that `build` returns for its arguments: of the address of its own, `void(void *)`.

    What `build` returns may depend on its arguments, its source file, this package and the processor. A kernel of the
    same arguments is compiled once on a machine (`machine_code.py`).
    """

    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Kernel:
        _register_helpers()
        what = f"{build.__module__}.{build.__qualname__} {args} {sorted(kwargs.items())}"
        code = kept(what, Path(build.__code__.co_filename), lambda: _emitted(build(*args, **kwargs)))
        return Kernel(build.__name__, Loaded(code))

    return cast(Callable[Arguments, Kernel], functools.cache(made))


def _emitted(function: Callable[[Any], None]) -> MachineCode:
    """numba's optimised assembly, turned into machine code here, in this process as for all others."""
    compiled = numba.cfunc(types.void(types.voidptr), **_OPTIONS)(function)
    return emitted(compiled.native_name, compiled.inspect_llvm())


@functools.cache
def _register_helpers() -> None:
    """Make known what compiled code calls by name: OpenMP, and helpers that numba registers when it first compiles."""
    openmp()
    numba.cfunc(types.void(types.voidptr))(lambda address: None).address  # noqa: B018


def _inttoptr(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_pointer: Final[Any] = intrinsic(_inttoptr)


def _add_one(typing_context: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        taken = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", taken, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(arguments), generate


#: `take(arguments)`: the next item of a kernel's work, from 0 on; no other thread gets the same. `arguments`: the
#: address of its arguments, an integer. Inside kernels.
take: Final[Any] = intrinsic(_add_one)


@inlined
def array(address: Any, shape: Any, dtype: Any) -> Any:
    """Memory at an address (an integer) as an array of `shape`, without a copy. Inside kernels."""
    return numba.carray(_pointer(address), shape, dtype)


@inlined
def float_of(bits: Any) -> Any:
    """The float64 of an argument's bits. Inside kernels."""
    return np.int64(bits).view(np.float64)
