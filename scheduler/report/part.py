"""What every part of the report is built on: a frozen model, and a figure with its interval."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict

from alphaloop.acceptance import Interval


class Part(BaseModel):
    """Part of the report."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(Part):
    """A figure with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, interval: Interval) -> Self:
        """An interval as it is published."""
        return cls(mean=interval.mean, low=interval.low, high=interval.high)
