"""The product's own functions, compiled: a run length of 50,000 jobs takes tens of millions of jobs to measure."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

import numba
from numba.core import config

#: In the order in which they use each other. The last one is no part of the product: it notes when alarms are raised.
_MODULES: Final = (
    "scheduler.drift.memory",
    "scheduler.drift.phases",
    "benchmarks.drift.raising",
)


def compiled_alarms(cache: Path) -> Callable[..., int]:
    """`benchmarks.drift.raising.alarms` with every function that it calls, compiled from their sources as they stand.

    What was compiled is kept in a folder of `cache` that is named by all sources together.
    """
    config.CACHE_DIR = str(cache / _sources())
    done: dict[FunctionType, Any] = {}
    module: ModuleType | None = None
    for name in _MODULES:
        module = _copy(name)
        original = sys.modules[name]
        for its, value in vars(original).items():
            if isinstance(value, FunctionType) and value.__module__ in _MODULES:
                if value.__module__ == name:
                    done[value] = numba.njit(cache=True)(getattr(module, its))
                setattr(module, its, done[value])
    assert module is not None
    alarms: Callable[..., int] = module.alarms
    return alarms


def _sources() -> str:
    parts = [Path(str(importlib.import_module(name).__file__)).read_bytes() for name in _MODULES]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _copy(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    importlib.import_module(name)
    spec.loader.exec_module(module)
    # Tuples with names keep one type on both sides.
    for its, value in vars(sys.modules[name]).items():
        if isinstance(value, type):
            setattr(module, its, value)
    return module
