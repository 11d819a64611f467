"""Decode a prompt with the engine alone: no Kafka, no PostgreSQL. What look-up gained stands below the text.

python examples/engine_alone.py "def fibonacci(n):"
"""

from __future__ import annotations

import sys

from engine import Decision, Job, LookupDrafterSettings, Mode, ModelSettings, Reason, Sampling, load_engine

settings = ModelSettings(drafters={"lookup": LookupDrafterSettings()})  # the target: configs/models.toml's, SmolLM2
engine = load_engine(settings, num_slots=1)
job = Job.model_validate({"job_id": "1", "task": "code", "body": {"prompt": sys.argv[1]}})
engine.admit(
    engine.prepare(job, Sampling(max_tokens=64, temperature=0.0)),
    Decision(Mode.SPECULATIVE, "lookup", None, 8, Reason.FORCED, "an example"),
)
while not (finished := engine.step().finished):
    pass
print(finished[0].text)
print(f"{len(finished[0].token_ids)} tokens in {finished[0].counts.rounds} rounds", file=sys.stderr)
engine.close()
