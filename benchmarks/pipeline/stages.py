"""Which stage of the worker a sampled stack belongs to. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Final

WAITING: Final = "waiting"
OTHER: Final = "other"
#: In the order in which a job meets them; the last three are no part of a job's way.
STAGES: Final = ("intake", "claim", "decide", "decode", "record", "publish", "finish", "metrics", WAITING, OTHER)

#: The first pattern that is found in `module:function` names the stage. The order settles names with two such words.
_RULES: Final = tuple(
    (re.compile(pattern), stage)
    for pattern, stage in (
        (r"metrics", "metrics"),
        (r"finish|watermark|commit|outbox|Outbox", "finish"),
        (r"claim|lease|worker\.jobs\.(feed|line)", "claim"),
        (r"publish|producer|Producer|emit|stream|dead_letter|refus", "publish"),
        (
            r"intake|consumer|kafka\.(records|conversion)|valid|messages\.(codec|job|body|text)|_take|"
            r"control|admission|lanes|shares|worker\.jobs\.(order|waiting|measured)|prompt_patterns|_receive",
            "intake",
        ),
        (r"record|outcome|Outcome|ended_jobs|store\.(decode_runs|acceptance_state)", "record"),
        (
            r"decid|Decid|decision|count_scored|evidence|posterior|incumbent|budget|cost|correction|watch|session",
            "decide",
        ),
        (r"engine|decod|worker\.jobs\.running|step|admit|steer", "decode"),
    )
)
_OURS: Final = ("worker.", "alphaloop.", "benchmarks.pipeline.instant_engine:")
#: A thread that stands still in one of these waits for work, not for the database or the broker's acknowledgement.
_WAITS: Final = ("threading:", "queue:", "alphaloop.kafka.consumer:")
#: What listens to the database waits in the driver, as a query does; the frame below the driver tells them apart.
_LISTENS: Final = "alphaloop.store.database:"


def stage_of(stack: Sequence[str], *, is_running: bool) -> str:
    """The stage of a stack of `module:function` names, innermost first.

    A stage is named by the innermost frame of our own code that tells one. `is_running` says whether the thread used
    the processor: one that did not, and stands in a queue, a lock or the consumer's poll, is `waiting`.
    """
    if stack and not is_running and (stack[0].startswith(_WAITS) or any(map(_listens, stack))):
        return WAITING
    return next((stage for label in stack if (stage := _stage_of_label(label)) is not None), OTHER)


def _listens(label: str) -> bool:
    return label.startswith(_LISTENS)


@cache
def _stage_of_label(label: str) -> str | None:
    if not label.startswith(_OURS):
        return None
    return next((stage for pattern, stage in _RULES if pattern.search(label)), None)
