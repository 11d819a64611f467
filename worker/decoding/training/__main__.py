"""`python -m worker.decoding.training`: what `alphaloop draft train` and `alphaloop draft register` become."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from alphaloop import logs
from alphaloop.cli.screen import note, show_error
from alphaloop.errors import AlphaloopError, ConfigError, StoreError
from alphaloop.settings import Settings, load_settings

INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes as the command line's: 0 done, 1 an error in words, 130 interrupted."""
    options = _options(argv)
    logs.configure("WARNING")
    try:
        settings = load_settings(options.configs, profile=options.profile)
        return _register(options, settings) if options.action == "register" else _make(options, settings)
    except AlphaloopError as error:
        show_error(error)
        return 1


def _make(options: argparse.Namespace, settings: Settings) -> int:
    from worker.decoding.training.progress import Stages
    from worker.decoding.training.recipe import read_recipe
    from worker.decoding.training.run import Order, TrainingRun
    from worker.decoding.training.telling import tell

    recipe = read_recipe(options.recipe, seed=options.seed)
    order = Order(
        settings,
        recipe,
        options.folder,
        options.name or options.folder.absolute().name,
        options.prompts,
        options.held_out,
        options.task,
    )
    should_stop = _on_signals()
    run = TrainingRun(order, Stages(), should_stop)
    try:
        card = run.make()
    finally:
        run.close()
    if card is None:
        note(f"stopped; what was done is in {options.folder}, and the same command goes on from there")
        return INTERRUPTED
    tell(card, options.folder)
    _register_if_possible(options.folder, settings)
    return 0


def _register_if_possible(folder: Path, settings: Settings) -> None:
    from worker.decoding.training.registering import register_folder

    try:
        card, status = register_folder(folder, settings)
    except (StoreError, ConfigError) as error:
        note(f"not registered: {error.message}. Later: alphaloop draft register {folder}")
    else:
        note(f"registered as {card.name} {card.draft_revision}, {status}")


def _register(options: argparse.Namespace, settings: Settings) -> int:
    from worker.decoding.training.registering import register_folder

    card, status = register_folder(options.folder, settings, options.name)
    note(f"{options.name or card.name} {card.draft_revision} for target {card.target_revision}: {status}")
    return 0


def _on_signals() -> Callable[[], bool]:
    """Whether to stop: the first SIGINT or SIGTERM ends the step at hand and keeps everything; the second ends now."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return stop.is_set


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker.decoding.training", description=__doc__)
    configs = os.environ.get("ALPHALOOP_CONFIGS")
    parser.add_argument("--configs", type=Path, default=configs and Path(configs), help="folder of TOML files")
    parser.add_argument(
        "--profile", default=os.environ.get("ALPHALOOP_PROFILE"), help="one more file of it, laid over the others"
    )
    actions = parser.add_subparsers(dest="action", required=True)
    make = actions.add_parser("make", help="train a draft, or go on with it")
    make.add_argument("folder", type=Path)
    make.add_argument("--recipe", type=Path)
    make.add_argument("--prompts", type=Path)
    make.add_argument("--held-out", type=Path)
    make.add_argument("--task")
    make.add_argument("--name")
    make.add_argument("--seed", type=int)
    register = actions.add_parser("register", help="make a trained draft known to the database")
    register.add_argument("folder", type=Path)
    register.add_argument("--name")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
