"""Kernels kept on disk: compiled once, never out of date, and only where nobody else could have written them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import pytest
from llvmlite import binding

from engine.network.kernels import compiling
from engine.network.kernels.compiling import MachineCode, array, kept, kernel, take
from engine.network.kernels.pointwise import LAYOUT, PointwiseArguments
from engine.network.kernels.threads import Kernel, openmp, team_functions

pytestmark = pytest.mark.skipif(openmp() is None, reason="there is no OpenMP runtime to call")

CODE = MachineCode("double", b"\x7fELF and more\n with a line end")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "cache" / "kernels"
    monkeypatch.setattr(compiling, "folder", lambda: found)
    return found


def is_kept(name: str = "double (8,)", source: Path = Path(__file__)) -> bool:
    """Whether the code comes from a file: else the one compiler is asked."""
    compilers = [CODE]
    assert kept(name, source, compilers.pop) == CODE
    return bool(compilers)


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_what_was_compiled_once_is_read(folder: Path) -> None:
    assert [is_kept(), is_kept(), is_kept("double (16,)"), is_kept("double (16,)")] == [False, True, False, True]
    assert [oct(file.stat().st_mode & 0o777) for file in folder.iterdir()] == ["0o600", "0o600"]
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: whole + b"x",
        lambda whole: whole.replace(b"ELF", b"elf"),
        lambda whole: whole.replace(b"sha256", b"sha255"),
        lambda whole: whole.replace(b"symbol", b"symbal"),
        lambda whole: b"[1, 2]\n" + whole,
        lambda whole: b"\xff\n" + whole,
    ],
)
def test_a_damaged_file_is_written_anew(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    is_kept()
    file = only_file(folder)
    file.write_bytes(damage(file.read_bytes()))
    assert [is_kept(), is_kept()] == [False, True]


@pytest.mark.parametrize("mode", [0o620, 0o602])
@pytest.mark.parametrize("which", ["file", "folder"])
def test_where_others_may_write_nothing_is_read(folder: Path, which: str, mode: int) -> None:
    is_kept()
    place = only_file(folder) if which == "file" else folder
    place.chmod(mode | 0o100 if which == "folder" else mode)
    assert not is_kept()


def test_a_link_and_a_file_of_another_user_are_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_kept()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not is_kept()
    file, elsewhere = only_file(folder), tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert not is_kept()


def test_no_place_to_keep_it_stops_nothing(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    assert [is_kept(), is_kept()] == [False, False]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (numba, "__version__", "0.0.1"),
        (llvmlite, "__version__", "0.0.1"),
        (binding, "llvm_version_info", (1, 2, 3)),
        (binding, "get_host_cpu_name", lambda: "another"),
        (numba.config, "CPU_NAME", "another"),
        (numba.config, "CPU_FEATURES", "+avx2"),
        (numba.config, "ENABLE_AVX", 0),
        (compiling, "_package", lambda: "others"),
    ],
)
def test_another_compiler_processor_or_source_has_another_file(
    owner: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_kept()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, value)
        assert not is_kept()
    assert is_kept()
    monkeypatch.setenv("NUMBA_OPT", "1")
    assert not is_kept()


def test_an_edited_source_has_another_file_and_a_missing_one_has_none(tmp_path: Path) -> None:
    source = tmp_path / "double.py"
    assert [is_kept(source=source), is_kept(source=source)] == [False, False]
    source.write_text("2 * x")
    assert [is_kept(source=source), is_kept(source=source)] == [False, True]
    source.write_text("x + x")
    assert [is_kept(source=source), is_kept(source=source)] == [False, True]


NUM_BUILT: list[int] = []


def build(factor: int) -> Callable[[Any], None]:
    """y = factor · x of whole rows, shared by the threads."""
    NUM_BUILT.append(factor)
    _, team, _ = team_functions()

    def scale(address: Any) -> None:
        a = numba.carray(address, (1,), LAYOUT)[0]
        shape = a.num_rows, a.size
        x, y = array(a.x, shape, np.float64), array(a.y, shape, np.float64)
        row = take(address)
        while row < len(x):
            for i in range(x.shape[1]):
                y[row, i] = factor * x[row, i] if team() == 2 else 0.0
            row = take(address)

    return scale


def scaled_by(made: Kernel) -> float:
    x, y = np.arange(12.0).reshape(4, 3), np.zeros((4, 3))
    made(PointwiseArguments(x=x.ctypes.data, y=y.ctypes.data, num_rows=4, size=3), 2)
    assert np.array_equal(y, y[0, 1] * x)
    return float(y[0, 1])


def test_a_kernel_from_a_file_computes_without_being_built(folder: Path) -> None:
    NUM_BUILT.clear()
    first, again, other = kernel(build)(3), kernel(build)(3), kernel(build)(5)
    assert [scaled_by(made) for made in (first, again, other)] == [3.0, 3.0, 5.0]
    assert NUM_BUILT == [3, 5]
    assert len(list(folder.iterdir())) == 2
