"""The contestants of one number of slots: who plays when, and each plays all jobs once when it is asked to."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alphaloop.settings import load_settings
from benchmarks.contestants.process import Contestant
from benchmarks.jobs import Jobs
from benchmarks.reporting import REPOSITORY
from benchmarks.servers import CONFIGS, PROFILE, Servers
from benchmarks.whole.near_ties import Difference
from benchmarks.workers import read_step_sums, started_worker

WORKER = "worker"  #: of this checkout
ENGINE = "engine"  #: fed directly, each job with the drafter and k that the worker reported for it
ENGINE_VANILLA = "engine, vanilla"
BASELINE = "baseline"  #: the worker of another commit
VLLM = "vllm"
CONTESTANTS = (WORKER, ENGINE, ENGINE_VANILLA, BASELINE, VLLM)


def draw_order(contestants: Collection[str], rng: random.Random) -> list[str]:
    """A random order. The engine needs the worker's decisions of the same round, so that it plays after the worker."""
    order = sorted(contestants)
    rng.shuffle(order)
    if WORKER in order and ENGINE in order:
        places = sorted((order.index(WORKER), order.index(ENGINE)))
        order[places[0]], order[places[1]] = WORKER, ENGINE
    return order


@dataclass(frozen=True, slots=True)
class Played:
    """One contestant's run of one round."""

    contestant: str
    seconds: float
    num_tokens: int
    occupied: float | None = None  #: mean share of the slots that held a sequence in a step while jobs waited
    stepping: float | None = None  #: share of that time that the engine spent in steps
    texts: Mapping[str, str] = field(default_factory=dict)
    token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)  #: jobs with several results, not succeeded
    num_drafted: int = 0  #: jobs that were decided speculative

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second."""
        return self.num_tokens / self.seconds


class Lineup:
    """Contestants with `num_slots` sequences at most. Engines stay loaded and idle; a worker runs while it plays."""

    def __init__(
        self,
        servers: Servers,
        jobs: Jobs,
        *,
        num_slots: int,
        baseline: Path | None,
        vllm_python: str | None,
        folder: Path,
        timeout_s: float,
    ) -> None:
        """`baseline`: a checkout of the other commit. `folder`: for logs and data. `timeout_s`: without any result."""
        self._servers, self._drawn, self.num_slots = servers, jobs, num_slots
        self._baseline, self._vllm_python, self._folder, self._timeout_s = baseline, vllm_python, folder, timeout_s
        self._decisions: dict[str, tuple[str, int] | None] = {}
        self._vllm: Contestant | None = None
        self._jobs = [asdict(job) for job in jobs.measured]
        settings = load_settings(CONFIGS, profile=PROFILE).models
        self._engine = Contestant(
            f"engine-{num_slots}", "benchmarks.contestants.our_engine", [settings.model_dump_json(), str(num_slots)]
        )
        self._engine.wait_until_ready()
        self._tokenized = self._engine.request({"what": "tokens", "jobs": self._jobs})
        self.engine_name = str(self._tokenized["engine"])
        warm_up = {job.job_id: None for job in jobs.warm_up}
        first = [asdict(job) for job in jobs.warm_up]
        self._engine.request({"what": "decode", "jobs": first, "decisions": warm_up})

    def play(self, contestant: str, *, seed: int) -> Played:
        """One run. The engine's run needs one of the worker before it."""
        if contestant == WORKER:
            return self._play_worker(contestant, REPOSITORY, seed)
        if contestant == BASELINE and self._baseline is not None:
            return self._play_worker(contestant, self._baseline, seed)
        if contestant == ENGINE:
            return self._play_engine(contestant, self._decisions)
        if contestant == ENGINE_VANILLA:
            return self._play_engine(contestant, {job["job_id"]: None for job in self._jobs})
        if contestant == VLLM:
            return self._play_vllm(contestant)
        raise ValueError(f"{contestant} does not take part")

    def differences(self, worker: Played, engine: Played) -> list[Difference]:
        """Where the worker's texts part from the engine's; one entry for each job whose texts differ."""
        differing = [job for job in self._jobs if worker.texts[job["job_id"]] != engine.texts[job["job_id"]]]
        if not differing:
            return []
        answer = self._engine.request(
            {
                "what": "near_ties",
                "jobs": differing,
                "token_ids": [engine.token_ids[job["job_id"]] for job in differing],
                "texts": [worker.texts[job["job_id"]] for job in differing],
            }
        )
        return [Difference(**fields) for fields in answer["differences"]]

    def close(self) -> None:
        """End the engines."""
        self._engine.close()
        if self._vllm is not None:
            self._vllm.close()

    def _play_worker(self, name: str, checkout: Path, seed: int) -> Played:
        """Warm-up and history, then the measured jobs, timed from Kafka to Kafka; the worker drains and ends."""
        jobs = self._drawn
        with started_worker(
            checkout,
            self._servers,
            jobs.tasks,
            num_slots=self.num_slots,
            seed=seed,
            folder=self._folder,
            name=name,
            timeout_s=self._timeout_s,
        ) as worker:
            client = worker.client
            for unmeasured, decoding in ((jobs.warm_up, "vanilla"), (jobs.history, "auto")):
                client.send_all(unmeasured, decoding=decoding)
                client.wait(unmeasured)
            before = read_step_sums(worker.address)
            began = time.monotonic()
            client.send_all(jobs.measured)
            client.wait(jobs.measured, num_left=self.num_slots - 1)
            backlog_s = time.monotonic() - began
            under_backlog = read_step_sums(worker.address).since(before)
            client.wait(jobs.measured)
            seconds = time.monotonic() - began
            worker.stop()
            client.read_to_the_end()
        results = {job.job_id: client.results[job.job_id] for job in jobs.measured}
        if name == WORKER:
            self._decisions = {job_id: result.decided for job_id, result in results.items()}
        return Played(
            name,
            seconds,
            sum(result.num_tokens for result in results.values()),
            under_backlog.occupied(self.num_slots),
            under_backlog.step_s / backlog_s,
            {job_id: result.text or "" for job_id, result in results.items()},
            faults={
                "several": sum(client.num_results[job_id] > 1 for job_id in results),
                "not_succeeded": sum(result.status != "succeeded" for result in results.values()),
            },
            num_drafted=sum(result.decided is not None for result in results.values()),
        )

    def _play_engine(self, name: str, decisions: Mapping[str, tuple[str, int] | None]) -> Played:
        answer = self._engine.request({"what": "decode", "jobs": self._jobs, "decisions": decisions})
        num_steps = answer["num_steps"]
        return Played(
            name,
            answer["seconds"],
            sum(map(len, answer["token_ids"].values())),
            answer["num_sequence_steps"] / (num_steps * self.num_slots) if num_steps else None,
            texts=answer["texts"],
            token_ids={job_id: tuple(tokens) for job_id, tokens in answer["token_ids"].items()},
            num_drafted=sum(decision is not None for decision in decisions.values()),
        )

    def _play_vllm(self, name: str) -> Played:
        if self._vllm is None:
            self._vllm = self._start_vllm()
        answer = self._vllm.ask(self._tokenized["prompts"], self._tokenized["max_tokens"], "vanilla", stop_at_end=True)
        return Played(name, answer["seconds"], sum(map(len, answer["tokens"])))

    def _start_vllm(self) -> Contestant:
        settings: dict[str, Any] = {
            "model": self._tokenized["folder"],
            "max_model_len": self._tokenized["context_length"],
            "max_num_seqs": self.num_slots,
            # Our engine copies beginnings that prompts share, so that the peer keeps its default.
            "enable_prefix_caching": True,
        }
        python = self._vllm_python
        if python is None:
            raise ValueError("vLLM needs --vllm-python")
        vllm = Contestant(
            f"vllm-{self.num_slots}", "benchmarks.contestants.peers", ["vllm", json.dumps(settings)], python=python
        )
        vllm.wait_until_ready()
        warm = self._tokenized["prompts"][: self.num_slots]
        vllm.ask(warm, 8, "vanilla", stop_at_end=False)
        return vllm
