"""What a refresh asks of the engine: train from the parent's weights, judge on held-out texts, name what is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaloop.draft_card import DraftCard
from alphaloop.errors import ConfigError
from alphaloop.settings import ModelSettings, Settings
from alphaloop.settings.models import HeadsDrafterSettings, TargetSettings
from worker.assembly import open_engine
from worker.commands import read_prompts

if TYPE_CHECKING:
    from engine.training.rivals import RivalRounds
    from engine.training.writing import TrainingProgress

#: Below the folder that a run writes: its texts and their states.
_STATE = ".training"


@dataclass(frozen=True, slots=True)
class ParentDraft:
    """The drafter that is trained anew, and where its files are on this machine."""

    settings: HeadsDrafterSettings
    path: Path


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """The prompts of a refresh, as JSON lines."""

    trained: Path
    held_out: Path


@dataclass(frozen=True, slots=True)
class Trainee:
    """One refresh as its stages see it."""

    settings: Settings
    name: str  #: of the candidate
    parent: ParentDraft
    prompts: PromptFiles
    out: Path  #: the folder of the candidate
    progress: TrainingProgress
    should_stop: Callable[[], bool]

    @property
    def target(self) -> TargetSettings:
        """The target as a trainer decodes it: itself, also where servers do, on the threads that it may use."""
        trainers_own = {"engine": "own", "num_threads": self.settings.refresh.num_threads}
        return self.settings.models.target.model_copy(update=trainers_own)

    def read(self, file: Path, tokenizer: Any) -> Any:
        """The prompts in a file that the target can answer."""
        return read_prompts(self.settings, None, self.progress.note, file, tokenizer, drops_wrong=True)


def target_revision(settings: Settings) -> str:
    """The revision of the target that this process would serve. Raises ModelError."""
    from engine.models import find_weights

    target = settings.models.target
    return find_weights(target.source, target.revision).revision


def open_parent(drafter: HeadsDrafterSettings, revision: str | None) -> ParentDraft:
    """The files of a drafter. Raises ModelError, ConfigError where they are not those of the draft revision.

    `revision` None: a server drafts, whose revision names no files.
    """
    from engine.models import find_weights

    weights = find_weights(drafter.source, drafter.revision)
    if revision is not None and not revision.startswith(weights.revision):
        raise ConfigError(f"expected the draft {revision} at {drafter.source}, found {weights.revision}")
    return ParentDraft(drafter, weights.path)


def train(trainee: Trainee) -> DraftCard | None:
    """Train from the parent's weights, or go on with it; None when stopped. Raises AlphaloopError."""
    from engine.training.recipe import Recipe
    from engine.training.run import TrainingRun, WantedDraft

    wanted = WantedDraft(
        trainee.out,
        trainee.parent.settings.method,
        trainee.name,
        trainee.prompts.trained,
        trainee.prompts.held_out,
        str(trainee.parent.path),
    )
    run = TrainingRun(
        wanted,
        trainee.target,
        Recipe(),
        descriptions={},
        read_prompts=trainee.read,
        progress=trainee.progress,
        should_stop=trainee.should_stop,
    )
    with closing(run):
        return run.make()


def judge(trainee: Trainee, work: Path) -> Sequence[RivalRounds] | None:
    """Parent and candidate on the held-out texts; None when stopped. Raises AlphaloopError.

    The texts that a training run wrote are used again. A command's folder has none: they are written below `work`.
    """
    from engine.training.recipe import Recipe
    from engine.training.rivals import judge_rivals

    state = trainee.out / _STATE
    if not state.is_dir():
        state = work / "judged"
        state.mkdir(exist_ok=True)
    return judge_rivals(
        trainee.target,
        trainee.parent.settings.method,
        str(trainee.parent.path),
        str(trainee.out),
        partial(trainee.read, trainee.prompts.held_out),
        state=state,
        recipe=Recipe(),
        progress=trainee.progress,
        should_stop=trainee.should_stop,
    )


def served_revision(trainee: Trainee) -> str:
    """The candidate's revision as a worker that loads it names it. Raises ModelError where a worker would refuse it."""
    drafter = trainee.parent.settings.model_copy(update={"source": str(trainee.out), "revision": None})
    models = ModelSettings(target=trainee.target, drafters={trainee.name: drafter})
    with closing(open_engine(models, num_slots=1)) as engine:
        (state,) = (drafter for drafter in engine.drafters if drafter.name == trainee.name)
        return state.revision
