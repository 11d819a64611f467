"""`python -m worker.calibrate_main`: measure what rounds cost on this device, show it, store it for every worker here.

`alphaloop calibrate` becomes this process. Data goes to standard output, the bar and notes to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from alphaloop import logs
from alphaloop.cli import screen
from alphaloop.cost import CostKind, CostPoint
from alphaloop.embedded.stack import with_running_stack
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.settings import Settings, load_settings
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from worker.costs.calibration import calibrate, plan
from worker.costs.shared_weights import timed_by, with_shared_weights
from worker.engine import Engine, EngineIdentity


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when done, 1 after an error that a person must see to."""
    options = _options(argv)
    try:
        settings = with_running_stack(load_settings(options.configs, profile=options.profile))
        logs.configure("WARNING", settings.logs.format)
        database = None if options.no_store else _database(settings)
        began = time.perf_counter()
        engine, points = _measure(settings, options.budget)
        if database is not None:
            revisions = {drafter.name: drafter.revision for drafter in engine.drafters}
            identity = engine.identity
            CostStore(database).replace(
                identity.host, identity.device, identity.engine, identity.target_revision, revisions, points
            )
            database.close()
    except AlphaloopError as error:
        screen.show_error(error)
        return 1
    seconds = time.perf_counter() - began
    if options.json:
        screen.print_json(as_json(engine.identity, points, seconds, is_stored=database is not None))
    else:
        show(engine.identity, points)
        stored = "not stored" if database is None else "stored for the workers of this device"
        screen.note(f"{len(points)} shapes in {seconds:.0f} s, the loading of the model included; {stored}")
    return 0


def show(identity: EngineIdentity, points: Sequence[CostPoint]) -> None:
    """Milliseconds as people read them: a row for each batch and context, a column for each width."""
    out = screen.out()
    out.print(f"{identity.target} on {identity.device}, {identity.engine}\n", soft_wrap=True, markup=False)
    out.print("milliseconds of a round, by positions a sequence; a drafter proposes one fewer")
    out.print(rounds_table([point for point in points if point.kind is CostKind.ROUND]))
    prompts = [point for point in points if point.kind is CostKind.PREFILL]
    if prompts:
        out.print("\nreading a prompt")
        out.print(_prompts_table(prompts))


def rounds_table(points: Sequence[CostPoint]) -> Table:
    """The times of rounds."""
    widths = sorted({point.width for point in points})
    columns = [f"w={width}" for width in widths]
    made = screen.table("what", "batch", "context", *columns, right=["batch", "context", *columns])
    times = {(p.drafter or "", p.context, p.batch, p.width): p.ms for p in points}
    last = None
    for part, context, batch in sorted({key[:3] for key in times}):
        cells = [times.get((part, context, batch, width)) for width in widths]
        name = part or "target"
        made.add_row(
            name if name != last else "", str(batch), str(context), *("" if ms is None else _ms(ms) for ms in cells)
        )
        last = name
    return made


def _prompts_table(points: Sequence[CostPoint]) -> Table:
    made = screen.table("what", "tokens", "ms", "ms/token", right=["tokens", "ms", "ms/token"])
    for point in sorted(points, key=lambda p: (p.drafter or "", p.width)):
        made.add_row(point.drafter or "target", str(point.width), _ms(point.ms), f"{point.ms / point.width:.3f}")
    return made


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def as_json(
    identity: EngineIdentity, points: Sequence[CostPoint], seconds: float, *, is_stored: bool
) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "host": identity.host,
        "device": identity.device,
        "engine": identity.engine,
        "target": identity.target,
        "target_revision": identity.target_revision,
        "seconds": round(seconds, 2),
        "is_stored": is_stored,
        "points": [asdict(point) for point in points],
    }


def _measure(settings: Settings, budget_s: float) -> tuple[Engine, list[CostPoint]]:
    with screen.progress() as bar:
        task = bar.add_task("loading the model", total=None, note="")
        # Loaded here, so that a wrong option is told before four seconds of torch.
        from worker.decoding.load import load_engine

        engine = load_engine(settings.models, num_slots=settings.worker.batch_size)

        def on_measured(done: int, total: int) -> None:
            bar.update(task, description="measuring", completed=done, total=total)

        points = calibrate(
            engine,
            plan(engine, settings.worker),
            num_samples=settings.worker.calibration_samples,
            budget_s=budget_s,
            on_measured=on_measured,
        )
    return engine, list(with_shared_weights(points, timed_by(engine.drafters)))


def _database(settings: Settings) -> Database:
    if settings.postgres.url is None:
        raise ConfigError("postgres.url: not set", hint="set DATABASE_URL, start `alphaloop up`, or give --no-store")
    database = Database(settings.postgres.url, connect_timeout_s=settings.postgres.connect_timeout_s)
    database.check_revision()
    return database


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker.calibrate_main", description=__doc__)
    configs = os.environ.get("ALPHALOOP_CONFIGS")
    parser.add_argument("--configs", type=Path, default=configs and Path(configs), help="folder of TOML files")
    parser.add_argument(
        "--profile", default=os.environ.get("ALPHALOOP_PROFILE"), help="one more file of it, laid over the others"
    )
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of measuring")
    parser.add_argument("--no-store", action="store_true", help="show only")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
