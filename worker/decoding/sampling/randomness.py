"""Random numbers that follow from a key and a counter: the same in every process, on every device, in any order.

SplitMix64 (Steele, Lea, Flood 2014, with the finaliser of its reference code) over `key + counter · γ`. Only integers
are mixed, which are exact everywhere, so a number can be computed where and when it is needed, for a few tokens as
well as for the whole vocabulary. torch's CPU generator keeps 32 bits of its seed, which makes different seeds equal.
"""

from __future__ import annotations

import hashlib
from typing import Final

from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GAMMA: Final = _signed(0x9E3779B97F4A7C15)
# Shift and multiplier of each mixing step; torch shifts int64 arithmetically, the mask makes it logical.
_STEPS: Final = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def key_of(*parts: int | str) -> int:
    """A key, signed 64 bits, for what the parts name."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big", signed=True)


def uniforms(key: int | Tensor, counters: Tensor) -> Tensor:
    """Draws from (0, 1) in float64, one a counter. `key` and `counters` (int64) broadcast against each other."""
    bits = counters * _GAMMA + key
    for shift, multiplier in _STEPS:
        bits ^= (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if multiplier != 1:
            bits *= multiplier
    # 52 bits and a half are still exact, so that neither 0 nor 1 is ever drawn.
    bits >>= 12
    bits &= (1 << 52) - 1
    return bits.double().add_(0.5).mul_(2.0**-52)


def gumbel(key: int | Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel draws in float64, one a counter.

    argmax(log p + gumbel) is distributed as p (Gumbel 1954; Maddison et al. 2014). Taken as -log(-log1p(-u)): winners
    have a small u, where it is the most precise.
    """
    return uniforms(key, counters).neg_().log1p_().neg_().log_().neg_()
