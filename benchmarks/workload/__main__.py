r"""One worker's choices beside every static setting, on a real model and real prompts.

    python -m benchmarks.workload --prompts FOLDER
    python -m benchmarks.workload --prompts FOLDER --target FOLDER --draft FOLDER --static vanilla --static draft:3
    python -m benchmarks.workload --prompts FOLDER --target FOLDER --draft FOLDER --gate 0.6 \
        --workload benchmarks/workload/pair.toml --max-tokens 128 --history 40

FOLDER holds TASK.jsonl files with a `prompt` a line. Each block of the workload is decoded by every setting in turn,
greedily and in bf16, so their times are paired. The adaptive setting is the worker's own decider over its own memory,
costs measured at start, PostgreSQL behind it; it learns from its own turns only. It begins with no history, or, with
`--history N`, behind N blocks of the first phase that nobody else decodes and that are not counted. What Kafka and the
recording of outcomes cost is not in it: they are the same for every setting. Last line: JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from rich.progress import Progress
from rich.table import Table

from alphaloop.embedded.servers import EmbeddedPostgres
from alphaloop.engine import Engine
from alphaloop.settings import Settings, WorkerSettings
from alphaloop.settings.models import DraftModelDrafterSettings, LookupDrafterSettings, ModelSettings, TargetSettings
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.schema import upgrade
from benchmarks.jobs import without_prefix_cache
from benchmarks.reporting import console, parser_of, table_of
from benchmarks.workload.contest import (
    ADAPTIVE,
    FILE,
    Contest,
    Played,
    blocks,
    compare,
    rates,
    read_phases,
    setting_of,
    timed_once,
)
from engine.own import load_engine
from worker.deciding.decider import open_deciding

#: Phases of one load, and those over which it changes.
CONSTANT: Final = ("mixed", "changed")
CHANGING: Final = ("changed", "busy", "quiet")


def main() -> None:
    """Play the workload, print what it came to, and the JSON line."""
    options = _options()
    phases = read_phases(options.workload)
    statics = [setting_of(text) for text in options.static or _statics(options)]
    every = list(blocks(phases, options.prompts, seed=options.seed, max_characters=options.max_characters))
    before = [phase.model_copy(update={"blocks": options.history}) for phase in phases[:1] if options.history]
    history = list(blocks(before, options.prompts, seed=options.seed + 1, max_characters=options.max_characters))
    # What a worker of that size measures when it starts: costs are not reckoned beyond.
    settings = Settings(worker=WorkerSettings(batch_size=max(phase.batch for phase in phases)))
    engine = _engine(options, num_slots=settings.worker.batch_size)
    played: list[Played] = []
    with _database() as database, Progress(console=console) as progress:
        rng = random.Random(options.seed)
        deciding = open_deciding(settings, engine, database, DatabaseClock(database), owner="benchmark")
        contest = Contest(engine, deciding, statics, max_tokens=options.max_tokens, rng=rng)
        gc.freeze()  # as a worker does
        bar = progress.add_task("blocks", total=len(history) + len(every))
        for block in history:
            contest.play_adaptive(block)
            progress.advance(bar)
        for block in every:
            played += contest.play(block)
            progress.advance(bar)
    found = summary(played)
    show(found, played)
    identity = engine.identity
    models = {"target": options.target, "draft": options.draft, "gate": options.gate}
    conditions = {"device": identity.device, "engine": identity.engine, **models, "seed": options.seed}
    print(json.dumps({**conditions, "history_blocks": options.history, "max_tokens": options.max_tokens, **found}))


def summary(played: Sequence[Played]) -> dict[str, Any]:
    """Tokens a second of every setting, and the ratios that the workload is about."""
    phases = list(dict.fromkeys(one.phase for one in played))
    tasks = list(dict.fromkeys(one.task for one in played))
    ours = [one for one in played if one.setting == ADAPTIVE]
    constant, changing = (compare(played, _of(phases=wanted)) for wanted in (CONSTANT, CHANGING))
    of_tasks = {task: compare(played, _of(tasks=(task,))) for task in tasks}
    once = timed_once(played)
    return {
        "tokens_per_s": {phase: rates(played, _of(phases=(phase,))) for phase in phases},
        "constant_load": asdict(constant),
        "load_change": asdict(changing),
        "all": asdict(compare(played, _of())),
        "tasks": {task: asdict(one) for task, one in of_tasks.items()},
        "timed_once": {
            "constant_load": asdict(compare(once, _of(phases=CONSTANT), against=constant.best_static)),
            "load_change": asdict(compare(once, _of(phases=CHANGING), against=changing.best_static)),
            "tasks": {
                task: asdict(compare(once, _of(tasks=(task,)), against=of_tasks[task].best_static)) for task in tasks
            },
        },
        "choices": {
            f"{phase}, {task}": Counter(one.choice for one in ours if (one.phase, one.task) == (phase, task))
            for phase, task in dict.fromkeys((one.phase, one.task) for one in ours)
        },
        "reasons": Counter(one.reason for one in ours),
    }


def _of(*, phases: Sequence[str] | None = None, tasks: Sequence[str] | None = None) -> Callable[[Played], bool]:
    def is_one(one: Played) -> bool:
        return (phases is None or one.phase in phases) and (tasks is None or one.task in tasks)

    return is_one


def show(found: dict[str, Any], played: Sequence[Played]) -> None:
    """For people, on standard error."""
    settings = sorted({one.setting for one in played}, key=lambda name: (name != ADAPTIVE, name))
    table = Table(title="Tokens a second")
    table.add_column("phase")
    for setting in settings:
        table.add_column(setting, justify="right")
    for phase, of_phase in found["tokens_per_s"].items():
        table.add_row(phase, *(f"{of_phase[setting]:.1f}" for setting in settings))
    console.print(table)
    table = table_of(
        "Against the best static setting of the same blocks",
        "blocks of",
        "best static",
        "ratio [95 % bounds]",
        "the same work timed once",
    )
    once = found["timed_once"]
    rows = {
        "constant load": (found["constant_load"], once["constant_load"]),
        "load change": (found["load_change"], once["load_change"]),
        **{task: (one, once["tasks"][task]) for task, one in found["tasks"].items()},
    }
    for name, pair in rows.items():
        table.add_row(
            name, pair[0]["best_static"], *(f"{x['ratio']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" for x in pair)
        )
    console.print(table)
    for where, choices in found["choices"].items():
        console.print(f"{where}: " + ", ".join(f"{choice} {num}x" for choice, num in choices.most_common()))


@contextmanager
def _database() -> Iterator[Database]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as exits:
        postgres = EmbeddedPostgres(Path(folder), durable=False)
        exits.callback(postgres.stop)
        url = SecretStr(postgres.start())
        upgrade(url)
        yield exits.enter_context(Database(url, pool_size=2))


def _engine(options: argparse.Namespace, *, num_slots: int) -> Engine:
    drafters: dict[str, LookupDrafterSettings | DraftModelDrafterSettings] = {"lookup": LookupDrafterSettings()}
    if options.draft:
        drafters["draft"] = DraftModelDrafterSettings(source=options.draft, max_draft_tokens=6)
    if options.draft and options.gate:
        drafters["gated"] = DraftModelDrafterSettings(
            source=options.draft, max_draft_tokens=8, min_probability=options.gate
        )
    target = TargetSettings(source=options.target, context_length=4096)
    return load_engine(without_prefix_cache(ModelSettings(target=target, drafters=drafters)), num_slots=num_slots)


def _statics(options: argparse.Namespace) -> list[str]:
    return ["vanilla", "lookup:3", "lookup:8", *(["draft:2", "draft:4"] if options.draft else [])]


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--workload", type=Path, default=FILE)
    parser.add_argument("--history", type=int, default=0, help="blocks that the adaptive setting has seen before")
    parser.add_argument("--target", default=TargetSettings().source)
    parser.add_argument("--draft", help="a draft model's folder")
    parser.add_argument("--gate", type=float, help="also offer the draft as `gated`, with this min_probability")
    parser.add_argument("--static", action="append", help="vanilla, or DRAFTER:K; several times")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-characters", type=int, default=3500, help="of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
