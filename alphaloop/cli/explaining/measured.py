"""Measurements of a task's last jobs: speculative against control, and the cost of exploration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from alphaloop.acceptance import Z95, Interval
from alphaloop.deciding.decision import Reason
from alphaloop.messages import Mode
from alphaloop.store.traffic import WayDecoded

_TRIED = frozenset({Reason.EXPLORING, Reason.CONTROL})


@dataclass(frozen=True, slots=True)
class Sums:
    """Jobs of several ways together."""

    num_jobs: int = 0
    num_tokens: int = 0
    device_s: float = 0.0
    tokens_sq: float = 0.0
    device_s_sq: float = 0.0
    tokens_device_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of the device's time; None without any."""
        return self.num_tokens / self.device_s if self.device_s > 0 else None

    @property
    def relative_variance(self) -> float:
        """Of `tokens_per_s`, over its square: the ratio estimator's, jobs being independent (Cochran 1977, §6.4)."""
        n, t, d = self.num_jobs, self.num_tokens, self.device_s
        if n < 2 or not t or not d:
            return math.inf
        spread = self.tokens_sq / t**2 - 2 * self.tokens_device_s / (t * d) + self.device_s_sq / d**2
        return max(0.0, spread) * n / (n - 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of the last jobs."""

    ways: Sequence[WayDecoded]
    speculative: Sums  #: as chosen, trials left out
    controls: Sums  #: drawn at random to be decoded vanilla
    speedup: Interval | None  #: of the first over the second; None before both were seen twice
    explored: Sums
    all: Sums

    @property
    def lost(self) -> float | None:
        """Share of the device's time that exploration and controls took beyond what the choice would have taken.

        None where nothing but trials was decoded.
        """
        tried = _together(way for way in self.ways if way.reason in _TRIED)
        chosen = _together(way for way in self.ways if way.reason not in _TRIED)
        if not chosen.num_tokens or not self.all.device_s:
            return None
        return (tried.device_s - tried.num_tokens * chosen.device_s / chosen.num_tokens) / self.all.device_s


def measured(ways: Sequence[WayDecoded]) -> Measured:
    """The figures of these ways."""
    speculative = _together(w for w in ways if w.mode == Mode.SPECULATIVE and w.reason not in _TRIED)
    controls = _together(w for w in ways if w.reason == Reason.CONTROL)
    explored = _together(w for w in ways if w.reason == Reason.EXPLORING)
    return Measured(ways, speculative, controls, _ratio(speculative, controls), explored, _together(ways))


def _ratio(one: Sums, other: Sums) -> Interval | None:
    above, below = one.tokens_per_s, other.tokens_per_s
    spread = math.sqrt(one.relative_variance + other.relative_variance)
    if above is None or below is None or not below or not math.isfinite(spread):
        return None
    ratio = above / below
    return Interval(ratio, ratio * math.exp(-Z95 * spread), ratio * math.exp(Z95 * spread))


def _together(ways: Iterable[WayDecoded]) -> Sums:
    found = list(ways)
    return Sums(**{field.name: sum(getattr(way, field.name) for way in found) for field in fields(Sums)})
