"""The devices that the settings name, which model lies on which, how much memory is left there, and how they fail."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from alphaloop.errors import ConfigError
from alphaloop.settings.models import AUTO, ModelSettings

TARGET_SETTING = "models.target.device"
#: In the words of errors that a GPU, its driver or its libraries raise as plain RuntimeErrors.
_FAULTS: Final = (
    "CUDA error",
    "CUDA driver error",
    "CUBLAS_STATUS",
    "CUDNN_STATUS",
    "Error [CUDA]",
    "HIP error",
    "HIPBLAS_STATUS",
    "MIOPEN_STATUS",
    "Error [HIP]",
)


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of the target, and of each draft model. Look-up is in no placement: it keeps nothing on a device."""

    target: torch.device
    drafts: Mapping[str, torch.device] = field(default_factory=dict)  #: by drafter

    @classmethod
    def of(cls, models: ModelSettings) -> Placement:
        """Raises ConfigError for a device that this host does not have, before anything is loaded."""
        target = find_device(models.target.device)
        drafts = {
            name: target if draft.device == AUTO else find_device(draft.device, setting=_device_setting(name))
            for name, settings in models.drafters.items()
            if (draft := settings.draft_model) is not None
        }
        return cls(target, drafts)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All of them, each once, the target's first."""
        return tuple(dict.fromkeys((self.target, *self.drafts.values())))

    @property
    def name(self) -> str:
        """The hardware, as a person would name it: `NVIDIA H100, small on cpu-16-threads`.

        Costs, measured speed-ups and choices are stored under it, because all of them are others where a draft model
        lies elsewhere. A GPU's number is no part of it: workers that have a pair of GPUs each share what they measured.
        """
        target = _hardware_name(self.target)
        elsewhere = [
            f"{drafter} on {'another ' if _hardware_name(device) == target else ''}{_hardware_name(device)}"
            for drafter, device in sorted(self.drafts.items())
            if device != self.target
        ]
        return ", ".join((target, *elsewhere))


def _device_setting(drafter: str) -> str:
    return f"models.drafters.{drafter}.device"


def find_device(name: str, *, setting: str = TARGET_SETTING) -> torch.device:
    """The device with its number; `auto` is the first GPU, and the CPU where there is none.

    Raises ConfigError, which names `setting`, for a GPU that this process does not see.
    """
    if name == AUTO:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    device = torch.device("cuda", device.index or 0)
    if torch.version.cuda is None and torch.version.hip is None:
        raise ConfigError(
            f"{setting}: expected a torch that was built for CUDA or ROCm to serve {name!r}, "
            f"found torch {torch.__version__}",
            hint="install such a build of torch, or set cpu or auto",
        )
    if not (num_seen := torch.cuda.device_count()):
        raise ConfigError(
            f"{setting}: expected a GPU that torch can use for {name!r}, found none",
            hint="nvidia-smi shows what the driver sees; CUDA_VISIBLE_DEVICES and the container decide what a process "
            "sees; or set cpu or auto",
        )
    if device.index >= num_seen:
        seen = "cuda:0" if num_seen == 1 else f"cuda:0 to cuda:{num_seen - 1}"
        raise ConfigError(
            f"{setting}: expected one of the {num_seen} GPUs that this process sees ({seen}), found {name!r}",
            hint="GPUs are counted from 0, and only those in CUDA_VISIBLE_DEVICES",
        )
    return device


def _hardware_name(device: torch.device) -> str:
    """What a device is: `NVIDIA H100`, `cpu-16-threads`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}-{torch.get_num_threads()}-threads"


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller batch may succeed where this one failed. On a CPU torch says it in words only."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_device_fault(error: Exception) -> bool:
    """Whether the device failed rather than what ran on it. Afterwards it computes nothing more for this process."""
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _FAULTS)


# Version 1 says "no limit" with the largest number of whole pages.
_UNLIMITED_BYTES: Final = 1 << 60
_LOGITS_BYTES: Final = 4  #: float32
_PROBABILITY_BYTES: Final = 8  #: float64, in which a sampled job is verified


def pass_bytes(vocabulary: int, num_rows: int) -> int:
    """Bytes that the rows of a pass (slots · width) take after the head: logits, and probabilities where sampled."""
    return num_rows * vocabulary * (_LOGITS_BYTES + _PROBABILITY_BYTES)


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on `device` before it, or the container around this process, runs out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds without using it is free too.
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_host_bytes()


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of main memory left: what the kernel calls available, or less where a control group allows less.

    `root` is the file system to read, for tests.
    """
    of_kernel = [line for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    limits = [*(int(line.split()[1]) * 1024 for line in of_kernel), *_from_control_groups(root)]
    return max(0, min(limits)) if limits else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _from_control_groups(root: Path) -> Iterator[int]:
    """What is left in this process's control group, and in every one around it, of either version."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        top = root / mount
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if (left := _left(folder, limit, usage, cache)) is not None:
                yield left
            if folder == top:
                break


def _left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    allowed, used = (next(_lines(folder / name), "") for name in (limit, usage))
    if not allowed.isdigit() or not used.isdigit() or int(allowed) >= _UNLIMITED_BYTES:
        return None
    # Pages of files that were read once count as used, and are given up when memory is wanted.
    fields = (line.split() for line in _lines(folder / "memory.stat"))
    reclaimable = next((int(field[1]) for field in fields if field[0] == cache), 0)
    return int(allowed) - int(used) + reclaimable


def _lines(file: Path) -> Iterator[str]:
    try:
        yield from file.read_text(encoding="ascii").splitlines()
    except OSError:
        return
