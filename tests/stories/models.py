"""The models of the stories: the first target, made of the second one, and a draft of the first target's texts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from alphaloop.cli.children import child_command
from alphaloop.cli.options import GlobalOptions
from tests.stories.prompts import StoryPrompts
from tests.stories.size import Size
from tests.stories.tuned_target import train_further

RECIPE: Final = Path(__file__).with_name("draft.toml")


def tuned_target(
    data_dir: Path, source: str, prompts: StoryPrompts, size: Size, *, seed: int, say: Callable[[str], None]
) -> Path:
    """The folder of the first target, trained from `source` unless it lies under `data_dir` already."""
    folder = data_dir / "tuned-target"
    if not (folder / "config.json").exists():
        say("training the first target …")
        train_further(source, folder, prompts.lessons, num_steps=size.target_steps, rate=size.target_rate, seed=seed)
    return folder


def trained_draft(
    data_dir: Path,
    target: Path,
    prompts: StoryPrompts,
    *,
    num_threads: int,
    seed: int,
    say: Callable[[str], None],
) -> Path:
    """The folder of a draft of `target`, trained unless it lies under `data_dir` already."""
    folder = data_dir / RECIPE.stem
    if (folder / "config.json").exists():
        return folder
    data_dir.mkdir(parents=True, exist_ok=True)
    prompts.write_training(data_dir / "training.jsonl")
    say("training a draft of two layers on the first target's texts …")
    train_draft(
        folder,
        *("--prompts", str(data_dir / "training.jsonl"), "--recipe", str(RECIPE), "--name", "small"),
        target=str(target),
        num_threads=num_threads,
        seed=seed,
    )
    return folder


def train_draft(folder: Path, *arguments: str, target: str, num_threads: int, seed: int) -> None:
    """`alphaloop draft train FOLDER` with these arguments, its data beside the folder."""
    environment = GlobalOptions(data_dir=folder.parent).environment()
    environment["ALPHALOOP_MODELS__TARGET__SOURCE"] = target
    environment["ALPHALOOP_MODELS__TARGET__NUM_THREADS"] = str(num_threads)
    command = child_command("alphaloop.cli", ["draft", "train", str(folder), *arguments, "--seed", str(seed)])
    subprocess.run(command, env=environment, check=True)
