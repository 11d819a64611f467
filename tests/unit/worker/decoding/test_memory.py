"""Bytes that a model takes, and bytes that are left."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.decoding.device import available_bytes, available_host_bytes, pass_bytes
from worker.decoding.network.kv_layout import KvShape

GB = 10**9


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def config(**found: Any) -> Any:
    made = SimpleNamespace(num_hidden_layers=30, num_attention_heads=9, hidden_size=576, **found)
    made.get_text_config = lambda: made
    return made


def test_keys_and_values_of_a_position() -> None:
    assert KvShape.of(config(num_key_value_heads=3), torch.bfloat16).bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert (
        KvShape.of(config(num_key_value_heads=3, head_dim=128), torch.float32).bytes_per_token == 2 * 30 * 3 * 128 * 4
    )
    assert KvShape.of(config(), torch.bfloat16).bytes_per_token == 2 * 30 * 9 * 64 * 2


def test_logits_and_probabilities_of_a_row() -> None:
    assert pass_bytes(49_152, 6) == 6 * 49_152 * 12


def test_without_a_limit_the_kernel_is_believed(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  7000000 kB\n", "proc/self/cgroup": "0::/\n"}
    assert available_host_bytes(write(tmp_path, files)) == 7_000_000 * 1024
    assert available_host_bytes(write(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})) == 7_000_000 * 1024


@pytest.mark.parametrize("path", ["/", "/pod/container"])
def test_a_container_of_either_version_allows_what_its_limit_leaves(tmp_path: Path, path: str) -> None:
    meminfo = {"proc/meminfo": f"MemAvailable: {64 * GB // 1024} kB\n"}
    two = {
        **meminfo,
        "proc/self/cgroup": f"0::{path}\n",
        f"sys/fs/cgroup{path}/memory.max": f"{4 * GB}\n",
        f"sys/fs/cgroup{path}/memory.current": f"{3 * GB}\n",
        f"sys/fs/cgroup{path}/memory.stat": f"anon {GB}\ninactive_file {GB}\n",
    }
    assert available_host_bytes(write(tmp_path / "two", two)) == 2 * GB
    one = {
        **meminfo,
        "proc/self/cgroup": f"9:cpu:/x\n4:memory:{path}\n",
        f"sys/fs/cgroup/memory{path}/memory.limit_in_bytes": f"{4 * GB}\n",
        f"sys/fs/cgroup/memory{path}/memory.usage_in_bytes": f"{3 * GB}\n",
        f"sys/fs/cgroup/memory{path}/memory.stat": f"total_inactive_file {GB}\n",
    }
    assert available_host_bytes(write(tmp_path / "one", one)) == 2 * GB


def test_a_group_around_ours_may_be_the_tighter_one(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemAvailable: {64 * GB // 1024} kB\n",
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/container/memory.max": "max\n",
        "sys/fs/cgroup/pod/container/memory.current": f"{GB}\n",
        "sys/fs/cgroup/pod/memory.max": f"{5 * GB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{2 * GB}\n",
    }
    assert available_host_bytes(write(tmp_path, files)) == 3 * GB


def test_version_one_without_a_limit_names_a_huge_one(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 1000 kB\n",
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
    }
    assert available_host_bytes(write(tmp_path, files)) == 1000 * 1024


def test_this_machine_has_some_left() -> None:
    assert 0 < available_bytes(torch.device("cpu")) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_that_torch_keeps_is_free_on_a_gpu() -> None:
    device = torch.device("cuda")
    before = available_bytes(device)
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert available_bytes(device) <= before - held.numel()
    del held
    assert available_bytes(device) >= before - (1 << 28)
