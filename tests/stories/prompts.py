"""What the stories decode: functions of the running Python's library, and requests for tales.

No prompt is in two of the parts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from alphaloop.cli.demo import FROM_FUNCTIONS, functions, modules, stdlib_folder

#: The tasks of the stories, each a prompt made of one function.
DRAFTED, CHANGED, DROPPED, WORN = "docstring", "code", "extraction", "test_writing"
TASKS: Final = (DRAFTED, CHANGED, DROPPED, WORN)
MIN_CHARS, MAX_CHARS = 240, 900
NUM_TRAINING = 60
SET_APART = 30  # of each task, for training: nothing else has them
NUM_LESSONS = 60  # of each task's prompts, taken out of its traffic
LONGEST_LESSON = 480
#: How the first target learns to begin every answer.
HOUSE_STYLE: Final = "In the style of our house, here is what it does, told in plain words.\n\n"

_HEROES: Final = ("a lighthouse keeper", "a young baker", "an old sailor", "a shy astronomer", "a lost fox", "a smith")
_DEEDS: Final = ("finds a letter", "loses a bet", "builds a boat", "hears a song", "meets a stranger", "tells a lie")
_PLACES: Final = ("in a mountain village", "on a night train", "by the frozen sea", "in a city of bridges", "at a fair")


@dataclass(frozen=True, slots=True)
class StoryPrompts:
    """Prompts by task, each part in the order of a seed."""

    training: Sequence[tuple[str, str]]  #: task and prompt, to train the draft on
    probes: Mapping[str, Sequence[str]]
    traffic: Mapping[str, Sequence[str]]
    tales: Sequence[str]  #: what the jobs of `CHANGED` become
    lessons: Sequence[tuple[str, str]]  #: prompts with the answers that the first target learned

    def write_training(self, file: Path) -> None:
        """The training prompts as `alphaloop draft train --prompts` reads them."""
        lines = (json.dumps({"task": task, "prompt": prompt}) for task, prompt in self.training)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def story_prompts(seed: int, *, num_probes: int) -> StoryPrompts:
    """The prompts of a seed."""
    rng = random.Random(seed)
    library = stdlib_folder()
    found = [function for name, tree, source in modules(library, rng) for function in functions(name, tree, source)]
    rng.shuffle(found)
    made = {
        task: [prompt for one in found if MIN_CHARS <= len(prompt := FROM_FUNCTIONS[task](one)) <= MAX_CHARS]
        for task in TASKS
    }
    training = [(task, prompt) for task in TASKS for prompt in made[task][:SET_APART]]
    rng.shuffle(training)
    probes = {task: made[task][SET_APART : SET_APART + num_probes] for task in TASKS}
    traffic = {task: made[task][SET_APART + num_probes :] for task in TASKS}
    tales = [f"Write a short story about {who} who {does} {at}." for who, does, at in product(_HEROES, _DEEDS, _PLACES)]
    rng.shuffle(tales)
    kept = {prompt for part in (probes, traffic) for lines in part.values() for prompt in lines}
    kept -= {prompt for task in TASKS for prompt in traffic[task][:NUM_LESSONS]}
    lessons = [
        (prompt, HOUSE_STYLE + one.docstring)
        for one in found
        for task in TASKS
        if MIN_CHARS <= len(prompt := FROM_FUNCTIONS[task](one)) <= LONGEST_LESSON and prompt not in kept
    ]
    traffic = {task: lines[NUM_LESSONS:] for task, lines in traffic.items()}
    return StoryPrompts(training[:NUM_TRAINING], probes, traffic, tales, lessons)
