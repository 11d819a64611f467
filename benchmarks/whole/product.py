"""All that this benchmark knows of the worker and of its engine: when they are renamed, this file changes alone.

The worker is known as a process: a command, its settings in the environment, the event that says it is ready, and its
metrics. The engine is known as `load_engine` and `worker.engine.Engine`; torch is imported when it is loaded.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from alphaloop.deciding.policy import Decision, Reason
from alphaloop.messages import Mode
from alphaloop.settings import load_settings
from benchmarks.whole.jobs import PromptJob

#: As `alphaloop up` starts the worker on one machine.
PROFILE: Final = "local"
READY_EVENT: Final = "worker_ready"
ADDRESS_FIELD: Final = "metrics"  #: of that event: where /metrics and /readyz are
STEP_BATCH: Final = "alphaloop_step_batch_size"  #: histogram: sequences a step
STEP_SECONDS: Final = "alphaloop_step_seconds"  #: histogram: time of a step
#: What the person who runs the benchmark has set must not reach the contestants.
_FOREIGN: Final = ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL")


def python_module(module: str, *arguments: str) -> list[str]:
    """How this interpreter runs a module of the checkout that PYTHONPATH names, whatever the current folder holds."""
    return [sys.executable, "-P", "-m", module, *arguments]


def worker_command(checkout: Path, *, seed: int) -> list[str]:
    """A worker of a checkout with the checkout's own configs."""
    return python_module("worker", "--configs", str(checkout / "configs"), "--profile", PROFILE, "--seed", str(seed))


def migrate_command() -> list[str]:
    """The checkout's own migrations on its database."""
    return python_module("alphaloop.cli", "migrate")


def environment_of(
    checkout: Path, *, broker: str, database_url: str, group: str, num_slots: int, data_dir: Path
) -> dict[str, str]:
    """The environment of the checkout's processes: its own code first, and these servers."""
    kept = {
        name: value for name, value in os.environ.items() if name not in _FOREIGN and not name.startswith("ALPHALOOP_")
    }
    return kept | {
        "PYTHONPATH": str(checkout),
        "KAFKA_BOOTSTRAP_SERVERS": broker,
        "DATABASE_URL": database_url,
        "ALPHALOOP_KAFKA__GROUP_ID": group,
        "ALPHALOOP_WORKER__BATCH_SIZE": str(num_slots),
        "ALPHALOOP_WORKER__HTTP_PORT": "0",
        "ALPHALOOP_LOGS__FORMAT": "json",
        "ALPHALOOP_DATA_DIR": str(data_dir),
    }


@dataclass(frozen=True, slots=True)
class FedRun:
    """What the engine did with jobs that it was fed directly."""

    seconds: float  #: from the first admission to the last text; prompts were tokenized before
    texts: dict[str, str]
    token_ids: dict[str, tuple[int, ...]]
    num_steps: int  #: while jobs waited
    num_sequence_steps: int  #: of them, sequences added up


class FedEngine:
    """The engine of this checkout's settings. A free slot is refilled before the next step."""

    def __init__(self, configs: Path, *, num_slots: int) -> None:
        from worker import decoding as _  # noqa: F401  # before torch: it settles how threads wait
        from worker.decoding.engine import load_engine

        settings = load_settings(configs, profile=PROFILE)
        self._target = settings.models.target
        self._engine = load_engine(settings.models, num_slots=num_slots)
        gc.collect()
        gc.freeze()  # as the worker does

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together."""
        return self._engine.identity.context_length

    @property
    def name(self) -> str:
        """Library, version and dtype."""
        return self._engine.identity.engine

    def prepare(self, jobs: Sequence[PromptJob]) -> list[Any]:
        """Tokenize as the worker does. Raises PromptTooLong for a prompt that leaves no room for an output."""
        from worker.engine import Sampling

        return [
            self._engine.prepare(job.as_job(), Sampling(max_tokens=job.max_tokens, temperature=0.0)) for job in jobs
        ]

    def run(self, prepared: Sequence[Any], decisions: Mapping[str, tuple[str, int] | None]) -> FedRun:
        """Decode all jobs. `decisions` gives drafter and k by job_id; None is vanilla."""
        waiting = deque((one, _decision(decisions[one.job.job_id])) for one in prepared)
        texts: dict[str, str] = {}
        token_ids: dict[str, tuple[int, ...]] = {}
        num_steps = num_sequence_steps = 0
        began = time.perf_counter()
        while waiting or self._engine.load().num_running:
            while waiting and self._engine.has_room(waiting[0][0]):
                self._engine.admit(*waiting.popleft())
            step = self._engine.step()
            if waiting:
                num_steps += 1
                num_sequence_steps += step.batch
            for generation in step.finished:
                texts[generation.job_id] = generation.text
                token_ids[generation.job_id] = generation.token_ids
        return FedRun(time.perf_counter() - began, texts, token_ids, num_steps, num_sequence_steps)

    def model_folder(self) -> Path:
        """The model as files that vLLM can read."""
        return Path(self._weights(self._target.dtype).folder)

    def reference(self) -> Any:
        """The target in float32 as transformers runs it, with its tokenizer: `model`, `tokenizer`."""
        return self._weights("float32")

    def end_tokens(self, reference: Any) -> frozenset[int]:
        """Every token that ends a text."""
        from worker.decoding.models import end_tokens

        return end_tokens(reference.model, reference.tokenizer)

    def _weights(self, dtype: str) -> Any:
        from worker.decoding.device import find_device
        from worker.decoding.models import load_weights

        return load_weights(self._target.source, self._target.revision, dtype, find_device("cpu"))


def _decision(drafter_and_k: tuple[str, int] | None) -> Decision:
    if drafter_and_k is None:
        return Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "benchmark")
    drafter, k = drafter_and_k
    return Decision(Mode.SPECULATIVE, drafter, "benchmark", k, Reason.FORCED, "benchmark")
