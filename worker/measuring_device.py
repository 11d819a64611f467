"""The part of an engine that measures what it runs on: memory, and the times of rounds and prompts."""

from __future__ import annotations

from typing import Protocol

from worker.cache_memory import CacheMemory


class MeasuringDevice(Protocol):
    """What decodes, as costs and memory see it."""

    def memory(self) -> CacheMemory | None:
        """Memory for keys and values, as it is now; None where servers have the memory."""

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """Median milliseconds of one target pass of that shape, or of that drafter's proposal for it.

        Every sequence has `context` tokens before. Scratch sequences: whatever runs is not touched. A server's drafter
        is measured with its pass: see CostKind.SERVED.
        """

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """Median milliseconds in which the target, or that drafter, reads a prompt it has never seen."""
