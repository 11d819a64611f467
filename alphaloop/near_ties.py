"""How far apart rounding may move two logits, so that greedy texts of the same prompt part and both are right."""

from __future__ import annotations

from typing import Final

#: By dtype, of logits of about 20. In bfloat16, whose neighbours are .125 apart there, 14 of 40 texts of SmolLM2
#: parted, all within .126.
_TOLERANCE: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}


def tolerance_of(dtype: str) -> float:
    """The largest gap of a near-tie; a dtype that is not known has bfloat16's."""
    return _TOLERANCE.get(dtype, _TOLERANCE["bfloat16"])
