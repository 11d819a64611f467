"""Jobs for the real engine, and the texts that it writes when nothing disturbs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from tests.chaos.work import PROMPT_MARK, Fate, PlannedJob

_MAX_TOKENS: Final = 16
_TOPICS: Final = ("harbours", "parcels", "windows", "letters", "stations")
_WISHES: Final = ("List three facts about", "Write a haiku about", "Explain to a child", "Name two risks of")
#: They differ; jobs repeat them, because every one has to be decoded once more to know the right text.
_PROMPTS: Final = [f"{wish} {topic} ({PROMPT_MARK})." for wish in _WISHES for topic in _TOPICS]


def real_jobs(num_jobs: int, texts: Sequence[str]) -> list[PlannedJob]:
    """Jobs over the prompts in turn; every fifth is streamed."""
    jobs = []
    for number in range(num_jobs):
        job_id, is_streamed = f"real-{number:04d}", number % 5 == 0
        body = {"prompt": _PROMPTS[number % len(_PROMPTS)], "max_tokens": _MAX_TOKENS, "stream": is_streamed}
        value = json.dumps({"job_id": job_id, **body}).encode()
        jobs.append(PlannedJob(job_id, value, Fate.SUCCEEDS, texts[number % len(_PROMPTS)], is_streamed))
    return jobs


def undisturbed_texts() -> list[str]:
    """What the target alone writes to each prompt, one job at a time. Loads the model: seconds, and a gigabyte."""
    from alphaloop.deciding.policy import Decision, Reason
    from alphaloop.messages import Job, Mode
    from alphaloop.settings import load_settings
    from worker.decoding.engine import load_engine
    from worker.engine import Sampling

    settings = load_settings(overrides={"models": {"target": REAL_TARGET}})
    engine = load_engine(settings.models, num_slots=1)
    vanilla = Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "the undisturbed text")
    texts = []
    for number, prompt in enumerate(_PROMPTS):
        job = Job.model_validate({"job_id": f"alone-{number}", "task": "chat", "prompt": prompt})
        engine.admit(engine.prepare(job, Sampling(max_tokens=_MAX_TOKENS, temperature=0.0)), vanilla)
        finished: dict[str, str] = {}
        while not finished:
            finished = {generation.job_id: generation.text for generation in engine.step().finished}
        texts.append(finished[job.job_id])
    return texts


#: float32, in which batches of every shape write the same text; a short context, so that slots stay small.
REAL_TARGET: Final = {"dtype": "float32", "context_length": 1024}
