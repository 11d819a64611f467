"""Names of devices in the settings. Whether a host has the device is checked where torch is loaded."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

AUTO: Final = "auto"
EXPECTED: Final = "expected auto, cpu, cuda, or cuda:N with the number of a GPU, as in cuda:1"
# Not every name that torch takes: sampled jobs are verified in float64, which for example `mps` does not have.
_KNOWN: Final = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d{0,2}))?")


def is_device_name(name: str) -> bool:
    """Whether a setting may name this device."""
    return _KNOWN.fullmatch(name) is not None


def _refuse_unknown(name: str) -> str:
    if not is_device_name(name):
        raise PydanticCustomError("device", EXPECTED)
    return name


DeviceName = Annotated[str, AfterValidator(_refuse_unknown)]
