"""How Python becomes machine code here, and where that is kept, so that a machine compiles a kernel once.

numba compiles, with types that numba itself does not state. The kernels of one model take it some ten seconds, and a
hundredth of that to load. A file is named by a hash of all that its code depends on: the kernel and its
arguments, the sources of this package, the versions and settings of the compilers, and the processor. So nothing is
ever out of date, and the folder may be deleted at any time.

A file is code that this process runs. It counts only if folder and file belong to this user and no other user may
write to them; else, and where a file is damaged or there is no place to keep one, the kernel is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

import llvmlite
import numba
import platformdirs
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from alphaloop.files import replace_file
from engine.network.kernels.threads import Kernel, openmp

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Parameters = ParamSpec("_Parameters")

#: Sums may be split over the lanes of vector units; numbers that are not finite are not expected.
_OPTIONS: Final[Any] = {"fastmath": True, "error_model": "numpy"}
#: Nothing calls these but kernels: what Python or C would call them through need not be compiled.
_ONLY_INSIDE: Final[Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

# It logs every line of what it compiles.
logging.getLogger("numba").setLevel(logging.WARNING)


def inlined(function: _Function) -> _Function:
    """A function that is compiled into each place that calls it: cheaper than its own where that is one."""
    function_inlined: _Function = numba.njit(inline="always", **_OPTIONS)(function)
    return function_inlined


def compiled(function: _Function) -> _Function:
    """A function that kernels call."""
    function_compiled: _Function = numba.njit(**_OPTIONS, **_ONLY_INSIDE)(function)
    return function_compiled


def kernel(build: Callable[_Parameters, Callable[[Any], None]]) -> Callable[_Parameters, Kernel]:
    """The kernel of a function that `build` returns for its arguments: of the address of its own, `void(void *)`.

    What `build` returns may depend on its arguments, its source file, this package and the processor. A kernel of the
    same arguments is compiled once on a machine.
    """

    def made(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Kernel:
        _register_helpers()
        what = f"{build.__module__}.{build.__qualname__} {args} {sorted(kwargs.items())}"
        return _loaded(kept(what, Path(build.__code__.co_filename), lambda: _emitted(build(*args, **kwargs))))

    return cast(Callable[_Parameters, Kernel], functools.cache(made))


def _emitted(function: Callable[[Any], None]) -> MachineCode:
    """numba's optimised assembly, turned into machine code here, in this process as for all others."""
    compiled = numba.cfunc(types.void(types.voidptr), **_OPTIONS)(function)
    return MachineCode(compiled.native_name, _host().emit_object(binding.parse_assembly(compiled.inspect_llvm())))


def _loaded(code: MachineCode) -> Kernel:
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _host())
    engine.add_object_file(binding.ObjectFileRef.from_data(code.content))
    engine.finalize_object()
    return Kernel(engine.get_function_address(code.symbol), engine)


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
        taken = builder.bitcast(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", taken, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(arguments), generate


#: `take(address)`: the next item of a kernel's work, from 0 on; no other thread gets the same. `address`: that of its
#: arguments, as the kernel gets it.
take: Final[Any] = intrinsic(_add_one)


@inlined
def array(address: Any, shape: Any, dtype: Any) -> Any:
    """Memory at an address (an integer) as an array of `shape`, without a copy. Inside kernels."""
    return numba.carray(_pointer(address), shape, dtype)


#: The form of the files.
_FORM: Final = 1
#: Beyond this size no file is read. Kernels have 4 to 70 kB.
_MOST_BYTES: Final = 16 << 20
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class MachineCode:
    """An object file, and the function in it."""

    symbol: str
    content: bytes


def kept(kernel: str, source: Path, compile_it: Callable[[], MachineCode]) -> MachineCode:
    """The code of `kernel`, which says what is compiled: from its file, else compiled now and kept.

    `source` is the file that the kernel is written in; where it cannot be read, nothing is kept.
    """
    if not source.is_file():
        return compile_it()
    file = folder() / _name_of(kernel, source)
    if (code := _read(file)) is not None:
        return code
    code = compile_it()
    with contextlib.suppress(OSError):  # a disk that is full, or read-only: the next process compiles again
        _write(file, code)
    return code


def folder() -> Path:
    """Where the files lie."""
    return platformdirs.user_cache_path("alphaloop", appauthor=False) / "kernels"


def _host() -> Any:
    """For the processor that numba compiles for. Each engine takes one for itself."""
    name, features = _processor()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=name, features=features, opt=3, codemodel="jitdefault", jit=True)


def _processor() -> tuple[str, str]:
    """Its name and features: the host's, unless numba's settings say for which one to compile."""
    config, features = cast(Any, numba.config), binding.get_host_cpu_features()
    if not config.ENABLE_AVX:
        features.update({name: False for name in features if name.startswith("avx")})
    return (
        config.CPU_NAME or binding.get_host_cpu_name(),
        features.flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES,
    )


def _name_of(kernel: str, source: Path) -> str:
    facts = {
        "form": _FORM,
        "kernel": kernel,
        "source": hashlib.sha256(source.read_bytes()).hexdigest(),
        "package": _package(),
        "versions": [platform.python_version(), numba.__version__, llvmlite.__version__, *binding.llvm_version_info],
        "processor": [platform.machine(), *_processor()],
        "settings": sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_")),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@functools.cache
def _package() -> str:
    """A hash of this package's files, and of the layout of the cache that kernels read."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*here.glob("*.py"), here.parent / "kv_layout.py"]):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> MachineCode | None:
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not (_is_ours(file.parent.lstat()) and _is_ours(status)) or status.st_size > _MOST_BYTES:
                return None
            head, _, content = opened.read().partition(b"\n")
        stated = json.loads(head)
        if stated["sha256"] != hashlib.sha256(content).hexdigest():
            return None
        return MachineCode(str(stated["symbol"]), content)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, code: MachineCode) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(file.parent.lstat()):
        return
    head = {"symbol": code.symbol, "sha256": hashlib.sha256(code.content).hexdigest()}
    replace_file(file, json.dumps(head).encode() + b"\n" + code.content, mode=0o600)


def _is_ours(status: os.stat_result) -> bool:
    """Whether this is a file or folder of this user that no other user may write, and no link."""
    is_link = stat.S_ISLNK(status.st_mode)
    return not is_link and status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
