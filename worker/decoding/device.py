"""The devices that the settings name, and which model lies on which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from alphaloop.errors import ConfigError
from alphaloop.settings.device import AUTO
from alphaloop.settings.models import DraftModelDrafterSettings, ModelSettings

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
            name: target if one.device == AUTO else find_device(one.device, setting=f"models.drafters.{name}.device")
            for name, one in models.drafters.items()
            if isinstance(one, DraftModelDrafterSettings)
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
        target = hardware_name(self.target)
        elsewhere = [
            f"{drafter} on {'another ' if hardware_name(device) == target else ''}{hardware_name(device)}"
            for drafter, device in sorted(self.drafts.items())
            if device != self.target
        ]
        return ", ".join((target, *elsewhere))


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
    num_seen = torch.cuda.device_count()
    if not num_seen:
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


def hardware_name(device: torch.device) -> str:
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
