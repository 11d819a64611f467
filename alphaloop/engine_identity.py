"""What decodes: the name of an engine on a device, under which evidence and costs are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: How the device of inference servers is named: several workers may ask the same servers.
SERVERS: Final = "servers "


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What decodes: part of the key of all evidence and of every stored cost."""

    engine: str  #: library, version and dtype, `transformers-5.23.0-bfloat16`: another dtype is another history
    target: str  #: name under which the target is served
    target_revision: str  #: hash of the weights that were loaded
    dtype: str
    device: str  #: as a person would name it: `cpu-2-threads`, `NVIDIA H200`, `NVIDIA L4, small on cpu-2-threads`
    context_length: int  #: tokens of prompt and output together
    host: str  #: the machine: costs of one machine say nothing of another

    @property
    def has_shared_device(self) -> bool:
        """Whether other workers with a device of this name have the same device, and not only an equal one."""
        return self.device.startswith(SERVERS)
