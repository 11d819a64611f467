"""A `KeyEvidence` as bytes, as a row of acceptance_state holds it.

Big-endian doubles: the sums that are one number each, then, array by array, those by draft position, all of one length.
First those of `KeyEvidence.all`, then those of `KeyEvidence.recent`. The view evidence_now reads the same.
"""

from __future__ import annotations

import struct
from datetime import datetime
from typing import Any, Final

from alphaloop.deciding.evidence import EvidenceSums, KeyEvidence
from alphaloop.errors import StoreError

#: Stored rows depend on these names and their order: only a migration that rewrites the rows may change them.
_NUMBERS: Final = (
    "jobs",
    "jobs_w2",
    "rounds",
    "offered",
    "tokens",
    "output_tokens",
    "output_tokens_sq",
    "prompt_tokens",
    "texts",
    "ends",
)
_BY_POSITION: Final = (
    "proposed",
    "chances",
    "trials",
    "accepts",
    "trials_w2",
    "accepts_w2",
    "accepts_trials_w2",
    "chances_w2",
    "accepts_chances_w2",
)


def pack(evidence: KeyEvidence) -> bytes:
    """The bytes of the evidence, without its moment."""
    both = (evidence.all, evidence.recent)
    length = max(len(getattr(sums, name)) for sums in both for name in _BY_POSITION)
    values: list[float] = []
    for sums in both:
        values += [getattr(sums, name) for name in _NUMBERS]
        for name in _BY_POSITION:
            of_it = getattr(sums, name)
            values += of_it
            values += [0.0] * (length - len(of_it))
    return struct.pack(f">{len(values)}d", *values)


def unpack(packed: bytes, as_of: datetime) -> KeyEvidence:
    """The evidence from the bytes of `pack`; empty for no bytes. Raises StoreError for anything else."""
    if not packed:
        return KeyEvidence.empty(as_of)
    num_values, rest = divmod(len(packed), 16)
    length, more = divmod(num_values - len(_NUMBERS), len(_BY_POSITION))
    if rest or more or length < 0:
        raise StoreError(
            f"expected twice {len(_NUMBERS)} sums and {len(_BY_POSITION)} by position, found {len(packed)} bytes"
        )
    values = struct.unpack(f">{2 * num_values}d", packed)
    return KeyEvidence(_sums(values[:num_values], length, as_of), _sums(values[num_values:], length, as_of))


def _sums(values: tuple[float, ...], length: int, as_of: datetime) -> EvidenceSums:
    sums: dict[str, Any] = dict(zip(_NUMBERS, values[: len(_NUMBERS)], strict=True))
    for i, name in enumerate(_BY_POSITION):
        start = len(_NUMBERS) + i * length
        sums[name] = values[start : start + length]
    return EvidenceSums(as_of, **sums)
