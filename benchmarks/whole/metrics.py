"""What a run reads from the worker's /metrics: sums of two histograms, before and after."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.whole.product import STEP_BATCH, STEP_SECONDS

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StepSums:
    """Steps of the engine since the worker started."""

    num_steps: int
    num_sequence_steps: int  #: sequences of all steps, added up
    step_s: float

    def since(self, before: StepSums) -> StepSums:
        """What came behind `before`."""
        return StepSums(
            self.num_steps - before.num_steps,
            self.num_sequence_steps - before.num_sequence_steps,
            self.step_s - before.step_s,
        )

    def occupied(self, num_slots: int) -> float | None:
        """Mean share of the slots that held a sequence in a step; None without steps."""
        return self.num_sequence_steps / (self.num_steps * num_slots) if self.num_steps else None


def read_step_sums(address: str) -> StepSums:
    """Ask the worker at `http://host:port`. Raises OSError where it does not answer."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=_TIMEOUT_S) as answer:
        return parse_step_sums(answer.read().decode())


def parse_step_sums(exposition: str) -> StepSums:
    """From Prometheus' text format. Raises ValueError that names a histogram which is not there."""
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if not sample.labels
    }
    try:
        return StepSums(
            int(samples[f"{STEP_BATCH}_count"]), int(samples[f"{STEP_BATCH}_sum"]), samples[f"{STEP_SECONDS}_sum"]
        )
    except KeyError as missing:
        raise ValueError(f"the worker's metrics have no {missing.args[0]}") from None


def is_ready(address: str) -> bool:
    """Whether the worker consumes: /readyz answers 200 once partitions are assigned."""
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False
