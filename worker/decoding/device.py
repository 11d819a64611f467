"""The device that a setting names."""

from __future__ import annotations

import torch

from alphaloop.errors import UnsupportedModel


def find_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises UnsupportedModel for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedModel(f"models.target.device is {name!r}: {error}", hint="auto, cpu, cuda, cuda:1") from error
    return device
